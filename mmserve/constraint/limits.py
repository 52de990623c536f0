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
MAX_INTEGER = 2**53  # beyond, llguidance rounds: 9007199254740993 becomes 9007199254740992
LARGEST = 9 * 10**18  # of numbers, on sides without a bound; llguidance counts in 64 bits
DIGITS = 15  # significant; with more, two decimals may be one double, and llguidance takes one for the other
SMALLEST = 1e-12  # bounds are written out in digits, never with an exponent
MAX_MULTIPLE = 10_000  # an automaton has one state a remainder: 10,000 compile in 0.1 s, 100,000 in 2 s
MAX_SCHEMAS = 50_000  # subschemas after rewriting: cases multiply

QUICK_SECONDS = 0.25  # of processor time, after which a constraint waits until faster ones are done
LARGE_BYTES = 20_000  # of a grammar, from which on it is known to take long: some four microseconds each
COMPILE_SECONDS = 2.0  # of a child's processor time: load on the machine changes no outcome
SEARCH_SECONDS = 2.0  # of a child's processor time, for the first answer under a grammar
CHECK_SECONDS = 1.0  # of a child's processor time, to validate a finished answer; other requests may wait for it
KILL_SECONDS = 1.0  # of processor time, after which a search that does not stop by itself is ended with its process
ANSWER_SECONDS = 60.0  # of wall time, for a child process that makes no progress
WAITING = 128  # constraints of one model that wait for a child process or for a lock, each on a thread
CHILDREN = 2  # child processes; starting one costs about as much as the slowest constraint
CHILD_BYTES = 1 << 30  # address space of a child process
IDLE_BYTES = 64 << 20  # besides its vocabulary, above which a child process is replaced
START_SECONDS = 60.0  # for a child process to start and to read its vocabulary
CACHE_BYTES = 32 << 20
LATE_SECONDS = 60.0  # that the result of a search ended by its time limit is kept: the next one would take as long
FAR_TOKENS = 1000  # where every answer needs more, and more than the budget, none is searched
REPLY_BYTES = 8 << 20  # of a reply with a grammar
MAX_TEMPLATE_BYTES = REPLY_BYTES  # of the grammars of all holes: some 20 bytes of memory each, a second for 4 MB
FINDING_CHARS = 1000  # of each text of a finding: schemas have names of any length

WALKS = 4  # random walks through a grammar in its probe
WALK_TOKENS = 48
WALK_SECONDS = 0.5  # of processor time; no further walk after that
STEP_SECONDS = 0.25  # of processor time, for the mask of one token

#: Limits of a parser, in llguidance's own units; half to a tenth of its defaults. The child process probes a grammar
#: under these limits, so every matcher of the grammar must be built with them.
PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # some 700 bytes each, which a parser keeps: 14 MB
    "max_grammar_size": 250_000,
    "verbose_errors": False,  # a refusal must not carry the whole schema
}
