"""How long answers can be at most: exact where that is easily said, and never less than any sentence."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import pytest
from grammars import accepts, grammar, matcher, schema_matcher, sentence
from schema_zoo import zoo

from mmserve.constraint.compile import wire
from mmserve.constraint.findings import Refused
from mmserve.core.constraint import Choice, Gbnf, JsonSchema, Lark, Regex


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def longest(schema: Any) -> int | None:
    return grammar(JsonSchema(json.dumps(schema))).longest


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
#: Schema, and the longest text that it allows.
EXACT: list[tuple[Any, str]] = [
    ({"type": "boolean"}, "false"),
    ({"type": ["boolean", "null"]}, "false"),
    ({"enum": ["red", "é", 7]}, '"red"'),
    ({"const": [1, {"a": None, "b": "x\ny"}]}, '[1, {"a": null, "b": "x\\ny"}]'),
    ({"enum": [1e-7, 0.5]}, "0.0000001"),
    ({"type": "integer", "minimum": -10, "maximum": 9}, "-10"),
    ({"type": "string", "maxLength": 2}, '"\U0001f600\U0001f600"'),
    ({"type": "string", "pattern": "^[a-z]{2,4}$"}, '"abcd"'),
    ({"type": "string", "pattern": '^["a]{2}$'}, '"\\"\\""'),
    ({"type": "string", "format": "date"}, '"2024-02-29"'),
    (of(a=DIGIT, b={"type": "boolean"}), '{"a": 1, "b": false}'),
    (of(a=DIGIT, b=False), '{"a": 1}'),
    ({"type": "array", "items": DIGIT, "maxItems": 3}, "[1, 2, 3]"),
    ({"type": "array", "prefixItems": [DIGIT, {"enum": ["xy"]}], "items": False}, '[1, "xy"]'),
    ({"type": "array", "prefixItems": [DIGIT], "items": {"type": "null"}, "maxItems": 3}, "[1, null, null]"),
    ({"anyOf": [DIGIT, {"const": "longer"}]}, '"longer"'),
    ({"allOf": [{"type": "string", "maxLength": 9}, {"enum": ["a", "bc"]}]}, '"bc"'),
    ({"$ref": "#/$defs/d", "$defs": {"d": of(n={"$ref": "#/$defs/e"}), "e": DIGIT}}, '{"n": 1}'),
]


@pytest.mark.parametrize(("schema", "text"), EXACT, ids=lambda value: json.dumps(value)[:40])
def test_a_bounded_schema_has_a_longest_document(schema: Any, text: str) -> None:
    assert longest(schema) == len(text.encode())
    assert accepts(schema_matcher(schema), text)


ENDLESS: list[Any] = [
    {},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "string"},
    {"type": "string", "minLength": 2},
    {"type": "string", "pattern": "^a+$"},
    {"type": ["boolean", "string"]},
    {"type": "array", "items": DIGIT},
    {"type": "object", "properties": {"a": DIGIT}},
    {"type": "object", "patternProperties": {"^a$": DIGIT}, "additionalProperties": False},
    {"anyOf": [DIGIT, {"type": "string"}]},
    {"$ref": "#/$defs/n", "$defs": {"n": of(next={"$ref": "#/$defs/n"})}},
]


@pytest.mark.parametrize("schema", ENDLESS, ids=lambda value: json.dumps(value)[:40])
def test_what_has_no_end_has_no_bound(schema: Any) -> None:
    assert longest(schema) is None


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("[0-9]", 1),
        ("[0-9]{2,3}", 3),
        ("a|bcd|é?", 3),
        ("(x{2}y?){3}", 9),
        ("^[a-é]$", 2),
        (".", 4),
        ("\u20ac{2}", 6),
        ("", 0),
        ("(?:){0,}a", 1),
        ("(a*){0}b", 1),
        ("a*", None),
        ("[ab]+c", None),
        ("a{2,}", None),
    ],
)
def test_of_an_expression_it_is_the_longest_way_through(pattern: str, most: int | None) -> None:
    assert grammar(Regex(pattern)).longest == most


def test_of_a_choice_it_is_the_longest_option() -> None:
    assert grammar(Choice(("yes", "no", "état"))).longest == 5


def test_of_a_grammar_of_ones_own_it_is_not_known() -> None:
    """Where it refers to itself; else it is one expression."""
    assert grammar(Lark('start: "a" start | "b"')).longest is None
    assert grammar(Gbnf('root ::= "a" root | "b"')).longest is None
    assert grammar(Lark('start: "a" b? | "é"\nb: "b"{3}')).longest == 4
    assert grammar(Gbnf('root ::= "a" b? | "é"\nb ::= "b"{3}')).longest == 4


def test_it_comes_through_the_wire() -> None:
    for made in (grammar(Choice(("a", "bc"))), grammar(Regex("a*"))):
        assert wire.to_outcome(wire.read(io.BytesIO(wire.packed(wire.from_outcome(made))))) == made


def test_no_sentence_is_longer() -> None:
    chance, bounded = random.Random(0), 0
    for schema in zoo(220):
        try:
            at, most = schema_matcher(schema), longest(schema)
        except Refused:
            continue
        if most is None:
            continue
        bounded += 1
        for _ in range(5):
            said = sentence(at, chance)
            assert said is None or len(said.encode()) <= most, (schema, said)
    assert bounded > 40


@pytest.mark.parametrize("pattern", ["(a|bc){2}d?", "[a-c]{1,3}(é|x){2}"])
def test_no_match_is_longer(pattern: str) -> None:
    at, most, chance = matcher(Regex(pattern)), grammar(Regex(pattern)).longest, random.Random(1)
    said = [sentence(at, chance) for _ in range(200)]
    assert most is not None and max(len(each.encode()) for each in said if each) == most
