"""Members in any order on request, and arrays whose items come once: both as one parametric grammar."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from itertools import permutations
from typing import Any

import jsonschema_rs
import pytest
from grammars import accepts, bundled_vocabulary, byte_trie, compact, enforced, sentence
from llguidance import LLMatcher, LLParserLimits
from schema_zoo import BY_HAND, zoo

from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.grammar import grammar_of, grammars_of
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.search import matcher as engine
from mmserve.constraint.search.prefix_equivalence import Documents, prefix_classes
from mmserve.constraint.search.witness import find_first
from mmserve.constraint.search.worker import Searching
from mmserve.core.constraint import ConstraintMode, ConstraintSpec, JsonSchema, SchemaOption

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "home": {"$ref": "#/$defs/home"},
        "pets": {"type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/pet"}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {
        "home": {
            "type": ["object", "null"],
            "properties": {"town": {"type": "string"}, "zip": {"type": "integer"}},
            "required": ["zip"],
        },
        "pet": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {"kind": {"enum": ["cat", "dog"]}, "young": {"$ref": "#/$defs/pet"}},
                    "additionalProperties": False,
                },
            ]
        },
    },
}

#: Integers as TypeScript's and Rust's enums have them in schemas.
TITLED = {"type": "integer", "oneOf": [{"const": 1, "title": "low"}, {"const": 2, "title": "high"}]}
#: Two integers: this draft ignores what is beside a reference.
_IGNORED = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "array",
    "uniqueItems": True,
    "items": [{"$ref": "#/definitions/n", "type": "string"}, {"type": "integer"}],
    "additionalItems": False,
    "definitions": {"n": {"type": "integer"}},
}


def spec(schema: Any, *options: str) -> ConstraintSpec:
    return ConstraintSpec(JsonSchema(json.dumps(schema), tuple(map(SchemaOption, options))))


def matcher(made: Grammar) -> LLMatcher | None:
    at = LLMatcher(byte_trie(), made.text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    return None if at.is_error() else at


def taken(schema: Any, *options: str) -> tuple[Grammar, LLMatcher]:
    """The first grammar of ``schema`` that compiles."""
    for made in grammars_of(spec(schema, *options)):
        if (at := matcher(made)) is not None:
            return made, at
    raise AssertionError("no grammar compiles")


def shuffled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, list):
        return [shuffled(each, chance) for each in value]
    if isinstance(value, dict):
        names = chance.sample(list(value), len(value))
        return {name: shuffled(value[name], chance) for name in names}
    return value


def test_members_come_in_any_order_on_request_at_every_depth() -> None:
    value = {
        "name": "Ada",
        "age": 36,
        "home": {"town": "London", "zip": 7, "open": [1.5]},
        "pets": ["cat", {"kind": "dog", "young": {"young": "x", "kind": "cat"}}],
    }
    made, at = taken(PERSON, "any_order")
    assert made.exact and made.warnings == (
        "properties may come in any order, as asked: at the root, /$defs/home, /$defs/pet/anyOf/1",
    )
    plain = taken(PERSON)[1]
    for names in permutations(value):
        text = compact({name: value[name] for name in names})
        assert accepts(at, text), text
        assert not accepts(plain, text)  # the youngest animal has its members turned round
    for text in [
        '{"age":1,"home":null,"name":"x"}',
        '{"age": 1, "name": "x", "home": {"zip": 1}}',
        '{"name":"x","pets":[],"age":2}',
    ]:
        assert accepts(at, text), text
    for text in [
        '{"age":1}',
        '{"age":1,"name":"x","age":2}',
        '{"age":1,"name":"x","more":2}',
        '{"age":1,"name":"x",}',
        '{"age":151,"name":"x"}',
        '{"home":{"town":"x"},"age":1,"name":"x"}',
        '{"pets":[{"young":1}],"age":1,"name":"x"}',
    ]:
        assert not accepts(at, text), text


def test_open_objects_have_other_members_anywhere() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "required": ["b", "c"]}
    at = taken(schema, "any_order")[1]
    for text in ['{"x":[],"c":1,"a":1,"y":{},"b":null,"z":0}', '{"c":{},"b":null}', '{"b":null,"c":0,"a":1}']:
        assert accepts(at, text), text
    for text in ['{"x":1,"b":null}', '{"c":1,"b":null,"a":"s"}', '{"c":1,"a":1,"b":null,"a":2}']:
        assert not accepts(at, text), text


def test_what_keeps_the_order_is_reported() -> None:
    many = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(64)}}
    made, at = taken(many, "any_order")
    assert made.warnings[1:] == (": members of objects of more than 63 properties come in the order of the schema",)
    assert accepts(at, '{"p0":null,"p63":null}') and not accepts(at, '{"p63":null,"p0":null}')
    del many["properties"]["p63"]
    many["additionalProperties"] = False
    many["required"] = list(many["properties"])
    made, at = taken(many, "any_order")
    assert len(made.warnings) == 1
    names = random.Random(0).sample(list(many["properties"]), 63)
    assert accepts(at, compact(dict.fromkeys(names))) and not accepts(at, compact(dict.fromkeys(names[1:])))


def test_white_space_and_any_order_go_together() -> None:
    made, at = taken(PERSON, "any_order", "white_space")
    value = {"age": 3, "pets": ["a", {"young": "b", "kind": "cat"}, {}], "home": {"zip": 2, "town": "x"}, "name": ""}
    for indent in (None, 2, "\t"):
        assert accepts(at, json.dumps(value, indent=indent))
    assert not accepts(at, '{"age":' + " " * 33 + '1,"name":""}') and made.longest is None


@pytest.mark.parametrize("part", range(4))
def test_answers_in_any_order_are_valid_and_orders_of_valid_ones_are_answers(part: int) -> None:
    chance = random.Random(part)
    compared = 0
    for schema in [*BY_HAND, *zoo(40, seed=3)][part::4]:
        judge = jsonschema_rs.validator_for(schema, validate_formats=True, offline=True)
        try:
            plain = taken(schema)[1]
        except Refused:
            continue
        made, at = taken(schema, "any_order")
        for _ in range(3):
            said = sentence(at, chance)
            if said is not None:
                assert judge.is_valid(json.loads(said, parse_float=Decimal)), (schema, said)
            known = sentence(plain, chance)
            if known is None:
                continue
            assert accepts(at, known), (schema, known)
            if not any("order of the schema" in warning for warning in made.warnings):
                text = json.dumps(shuffled(json.loads(known, parse_float=str), chance), ensure_ascii=False)
                if text.count('"') == known.count('"'):  # no decimals, whose digits would not stay
                    assert accepts(at, text), (schema, text)
                    compared += 1
    assert compared > 10


def test_first_answers_and_their_least_length_in_any_order() -> None:
    searching = Searching(bundled_vocabulary())
    found = []
    for options in ((), ("any_order",)):
        made = grammar_of(spec(PERSON, *options))
        assert isinstance(prefix_classes(made.text), Documents)
        compiled = engine.Grammar(made.text, searching._tokens, LLParserLimits(**PARSER_LIMITS))
        close = find_first(compiled, searching._lexicon, 40, sketch=made.sketch).shortest(40)
        assert close is not None
        text = searching._lexicon.text(close.tokens).decode()
        assert jsonschema_rs.is_valid(PERSON, json.loads(text)) and len(text.encode()) >= made.shortest
        found.append(len(close.tokens))
    assert found[1] <= found[0]


def test_items_out_of_a_large_enum_come_once() -> None:
    names = [f"k{n}" for n in range(40)]
    schema = {"type": "array", "items": {"enum": names}, "uniqueItems": True, "minItems": 2, "maxItems": 5}
    enforced(schema, [["k1", "k11"], names[3:8]], [["k1"], ["k1", "k1"], ["k1", "k2", "k1"], names[:6], ["k1", "x"]])
    inside = {"type": "object", "properties": {"a": {"type": "null"}, "l": schema, "z": {}}, "required": ["l"]}
    enforced(
        inside,
        [{"l": ["k0", "k39"]}, {"a": None, "l": ["k0", "k39"], "z": [1], "other": 2}],
        [{"a": None}, {"l": ["k0", "k0"]}, {"l": ["k0", "k39", "k0"], "z": 1}],
    )
    with pytest.raises(Refused, match="uniqueItems"):
        grammar_of(spec({**schema, "items": {"enum": list(range(64))}}))
    both = {"allOf": [schema, {"type": "array", "items": {"enum": names[:20]}, "maxItems": 4}]}
    enforced(both, [names[:4]], [names[:5], ["k0", "k0"], ["k0", "k20"]])


def test_what_cannot_be_written_beside_other_schemas_is_refused_or_checked() -> None:
    tags = {"type": "array", "items": {"enum": [f"k{n}" for n in range(40)]}, "uniqueItems": True}
    node = {"properties": {"tags": tags, "next": {"$ref": "#/$defs/node"}}, "type": "object", "required": ["tags"]}
    schema = {"allOf": [{"$ref": "#/$defs/node"}, {"required": ["next"]}], "$defs": {"node": node}}
    with pytest.raises(Refused, match="/\\$defs/node/properties/tags/uniqueItems: uniqueItems"):
        grammar_of(spec(schema))
    made = grammar_of(ConstraintSpec(JsonSchema(json.dumps(schema)), ConstraintMode.VALIDATE))
    at = matcher(made)
    assert at is not None and not made.exact and accepts(at, '{"tags":["k1","k1"],"next":{"tags":[]}}')


def test_items_whose_values_are_named_elsewhere_come_once() -> None:
    color, size = {"enum": ["red", "green", "blue"]}, {"type": "integer", "minimum": 1, "maximum": 30}
    schema = {"type": "array", "items": {"$ref": "#/$defs/color"}, "uniqueItems": True, "$defs": {"color": color}}
    enforced(schema, [[], ["red", "blue"]], [["red", "red"], ["pink"]])
    enforced({"type": "array", "items": size, "uniqueItems": True}, [[], [30, 1, 7]], [[7, 7], [31]])
    either = {"type": "array", "items": {"anyOf": [color, {"type": "boolean"}, {"const": None}]}, "uniqueItems": True}
    enforced(either, [[None, True, "red", False]], [[None, None], [True, True], [0]])
    overlapping = {"oneOf": [color, {"enum": ["red", "pink"]}]}
    enforced({"type": "array", "items": overlapping, "uniqueItems": True}, [["pink", "green"]], [["red"], ["pink"] * 2])
    titled = {"type": "array", "items": TITLED, "uniqueItems": True, "minItems": 1}
    enforced(titled, [[1], [2, 1]], [[], [1, 1], [3]])


def test_items_of_different_types_differ() -> None:
    row = [{"type": "string"}, {"type": "number"}, {"enum": [True, None]}]
    schema = {"type": "array", "prefixItems": row, "items": False, "uniqueItems": True}
    enforced(schema, [["a", 1.5, True], []], [["a", 1, 2], ["a", 1, False]])
    row[2] = {"enum": [True, 7]}
    with pytest.raises(Refused, match="uniqueItems"):
        grammar_of(spec(schema))
    enforced({**schema, "maxItems": 2}, [["a", 7]], [["a", 7, True]])
    for same in ({**schema, "prefixItems": [TITLED, TITLED]}, _IGNORED):
        with pytest.raises(Refused, match="uniqueItems"):
            grammar_of(spec(same))


def test_names_of_patterns_are_none_of_a_property_that_may_not_be_there() -> None:
    inner = {"type": "object", "properties": {"x": {}, "y": {}}, "additionalProperties": False}
    schema = {
        "type": "object",
        "properties": {"a": False},
        "patternProperties": {"^[a-z]$": inner},
        "additionalProperties": False,
    }
    made, at = taken(schema, "any_order")
    assert accepts(at, '{"b":{"x":1}}') and not accepts(at, '{"a":{"x":1}}')
    assert made.warnings[1:] == (
        ": members of objects that have patternProperties beside other properties come in the order of the schema",
    )
    once = {"type": "array", "uniqueItems": True, "items": {"enum": list(range(20))}}
    with pytest.raises(Refused, match="uniqueItems"):
        grammar_of(spec({**schema, "patternProperties": {"^[a-z]$": once}}))


@pytest.mark.parametrize("names", [["n" * 70, "b"], [f"number_{i:03}_{'abcdefghij' * 3}" for i in range(40)]])
def test_open_objects_keep_the_order_where_their_names_are_long(names: list[str]) -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    made, at = taken(schema, "any_order")
    assert accepts(at, compact({names[0]: 1, names[1]: 2})) and not accepts(at, compact({names[1]: 1, names[0]: 2}))
    assert made.warnings[1:] == (
        ": members of objects with names too many or too long to tell from others come in the order of the schema",
    )
    once = {"type": "array", "uniqueItems": True, "items": {"enum": list(range(20))}}
    schema["properties"][names[0]] = once  # type: ignore[index]
    with pytest.raises(Refused, match="uniqueItems"):
        grammar_of(spec(schema))
    made = grammar_of(ConstraintSpec(JsonSchema(json.dumps(schema)), ConstraintMode.VALIDATE))
    at = matcher(made)
    assert at is not None and not made.exact and accepts(at, compact({names[0]: [1, 2]}))
