"""Limits on the size of a constraint, and on the time and memory of compiling and searching it."""

from __future__ import annotations

from typing import Any

MAX_SCHEMA_BYTES = 256 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_REGEX_BYTES = 16 << 10
MAX_CHOICES = 10_000
MAX_CHOICE_BYTES = 256 << 10  # of all options together
MAX_HOLES = 64  # of a template
MAX_DEPTH = 64  # nested arrays and objects of a schema's text
MAX_PROPERTIES = 5_000  # all ``properties`` of a schema together
MAX_ENUM_VALUES = 10_000  # all ``enum`` values of a schema together
MAX_ENUM_BYTES = 256 << 10
MAX_REPEAT = 100_000  # bounds of lengths and items, and of a regular expression written out
MAX_INTEGER = 2**53  # larger integers are rounded by llguidance: 9007199254740993 becomes 9007199254740992
LARGEST = 9 * 10**18  # bound of unbounded numbers; llguidance computes in 64 bits
DIGITS = 15  # significant digits; with more, two decimals may be the same double, which llguidance confuses
SMALLEST = 1e-12  # bounds are written without exponents
MAX_MULTIPLE = 10_000  # an automaton has one state per remainder: 10,000 compile in 0.1 s, 100,000 in 2 s
MAX_SCHEMAS = 50_000  # subschemas after rewriting: cases multiply

QUICK_SECONDS = 0.25  # CPU time after which a constraint waits for faster ones
LARGE_BYTES = 20_000  # size of a grammar that is known to compile slowly: about four microseconds per byte
COMPILE_SECONDS = 2.0  # CPU time of a child: independent of the machine's load
SEARCH_SECONDS = 2.0  # CPU time of a child, for the first answer under a grammar
CHECK_SECONDS = 1.0  # CPU time of a child, to validate a finished answer; other requests may wait for it
KILL_SECONDS = 1.0  # CPU time after which a search that does not stop by itself is killed with its process
ANSWER_SECONDS = 60.0  # wall time after which a child process without progress is killed
WAITING = 128  # constraints of one model waiting for a child process or a lock, each on a thread
CHILDREN = 2  # child processes; starting one costs about as much as the slowest constraint
CHILD_BYTES = 1 << 30  # address space of a child process
IDLE_BYTES = 64 << 20  # memory besides its vocabulary above which a child process is replaced
START_SECONDS = 60.0  # maximum time for a child process to start and read its vocabulary
CACHE_BYTES = 32 << 20
LATE_SECONDS = 60.0  # caching time of a result whose search hit its time limit: repeating it would take as long
FAR_TOKENS = 1000  # no answer is searched if every answer needs more tokens than this and than the budget
REPLY_BYTES = 8 << 20  # maximum size of a reply with a grammar
MAX_TEMPLATE_BYTES = REPLY_BYTES  # of the grammars of all holes: some 20 bytes of memory each, a second for 4 MB
MAX_TEMPLATE_SECONDS = 20.0  # CPU time of children for all different holes
FINDING_CHARS = 1000  # of each text of a finding: schemas have names of any length

WALKS = 4  # random walks through a grammar when it is probed
WALK_TOKENS = 48
WALK_SECONDS = 0.5  # CPU time after which no further walk is started
STEP_SECONDS = 0.25  # maximum CPU time of the mask of one token

#: Limits of a parser, in llguidance's own units; half to a tenth of its defaults. The child process probes a grammar
#: under these limits, so every matcher of the grammar must be built with them.
PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # some 700 bytes each in a parser: 14 MB
    "max_grammar_size": 250_000,
    "verbose_errors": False,  # a refusal must not contain the whole schema
}
