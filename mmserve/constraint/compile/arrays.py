"""Array keywords that are written out: ``uniqueItems`` over small sets, ``contains`` as one row for each position."""

from __future__ import annotations

from itertools import permutations
from math import perm
from typing import Any

from mmserve.constraint.compile.negation import Scope, complement
from mmserve.constraint.compile.shapes import finite
from mmserve.constraint.findings import Notes, child

_MOST_ARRAYS = 1_000


def is_trivial(node: dict[str, Any]) -> bool:
    """Whether arrays of ``node`` have at most one item anyway."""
    longest = node.get("maxItems")
    if node.get("items") is False:
        longest = min(len(node.get("prefixItems", ())), longest if longest is not None else 1 << 30)
    return longest is not None and longest <= 1


def all_arrays(node: dict[str, Any]) -> list[list[Any]] | None:
    """Every array with distinct items that ``node``'s array keywords allow; None where they are too many, or unknown.

    The items' own schema must name its values with ``enum``, ``const`` or a type of few values, and nothing else.
    """
    items = node.get("items")
    if "prefixItems" in node or "contains" in node or not isinstance(items, dict):
        return None
    values = finite(items)
    if (
        values is None
        or set(items) - {"enum", "const", "type", "title", "description"}
        or {"enum", "const"} <= set(items)
    ):
        return None
    low, high = node.get("minItems", 0), min(node.get("maxItems", len(values)), len(values))
    count = 0
    for length in range(low, high + 1):
        count += perm(len(values), length)
        if count > _MOST_ARRAYS:
            return None
    return [list(chosen) for length in range(low, high + 1) for chosen in permutations(values, length)]


Schema = dict[str, Any]
#: Places among which the item must stand, if an array may be longer.
_MOST_PLACES = 8


def rows(node: Schema, scope: Scope, pointer: str, notes: Notes) -> list[Schema]:
    """What ``contains`` of ``node``, with its bounds, says of arrays: alternatives; none where it says nothing."""
    least, most = node.get("minContains", 1), node.get("maxContains")
    if "contains" not in node or (not least and most is None):
        return []
    if least > 1 or most not in (None, 0) or (least and most == 0):
        notes.cannot(pointer, "contains", "only one item at least, or none at all, can be enforced")
        return []
    if most == 0:
        other = complement(node["contains"], scope, child(pointer, "contains"))
        if other is None:
            notes.cannot(pointer, "maxContains", "only types, constants, bounds and required properties can be negated")
            return []
        return [{"items": other}]
    longest = node.get("maxItems")
    if longest is None or longest > _MOST_PLACES:
        notes.warn(pointer, "contains", f"is satisfied by one of the first {_MOST_PLACES} items")
        longest = _MOST_PLACES
    places = range(max(longest, 1))
    row = "prefixItems" if scope.draft >= 2020 else "items"
    anything: dict[str, Any] = {}  # true is no schema of draft 4
    return [{row: [*[anything] * place, node["contains"]], "minItems": place + 1} for place in places]
