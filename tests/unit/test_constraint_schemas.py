"""Schemas that are enforced exactly: what the grammar takes and what it does not, and an independent judge agrees."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from grammars import accepts, compact, enforced, grammar, schema_matcher, sentence

from mmserve.constraint.compile.schema import rewrite
from mmserve.constraint.findings import Refused
from mmserve.core.constraint import JsonSchema

KINDS = {"enum": ["a", "b"]}
TAGGED = {
    "type": "object",
    "properties": {"k": KINDS, "v": {"type": ["integer", "string"]}},
    "required": ["k", "v"],
    "additionalProperties": False,
}
AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CLOSED = {**AB, "additionalProperties": False}
LIST = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}}, "required": ["v"]}


def branch(tag: str, **more: Any) -> Any:
    return {"type": "object", "properties": {"t": {"const": tag}, **more}, "required": ["t"]}


#: Schema, values it takes, values it does not.
EXACT: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "not_enum": ({"type": "string", "not": KINDS}, ["", "c", "ab", "é"], ["a", "b"]),
    "not_const_of_any_type": ({"not": {"const": "a"}}, ["b", 1, None, {}], ["a"]),
    "not_a_number": ({"type": "integer", "not": {"const": 3}}, [2, 4, -3, 33], [3]),
    "not_type": ({"not": {"type": ["string", "null"]}}, [1, [], True], ["a", None]),
    "not_required": ({**AB, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    "not_any_of": ({"type": "integer", "not": {"anyOf": [{"const": 1}, {"const": 2}]}}, [0, 3], [1, 2]),
    "if_then_else": (
        {
            **TAGGED,
            "if": {"properties": {"k": {"const": "a"}}, "required": ["k"]},
            "then": {"properties": {"v": {"type": "integer"}}},
            "else": {"properties": {"v": {"type": "string"}}},
        },
        [{"k": "a", "v": 1}, {"k": "b", "v": "x"}],
        [{"k": "a", "v": "x"}, {"k": "b", "v": 1}],
    ),
    "dependent_required": ({**CLOSED, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    "dependencies": (
        {**CLOSED, "$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}},
        [{}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    "dependent_schemas": (
        {**CLOSED, "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}, "required": ["b"]}}},
        [{"b": 1}, {"a": 1, "b": 5}],
        [{"a": 1}, {"a": 1, "b": 4}],
    ),
    "unique_items": (
        {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 1},
        [[1], [3, 1, 2]],
        [[], [1, 1], [1, 2, 1]],
    ),
    "one_of_by_constant": (
        {"oneOf": [branch("x", n={"type": "integer"}), branch("y")]},
        [{"t": "x", "n": 1}, {"t": "y"}],
        [{"t": "z"}, {"t": "x", "n": "a"}],
    ),
    "one_of_by_type": ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [1.5, None]),
    "one_of_by_range": (
        {"oneOf": [{"type": "integer", "maximum": 1}, {"type": "number", "minimum": 2}]},
        [0, 2.5],
        [1.5],
    ),
    "one_of_split": (
        {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]},
        [-1, 6],
        [0, 5],
    ),
    "one_of_through_references": (
        {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {"x": branch("x"), "y": branch("y")}},
        [{"t": "x"}, {"t": "y"}],
        [{"t": "z"}],
    ),
    "at_least_one": ({**CLOSED, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{}]),
    "at_most_one": ({**CLOSED, "maxProperties": 1}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    "map_of_at_least_one": ({"type": "object", "minProperties": 1}, [{"x": 1}, {"x": 1, "y": 2}], [{}]),
    "names_by_pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
        [{}, {"ab": 1}],
        [{"A": 1}, {"a": "x"}],
    ),
    "names_by_enum": ({"type": "object", "propertyNames": {"enum": ["x", "y"]}}, [{}, {"x": 1, "y": []}], [{"z": 1}]),
    "unevaluated": ({**AB, "unevaluatedProperties": False}, [{"a": 1}], [{"c": 1}]),
    "recursion": ({"$ref": "#/$defs/n", "$defs": {"n": LIST}}, [{"v": 1, "next": {"v": 2}}], [{"next": {"v": 2}}]),
    "endless_but_optional": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}},
            "additionalProperties": False,
            "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
        },
        [{}],
        [{"a": {}}, {"a": {"n": {}}}],
    ),
    "rows_of_old_drafts": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": [{"type": "integer"}],
            "additionalItems": False,
        },
        [[], [1], "not an array"],
        [["a"], [1, 2]],
    ),
    "exclusive_of_draft_4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": True,
        },
        [4],
        [3],
    ),
    "siblings_of_an_old_reference": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"s": {"type": "string"}},
            "properties": {"a": {"$ref": "#/definitions/s", "maxLength": 1}},
        },
        [{"a": "long"}],
        [{"a": 1}],
    ),
    "constants": ({"enum": ["a", 1, None, [1, {"x": 2}], 1.5]}, ["a", 1, None, [1, {"x": 2}], 1.5], [2, True, [1]]),
    "constant_with_a_fraction_of_zero": ({"const": 1.0}, [1], [2]),
    "anchors_of_alternatives": ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xa", "bx"]),
    "search": ({"type": "string", "pattern": "[0-9]{2}"}, ["x12y"], ["1x2"]),
    "types": ({"type": ["string", "null"], "maxLength": 3}, ["abc", None], ["abcd", 1]),
    "bounds_that_llguidance_misses": (
        {"type": "number", "exclusiveMinimum": 1, "maximum": 1.25},
        [1.1, 1.25],
        [1, 1.26],
    ),
    "not_above_zero": ({"type": "number", "exclusiveMaximum": 0.05, "exclusiveMinimum": 0}, [0.01], [0, 0.05]),
    "items_beside_rows_of_others": (
        {"type": "array", "prefixItems": [True], "anyOf": [{"items": {"type": "integer"}}]},
        [[], [1]],
        [["a"]],
    ),
    "more_properties_beside_those_of_others": (
        {**AB, "properties": {"a": True}, "anyOf": [{"additionalProperties": {"type": "integer"}}]},
        [{"a": 1}, {"b": 1}],
        [{"a": "x"}],
    ),
    "conditions_in_conditions": (
        {
            **TAGGED,
            "properties": {"k": {"enum": ["a", "b", "c"]}, "v": {"type": "integer"}},
            "if": {"properties": {"k": {"const": "a"}}},
            "then": {"properties": {"v": {"minimum": 10}}},
            "else": {
                "if": {"properties": {"k": {"const": "b"}}},
                "then": {"properties": {"v": {"maximum": -10}}},
                "else": {"properties": {"v": {"const": 0}}},
            },
        },
        [{"k": "a", "v": 10}, {"k": "b", "v": -10}, {"k": "c", "v": 0}],
        [{"k": "a", "v": 9}, {"k": "b", "v": 0}, {"k": "c", "v": 10}],
    ),
    "schemas_that_depend_on_each_other": (
        {
            **CLOSED,
            "dependentSchemas": {
                "a": {"required": ["b"], "properties": {"b": {"minimum": 3}}},
                "b": {"properties": {"a": {"maximum": 1}}},
            },
        },
        [{}, {"b": 0}, {"a": 1, "b": 3}],
        [{"a": 1}, {"a": 2, "b": 3}, {"a": 1, "b": 2}],
    ),
    "properties_named_as_keywords": (
        {
            "type": "object",
            "properties": {"$ref": {"type": "integer"}, "allOf": {"type": "string"}, "const": {"type": "null"}},
            "required": ["$ref", "allOf"],
            "additionalProperties": False,
        },
        [{"$ref": 1, "allOf": ""}, {"$ref": 1, "allOf": "", "const": None}],
        [{"$ref": "x", "allOf": ""}, {"allOf": ""}, {"$ref": 1, "allOf": "", "const": 1}],
    ),
    "names_and_values_beyond_16_bits": (
        {
            "type": "object",
            "properties": {"😀": {"type": "string", "maxLength": 1}, 'a"\\\n': {"const": "e\u0301"}},
            "required": ["😀"],
            "additionalProperties": False,
        },
        [{"😀": "😀"}, {"😀": "é", 'a"\\\n': "e\u0301"}],
        [{"😀": "e\u0301"}, {"😀": "", 'a"\\\n': "é"}, {}],
    ),
    "constants_and_what_stands_beside_them": (
        {
            "enum": [[1], ["a"], {"a": 1}, {"b": 1}, "ab", 4, 5],
            "items": {"type": "string"},
            "required": ["a"],
            "multipleOf": 2,
        },
        [["a"], {"a": 1}, "ab", 4],
        [[1], {"b": 1}, 5],
    ),
    "constants_as_written_otherwise": (
        '{"const": {"a": [1.0, {"b": 2.50}], "c": 1e2}}',
        [{"a": [1, {"b": 2.5}], "c": 100}],
        [{}],
    ),
    "zero_of_either_sign": (
        '{"type": "number", "exclusiveMinimum": -0.0, "maximum": 0.5}',
        [0.5, 0.25],
        [0, -0.1],
    ),
    "bounds_of_integers_with_fractions": (
        {"type": "integer", "minimum": -2.5, "exclusiveMaximum": 0.5},
        [-2, 0],
        [-3, 1],
    ),
    "references_with_escapes": (
        {
            "anyOf": [{"$ref": "#/$defs/a%20b%25"}, {"$ref": "#/$defs/c~0~1d"}],
            "$defs": {"a b%": {"type": "integer"}, "c~/d": {"type": "null"}},
        },
        [1, None],
        ["", 1.5],
    ),
    "rows_that_are_joined": (
        {
            "type": "array",
            "allOf": [
                {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
                {"prefixItems": [True, {"maxLength": 2}], "items": {"maxLength": 1}},
            ],
            "minItems": 2,
        },
        [[1, "ab"], [1, "ab", "a"]],
        [[1], [1, "abc"], [1, "ab", "ab"], ["a", "a"]],
    ),
    "closed_beside_others": (
        {"allOf": [{**AB, "additionalProperties": False}, {"properties": {"b": {"minimum": 3}, "c": True}}]},
        [{}, {"a": 1, "b": 3}],
        [{"c": 1}, {"b": 2}],
    ),
    "multiples": ({"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 2}, [0.25, 1.75], [0.3, 2.25]),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_schema_is_enforced_exactly(name: str) -> None:
    enforced(*EXACT[name])


FORMATS = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-04-31", "24-01-01"]),
    "time": (["10:00:00Z", "23:59:59.5+02:00"], ["24:00:00Z", "10:00:00", "10:60:00Z"]),
    "date-time": (["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-02-29 10:00:00Z"]),
    "duration": (["P1D", "PT5M", "P1Y2M3DT4H", "P2W"], ["P", "PT", "P1Y3D", "1D"]),
    "ipv4": (["0.0.0.0", "255.1.20.3"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
    "ipv6": (["::", "::1", "1:2:3:4:5:6:7:8", "fe80::1:2"], ["1::2::3", ":1", "1:2:3:4:5:6:7"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "hostname": (
        ["example.com", "a-b.c", "data-processing-cluster", "s3-eu-west-1-prod-abc123.example.org"],
        ["-a", "a..b", "a_b"],
    ),
    "email": (["a.b+c@example.com", "x@mail.my-firm-2.co.uk", "x@mail.dept.univ.edu"], ["a@", "@b.c", "a b@c.d"]),
    "uri": (
        [
            "http://a.b:80/c?x=1#y",
            "mailto:a@b.c",
            "urn:a:b",
            "http://1.2.3.4/",
            "safari-web-extension://d11111abcdef8ab/",
        ],
        ["a", "http//a", "a b:c"],
    ),
    "json-pointer": (["", "/a/~0b"], ["a", "/~2"]),
    "relative-json-pointer": (["0", "2/a", "1#"], ["", "/a", "01"]),
    "uri-reference": (["", "a/b", "/a", "//a.b/c", "?x", "#y", "http://a.b"], ["a b", "\\", "#a#"]),
    "uri-template": (["", "http://a.b/{c}/{+d,e:3}{?f*}"], ["{", "{a b}", "}"]),
    "regex": (["", "^a+$", "[a-z]{2}|\\d*", "(ab|c)?", "^(?:x|[^,])$"], ["(", "[", "*", "a**", "\\"]),
    "idn-email": (["a@b.c"], ["a", "@b"]),
    "idn-hostname": (["a.b"], ["a b", "-a"]),
    "iri": (["http://a.b/c"], ["a", "a b:c"]),
    "iri-reference": (["", "a/b"], ["a b", "#a#"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_patterns(name: str) -> None:
    judge = jsonschema_rs.validator_for({"format": name}, validate_formats=True)
    at = schema_matcher({"type": "string", "format": name})
    good, bad = FORMATS[name]
    for text in good:
        assert judge.is_valid(text), "the test is wrong"
        assert accepts(at, compact(text)), text
    assert not any(accepts(at, compact(text)) for text in bad)
    chance = random.Random(1)
    for _ in range(20):
        if (said := sentence(at, chance)) is not None:
            assert judge.is_valid(json.loads(said)), said


def test_a_named_property_does_not_come_again_under_an_escaped_name() -> None:
    schema = {**AB, "additionalProperties": {"type": "string"}}
    assert not jsonschema_rs.is_valid(schema, json.loads('{"\\u0061":"x"}'))
    assert not accepts(schema_matcher(schema), '{"\\u0061":"x"}')


def test_members_are_counted_by_name() -> None:
    """llguidance counts {"a":1,"a":1} as two: it is not asked for two."""
    with pytest.raises(Refused, match="minProperties"):
        schema_matcher({"type": "object", "minProperties": 2})


def test_users_cannot_loosen_the_grammar() -> None:
    schema = {"type": "string", "maxLength": 1, "x-guidance": {"lenient": True}}
    at = schema_matcher(schema)
    assert accepts(at, '"a"') and not accepts(at, '"ab"')
    assert any("x-guidance" in warning for warning in grammar(JsonSchema(json.dumps(schema))).warnings)


def test_spaces_come_one_at_most() -> None:
    at = schema_matcher(AB)
    assert accepts(at, '{"a": 1, "b": 2}') and accepts(at, '{"a":1,"b":2}')
    assert not accepts(at, '{"a":  1}') and not accepts(at, '{ "a":1}')


def test_names_that_are_required_twice_are_required_once() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "a"]}
    found = rewrite(schema)
    assert found.schema == rewrite(schema | {"required": ["a"]}).schema
    assert [(warning.pointer, warning.keyword) for warning in found.warnings] == [("/required", "required")]


def test_an_object_that_must_have_one_of_its_own_kind_has_no_end() -> None:
    tree: dict[str, Any] = {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}}
    with pytest.raises(Refused, match="infinitely deep"):
        schema_matcher(tree)
    enforced({**tree, "properties": {"end": {"type": "null"}}}, [{"end": None}, {"a": {"end": None}}], [{}, {"a": {}}])


def test_a_branch_of_one_of_that_takes_everything_is_apart_from_one_that_takes_nothing() -> None:
    schema = {"type": "object", "oneOf": [{"minItems": 2, "const": [1, 2]}, True]}
    enforced(schema, [{}, {"a": 1}], [1, [1, 2]])


A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
ONLY_TEXT: dict[str, Any] = {"type": "object", "unevaluatedProperties": {"type": "string"}}


def test_properties_that_all_of_and_references_evaluate_are_followed() -> None:
    taken: list[Any] = [{"a": 1, "b": 2}, {"b": 2}, {"b": 2, "x": "s"}]
    refused: list[Any] = [{"a": 1}, {"a": "s", "b": 2}, {"b": 2, "x": 1}]
    enforced({**ONLY_TEXT, "allOf": [A, {"allOf": [True, B]}]}, taken, refused)
    enforced({**ONLY_TEXT, **A, "$ref": "#/$defs/b", "$defs": {"b": B}}, taken, refused)
    enforced({**ONLY_TEXT, "allOf": [A, B], "unevaluatedProperties": False}, taken[:2], [*refused, taken[2]])
    patterns = {"patternProperties": {"^x": {"type": "null"}}}
    enforced({**ONLY_TEXT, "allOf": [patterns, A]}, [{"x": None}, {"y": "s"}], [{"x": "s"}, {"y": None}])
    every = {**B, "additionalProperties": {"type": "boolean"}}
    enforced({**ONLY_TEXT, "allOf": [every]}, [{"b": 1, "x": True}], [{"b": 1, "x": "s"}, {"x": True}])
