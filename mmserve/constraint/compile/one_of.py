"""``oneOf``: a proof that two schemas are disjoint, or each branch without the values of the others.

``oneOf`` of disjoint schemas is ``anyOf``.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

from mmserve.constraint.compile.derivatives import automaton_of, disjoint, matches
from mmserve.constraint.compile.expression import BadPattern, with_property
from mmserve.constraint.compile.keywords import (
    ALL,
    finite,
    is_number,
    key,
    malformed_keywords,
    names_of,
    types_of,
    values_within,
)
from mmserve.constraint.compile.negation import Scope, either, negation
from mmserve.constraint.compile.pattern import searched

_DEPTH = 8  # nested schemas and references looked through
_MOST_TEXTS = 64  # strings that are compared one by one
_MOST_STATES = 100  # of two expressions; each tries one character of every class
_MOST_READ = 60_000  # characters of expressions and strings, in all proofs for a document


@dataclass
class Effort:
    """The budget of string comparisons for all proofs of a document: characters of expressions and strings read."""

    left: int = _MOST_READ

    def spent(self, cost: int) -> bool:
        """Spend ``cost``. Returns False, without spending, if less is left."""
        if cost > self.left:
            return False
        self.left -= cost
        return True


class _Proof(NamedTuple):
    """The context of a proof; without ``effort``, strings are not compared."""

    scope: Scope
    effort: Effort | None


def exclude(one: Any, other: Any, scope: Scope, effort: Effort) -> bool:
    """True only if no value is valid under both.

    Strings are compared only where nothing else distinguishes the two, and as far as ``effort`` allows.
    """
    return any(_exclude(one, other, _Proof(scope, each), _DEPTH) for each in (None, effort))


def effective(node: Any, draft: int) -> Any:
    """``node`` without the keywords that its draft ignores: the siblings of a reference."""
    return {"$ref": node["$ref"]} if draft <= 7 and isinstance(node, dict) and "$ref" in node else node


def _exclude(one: Any, other: Any, proof: _Proof, depth: int) -> bool:
    if one is False or other is False:
        return True
    one, other = effective(one, proof.scope.draft), effective(other, proof.scope.draft)
    if depth == 0 or not _is_read(one) or not _is_read(other):
        return False
    for first, second in ((one, other), (other, one)):
        if "$ref" in first and _exclude(proof.scope.resolve(first["$ref"]), second, proof, depth - 1):
            return True
        if any(_exclude(part, second, proof, depth - 1) for part in first.get("allOf", ())):
            return True
        for keyword in ("anyOf", "oneOf"):
            if keyword in first and all(_exclude(part, second, proof, depth - 1) for part in first[keyword]):
                return True
    values, others = finite(one), finite(other)
    if values is not None and others is not None and not set(map(key, values)) & set(map(key, others)):
        return True
    return _by_type(one, other, proof, depth)


def _is_read(node: Any) -> bool:
    """Whether ``node`` is a well-formed schema with keywords."""
    return isinstance(node, dict) and not any(malformed_keywords(node, ""))


def _by_type(one: Any, other: Any, proof: _Proof, depth: int) -> bool:
    shared = types_of(one) & types_of(other)
    if not shared:
        return True
    if shared == {"object"}:
        return _by_property(one, other, proof, depth) or _by_property(other, one, proof, depth)
    if shared <= {"number", "integer"}:
        return _below(one, other) or _below(other, one)
    if shared == {"string"}:
        return _sized(one, other, "Length") or (proof.effort is not None and _by_text(one, other, proof.effort))
    if shared == {"array"}:
        return _sized(one, other, "Items")
    return False


def _by_property(one: Any, other: Any, proof: _Proof, depth: int) -> bool:
    """Whether ``one`` requires a property whose schemas in both are disjoint."""
    for name in one.get("required", ()):
        inner = one.get("properties", {}).get(name, True)
        other_inner = other.get("properties", {}).get(name, not _closed(other))
        if _exclude(inner, other_inner, proof, depth - 1):
            return True
    return False


def _sized(one: Any, other: Any, what: str) -> bool:
    """Whether the minimum of one exceeds the maximum of the other."""
    pairs = ((one, other), (other, one))
    return any(a.get(f"min{what}", 0) > b.get(f"max{what}", a.get(f"min{what}", 0)) for a, b in pairs)


def _by_text(one: Any, other: Any, effort: Effort) -> bool:
    """Whether no string matches both. Formats count only as far as their language is known."""
    for first, second in ((one, other), (other, one)):
        texts = finite(first)
        if texts is not None and len(texts) <= _MOST_TEXTS:
            strings = [text for text in texts if isinstance(text, str)]
            read = sum(map(len, strings)) + len(_expression(second) or "")
            return effort.spent(read) and not any(_holds(text, second) for text in strings)
    expression, other_expression = _expression(one), _expression(other)
    if expression is None or other_expression is None:
        return False
    return effort.spent(len(expression) + len(other_expression)) and _disjoint(expression, other_expression)


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
def _disjoint(one: str, other: str) -> bool:
    with suppress(BadPattern):
        return disjoint(one, other, _MOST_STATES)
    return False


_CACHES = _searched, _disjoint, automaton_of, with_property


def clear_caches() -> None:
    """Clear the caches of patterns."""
    for cache in _CACHES:
        cache.cache_clear()


def _below(one: Any, other: Any) -> bool:
    """Whether all numbers of ``one`` are below all numbers of ``other``."""
    high, low = one.get("maximum"), other.get("minimum")
    open_high, open_low = one.get("exclusiveMaximum"), other.get("exclusiveMinimum")
    if is_number(high) and is_number(low) and high < low:
        return True
    if is_number(high) and is_number(open_low) and high <= open_low:
        return True
    return is_number(open_high) and any(is_number(x) and open_high <= x for x in (low, open_low))


_MOST_SPLIT = 4  # branches that are separated by all cases in which the others do not hold
_MOST_CASES = 64  # cases of one such branch
_MOST_BRANCHES = 40
_NEGATED_DEPTH = 4  # nesting depth of negated schemas
_MOST_PARTS = 16  # alternatives to another branch that are tried
_LARGEST = 64  # objects and arrays in one alternative
_MOST_TEXT = 128 << 10  # total characters of the alternatives to all branches


@dataclass(frozen=True)
class Separation:
    """For each branch, schemas that exclude everything that another branch accepts; ``exact``: and nothing else."""

    parts: list[list[Any]]
    exact: bool


class Overlapping(NamedTuple):
    """The indices of two branches that may both hold."""

    first: int
    second: int


def separate(
    branches: list[Any], scope: Scope, at: str, effort: Effort, within: frozenset[str] = ALL
) -> Separation | Overlapping:
    """Schemas that separate each of ``branches`` from the others, or two branches that cannot be separated.

    Only values of the types ``within`` (of ``types_of``) count. ``effort``: the budget of the document's proofs.
    """
    branches = [typed(effective(branch, scope.draft), scope, within) for branch in branches]
    overlapping = [list[int]() for _ in branches]
    for i, j in combinations(range(len(branches)), 2):
        if not exclude(branches[i], branches[j], scope, effort):
            overlapping[i].append(j)
            overlapping[j].append(i)
    flat = [_resolved(branch, scope) for branch in branches]
    few = sum(map(bool, overlapping)) <= _MOST_SPLIT
    parts, exact, text = list[list[Any]](), True, 0
    for i, found in enumerate(overlapping):
        cases = []
        for j in found:
            without, whole = _without(flat[i], flat[j], scope, at, effort, within)
            text += sum(len(each) for each in values_within(without) if isinstance(each, str))
            if (not without and not whole) or len(branches) > _MOST_BRANCHES or text > _MOST_TEXT:
                return Overlapping(min(i, j), max(i, j))
            cases.append(without)
            exact &= whole
        if not few or prod(map(len, cases)) > _MOST_CASES:
            exact &= all(len(case) <= 1 for case in cases)
            cases = [[_best(case, flat[i])] if case else [] for case in cases]
        parts.append([either(*case) for case in cases])
    return Separation(parts, exact)


def typed(branch: Any, scope: Scope, within: frozenset[str]) -> Any:
    """``branch`` restricted to the types ``within``, if it has no ``type``."""
    branch = {} if branch is True else branch
    if not isinstance(branch, dict) or "type" in branch or ("$ref" in branch and scope.draft <= 7) or within == ALL:
        return branch
    return {**branch, "type": names_of(within)}


def _without(
    branch: Any, other: Any, scope: Scope, at: str, effort: Effort, within: frozenset[str]
) -> tuple[list[Any], bool]:
    """Alternatives that exclude everything valid under ``other``, and that may accept something of ``branch``."""
    within = types_of(branch) & within if isinstance(branch, dict) else within
    found = negation(other, scope, at, within, _NEGATED_DEPTH)
    if found.schema is True:
        return [True], True
    parts = [] if found.schema is False else _parts(found.schema)
    sizes = [sum(isinstance(each, dict | list) for each in values_within(part)) for part in parts]
    small = [part for part, size in zip(parts, sizes, strict=True) if size <= _LARGEST][:_MOST_PARTS]
    exact = found.exact and len(small) == len(parts)
    parts = small
    if not exact and isinstance(other, dict) and isinstance(branch, dict) and _closed(other):
        names = [name for name, schema in branch.get("properties", {}).items() if schema is not False]
        more = [name for name in names if name not in other.get("properties", {})]
        parts += [{"type": "object", "required": [name]} for name in more]
    return [part for part in parts if not exclude(branch, part, scope, effort)], exact


def _parts(schema: Any) -> list[Any]:
    """The alternatives of ``schema``."""
    if isinstance(schema, dict) and schema.keys() == {"anyOf"}:
        return [part for each in schema["anyOf"] for part in _parts(each)]
    return [schema]


def _best(parts: list[Any], branch: Any) -> Any:
    """The one of ``parts`` that restricts ``branch`` least: preferably the absence of a property that it does not
    declare."""
    named = branch.get("properties", {}) if isinstance(branch, dict) else {}
    required = branch.get("required", ()) if isinstance(branch, dict) else ()

    def cost(part: Any) -> int:
        if part.get("properties", {}).keys() and "required" not in part:  # a property is absent
            name = next(iter(part["properties"]))
            return 2 if name in named else 0
        if part.get("required"):  # present, or present with another value
            return 1 if part["required"][0] in required else 3
        return 1

    return min(parts, key=cost)


def _closed(node: dict[str, Any]) -> bool:
    return node.get("additionalProperties") is False and not node.get("patternProperties")


def _resolved(node: Any, scope: Scope) -> Any:
    for _ in range(_NEGATED_DEPTH):
        if not isinstance(node, dict) or "$ref" not in node or (len(node) > 1 and scope.draft > 7):
            break
        node = effective(scope.resolve(node["$ref"]), scope.draft)
    return node
