"""Array keywords: ``uniqueItems`` where items differ anyway or come from a small set, ``contains`` as a row for each
position."""

from __future__ import annotations

from itertools import permutations
from math import perm
from typing import Any

from mmserve.constraint.compile.draft import modern
from mmserve.constraint.compile.negation import Scope, complement
from mmserve.constraint.compile.shapes import ANNOTATIONS, distinct, finite, key, misshapen, types_of
from mmserve.constraint.findings import Notes, child

_MOST_ARRAYS = 1_000
_MOST_VALUES = 1_000
_DEPTH = 8  # of references and alternatives


def is_trivial(node: dict[str, Any]) -> bool:
    """Whether arrays of ``node`` have at most one item anyway."""
    longest = _longest(node)
    return longest is not None and longest <= 1


def _longest(node: dict[str, Any]) -> int | None:
    """Most items of an array of ``node``, where its array keywords bound them."""
    longest: int | None = node.get("maxItems")
    if node.get("items") is False:
        longest = min(len(node.get("prefixItems", ())), longest if longest is not None else 1 << 30)
    return longest


def apart(node: dict[str, Any], scope: Scope) -> bool:
    """Whether all items of an array of ``node`` stand at places whose types or values are never the same."""
    first, longest = node.get("prefixItems", []), _longest(node)
    if longest is None or longest > len(first):
        return False
    found = [(values_of(each, scope), _types(each)) for each in first[:longest]]
    return not any(_meet(one, other) for i, one in enumerate(found) for other in found[:i])


def _types(schema: Any) -> frozenset[str]:
    return types_of(schema) if isinstance(schema, dict) else types_of({})


def _meet(one: tuple[list[Any] | None, frozenset[str]], other: tuple[list[Any] | None, frozenset[str]]) -> bool:
    (mine, kinds), (theirs, others) = one, other
    if mine is not None and theirs is not None:
        return bool({key(value) for value in mine} & {key(value) for value in theirs})
    return bool(kinds & others)


def values_of(schema: Any, scope: Scope, depth: int = _DEPTH) -> list[Any] | None:
    """All values that ``schema`` allows, through references and alternatives; None where they are not few, or unknown.

    Never fewer than it allows: ``oneOf`` counts as ``anyOf`` only where no two branches share a value.
    """
    if not isinstance(schema, dict) or not depth:
        return None
    body = {name: value for name, value in modern(schema, scope.draft, "").items() if name not in ANNOTATIONS}
    if any(misshapen(body, "")):
        return None
    if body.keys() == {"$ref"}:
        return values_of(scope.resolve(body["$ref"]), scope, depth - 1)
    for keyword in ("anyOf", "oneOf"):
        if body.keys() == {keyword} or (body.keys() == {keyword, "type"}):
            branches = [values_of(each, scope, depth - 1) for each in body[keyword]]
            known = [values for values in branches if values is not None]
            if len(known) < len(branches):
                return None
            found = [value for values in known for value in values]
            if keyword == "oneOf" and len(distinct(found)) < len(found):
                return None
            allowed = types_of(body)
            return [value for value in distinct(found) if types_of({"const": value}) <= allowed]
    if body.keys() <= {"enum", "const", "type"} and not {"enum", "const"} <= body.keys():
        return finite(body)
    return _integers(body)


def _integers(body: dict[str, Any]) -> list[Any] | None:
    """The integers between two bounds."""
    if body.get("type") != "integer" or body.keys() != {"type", "minimum", "maximum"}:
        return None
    low, high = body["minimum"], body["maximum"]
    if not all(isinstance(bound, int) and not isinstance(bound, bool) for bound in (low, high)):
        return None
    return list(range(low, high + 1)) if high - low < _MOST_VALUES else None


def of_items(node: dict[str, Any], scope: Scope) -> list[Any] | None:
    """The values of which each item of an array of ``node`` is one; None where they are not few, or not all alike."""
    if "prefixItems" in node or "contains" in node or "items" not in node:
        return None
    return values_of(node["items"], scope)


def all_arrays(node: dict[str, Any], values: list[Any]) -> list[list[Any]] | None:
    """Every array with distinct items out of ``values`` that ``node`` allows; None where they are too many."""
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
