"""Bounds of numbers, and that no number is read as an infinity, wherever a schema leaves one open."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from typing import Any

import jsonschema_rs
import pytest
from grammars import accepts, schema_matcher, sentence
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_constraint_schemas import branch

from mmserve.constraint.findings import Refused


def recurring(**node: Any) -> Any:
    """A definition that may refer to itself."""
    base = {"type": "object", "properties": {"a": {}}}
    return {"$ref": "#/$defs/r", "$defs": {"r": node, "base": base}}


BOUNDS = st.one_of(
    st.integers(-1000, 1000),
    st.sampled_from([0.1, 0.05, 1.25, -2.5, 123.456, 1e-3, 1e-7, 2.999, 1e15, 0.30000000000000004]),
)
KEYWORDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]


@settings(deadline=None, max_examples=80)
@given(
    st.dictionaries(st.sampled_from(KEYWORDS), BOUNDS, min_size=1),
    st.sampled_from(["number", "integer"]),
    st.sampled_from([None, None, 1, 3, 0.5, 0.1, 7]),
)
def test_bounds_of_numbers_are_sound(bounds: dict[str, float], kind: str, step: float | None) -> None:
    schema = {"type": kind, **bounds, **({} if step is None else {"multipleOf": step})}
    judge = jsonschema_rs.validator_for(schema)
    try:
        at = schema_matcher(schema)
    except Refused:
        assume(False)
    for bound in bounds.values():
        for near in ("0", "1", "-1", "0.5", "0.1", "-0.1", "0.001", "-0.00001", "0.00000000000000001"):
            exact = Fraction(repr(bound)) + Fraction(near)
            text = str(int(exact)) if exact.denominator == 1 else f"{float(exact):.18f}".rstrip("0")
            if accepts(at, text) and abs(exact) < 2**50:
                assert judge.is_valid(json.loads(text)), text
            if accepts(at, text) and not math.isclose(exact, bound):
                assert judge.is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    "bounds", [{"minimum": 0}, {"maximum": 9}, {"exclusiveMinimum": -2}, {"minimum": 1, "maximum": 9}]
)
@pytest.mark.parametrize("step", [{}, {"multipleOf": 0.5}])
def test_a_bounded_number_is_never_read_as_an_infinity(bounds: dict[str, float], step: dict[str, float]) -> None:
    at = schema_matcher({"type": "number", **bounds, **step})
    assert accepts(at, "5") or accepts(at, "5.0")
    for text in ("1e999", "1E999", "1e5", "-1e999", "1e-999", "0e0", "9" * 400, f"-{'9' * 400}", f"{'9' * 400}.5"):
        assert not accepts(at, text), text
    chance = random.Random(0)
    for said in filter(None, (sentence(at, chance, 600) for _ in range(5))):
        assert math.isfinite(float(said)), said


def test_integers_without_bounds_have_as_many_digits_as_64_bits_hold() -> None:
    """Python reads more, most readers do not."""
    for kind in ("integer", ["integer", "null"]):
        matcher = schema_matcher({"type": kind, "minimum": 0})
        assert accepts(matcher, "9" * 18) and not accepts(matcher, "9" * 19)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "number"},
        {"type": "integer"},
        {"type": ["integer", "string"], "minimum": 3},
        {"type": "array"},
        {"type": "array", "prefixItems": [{"type": "string"}]},
        {"type": "object", "properties": {"a": True}},
        {"properties": {"a": {"$ref": "#"}}},
        {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "array"}}]},
        {"type": "object", "patternProperties": {"^x": {}}},
        {"$ref": "#/$defs/r0", "$defs": {"r0": {"type": "array", "items": {}}, "any": {"type": "null"}}},
        {"multipleOf": 0.5},
        {"type": "array", "items": {"type": "integer", "multipleOf": 7}},
        {"allOf": [{"minItems": 1}, {"maxItems": 3}]},
        {"type": "object", "properties": {"a": True}, "allOf": [{"required": ["a"]}]},
        {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["x"]}], "minProperties": 1},
        {"$ref": "#/$defs/x", "properties": {"b": {}}, "$defs": {"x": {"required": ["a"], "type": "object"}}},
        recurring(allOf=[{"properties": {"a": {}}, "type": "object"}, {"properties": {"n": {"$ref": "#/$defs/r"}}}]),
        recurring(properties={"a": {}, "n": {"$ref": "#/$defs/r"}}, anyOf=[{"required": ["a"]}, {"required": ["x"]}]),
        {**recurring(type="object", properties={"a": {}, "n": {"$ref": "#/$defs/r"}}), "required": ["a"]},
        recurring(
            allOf=[{"$ref": "#/$defs/base"}, {"properties": {"n": {"type": "array", "items": {"$ref": "#/$defs/r"}}}}]
        ),
        recurring(
            type="object",
            anyOf=[branch("x", n={"$ref": "#/$defs/r"}), {"properties": {"a": True, "n": {"$ref": "#/$defs/r"}}}],
        ),
        recurring(anyOf=[{"items": {"$ref": "#/$defs/r"}}, {"prefixItems": [{"type": "string"}]}], type="array"),
        recurring(**{"if": {"required": ["n"]}, "then": {"properties": {"n": {"$ref": "#/$defs/r"}}}}),
    ],
)
def test_no_number_is_read_as_an_infinity(schema: Any) -> None:
    """Wherever a schema leaves a number open, whatever it calls its definitions."""
    at = schema_matcher(schema)
    forms = ("{}", "[{}]", '["s",{}]', '{{"a":{}}}', '{{"x":[{}]}}', '{{"b":{{"c":{}}}}}', "[[{}]]")
    for number in ("1e999", "-1E400", "0.1e5", "1" * 400, "-" + "9" * 20):
        assert not any(accepts(at, form.format(number)) for form in forms)
    assert any(accepts(at, form.format("7")) for form in forms)
