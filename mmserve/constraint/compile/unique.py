"""``uniqueItems`` where it can be written out: arrays of at most one item, and of items from a small set."""

from __future__ import annotations

from itertools import permutations
from math import perm
from typing import Any

from mmserve.constraint.compile.values import finite

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
