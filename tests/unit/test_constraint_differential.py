"""Whatever schema is taken: what its grammar accepts is valid, and most of what is valid is accepted."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import jsonschema_rs
import pytest
from grammars import accepts, compact, schema_matcher, sentence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmserve.constraint.findings import Refused
from mmserve.core.constraint import ConstraintMode

NAMES = ["a", "b", "ab", "é", "x/y"]
PATTERNS = ["^a", "b$", "^a|b$", "^(a|bc)*$", "[0-9]{2,}", "^\\d+$", "\\w", "^[^a]*$", "^x?$", "a.b", "\\s", "[à-ÿ]"]
STRINGS = ["", "a", "b", "ab", "é", "a\nb", '"', "abc", "10", "\U0001f600", "a b", "\\"]
NUMBERS = [0, 1, -1, 2, 3, 10, -10, 1.5, -0.25, 100, 1e-3]

scalars = st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(STRINGS))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
    max_leaves=4,
)
small = st.integers(0, 3)
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


strings = some(type=st.just("string"), minLength=small, maxLength=small, pattern=st.sampled_from(PATTERNS))
numbers = some(
    type=st.sampled_from(["number", "integer"]),
    minimum=st.sampled_from(NUMBERS),
    exclusiveMinimum=st.sampled_from(NUMBERS),
    maximum=st.sampled_from(NUMBERS),
    exclusiveMaximum=st.sampled_from(NUMBERS),
    multipleOf=st.sampled_from([1, 2, 3, 0.5, 0.25, 0.1]),
)
leaves = st.one_of(
    st.just({"type": "integer"}),
    st.just({"type": ["boolean", "null"]}),
    st.builds(lambda value: {"const": value}, values),
    st.builds(lambda several: {"enum": several}, st.lists(values, min_size=1, max_size=4)),
    st.builds(lambda body: {"type": "string", **body}, strings),
    st.builds(lambda body: {"type": "number", **body}, numbers),
    st.booleans(),
)


def _joined(*parts: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    return merged


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = some(
        type=st.just("object"),
        properties=st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=3),
        required=names,
        additionalProperties=st.one_of(st.just(False), st.just(False), inner),
        patternProperties=st.dictionaries(st.sampled_from(PATTERNS), inner, min_size=1, max_size=1),
        minProperties=small,
        maxProperties=small,
        dependentRequired=st.dictionaries(st.sampled_from(NAMES), names, min_size=1, max_size=1),
        dependentSchemas=st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=1),
        propertyNames=st.sampled_from([{"pattern": "^a"}, {"enum": ["a", "é"]}]),
    )
    arrays = some(
        type=st.just("array"),
        items=inner,
        prefixItems=st.lists(inner, min_size=1, max_size=2),
        minItems=st.integers(0, 2),
        maxItems=small,
    )
    sets = st.builds(
        lambda several: {"type": "array", "items": {"enum": several}, "uniqueItems": True},
        st.lists(scalars, min_size=1, max_size=3),
    )
    several = st.lists(inner, min_size=1, max_size=3)
    referred = st.sampled_from(["#/$defs/A", "#/$defs/B"])
    joined = some(allOf=several, anyOf=several, oneOf=several, **{"not": inner, "$ref": referred})
    conditions = st.fixed_dictionaries({"if": inner}, optional={"then": inner, "else": inner})
    bodies = st.one_of(objects, objects, arrays, sets, strings, numbers)
    return st.one_of(bodies, bodies, joined, st.builds(_joined, bodies, joined | conditions))


schemas = st.builds(
    lambda body, a, b: {**(body if isinstance(body, dict) else {}), "$defs": {"A": a, "B": b}},
    st.recursive(leaves, _larger, max_leaves=5),
    leaves,
    st.recursive(leaves, _larger, max_leaves=3),
)
SETTINGS = settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck), derandomize=True)


def _instance(schema: Any, chance: random.Random, depth: int = 3) -> Any:
    """A guess at a value that ``schema`` takes."""
    if not isinstance(schema, dict) or depth == 0:
        return chance.choice([*STRINGS[:3], *NUMBERS[:3], None, True])
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return chance.choice(schema["enum"])
    for keyword in ("allOf", "anyOf", "oneOf"):
        if keyword in schema and chance.random() < 0.6:
            return _instance(chance.choice(schema[keyword]), chance, depth - 1)
    kind = schema.get("type", chance.choice(["object", "array", "string", "number"]))
    match kind if isinstance(kind, str) else chance.choice(kind):
        case "object":
            known, required = schema.get("properties", {}), schema.get("required", [])
            wanted = [name for name in dict.fromkeys([*known, *required]) if name in required or chance.random() < 0.5]
            return {name: _instance(known.get(name, True), chance, depth - 1) for name in wanted}
        case "array":
            length = schema.get("minItems", 0) + chance.randrange(2)
            return [_instance(schema.get("items", True), chance, depth - 1) for _ in range(length)]
        case "string":
            return chance.choice(STRINGS)
        case "boolean":
            return True
        case "null":
            return None
    return chance.choice(NUMBERS)


def _judged(schema: Any) -> Any | None:
    try:
        return jsonschema_rs.validator_for(schema)
    except (ValueError, jsonschema_rs.ReferencingError):
        return None


@SETTINGS
@given(schemas, st.randoms(use_true_random=False))
def test_what_a_strict_grammar_accepts_is_valid(schema: Any, chance: random.Random) -> None:
    judge = _judged(schema)
    if judge is None:
        return
    try:
        at = schema_matcher(schema)
    except Refused:
        return
    for _ in range(4):
        said = sentence(at, chance)
        if said is not None:
            assert judge.is_valid(json.loads(said)), said
    for value in (_instance(schema, chance) for _ in range(4)):
        if accepts(at, compact(value)):
            assert judge.is_valid(value), value


@pytest.mark.parametrize("mode", [ConstraintMode.VALIDATE, ConstraintMode.LENIENT])
def test_a_wider_grammar_accepts_what_is_valid(mode: ConstraintMode) -> None:
    """What is left out widens: a valid value, in the grammar's order of members and spelling, is never shut out."""
    seen = Counter[bool]()

    @SETTINGS
    @given(schemas, st.randoms(use_true_random=False))
    def run(schema: Any, chance: random.Random) -> None:
        judge = _judged(schema)
        if judge is None:
            return
        try:
            at = schema_matcher(schema, mode)
        except Refused:
            return
        for value in (_instance(schema, chance) for _ in range(6)):
            if judge.is_valid(value):
                seen[accepts(at, compact(value))] += 1

    run()
    assert seen.total() > 100, "too little was tried to tell"
    assert seen[True] > 0.95 * seen.total()


def test_most_valid_values_of_a_strict_grammar_are_accepted() -> None:
    seen = Counter[bool]()

    @SETTINGS
    @given(schemas, st.randoms(use_true_random=False))
    def run(schema: Any, chance: random.Random) -> None:
        judge = _judged(schema)
        if judge is None:
            return
        try:
            at = schema_matcher(schema)
        except Refused:
            return
        for value in (_instance(schema, chance) for _ in range(6)):
            if judge.is_valid(value):
                seen[accepts(at, compact(value))] += 1

    run()
    assert seen.total() > 100, "too little was tried to tell"
    assert seen[True] > 0.95 * seen.total()
