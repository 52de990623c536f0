"""Numbers with few decimals, below a bound that has more of them."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from grammars import accepts, enforced, grammar, schema_matcher

from mmserve.core.constraint import JsonSchema

CASES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"exclusiveMaximum": 1}, [0.9, 0.99, 0.999999, 0.95, 0, -3], [1, 1.5]),
    ({"minimum": 0.15, "maximum": 0.25}, [0.2, 0.15, 0.25, 0.18], [0.1, 0.26, 0.3]),
    ({"exclusiveMinimum": 0.1, "exclusiveMaximum": 0.3}, [0.2, 0.29, 0.11], [0.1, 0.3]),
    ({"minimum": -0.25, "maximum": -0.15}, [-0.2, -0.25], [-0.1, -0.3]),
    ({"minimum": -0.25, "maximum": 12.305}, [-0.2, 12.3, 12.305], [12.31, -0.3]),
    ({"minimum": 0, "maximum": 0.975, "multipleOf": 0.075}, [0.9, 0.975], [0.97, 0.95]),
]


@pytest.mark.parametrize(("bounds", "taken", "refused"), CASES, ids=lambda value: json.dumps(value)[:50])
def test_numbers_with_the_first_decimals_of_a_bound_are_taken(
    bounds: dict[str, float], taken: list[Any], refused: list[Any]
) -> None:
    number = {"type": "number", **bounds}
    enforced(number, taken, refused)
    enforced({"type": ["number", "string"], **bounds}, [*taken, "a"], [*refused, True])
    enforced({"type": "array", "items": number}, [taken], [[each] for each in refused])
    enforced({"$ref": "#/$defs/n", "$defs": {"n": number}}, taken, refused)


def test_every_number_of_few_decimals_within_bounds_is_taken() -> None:
    at = schema_matcher({"type": "number", "minimum": -1.234, "maximum": 0.987})
    for thousandths in range(-1300, 1100):
        text = str(float(Fraction(thousandths, 1000))).removesuffix(".0")
        assert accepts(at, text) is (-1234 <= thousandths <= 987), text


def test_no_more_constants_are_added_than_a_grammar_has_room_for() -> None:
    excluded = {"type": "number", "not": {"enum": list(range(1, 1000))}}
    assert len(grammar(JsonSchema(json.dumps(excluded))).text) < 200_000


def test_numbers_of_an_integer_format_are_integers_also_among_multiples() -> None:
    at = schema_matcher({"type": "number", "format": "int32", "multipleOf": 1.5})
    assert [text for text in ("0", "1.5", "3", "4.5", "-6", "2") if accepts(at, text)] == ["0", "3", "-6"]
