"""``contains`` as rows of items: the first item that it asks for stands at one of a few places."""

from __future__ import annotations

from typing import Any

from mmserve.constraint.compile.negation import Scope, complement
from mmserve.constraint.compile.notes import Notes
from mmserve.constraint.findings import child

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
