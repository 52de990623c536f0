"""Whether two schemas exclude each other: a proof or nothing. ``oneOf`` of such schemas is ``anyOf``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from mmserve.constraint.compile import derivatives
from mmserve.constraint.compile.derivatives import disjoint, matches
from mmserve.constraint.compile.negation import Scope
from mmserve.constraint.compile.pattern import BadPattern, searched
from mmserve.constraint.compile.shapes import is_number, misshapen
from mmserve.constraint.compile.values import finite, key, types_of

_DEPTH = 8  # nested schemas and references looked through
_MOST_TEXTS = 64  # strings that are looked at one by one
_MOST_STATES = 100  # of two expressions together; each costs a character of every class
_MOST_READ = 60_000  # characters of expressions and strings, in all proofs for a document


@dataclass
class Effort:
    """What looking into strings may still cost, all proofs of a document together: characters of what is looked at."""

    left: int = _MOST_READ

    def spent(self, cost: int) -> bool:
        """Whether ``cost`` was there to be spent, and now is."""
        if cost > self.left:
            return False
        self.left -= cost
        return True


class _Means(NamedTuple):
    """What a proof may use; without ``effort`` it does not look into strings."""

    scope: Scope
    effort: Effort | None


def exclude(one: Any, other: Any, scope: Scope, effort: Effort) -> bool:
    """True only if no value is valid under both.

    Strings are looked into only where nothing else tells the two apart, and no further than ``effort`` allows.
    """
    return any(_exclude(one, other, _Means(scope, each), _DEPTH) for each in (None, effort))


def said(node: Any, draft: int) -> Any:
    """``node`` without what its draft ignores: the siblings of a reference."""
    return {"$ref": node["$ref"]} if draft <= 7 and isinstance(node, dict) and "$ref" in node else node


def _exclude(one: Any, other: Any, means: _Means, depth: int) -> bool:
    if one is False or other is False:
        return True
    one, other = said(one, means.scope.draft), said(other, means.scope.draft)
    if depth == 0 or not _is_read(one) or not _is_read(other):
        return False
    for first, second in ((one, other), (other, one)):
        if "$ref" in first and _exclude(means.scope.resolve(first["$ref"]), second, means, depth - 1):
            return True
        if any(_exclude(part, second, means, depth - 1) for part in first.get("allOf", ())):
            return True
        for keyword in ("anyOf", "oneOf"):
            if keyword in first and all(_exclude(part, second, means, depth - 1) for part in first[keyword]):
                return True
    return _by_value(one, other) or _by_type(one, other, means, depth)


def _is_read(node: Any) -> bool:
    """Whether ``node`` says something, in the shape it must have."""
    return isinstance(node, dict) and not any(misshapen(node, ""))


def _by_value(one: Any, other: Any) -> bool:
    values, others = finite(one), finite(other)
    if values is None or others is None:
        return False
    return not {key(value) for value in values} & {key(value) for value in others}


def _by_type(one: Any, other: Any, means: _Means, depth: int) -> bool:
    shared = types_of(one) & types_of(other)
    if not shared:
        return True
    if shared == {"object"}:
        return _by_property(one, other, means, depth) or _by_property(other, one, means, depth)
    if shared <= {"number", "integer"}:
        return _below(one, other) or _below(other, one)
    if shared == {"string"}:
        return _sized(one, other, "Length") or (means.effort is not None and _by_text(one, other, means.effort))
    if shared == {"array"}:
        return _sized(one, other, "Items")
    return False


def _by_property(one: Any, other: Any, means: _Means, depth: int) -> bool:
    """Whether a property that ``one`` requires is, in both, impossible to agree on."""
    for name in one.get("required", ()):
        mine = one.get("properties", {}).get(name, True)
        theirs = _property(other, name)
        if _exclude(mine, theirs, means, depth - 1):
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


def _by_text(one: Any, other: Any, effort: Effort) -> bool:
    """Whether no string is of both; what formats allow may be more than what is known of them."""
    for first, second in ((one, other), (other, one)):
        texts = finite(first)
        if texts is not None and len(texts) <= _MOST_TEXTS:
            strings = [text for text in texts if isinstance(text, str)]
            read = sum(map(len, strings)) + len(_expression(second) or "")
            return effort.spent(read) and not any(_holds(text, second) for text in strings)
    mine, theirs = _expression(one), _expression(other)
    if mine is None or theirs is None:
        return False
    return effort.spent(len(mine) + len(theirs)) and _apart(mine, theirs)


def _holds(text: str, node: Any) -> bool:
    """False only if ``text`` is not valid under ``node``."""
    if not node.get("minLength", 0) <= len(text) <= node.get("maxLength", len(text)):
        return False
    expression = _expression(node)
    with suppress(BadPattern):
        return expression is None or matches(expression, text)
    return True


def _expression(node: Any) -> str | None:
    return _searched(node["pattern"]) if "pattern" in node else None


@lru_cache(maxsize=256)
def _searched(pattern: str) -> str | None:
    with suppress(BadPattern):
        return searched(pattern)
    return None


@lru_cache(maxsize=256)
def _apart(one: str, other: str) -> bool:
    with suppress(BadPattern):
        return disjoint(one, other, _MOST_STATES)
    return False


_CACHES = _searched, _apart


def forget() -> None:
    """Keep nothing of the schemas asked about so far."""
    for cache in _CACHES:
        cache.cache_clear()
    derivatives.forget()


def _below(one: Any, other: Any) -> bool:
    """Whether every number of ``one`` is below every number of ``other``."""
    high, low = one.get("maximum"), other.get("minimum")
    open_high, open_low = one.get("exclusiveMaximum"), other.get("exclusiveMinimum")
    if is_number(high) and is_number(low) and high < low:
        return True
    if is_number(high) and is_number(open_low) and high <= open_low:
        return True
    return is_number(open_high) and any(is_number(x) and open_high <= x for x in (low, open_low))
