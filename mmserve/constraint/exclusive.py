"""Whether two schemas exclude each other: a proof or nothing. ``oneOf`` of such schemas is ``anyOf``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from mmserve.constraint.derivatives import Automaton
from mmserve.constraint.pattern import BadPattern, literal, searched
from mmserve.constraint.shapes import is_number, misshapen
from mmserve.constraint.values import finite, key, types_of

Resolve = Callable[[str], Any]
_DEPTH = 8  # nested schemas and references looked through
_LONGEST = 256  # lengths of strings that are counted
_MOST_STATES = 2_000  # of two expressions together


def exclude(one: Any, other: Any, resolve: Resolve, depth: int = _DEPTH) -> bool:
    """True only if no value is valid under both; ``resolve`` gives the schema that a ``$ref`` names."""
    if one is False or other is False:
        return True
    if depth == 0 or not _is_read(one) or not _is_read(other):
        return False
    for first, second in ((one, other), (other, one)):
        if "$ref" in first and exclude(resolve(first["$ref"]), second, resolve, depth - 1):
            return True
        if any(exclude(part, second, resolve, depth - 1) for part in first.get("allOf", ())):
            return True
        for keyword in ("anyOf", "oneOf"):
            if keyword in first and all(exclude(part, second, resolve, depth - 1) for part in first[keyword]):
                return True
    if "$ref" in one or "$ref" in other:
        return False  # in old drafts the siblings of a reference mean nothing
    return _by_value(one, other) or _by_type(one, other, resolve, depth)


def _is_read(node: Any) -> bool:
    """Whether ``node`` says something, in the shape it must have."""
    return isinstance(node, dict) and not any(misshapen(node, ""))


def _by_value(one: Any, other: Any) -> bool:
    values, others = finite(one), finite(other)
    if values is None or others is None:
        return False
    return not {key(value) for value in values} & {key(value) for value in others}


def _by_type(one: Any, other: Any, resolve: Resolve, depth: int) -> bool:
    shared = types_of(one) & types_of(other)
    if not shared:
        return True
    if shared == {"object"}:
        return _by_property(one, other, resolve, depth) or _by_property(other, one, resolve, depth)
    if shared <= {"number", "integer"}:
        return _below(one, other) or _below(other, one)
    if shared == {"string"}:
        return any(disjoint(mine, theirs) for mine in _languages(one) for theirs in _languages(other))
    if shared == {"array"}:
        return _sized(one, other, "Items")
    return False


def _by_property(one: Any, other: Any, resolve: Resolve, depth: int) -> bool:
    """Whether a property that ``one`` requires is, in both, impossible to agree on."""
    for name in one.get("required", ()):
        mine = one.get("properties", {}).get(name, True)
        theirs = _property(other, name)
        if exclude(mine, theirs, resolve, depth - 1):
            return True
    return False


def _property(node: Any, name: str) -> Any:
    if name in node.get("properties", {}):
        return node["properties"][name]
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    return not closed


def _sized(one: Any, other: Any, what: str) -> bool:
    """Whether one asks for more than the other allows."""
    pairs = ((one, other), (other, one))
    return any(a.get(f"min{what}", 0) > b.get(f"max{what}", a.get(f"min{what}", 0)) for a, b in pairs)


def _languages(node: Any) -> list[str]:
    """Expressions that all strings of ``node`` match; what formats allow may be more than what is known of them."""
    found = []
    if "pattern" in node:
        with suppress(BadPattern):
            found.append(searched(node["pattern"]))
    if (values := finite(node)) is not None:
        found.append("(?:" + "|".join(literal(value) for value in values if isinstance(value, str)) + ")")
    low, high = node.get("minLength", 0), node.get("maxLength")
    if max(low, high or 0) <= _LONGEST and (low or high is not None):
        found.append(f"(?s:.){{{low},{'' if high is None else high}}}")
    return found


@lru_cache(maxsize=256)
def disjoint(one: str, other: str) -> bool:
    """True only if no string matches both expressions (of ``pattern``, without anchors)."""
    try:
        mine, theirs = Automaton(one), Automaton(other)
        chars = [chr(bound) for bound in sorted({0, *mine.bounds, *theirs.bounds}) if bound <= 0x10FFFF]
        seen, pending = {(0, 0)}, [(0, 0)]
        while pending:
            a, b = pending.pop()
            if mine.ends(a) and theirs.ends(b):
                return False
            following = {(mine.after(a, char), theirs.after(b, char)) for char in chars} - seen
            seen |= following
            pending += following
            if len(seen) > _MOST_STATES:
                return False
    except BadPattern:
        return False
    return True


def _below(one: Any, other: Any) -> bool:
    """Whether every number of ``one`` is below every number of ``other``."""
    high, low = one.get("maximum"), other.get("minimum")
    open_high, open_low = one.get("exclusiveMaximum"), other.get("exclusiveMinimum")
    if is_number(high) and is_number(low) and high < low:
        return True
    if is_number(high) and is_number(open_low) and high <= open_low:
        return True
    return is_number(open_high) and any(is_number(x) and open_high <= x for x in (low, open_low))
