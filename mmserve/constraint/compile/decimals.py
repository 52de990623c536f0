"""Numbers that llguidance wrongly excludes near a bound with decimals.

After the first decimals of the bound it requires more decimals: of the numbers up to 0.25 it accepts 0.20 but not 0.2,
and below 1, which is up to 0.999999999999999, not 0.9 or 0.99. These numbers are added as constants.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from math import inf
from typing import Any

from mmserve.constraint.compile.keywords import Schema, types_of, with_children

_MOST_ADDED = 1_000  # constants, in a whole schema
_OTHERS = frozenset({"enum", "anyOf", "allOf", "$ref"})


def with_short_decimals(schema: Any) -> Any:
    """``schema`` (of ``compile.schema``) with the numbers that llguidance excludes, unless they are too many."""
    added = 0

    def of(node: Any) -> Any:
        nonlocal added
        if not isinstance(node, dict):
            return node
        made = with_children(node, of)
        numbers = _left_out(node)
        if not numbers or added + len(numbers) > _MOST_ADDED:
            return made
        added += len(numbers)
        definitions = {"$defs": made.pop("$defs")} if "$defs" in made else {}
        return {"anyOf": [made, {"enum": numbers}], **definitions}

    return of(schema)


def _left_out(node: Schema) -> list[float]:
    """The numbers valid under ``node`` whose decimals are a proper prefix of a bound's."""
    if node.keys() & _OTHERS or "number" not in types_of(node):
        return []
    low, high = node.get("minimum", -inf), node.get("maximum", inf)
    step = Fraction(repr(node.get("multipleOf", 0)))
    found = list[float]()
    for bound, sign in ((high, 1), (low, -1)):
        if sign * bound <= 0 or not isinstance(bound, float) or bound in (inf, -inf):
            continue
        whole, _, decimals = f"{abs(Decimal(repr(bound))):f}".partition(".")
        for count in range(1, len(decimals)):
            number = sign * float(f"{whole}.{decimals[:count]}")
            if decimals[count - 1] != "0" and low <= number <= high and not (step and Fraction(repr(number)) % step):
                found.append(number)
    return found
