"""Numbers that llguidance leaves out below a bound that has decimals.

After the first decimals of such a bound it asks for more decimals: of the numbers up to 0.25 it takes 0.20 and not 0.2,
and below 1, which is up to 0.999999999999999, not 0.9 or 0.99. Those are added as constants.
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
    """``schema`` (of ``compile.schema``) with the numbers that llguidance leaves out, if they are not too many."""
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
    """The numbers valid under ``node`` that have the first decimals of a bound and no others."""
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
