"""Lazy repetitions in Lark terminals: what is one token, as Python's own ``re`` says it."""

from __future__ import annotations

import random
import re
from itertools import product

import lark
import pytest
from grammars import accepts, matcher, sentence

from mmserve.constraint.findings import Refused
from mmserve.core.constraint import Lark

#: Expressions, and the characters of the texts that they are tried on.
WHOLE = {
    r'".*?"': 'ab"',
    r'"\w*?"': 'ab"-',
    r'"(\\.|[^"\\])*?"': 'a"\\',
    r"\/\*.*?\*\/": "a/*",
    r"\/\*.+?\*\/": "a/*",
    r"a.*?bab": "abc",
    r"a[ab]{2,4}?b": "ab",
    r"a.*?b+": "abc",
    r"a.*?(b)(c|d)?": "abcd",
    r"<.*?>.*?<\/>": "a</>",
    r"(?:a.*?b)c*": "abc",
    r"a.*?": "ab",
    r"a.{2,}?": "ab",
    r"ab??b": "ab",
}
#: Those of which some tokens are left out: a later end is one only where what follows the first does not fit.
SOME = {r"a.*?bc*d": "abcd", r"(a.*?b|c)+d": "abcd", r"(?:a.*?b)+": "abc", r"a[^c]*?b[^d]*?c": "abcd"}


def texts(characters: str, longest: int = 7) -> list[str]:
    return ["".join(text) for size in range(longest) for text in product(characters, repeat=size)]


def is_token(expression: str, text: str) -> bool:
    found = re.match(expression, text, re.ASCII)
    return found is not None and found.end() == len(text)


@pytest.mark.parametrize("expression", [*WHOLE, *SOME])
def test_tokens_end_where_they_first_can(expression: str) -> None:
    at, taken = matcher(Lark(f"start: A\nA: /{expression}/\n")), 0
    for text in texts((WHOLE | SOME)[expression], 6 if len((WHOLE | SOME)[expression]) > 3 else 8):
        if accepts(at, text):
            assert is_token(expression, text), text
            taken += 1
        elif expression in WHOLE:
            assert not is_token(expression, text), text
    assert taken


def test_a_terminal_is_read_with_those_that_it_refers_to() -> None:
    grammar = 'start: S ("," S)*\nS: "\\"" INNER "\\""\nINNER: /.*?/\n'
    at, parser, chance = matcher(Lark(grammar)), lark.Lark(grammar, parser="earley"), random.Random(0)
    found = {said for _ in range(60) if (said := sentence(at, chance)) is not None}
    assert len(found) > 20
    for said in found:
        tokens = [str(token) for token in parser.parse(said).scan_values(lambda token: token.type == "S")]
        assert ",".join(tokens) == said and all(token.count('"') == 2 for token in tokens)
    assert not accepts(at, '"a"b"')


@pytest.mark.parametrize(
    ("grammar", "where", "why"),
    [
        ('start: "x" /.*?/ "y"\n', "line 1, 'start'", "nothing after it"),
        ('start: A\nA: /"(\\\\"|[^"])*?"/\n', "line 2, 'A'", "single characters before a text of a fixed length"),
        ("start: A\nA: /(a.*?|c)b/\n", "line 2, 'A'", "at the end of a group"),
        ("start: A\nA: /a.*?b*?c/\n", "line 2, 'A'", "right after another one"),
        ("start: A\nA: B & C\nB: /a.*?b/\nC: /.../\n", "line 2, 'A'", "'&' or '~'"),
        ('start: "x" r\nr: A\n\nA: /x.{0,90}?b{60}/\n', "line 4, 'A'", "too many ways"),
    ],
)
def test_what_depends_on_the_text_after_is_refused_with_its_line(grammar: str, where: str, why: str) -> None:
    with pytest.raises(Refused) as refused:
        matcher(Lark(grammar))
    assert where in str(refused.value) and why in str(refused.value)
