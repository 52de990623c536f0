"""Lark and GBNF grammars: what is read, what is refused and where, and the shortest sentence of each."""

from __future__ import annotations

import itertools
import random
import re
from math import inf

import lark
import pytest
import regex
from gbnf_judge import Judge
from grammars import accepts, bundled_vocabulary, grammar, matcher
from llguidance import LLParserLimits

from mmserve.constraint.admission import failures
from mmserve.constraint.compile.derivations import derivations
from mmserve.constraint.compile.gbnf import GbnfReader
from mmserve.constraint.compile.pattern import whole
from mmserve.constraint.compile.terminals import COMMON
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import MAX_CHOICE_BYTES, PARSER_LIMITS
from mmserve.constraint.search import matcher as engine
from mmserve.constraint.search.witness import Infeasible, find_first
from mmserve.constraint.search.worker import Searching
from mmserve.core.constraint import Choice, ConstraintKind, Gbnf, Lark, Regex
from mmserve.errors import InvalidArgument, Unimplemented


@pytest.fixture(scope="module")
def searching() -> Searching:
    return Searching(bundled_vocabulary())


def first(searching: Searching, kind: ConstraintKind, budget: int = 64) -> str | None:
    """The first answer found."""
    made = grammar(kind)
    compiled = engine.Grammar(made.text, searching._tokens, LLParserLimits(**PARSER_LIMITS))
    close = find_first(compiled, searching._lexicon, budget, sketch=made.sketch).shortest(budget)
    return None if close is None else searching._lexicon.text(close.tokens).decode()


#: Grammars in which what comes first everywhere never ends, or takes what is needed behind it.
NATURAL: dict[str, ConstraintKind] = {
    "columns": Lark('start: c " FROM " N\nc: N (", " N)*\nN: /[a-z]+/\n'),
    "statements": Lark('start: (s ";\\n")+ "end"\ns: N " = " (N | "(" s ")")\nN: /[a-z]+/\n'),
    "keywords": Lark('start: "SELECT" N "FROM" N\nN: /[a-zA-Z]+/\n%ignore / +/\n'),
    "words": Lark('start: N "=" e ";"\ne: N | "(" e ")"\nN: /[a-z]+( [a-z]+)*/\n'),
    "spaces": Gbnf(
        'root ::= (e "=" ws t "\\n")+\ne ::= t ([-+] t)*\nt ::= i | "(" ws e ")" ws\ni ::= [a-z]+ ws\nws ::= [ \\n]*\n'
    ),
    "choice": Choice(tuple(f"{'a' * 600}{n}{'b' * 600}" for n in range(200))),
}


@pytest.mark.parametrize("name", NATURAL)
def test_a_first_answer_is_found(searching: Searching, name: str) -> None:
    found = first(searching, NATURAL[name], 1500)
    assert found is not None
    assert accepts(matcher(NATURAL[name]), found)


def test_words_that_would_run_together_are_kept_apart(searching: Searching) -> None:
    found = first(searching, NATURAL["keywords"])
    assert found is not None
    assert re.fullmatch(r"SELECT *\w+ +FROM *\w+", found), found


def drawn(rng: random.Random) -> str:
    """A random GBNF grammar of a few rules, some of which may have no sentence."""
    names = ["root", "a", "b", "c"]
    rows = [
        "".join(
            f" {rng.choice([*names, *names[1:], '[xy]', chr(34) + 'z' * rng.randint(0, 3) + chr(34)])}"
            f"{rng.choice(['', '', '', '*', '{2}', '{1,3}'])}"
            for _ in range(rng.randint(1, 3))
        )
        for _ in range(8)
    ]
    return "\n".join(f"{name} ::={rows[2 * i]} |{rows[2 * i + 1]}" for i, name in enumerate(names))


def least_by_rounds(text: str) -> dict[str, float]:
    """Fewest bytes of each rule, by as many rounds over all rules as there may be, over the grammar's text."""
    rules = {line.split(" ::=")[0]: line.split(" ::=")[1].split(" |") for line in text.splitlines()}
    least = dict.fromkeys(rules, inf)

    def of(word: str) -> float:
        part, times = re.fullmatch(r'("z*"|\[xy\]|\w+)(\*|\{.*)?', word).groups()  # type: ignore[union-attr]
        low = 0 if times == "*" else int(times[1]) if times else 1
        size = 1 if part == "[xy]" else len(part) - 2 if part.startswith('"') else least[part]
        return low * size if low else 0

    for _ in range(50):
        least = {name: min(sum(map(of, row.split())) for row in rows) for name, rows in rules.items()}
    return least


def test_the_least_length_of_every_rule_is_a_fixpoint() -> None:
    rng = random.Random(5)
    endless = 0
    for _ in range(300):
        text = drawn(rng)
        known, expected = derivations(GbnfReader(text).grammar()), least_by_rounds(text)
        assert {name: cost[0] for name, cost in known.costs.items()} == {
            k: v for k, v in expected.items() if v < inf
        }, text
        pieces = known.pieces(1000)
        assert (pieces is None) == (expected["root"] == inf), text
        if pieces is None:
            endless += 1
        else:
            sentence = "".join(map(str, pieces))
            assert len(sentence) == expected["root"]
            assert Judge(text).takes(sentence), (text, sentence)
    assert 10 < endless < 250


def test_a_rule_that_never_ends_is_named() -> None:
    with pytest.raises(Refused) as caught:
        grammar(Lark('start: "a" b\nb: "x" c | "y" b\nc: "(" b ")"\nd: "z"\n'))
    assert [f.pointer for f in caught.value.findings] == ["/1", "/2", "/3"]
    assert all("has no sentence" in f.reason for f in caught.value.findings)


def test_a_search_that_gave_up_says_nothing_about_what_there_is() -> None:
    """Three outcomes, three kinds of errors: none exists, a number of tokens is needed, nothing is known."""
    with pytest.raises(Unimplemented, match="gave up, and there may be one"), failures("at least {} for {}", "budget"):
        raise Infeasible(None)
    with pytest.raises(InvalidArgument, match="budget: must be at least 7 for the shortest answer found"):  # noqa: SIM117
        with failures("at least {} for {}", "budget"):
            raise Infeasible(7)


WRONG = [
    (Gbnf('root ::= a\na ::= "x" )'), "/2", "line 2, rule 'a': unexpected ')'"),
    (Gbnf('root ::= "x"\n\nb ::= "y\nc ::= "z"'), "/3", "rule 'b': a literal is not closed"),
    (Gbnf("root ::= a\n# more\na ::= [b-a]"), "/3", "rule 'a': a range must go"),
    (Gbnf('root ::= "a" other'), "/1", "line 1, 'root': 'other' is not defined"),
    (Gbnf('root ::= "a"\nroot ::= "b"'), "/2", "rule 'root': is defined twice, first on line 1"),
    (Gbnf('root ::= "a"{3,2}'), "/1", "upper bound"),
    (Gbnf('root ::= <think> "a"'), "/1", "special tokens"),
    (Gbnf('a ::= "a"'), "", "must have a rule named root"),
    (Lark('start: a\na: "x" |\n   ("y"\n'), "/4", "')' is missing"),
    (Lark('start: "a" b'), "/1", "line 1, 'start': 'b' is not defined"),
    (Lark('start: A\nA: "x" A'), "/2", "a terminal cannot refer to itself"),
    (Lark('start: A\nA: b\nb: "x"'), "/2", "a terminal cannot refer to the rule 'b'"),
    (Lark("start: A\n\nA: /a(?=b)/"), "/3", "look-around"),
    (Lark('start: "\\q"'), "/1", "not supported in a string"),
    (Lark("%import common.NAMES\nstart: NAMES"), "/1", "'common' has no 'NAMES'"),
    (Lark("start: WS\n%import common (WS, INT\n"), "/2", "a name to import, or ')', is missing"),
    (Lark("start: WS\n%import common (WS"), "/2", "unexpected the end"),
    (Lark('start: "a"\n  | %json {"type": "strin"}'), "/2/type", "%json"),
    (Lark("_list{x}: x+\nstart: _list{/a/}"), "/1", "templates are not supported"),
]


@pytest.mark.parametrize(("kind", "pointer", "reason"), WRONG)
def test_what_is_wrong_is_said_with_rule_and_line(kind: ConstraintKind, pointer: str, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        grammar(kind)
    assert (caught.value.findings[0].pointer, reason in caught.value.findings[0].reason) == (pointer, True), (
        caught.value
    )


READ: list[tuple[ConstraintKind, list[str], list[str]]] = [
    (Gbnf('root ::= ([01]{2} " "?){2}{1,2} ("ab"+)? "c"?+'), ["0101", "01 01 11 00", "0000ababc"], ["01", "010101"]),
    (
        Gbnf('root ::= a\n  | b # two\n\na ::= "x" (\n  "y"\n  | "z" )\nb ::= .'),
        ["xy", "xz", "\n", "é"],
        ["x\ny", "xyz"],
    ),
    (Gbnf('root ::= "\\u00e9\\x41\\U0001f600" [^\\]\\n-]'), ["éA😀a"], ["éA😀]", "éA😀-", "éA😀\n"]),
    (Gbnf("root ::= camelCase\ncamelCase ::= camel-case\ncamel-case ::= [a]"), ["a"], ["b"]),
    (
        Lark('?start: a -> one\n | b\n!a: "x"~2 "é"i\nb: ["y"] ("z"|"w"){2,}\n'),
        ["xxÉ", "zz", "ywz"],
        ["x", "z"],
    ),
    (Gbnf("root ::= a0\n" + "".join(f'a{n} ::= "x"? a{n + 1}\n' for n in range(500)) + 'a500 ::= "y"'), ["xxy"], ["x"]),
    (Lark('start: (("" ~ 4000) ~ 4000) ~ 4000 "x"'), ["x"], ["", "xx"]),
    (Gbnf('root ::= ("" {4000}){4000} a\na ::= "(" a ")" | "x"'), ["x", "((x))"], ["", "(x"]),
    (Lark('start: A b\nA.2: "a".."c" | /[x-z]/i\nb.1: "\\x41" | "\\u00e9"\n'), ["aA", "Xé", "zA"], ["dA", "ae"]),
    (Lark('start: T\nT: /[a-z]*/ & ~("if" | "do")\n'), ["i", "ifs", ""], ["if", "do", "A"]),
    (Lark('start: a |\n\na: "x" |\n  "y"\n  // z\n  | "w" # v\n'), ["", "x", "y", "w"], ["z", "v"]),
    (
        Lark('start: "<" %json {"type": "integer", "minimum": 3, "maximum": 5} ">"'),
        ["<3>", "<5>"],
        ["<2>", "<>", "<3.5>"],
    ),
    (
        Lark("%import common (INT, WS)\n%import common.CNAME -> NAME\nstart: NAME INT\n%ignore WS"),
        ["a1 2", "b 3"],
        ["1", "1 a"],
    ),
    (Lark("start: /(?P<n>a|b)(?i:c)\\p{Greek}/"), ["acλ", "bCω"], ["acl", "Acλ"]),
    (
        Regex("(?i)straße|[^k]σ"),
        ["STRASSE".replace("SS", "ẞ"), "strasse".replace("ss", "ß"), "aς", "aΣ"],
        ["kσ", "\u212aσ"],
    ),
    (Regex("(?P<year>\\d{4})-\\p{Lu}\\P{L}(?s:.)(?-s:.)"), ["2024-Ä1\n1"], ["2024-ä1\n1", "2024-ÄÄ\n1", "2024-Ä1\n\n"]),
]


@pytest.mark.parametrize(("kind", "taken", "refused"), READ)
def test_what_people_write_is_read(kind: ConstraintKind, taken: list[str], refused: list[str]) -> None:
    at = matcher(kind)
    assert [text for text in taken if not accepts(at, text)] == []
    assert [text for text in refused if accepts(at, text)] == []


TEXTS = [
    "7",
    "-7",
    "+12",
    "1.5",
    ".5",
    "1.",
    "1e9",
    "-1.5E-3",
    "a",
    "Z",
    "aB",
    "_a1",
    "1a",
    " ",
    " \t",
    "\n",
    "\r\n",
    "\r",
]
TEXTS += [
    '"a"',
    '"a\\"b"',
    '"a"b"',
    '"a\nb"',
    "#x",
    "//x\n",
    "//x",
    "/* a */",
    "/* a */ */",
    "/***/",
    "--x",
    "f",
    "é",
    "e5",
]


@pytest.mark.parametrize("name", COMMON)
def test_common_terminals_are_larks(name: str) -> None:
    judge = lark.Lark(f"%import common.{name}\nstart: {name}", parser="earley", keep_all_tokens=True)
    at = matcher(Lark(f"%import common.{name}\nstart: {name}"))
    for text in TEXTS:
        try:
            judge.parse(text)
            right = True
        except lark.exceptions.LarkError:
            right = False
        assert accepts(at, text) is right, text


@pytest.mark.parametrize(
    ("text", "chars"),
    [
        ('start: "a" "b"\n%ignore / +/\n', "ab "),
        ("start: A?\nA: /a+/\n%ignore / /\n%ignore /#a*\\n/\n", "a #\n"),
        ('start: "a" start | b\nb: "b" ("," start)?\n%import common.WS\n%ignore WS\n', "ab,\n"),
    ],
)
def test_what_is_ignored_may_come_anywhere_between_terminals_as_in_lark(text: str, chars: str) -> None:
    judge, at = lark.Lark(text), matcher(Lark(text))
    for letters in (each for size in range(5) for each in itertools.product(chars, repeat=size)):
        written = "".join(letters)
        try:
            judge.parse(written)
            right = True
        except lark.exceptions.LarkError:
            right = False
        assert accepts(at, written) is right, written


@pytest.mark.parametrize("name", ["L", "Lu", "Nd", "Greek", "Script=Cyrillic", "Sc"])
def test_unicode_properties_and_either_case(name: str) -> None:
    ours = re.compile(re.sub(r"\\u\{(\w+)\}", lambda found: rf"\U{int(found[1], 16):08x}", whole(rf"\p{{{name}}}")))
    cased = re.compile(
        re.sub(r"\\u\{(\w+)\}", lambda found: rf"\U{int(found[1], 16):08x}", whole(rf"(?i)\p{{{name}}}"))
    )
    theirs = regex.compile(rf"\p{{{name}}}")
    for code in random.Random(1).sample(range(0x3000), 1500):
        char = chr(code)
        assert bool(ours.fullmatch(char)) is bool(theirs.fullmatch(char)), hex(code)
        alike = [char, *(c for c in (char.lower(), char.upper()) if len(c) == 1)]
        assert bool(cased.fullmatch(char)) or not any(theirs.fullmatch(c) for c in alike), hex(code)


def test_choices_may_have_a_quarter_of_a_megabyte() -> None:
    options = tuple(f"{n:04}{'é' * 30}" for n in range(MAX_CHOICE_BYTES // 64))
    at = matcher(Choice(options))
    assert accepts(at, options[77]) and not accepts(at, options[77][:-1])
    with pytest.raises(Refused, match=f"{MAX_CHOICE_BYTES} bytes"):
        grammar(Choice((*options, "more")))
