"""Schemas of every kind that a strict grammar can enforce: some written by hand, the rest drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from mmserve.constraint.compile.formats import FORMATS

Schema = dict[str, Any]

NAMES = ["a", "b", "kind", "na me", "é", "x/y", 'q"', "tags"]
WORDS = ["red", "green", "a b", "", "é", 'say "hi"', "back\\slash", "10", "true", "\U0001f600"]
PATTERNS = [
    "^[a-z]{2,4}$",
    "^[A-Z]{3}-[0-9]{2}$",
    "[0-9]",
    "^(ab|cd)+$",
    "^x?y*z+$",
    "^[^a-z]{1,3}$",
    "\\d{3}",
    "^\\w+\\s\\w+$",
    "^(a|b|c)$",
    "^[à-ÿ]{2}$",
    "^.{3}$",
    '^"\\\\[0-9]"$',
]
NUMBERS = [0, 1, -1, 3, 10, -10, 99, 1000, 0.5, -2.25, 1e-3, 12.75]


def of(*required: str, **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
_AB = {"a": INTEGER, "b": STRING}
_NODE = {"$ref": "#/$defs/node"}

BY_HAND: list[Schema] = [
    {},
    {"type": "object"},
    {"type": "array"},
    {"type": ["string", "null"]},
    {"$ref": "#/$defs/node", "$defs": {"node": of("v", v=INTEGER, next=_NODE)}},
    {"$ref": "#/$defs/node", "$defs": {"node": of("kids", kids={"type": "array", "items": _NODE})}},
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {"anyOf": [{"type": "number"}, of("op", "l", "r", op={"enum": ["+", "*"]}, l=_NODE, r=_NODE)]}
        },
    },
    {
        "$ref": "#/$defs/even",
        "$defs": {
            "even": {"anyOf": [NULL, of("odd", odd={"$ref": "#/$defs/odd"})]},
            "odd": of("even", even={"$ref": "#/$defs/even"}),
        },
    },
    {"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [INTEGER, STRING], "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True, "minItems": 2, "maxItems": 2},
    {**of(**_AB), "minProperties": 1},
    {**of(**_AB), "maxProperties": 1},
    {**of(**_AB), "minProperties": 1, "maxProperties": 1},
    {"type": "object", "minProperties": 1, "additionalProperties": INTEGER},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "additionalProperties": NULL},
    {"type": "object", "propertyNames": {"enum": ["x", "y"]}},
    {"type": "object", "patternProperties": {"^x": INTEGER, "^y": STRING}, "additionalProperties": False},
    {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"a": INTEGER}, "required": ["a", "other"]},
    {**of(**_AB), "dependentRequired": {"a": ["b"]}},
    {**of(**_AB), "dependentSchemas": {"a": {"properties": {"b": {"minLength": 2}}, "required": ["b"]}}},
    {
        **of("kind", kind={"enum": ["n", "s"]}, v={"type": ["integer", "string"]}),
        "if": {"properties": {"kind": {"const": "n"}}, "required": ["kind"]},
        "then": {"properties": {"v": INTEGER}, "required": ["v"]},
        "else": {"properties": {"v": {"type": "string", "minLength": 2}}, "required": ["v"]},
    },
    {"type": "integer", "if": {"minimum": 10}, "then": {"maximum": 20}, "else": {"minimum": -5}},
    {"type": "string", "not": {"enum": ["a", "b", ""]}},
    {"type": "integer", "not": {"const": 0}},
    {"not": {"type": ["object", "array", "string"]}},
    {**of(**_AB), "not": {"required": ["a"]}},
    {"type": "number", "not": {"minimum": 5}},
    {"oneOf": [of("k", "n", k={"const": "dot"}, n=INTEGER), of("k", "s", k={"const": "box"}, s=STRING)]},
    {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]},
    {"oneOf": [STRING, INTEGER, NULL]},
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 17}]},
    {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 5}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"properties": {"b": STRING}, "required": ["b"]},
        ]
    },
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.05},
    {"type": "number", "minimum": 1e-7, "maximum": 1e-6},
    {"type": "number", "minimum": -1},
    {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 2},
    {"type": "integer", "multipleOf": 7, "exclusiveMinimum": 100},
    {"enum": [None, True, 1.5, "x", [1, {"y": None}], {"z": []}]},
    {"const": {"deep": [{"er": "é"}]}},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [INTEGER, STRING],
        "additionalItems": False,
        "minItems": 2,
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"p": {"type": "integer", "minimum": 0}},
        **of("w", "h", w={"$ref": "#/definitions/p"}, h={"$ref": "#/definitions/p"}),
    },
    {**of(**_AB), "unevaluatedProperties": False},
    {"type": "string", "minLength": 12},
    {"type": "string", "minLength": 3, "maxLength": 3, "pattern": "^[0-9]+$"},
    *({"type": "string", "format": name} for name in FORMATS),
]


def zoo(count: int, seed: int = 0) -> list[Schema]:
    """``BY_HAND``, and drawn schemas to make it ``count``; no two are equal."""
    rng, found = random.Random(seed), {repr(schema): schema for schema in BY_HAND}
    while len(found) < count:
        made = _any(rng, rng.choice((1, 2, 2, 3)))
        if "$ref" in repr(made):
            made = {**made, "$defs": {"tree": _tree(rng), "leaf": _leaf(rng)}}
        found.setdefault(repr(made), made)
    return list(found.values())[:count]


def _any(rng: random.Random, depth: int) -> Schema:
    return _leaf(rng) if depth == 0 else rng.choice(_LARGER)(rng, depth - 1)


def _leaf(rng: random.Random) -> Schema:
    return rng.choice(_LEAVES)(rng)


def _string(rng: random.Random) -> Schema:
    low = rng.randint(0, 5)
    more: Schema = rng.choice(
        (
            {},
            {"minLength": low, "maxLength": low + rng.randint(0, 5)},
            {"maxLength": low},
            {"pattern": rng.choice(PATTERNS)},
            {"format": rng.choice(list(FORMATS))},
            {"not": {"enum": rng.sample(WORDS, 3)}},
        )
    )
    return {"type": "string", **more}


def _number(rng: random.Random) -> Schema:
    kind, low = rng.choice(("integer", "number")), rng.choice(NUMBERS)
    more: Schema = {rng.choice(("minimum", "exclusiveMinimum")): low} if rng.random() < 0.7 else {}
    if rng.random() < 0.6:
        more[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.choice((2, 5.5, 40))
    if rng.random() < 0.3:
        more["multipleOf"] = rng.choice((2, 3, 7) if kind == "integer" else (0.5, 0.1, 2))
    return {"type": kind, **more}


def _constant(rng: random.Random) -> Schema:
    values = [*WORDS, *NUMBERS, None, True, [], [1, "x"], {"a": None}]
    return rng.choice(({"const": rng.choice(values)}, {"enum": rng.sample(values, rng.randint(1, 6))}))


def _plain(rng: random.Random) -> Schema:
    return {"type": rng.choice(("null", "boolean", "integer", "number", "string", ["integer", "null"]))}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    node: Schema = {"type": "object", "properties": {name: _any(rng, rng.randint(0, depth)) for name in names}}
    if required := [name for name in names if rng.random() < 0.6]:
        node["required"] = required
    rest = rng.random()
    if rest < 0.6:
        node["additionalProperties"] = False
        if rng.random() < 0.2:
            node["minProperties"] = len(required) + (len(required) < len(names))
        if len(names) > 1 and rng.random() < 0.3:
            node["dependentRequired"] = {names[0]: names[1:2]}
    elif rest < 0.8:
        node["additionalProperties"] = _leaf(rng)
    if rng.random() < 0.15:
        node["patternProperties"] = {"^[0-9]+$": _leaf(rng)}
    return node


def _condition(rng: random.Random, depth: int) -> Schema:
    first, second = rng.sample(WORDS, 2)
    then, otherwise = _any(rng, depth), _any(rng, depth)
    return {
        **of("if", "v", **{"if": {"enum": [first, second]}, "v": True}),
        "if": {"properties": {"if": {"const": first}}, "required": ["if"]},
        "then": {"properties": {"v": then}},
        "else": {"properties": {"v": otherwise}},
    }


def _array(rng: random.Random, depth: int) -> Schema:
    node: Schema = {"type": "array", "items": _any(rng, depth)}
    if rng.random() < 0.3:
        node["prefixItems"] = [_leaf(rng) for _ in range(rng.randint(1, 2))]
        node["items"] = rng.choice((False, node["items"]))
    if rng.random() < 0.6 and node["items"] is not False:
        node["minItems"] = rng.randint(0, 2)
    if rng.random() < 0.6:
        node["maxItems"] = node.get("minItems", 0) + rng.randint(0, 2)
    return node


def _set(rng: random.Random, _depth: int) -> Schema:
    items = rng.sample([*WORDS, *NUMBERS], rng.randint(1, 4))
    return {"type": "array", "items": {"enum": items}, "uniqueItems": True, "minItems": rng.randint(0, len(items))}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _tagged(rng: random.Random, depth: int) -> Schema:
    tags = rng.sample(WORDS, rng.randint(2, 3))
    return {"oneOf": [of("t", "v", t={"const": tag}, v=_any(rng, depth)) for tag in tags]}


def _all_of(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"allOf": [{"type": "string", "pattern": rng.choice(PATTERNS)}, {"maxLength": rng.randint(6, 12)}]}
    parts = [{"properties": {name: _any(rng, depth)}, "required": [name]} for name in rng.sample(NAMES, 2)]
    return {"type": "object", "allOf": parts}


def _map(rng: random.Random, depth: int) -> Schema:
    return {
        "type": "object",
        "propertyNames": {"pattern": rng.choice(("^[a-z]+$", "^x"))},
        "additionalProperties": _any(rng, depth),
        "minProperties": rng.randint(0, 1),
    }


def _reference(rng: random.Random, _depth: int) -> Schema:
    return {"type": "array", "items": {"$ref": rng.choice(("#/$defs/tree", "#/$defs/leaf"))}, "minItems": 1}


def _tree(rng: random.Random) -> Schema:
    kids = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
    return of("v", *rng.choice(((), ("kids",))), v=_leaf(rng), kids=kids)


_LEAVES: list[Callable[[random.Random], Schema]] = [_string, _string, _number, _number, _constant, _plain]
_LARGER: list[Callable[[random.Random, int], Schema]] = [
    _object,
    _object,
    _object,
    _array,
    _set,
    _condition,
    _any_of,
    _tagged,
    _all_of,
    _map,
    _reference,
]
