"""``unevaluatedProperties`` and ``unevaluatedItems`` beside schemas that may hold or not, compared with the judge."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from grammars import accepts, compact, enforced_among, grammar, schema_matcher, sentence

from mmserve.constraint.findings import Refused
from mmserve.core.constraint import JsonSchema

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
A, B, C = ({"properties": {name: INTEGER}, "required": [name]} for name in "abc")
ONE = {"properties": {"a": {"const": 1}}, "required": ["a"]}
LAST = {"unevaluatedProperties": False}
DRAFT_2019 = {"$schema": "https://json-schema.org/draft/2019-09/schema"}

OBJECTS: dict[str, Any] = {
    "any_of": {"anyOf": [A, B, C], **LAST},
    "any_of_where_one_evaluates_nothing": {"anyOf": [A, {"required": ["c"]}], "properties": {"b": True}, **LAST},
    "any_of_beside_the_same_names": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], **A, **LAST},
    "any_of_with_a_schema_for_the_rest": {"anyOf": [A, B], "unevaluatedProperties": STRING},
    "any_of_with_patterns": {"anyOf": [{"patternProperties": {"^[ab]": INTEGER}, "minProperties": 1}, C], **LAST},
    "any_of_with_an_open_branch": {"anyOf": [A, {**B, "additionalProperties": STRING}], **LAST},
    "one_of_apart": {
        "oneOf": [{**A, "properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": "s"}, "b": True}, **C}],
        **LAST,
    },
    "one_of_that_overlaps": {"oneOf": [A, B], "properties": {"c": True}, **LAST},
    "if": {"if": ONE, "then": {"properties": {"b": True}}, "else": C, **LAST},
    "if_alone": {"if": A, "properties": {"b": True}, **LAST},
    "if_then": {"if": {"properties": {"a": {"const": 1}}}, "then": {"properties": {"b": True}}, **LAST},
    "dependent_schemas": {"properties": {"a": INTEGER}, "dependentSchemas": {"a": B, "b": C}, **LAST},
    "nested": {"allOf": [{"anyOf": [{"allOf": [A, {"anyOf": [B, True]}]}, C]}], **LAST},
    "references": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}, **LAST},
    "not": {"not": B, "anyOf": [A, C], **LAST},
    "within_a_branch": {"anyOf": [{"anyOf": [A, B], **LAST}, C]},
    "seen_from_outside": {"anyOf": [{"anyOf": [A, B], "unevaluatedProperties": STRING}, C], **LAST},
}
MEMBERS = [1, "s", None]
DOCUMENTS = [
    dict(zip(names, values, strict=True))
    for size in range(4)
    for names in itertools.combinations("abc", size)
    for values in itertools.product(MEMBERS if size < 3 else MEMBERS[:2], repeat=size)
]


@pytest.mark.parametrize("name", OBJECTS)
def test_properties_are_evaluated_by_the_schemas_that_hold(name: str) -> None:
    taken, refused = enforced_among({"type": "object", **OBJECTS[name]}, DOCUMENTS)
    assert taken and refused


NUMBER_FIRST, TEXT_FIRST = {"prefixItems": [INTEGER]}, {"prefixItems": [STRING, STRING]}
ARRAYS: dict[str, Any] = {
    "any_of": {"anyOf": [NUMBER_FIRST, TEXT_FIRST], "unevaluatedItems": False},
    "all_of": {"allOf": [NUMBER_FIRST, {"prefixItems": [True, True]}], "unevaluatedItems": {"const": None}},
    "contains": {"contains": {"const": "s"}, "unevaluatedItems": INTEGER},
    "contains_in_branches": {"anyOf": [{"contains": {"const": "s"}}, NUMBER_FIRST], "unevaluatedItems": False},
    "every_item_of_one": {"oneOf": [{"items": INTEGER, "maxItems": 1}, {"minItems": 2, **TEXT_FIRST}]}
    | {"unevaluatedItems": False},
    "if": {"if": {"minItems": 2}, "then": TEXT_FIRST, "unevaluatedItems": INTEGER},
    "contains_in_2019": {**DRAFT_2019, "contains": {"const": "s"}, "unevaluatedItems": STRING},
    "rows_in_2019": {**DRAFT_2019, "anyOf": [{"items": [INTEGER]}, {"items": [STRING, STRING]}]}
    | {"unevaluatedItems": False},
    "padded_in_2019": {**DRAFT_2019, "items": [INTEGER], "allOf": [{"items": [True, STRING]}]}
    | {"unevaluatedItems": {"const": None}},
}


@pytest.mark.parametrize("name", ARRAYS)
def test_items_are_evaluated_by_the_schemas_that_hold(name: str) -> None:
    documents = [list(items) for size in range(4) for items in itertools.product([1, "s", None], repeat=size)]
    taken, refused = enforced_among({"type": "array", **ARRAYS[name]}, documents)
    assert taken and refused


def test_properties_and_items_of_the_same_alternatives() -> None:
    schema = {"anyOf": [{**A, **NUMBER_FIRST}, {**B, **TEXT_FIRST}], **LAST, "unevaluatedItems": False}
    values = [*DOCUMENTS, [], [1], ["s"], ["s", "s"], [1, 1], [1, "s"], 1, None]
    assert enforced_among(schema, values) == (9, len(values) - 9)


def drawn(chance: random.Random, depth: int = 2) -> Any:
    """A schema of objects with applicators."""
    names = chance.sample("abc", chance.randint(0, 2))
    made: dict[str, Any] = {"properties": {name: chance.choice([True, INTEGER, STRING]) for name in names}}
    if chance.random() < 0.5:
        made["required"] = chance.sample("abc", 1)
    for keyword in chance.sample(["anyOf", "oneOf", "allOf", "if", "dependentSchemas"], 2 if depth == 2 else 1):
        if depth and keyword == "dependentSchemas":
            made[keyword] = {chance.choice("abc"): drawn(chance, 0)}
        elif depth and keyword == "if":
            made |= {"if": drawn(chance, 0), "then": drawn(chance, 0), "else": drawn(chance, depth - 1)}
        elif depth:
            made[keyword] = [drawn(chance, depth - 1) for _ in range(2)]
    return made


@pytest.mark.parametrize("seed", range(6))
def test_drawn_schemas_are_enforced_exactly_or_refused(seed: int) -> None:
    chance, compared = random.Random(seed), 0
    for _ in range(6):
        schema = {"type": "object", **drawn(chance), "unevaluatedProperties": chance.choice([False, STRING])}
        try:
            made = grammar(JsonSchema(json.dumps(schema)))
            if any("overlap" in warning for warning in made.warnings):
                continue
            enforced_among(schema, chance.sample(DOCUMENTS, 25))
        except Refused:
            continue
        compared += 1
    assert compared


def test_members_keep_the_order_of_the_document() -> None:
    schema = {"type": "object", "properties": {"z": INTEGER}, "$ref": "#/$defs/a", "$defs": {"a": A}, **LAST}
    assert accepts(schema_matcher(schema), '{"z":1,"a":1}')


UNKNOWN: dict[str, Any] = {
    "too_many_combinations": {"anyOf": [{"properties": {f"p{i}": True}} for i in range(10)]},
    "a_condition_that_cannot_be_negated": {"if": {"properties": {"a": {"multipleOf": 3}}}, "then": A},
    "a_cycle": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, A]}}},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_to_be_evaluated_is_refused(name: str) -> None:
    with pytest.raises(Refused, match=r"/unevaluatedProperties: unevaluatedProperties: use additionalProperties"):
        grammar(JsonSchema(json.dumps({"type": "object", **UNKNOWN[name], **LAST})))


def test_many_alternatives_that_a_constant_tells_apart() -> None:
    kinds = [{"properties": {"kind": {"const": i}, f"p{i}": True}, "required": ["kind"]} for i in range(20)]
    at = schema_matcher({"type": "object", "anyOf": kinds, **LAST})
    assert accepts(at, compact({"kind": 7, "p7": [1]})) and not accepts(at, compact({"kind": 7, "p8": 1}))
    said = {sentence(at, random.Random(seed)) for seed in range(10)} - {None}
    assert said and all(len(json.loads(text)) <= 2 for text in said if text is not None)


def test_a_refusal_in_a_branch_has_the_pointer_of_the_branch() -> None:
    branch = {"properties": {"a": {"pattern": "(?=a)"}}}
    with pytest.raises(Refused) as caught:
        grammar(JsonSchema(json.dumps({"anyOf": [branch, B], **LAST})))
    assert [finding.pointer for finding in caught.value.findings] == ["/anyOf/0/properties/a/pattern"]
