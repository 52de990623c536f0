"""Constraints that must be refused: why each must, and where and by which keyword the refusal says so."""

from __future__ import annotations

import json
from typing import Any

from mmserve.core.constraint import Choice, ConstraintKind, Gbnf, JsonSchema, Lark, Regex

_OPEN = {"type": "object", "properties": {"a": {}, "b": {}}}
_TYPED = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}
_LIST = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
_TREE = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}


def _nested(depth: int) -> str:
    return '{"items":' * depth + "true" + "}" * depth


#: Schemas by name: what is wrong, the pointer, and the keyword of its refusal.
SCHEMAS: dict[str, tuple[Any, str, str]] = {
    # No schema at all.
    "no_json": ("{", "", "schema"),
    "not_a_schema": ("3", "", "schema"),
    "nan": ('{"const": NaN}', "", "schema"),
    "infinity": ('{"minimum": 1e999}', "", "schema"),
    "long_integer": ('{"minimum": ' + "9" * 5000 + "}", "", "schema"),
    "half_of_a_pair": ('{"properties": {"a": {"const": "\\ud800"}}}', "/properties/a/const", "schema"),
    "named_twice": ('{"type": "string", "type": "integer"}', "", "schema"),
    "wrong_type": ({"properties": {"a": {"type": "strin"}}}, "/properties/a/type", "type"),
    "wrong_length": ({"minLength": -1}, "/minLength", "minLength"),
    "wrong_required": ({"required": "a"}, "/required", "required"),
    "wrong_subschema": ({"items": {"anyOf": [3]}}, "/items/anyOf", "anyOf"),
    "wrong_steps": ({"multipleOf": 0}, "/multipleOf", "multipleOf"),
    "unknown_dialect": ({"$schema": "https://example.com/mine"}, "/$schema", "$schema"),
    "too_new_for_its_dialect": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "const": 1},
        "/const",
        "const",
    ),
    # Too much.
    "too_long": (json.dumps({"title": "x" * (256 << 10)}), "", "schema"),
    "too_deep": (_nested(100), "", "schema"),
    "much_too_deep": (_nested(20_000), "", "schema"),
    "too_many_properties": ({"properties": {f"p{i}": {} for i in range(5001)}}, "", "properties"),
    "too_many_values": ({"properties": {"a": {"enum": list(range(10_001))}}}, "/properties/a", "enum"),
    "too_long_a_string": ({"type": "string", "minLength": 10**6}, "/minLength", "minLength"),
    "too_many_items": ({"type": "array", "minItems": 10**9}, "/minItems", "minItems"),
    "pattern_repeats": ({"pattern": "a{1000000}"}, "/pattern", "pattern"),
    "pattern_repeats_repeats": ({"pattern": "(a{1000}){1000}"}, "/pattern", "pattern"),
    "steps_too_fine": ({"type": "integer", "multipleOf": 99999989}, "/multipleOf", "multipleOf"),
    "steps_meet": ({"multipleOf": 9973, "allOf": [{"multipleOf": 9967}]}, "/allOf/0/multipleOf", "multipleOf"),
    "huge_bound": ({"type": "integer", "minimum": 10**20}, "/minimum", "minimum"),
    "huge_constant": ({"const": 9007199254740993}, "/const", "const"),
    "cases_multiply": (
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"const": 1}}} for j in range(20)]} for i in range(8)]},
        "",
        "json_schema",
    ),
    # No finite value.
    "endless": ({"$ref": "#/$defs/n", "$defs": {"n": _LIST}}, "", "schema"),
    "endless_array": (_TREE, "", "schema"),
    "endless_in_turn": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "",
        "schema",
    ),
    "endless_required": ({**_LIST, "$defs": {"n": _LIST}}, "", "schema"),
    "nothing": (False, "", "schema"),
    "nothing_by_type": ({"type": "string", "enum": [1]}, "", "schema"),
    "nothing_by_bounds": ({"type": "integer", "minimum": 2, "maximum": 1}, "", "json_schema"),
    "only_control_characters": ({"const": "\u0001"}, "/const", "const"),
    "pattern_of_control_characters": ({"type": "string", "pattern": "^\\u0001$"}, "", "json_schema"),
    # Outside of the document.
    "network": ({"$ref": "https://example.com/schema.json"}, "/$ref", "$ref"),
    "file": ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "/properties/a/$ref", "$ref"),
    "anchor": ({"$ref": "#there", "$defs": {"a": {"$anchor": "here"}}}, "/$ref", "$ref"),
    "anchor_of_two": ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}, "b": {"$anchor": "a"}}}, "/$ref", "$ref"),
    "id_of_two": ({"$ref": "a", "$defs": {"a": {"$id": "a"}, "b": {"$id": "a"}}}, "/$defs/b/$id", "$id"),
    "beside_an_inner_root": (
        {"$defs": {"a": {}}, "properties": {"p": {"$id": "other", "$ref": "#/$defs/a"}}},
        "/properties/p/$ref",
        "$ref",
    ),
    "dangling": ({"$ref": "#/$defs/none"}, "/$ref", "$ref"),
    "not_even_a_schema": ({"$ref": "#/title", "title": "text"}, "/$ref", "$ref"),
    "inner_dialect": (
        {"properties": {"a": {"$id": "other", "$schema": "http://json-schema.org/draft-04/schema#"}}},
        "/properties/a/$id",
        "$id",
    ),
    "dynamic": ({"$dynamicRef": "#a"}, "/$dynamicRef", "$dynamicRef"),
    "dynamic_of_two": (
        {
            "$id": "http://a.b/root",
            "$dynamicAnchor": "n",
            "type": "object",
            "properties": {"p": {"$ref": "list"}},
            "$defs": {"l": {"$id": "list", "$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}}},
        },
        "/$defs/l/items/$dynamicRef",
        "$dynamicRef",
    ),
    # What no grammar enforces.
    "look_ahead": ({"pattern": "^(?=a)"}, "/pattern", "pattern"),
    "back_reference": ({"pattern": "(a)\\1"}, "/pattern", "pattern"),
    "broken_pattern": ({"pattern": "("}, "/pattern", "pattern"),
    "pattern_of_names": ({"patternProperties": {"(?!a)": {}}}, "/patternProperties", "patternProperties"),
    "unknown_format": ({"format": "phone"}, "/format", "format"),
    "contains": ({"contains": {"type": "integer"}, "minContains": 2}, "/contains", "contains"),
    "contains_at_most": ({"contains": {"type": "integer"}, "maxContains": 1}, "/contains", "contains"),
    "contains_none": (
        {"contains": {"multipleOf": 3}, "minContains": 0, "maxContains": 0},
        "/maxContains",
        "maxContains",
    ),
    "unique_items": ({"type": "array", "uniqueItems": True}, "/uniqueItems", "uniqueItems"),
    "one_of_overlaps": ({"oneOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, "/oneOf", "oneOf"),
    "not_a_multiple": ({"not": {"multipleOf": 3}}, "/not", "not"),
    "condition": ({"if": {"multipleOf": 3}, "then": {"minimum": 10}}, "/if", "if"),
    "property_names": ({"propertyNames": {"format": "regex"}}, "/propertyNames", "propertyNames"),
    "least_properties": ({"type": "object", "minProperties": 3}, "/minProperties", "minProperties"),
    "most_properties": ({**_TYPED, "maxProperties": 1}, "/maxProperties", "maxProperties"),
    "unevaluated": (
        {"anyOf": [{"properties": {f"p{i}": {}}} for i in range(10)], "unevaluatedProperties": False},
        "/unevaluatedProperties",
        "unevaluatedProperties",
    ),
}

#: Constraints that are no schemas, in the same way.
OTHERS: dict[str, tuple[ConstraintKind, str, str]] = {
    "regex_broken": (Regex("["), "", "regex"),
    "regex_look_behind": (Regex("(?<=a)b"), "", "regex"),
    "regex_repeats": (Regex("((a{100}){100}){100}"), "", "regex"),
    "regex_explodes": (Regex("(a?){2000}a{2000}"), "", "regex"),
    "regex_too_long": (Regex("a" * (17 << 10)), "", "regex"),
    "regex_too_deep": (Regex("(" * 1000 + "a" + ")" * 1000), "", "regex"),
    "choice_of_nothing": (Choice(()), "", "choice"),
    "choice_of_an_empty_one": (Choice(("a", "")), "/options/1", "choice"),
    "choice_of_half_a_pair": (Choice(("\ud800",)), "/options/0", "choice"),
    "lark_without_start": (Lark('root: "a"'), "", "lark"),
    "lark_broken": (Lark("start: ("), "/1", "lark"),
    "lark_unknown_rule": (Lark("start: other"), "/1", "lark"),
    "lark_with_a_schema": (Lark('start: "a"\n  | %json {"uniqueItems": true}'), "/2/uniqueItems", "uniqueItems"),
    "lark_with_special_tokens": (Lark('start: "a"\n  | <|eot|>'), "/2", "<token>"),
    "lark_elsewhere": (Lark("start: @other"), "/1", "@"),
    "lark_cut_off": (Lark("start[max_tokens=3]: /a*/"), "/1", "[…]"),
    "lark_endless": (Lark('start: a\na: "x" a'), "/2", "lark"),
    "gbnf_broken": (Gbnf("root ::= ("), "/1", "gbnf"),
    "gbnf_too_deep": (Gbnf("root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "/1", "gbnf"),
}

#: All of them, ready to be asked for.
ALL: dict[str, tuple[ConstraintKind, str, str]] = {
    **{
        name: (JsonSchema(schema if isinstance(schema, str) else json.dumps(schema)), pointer, keyword)
        for name, (schema, pointer, keyword) in SCHEMAS.items()
    },
    **OTHERS,
}
