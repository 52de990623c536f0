"""Regular expressions, choices and grammars: read as ECMAScript, GBNF or Lark, they match what they say."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest
from grammars import accepts, compact, enforced, grammar, matcher, schema_matcher
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.constraint.compile.derivatives import all_but, complement, matches
from mmserve.constraint.compile.expression import EVERY, BadPattern, inverse, union
from mmserve.constraint.compile.pattern import searched, whole
from mmserve.constraint.findings import Refused
from mmserve.core.constraint import Choice, ConstraintMode, Gbnf, JsonSchema, Lark, Regex

atoms = st.sampled_from(["a", "b", "é", "\\d", "\\w", "\\s", ".", "[ab]", "[^a]", "[a-c\\d]", "\\.", "\\n", "\\u00e9"])
repeats = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{1,}", "*?"])
pieces = st.builds(lambda atom, repeat: atom + repeat, atoms, repeats)
rows = st.lists(pieces, max_size=3).map("".join)
groups = st.builds(lambda one, two, repeat: f"({one}|{two}){repeat}", rows, rows, st.sampled_from(["", "?", "*"]))
patterns = st.builds(
    lambda start, body, end: start + body + end,
    st.sampled_from(["", "^"]),
    st.one_of(rows, groups, st.builds("{}{}".format, rows, groups), st.builds("{}|{}".format, rows, rows)),
    st.sampled_from(["", "$"]),
)
texts = st.text(alphabet="ab1_é .\n\u00a0\u2028٣", max_size=5)


@settings(deadline=None, max_examples=80)
@given(patterns, st.lists(texts, min_size=1, max_size=8))
def test_patterns_are_searched_as_the_judge_searches(pattern: str, tried: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern}
    judge = jsonschema_rs.validator_for(schema)
    at = schema_matcher(schema)
    for text in tried:
        if judge.is_valid(text) != accepts(at, compact(text)):
            assert set(text) & set("\u2028\u00a0٣\n"), (pattern, text)  # dialects differ there: ECMA-262 is followed


ECMA = [
    (r"^\d$", "1", "٣"),
    (r"^\w$", "_", "é"),
    (r"^\s$", "\u00a0", "a"),
    (r"^\s$", "\ufeff", "\u200b"),
    (r"^.$", "\u200b", "\u2028"),
    (r"^.$", "\U0001f600", "\r"),
    (r"^[^\d]$", "٣", "1"),
    (r"^[\s\S]$", "\n", "ab"),
    (r"^\u{1F600}$", "\U0001f600", "x"),
    (r"^\ud83d\ude00$", "\U0001f600", "x"),
    (r"^[\b]$", "\b", "b"),
    (r"^a{2}?$", "aa", "a"),
    (r"(?i)^\W$", "-", "s"),
    (r"(?i)^\w$", "K", "\u212a"),
    (r"(?i)^[\W]$", "\u017f", "k"),
    (r"(?i)^[^\W]$", "S", "-"),
    (r"(?i)^[b-d\D]$", "C", "1"),
    (r"(?i)^[k-l]$", "\u212a", "j"),
    (r"^(?<name>a)$", "a", "b"),
    (r"^\/\-\.$", "/-.", "a"),
    (r"^[a\]-]$", "]", "b"),
]


@pytest.mark.parametrize(("pattern", "taken", "refused"), ECMA)
def test_classes_are_ecmascripts(pattern: str, taken: str, refused: str) -> None:
    at = schema_matcher({"type": "string", "pattern": pattern})
    assert accepts(at, compact(taken))
    assert not accepts(at, compact(refused))


BAD = ["(", ")", "a)", "[", "[a", "a**", "*a", "a{2,1}", "a{", "{1}", "\\", "\\k", "\\1", "(?m)a", "(?=a)", "(?!a)"]
BAD += [
    "(?<=a)",
    "(?<!a)",
    "\\b",
    "\\p{Wide}",
    "\\p{L",
    "\\p",
    "(?i",
    "(?P=a)",
    "[z-a]",
    "[[:alpha:]]",
    "[a&&b]",
    "a^",
    "a$b",
    "(a$|b)c",
    "a(^b|c)d",
    "[]",
    "[^]",
]
BAD += ["\\ud800", "\\u{110000}", "\\x4", "a{100001}", "((a{1000}){1000})", "(" * 500, "^*", "a++", "[\\d-z]"]
BAD += ["\\p{Wide}", "\\p{L", "\\p", "(?i", "(?P=a)", "(?x)a", "(?i)*"]
#: Alternatives with and without anchors, whose number is squared at each of several levels.
ANCHORED = "(^a|b$|c)"
for _ in range(5):
    ANCHORED = f"({ANCHORED}{ANCHORED}|d)"
BAD += [ANCHORED]


@pytest.mark.parametrize("pattern", BAD)
def test_what_cannot_be_enforced_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern):
        whole(pattern)
    with pytest.raises(BadPattern):
        searched(pattern)


def test_a_regex_matches_the_whole_answer() -> None:
    at = matcher(Regex("[a-z/]+\\d{2}"))
    assert accepts(at, "ab/12")
    assert not accepts(at, "xab/123") and not accepts(at, "ab/1")
    either = matcher(Regex("^a|b$"))
    assert accepts(either, "a") and accepts(either, "b") and not accepts(either, "ab")


def test_choices_are_taken_letter_for_letter() -> None:
    options = ("yes", 'a/b\n"é\\', "(", "yes, but", "[x]*", "\U0001f600")
    at = matcher(Choice(options))
    assert all(accepts(at, option) for option in options)
    assert not any(accepts(at, text) for text in ("", "ye", "yes,", "xx", "YES"))


@settings(deadline=None, max_examples=60)
@given(st.sets(st.text("abé", max_size=4), min_size=1, max_size=5), st.lists(st.text("abé", max_size=5), max_size=8))
def test_all_but_some_words(words: set[str], tried: list[str]) -> None:
    at = schema_matcher({"type": "string", "pattern": all_but(words)})
    for text in [*words, *tried]:
        assert accepts(at, compact(text)) is (text not in words)


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF)).map(lambda r: (min(r), max(r)))))
def test_sets_of_characters_and_their_complements_share_nothing(ranges: list[tuple[int, int]]) -> None:
    one = union(*((r,) for r in ranges))
    other = inverse(one)
    assert union(one, other) == union(EVERY)
    assert inverse(other) == one
    assert sum(b - a + 1 for a, b in (*one, *other)) == 0x110000 - 0x800


GBNF = r"""
root ::= "say" ws ( greeting | number )? "." # a comment
greeting ::= "hello" | "good\tbye" | "\"" [^"\n]* "\""
number ::= "-"? [0-9]+ ("/" [1-9] [0-9]{0,2})?
ws ::= [ \t]*
"""


def test_gbnf_is_converted() -> None:
    at = matcher(Gbnf(GBNF))
    for text in ("say.", "say hello.", "say good\tbye.", 'say "a/b".', "say -12/345."):
        assert accepts(at, text), text
    for text in ("say", "say hell.", 'say "\n".', "say 1/0.", "say 1/2345."):
        assert not accepts(at, text), text


def test_gbnf_recursion() -> None:
    at = matcher(Gbnf('root ::= list\nlist ::= "[" (list ("," list)*)? "]"\n'))
    assert accepts(at, "[[],[[]]]") and not accepts(at, "[[]")


def test_lark_is_passed_on() -> None:
    at = matcher(Lark('start: word ("," word)*\nword: /[a-z]+/ // <not a token>, %json neither\n'))
    assert accepts(at, "a,bc") and not accepts(at, "a,")
    assert accepts(matcher(Lark('start: "<b>" "@" "%json"')), "<b>@%json")


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" <|eos|>',
        "start: @x",
        "start: %lark { start: /a/ }",
        "%import .file.INT\nstart: INT",
        "%import python.INT\nstart: INT",
        "%declare INT\nstart: INT",
    ],
)
def test_lark_reaches_nothing_else(text: str) -> None:
    with pytest.raises(Refused) as caught:
        matcher(Lark(text))
    assert re.fullmatch(r"/\d+", caught.value.findings[0].pointer)


@pytest.mark.parametrize(
    "pattern", [r"^[^\\]+$", r'^[^"]+$', r'^[^\\"]*$', r"^[\x00-\x1f]+$", r"^[^\\\n]*$", r"^[^a]$", r"^[^\\]{2}$"]
)
def test_what_a_class_leaves_out_is_not_let_through_as_an_escape(pattern: str) -> None:
    at, judge = (
        schema_matcher({"type": "string", "pattern": pattern}),
        jsonschema_rs.validator_for({"pattern": pattern}),
    )
    for text in ["\\", '"', "\n", "a", "\\\\", '""', 'a"', "a\\", "\t\b"]:
        assert accepts(at, compact(text)) is judge.is_valid(text), text


@settings(deadline=None, max_examples=60, derandomize=True)
@given(patterns, st.lists(texts, min_size=4, max_size=8))
def test_the_complement_of_a_pattern_matches_the_other_strings(pattern: str, strings: list[str]) -> None:
    other = complement(searched(pattern))
    judge = jsonschema_rs.validator_for({"pattern": pattern})
    for text in strings:
        if other is not None:
            assert matches(searched(other), text) is not judge.is_valid(text), text


def test_strings_without_a_pattern_and_names_with_one_of_a_few_are_enforced() -> None:
    enforced({"type": "string", "not": {"pattern": "^[0-9a-f]{4}-[0-9]+$"}}, ["", "12af-", "x"], ["12af-7", 1])
    enforced({"type": "string", "not": {"pattern": "//"}}, ["a/b"], ["a//b"])
    names = {"type": "object", "not": {"propertyNames": {"not": {"enum": ["a", "b"]}}}}
    enforced(names, [{"a": 1}, {"b": 1, "c": 1}], [{}, {"c": 1}])
    assert complement(searched("(ab|cd){60}")) is None, "too many states"
    for more in ({"pattern": "^a"}, {"maxLength": 1}):
        both = {"type": "object", "not": {"propertyNames": {"not": {"enum": ["a", "bb"], **more}}}}
        enforced(both, [{"a": 1}, {"a": 1, "bb": 1}], [{}, {"bb": 1}])
    with pytest.raises(Refused):
        schema_matcher({"type": "object", "not": {"propertyNames": {"not": {"enum": 5}}}})


def test_names_beside_patterns_of_names_are_enforced() -> None:
    own = {"patternProperties": {"^a[0-9]$": {"type": "integer"}}, "type": "object"}
    same = {**own, "propertyNames": {"pattern": "^a[0-9]$"}}
    enforced(same, [{"a1": 1}, {}], [{"a1": "x"}, {"b": 1}])
    wider = {**own, "propertyNames": {"pattern": "^a"}, "additionalProperties": False}
    enforced(wider, [{"a1": 1}], [{"a": 1}, {"b": 1}])
    enforced({"type": "object", "propertyNames": {"not": {"pattern": "x"}}}, [{"a": 1}], [{"ax": 1}])


def test_anchors_may_end_alternatives_of_a_group_at_the_end() -> None:
    for pattern, taken, refused in [
        ("^([^,]|$)", ["", "a", "ab"], [",", ",a"]),
        (r"^([0-9x]+\.[0-9x]+$|\%V\%)", ["1.x", "%V%", "%V%a"], ["1.xa", "a%V%"]),
        (r"^(a\_b$)|(^c$)", ["a_b", "c"], ["a_bc", "cc", "xc"]),
        ("(^a|b)c", ["ac", "acx", "xbcx", "bc"], ["xac"]),
        ("((^a)|b)(c|(d$|e))", ["ac", "acx", "xbd", "bex"], ["xac", "bdx"]),
    ]:
        enforced({"type": "string", "pattern": pattern}, taken, refused)
    assert whole("^(a$|b)") == whole("a|b")


def test_names_out_of_a_few_or_of_a_narrower_pattern_take_the_schemas_of_patterns() -> None:
    two = {"type": "object", "propertyNames": {"enum": ["p1", "p2"]}}
    numbers = {**two, "patternProperties": {".*": {"type": "number"}, "2": {"minimum": 3}}}
    enforced(numbers, [{}, {"p1": 1}, {"p1": 1, "p2": 3}], [{"p3": 1}, {"p2": 2}, {"p1": "x"}])
    rest = {**two, "patternProperties": {"2$": {"type": "number"}}, "additionalProperties": {"type": "null"}}
    enforced(rest, [{"p2": 1}, {"p1": None, "p2": 1}], [{"p1": 1}, {"p2": None}])
    lower = {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}
    enforced({**lower, "patternProperties": {"": {"type": "number"}}}, [{"a": 1}], [{"A": 1}, {"a": "x"}])
    closed = {**lower, "patternProperties": {".+": {"type": "number"}}, "additionalProperties": False}
    enforced(closed, [{"a": 1}], [{"A": 1}, {"a": "x"}, {"": 1}])


def test_names_that_match_several_patterns_take_the_schemas_of_all() -> None:
    two: dict[str, Any] = {"^a": {"type": "integer"}, "b$": {"maximum": 5}}
    schema = {"type": "object", "patternProperties": two}
    taken: list[Any] = [{"ab": 1}, {"ac": 9}, {"cb": "x"}, {"cb": 4}, {"x": "x"}, {"aab": 3, "b": 2}]
    refused: list[Any] = [{"ab": 6}, {"ab": "x"}, {"cb": 9}, {"ac": "x"}]
    enforced(schema, taken, refused)
    enforced({**schema, "properties": {"ab": {"minimum": 3}}, "required": ["ab"]}, [{"ab": 4}], [{"ab": 2}, {"ab": 6}])
    enforced({**schema, "additionalProperties": False}, [{"ab": 1}, {"ac": 9}], [{"x": "x"}, *refused])
    all_of_them = {**schema, "patternProperties": {**two, "": {"type": ["integer", "string"]}}}
    enforced(all_of_them, taken, [*refused, {"x": None}, {"b": 1.5}])


def test_patterns_that_are_too_large_to_be_separated_are_refused_alone() -> None:
    names = {"^[a-z]{1,60}$": {"type": "string"}, "^.{3,50}$": {"minLength": 2}}
    schema = {"type": "object", "patternProperties": names, "properties": {"id": {"pattern": "^[0-9]+$"}}}
    with pytest.raises(Refused, match=r"/patternProperties: .*share no name"):
        grammar(JsonSchema(json.dumps(schema)))
    at = schema_matcher(schema, ConstraintMode.VALIDATE)
    assert accepts(at, '{"id":"12"}') and not accepts(at, '{"id":"x"}')
