"""``oneOf`` whose branches may hold together: each without what the others hold for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

from mmserve.constraint.compile.exclusive import Effort, exclude, said
from mmserve.constraint.compile.negation import Scope, either, negation
from mmserve.constraint.compile.values import ALL, names_of, types_of

_MOST_SPLIT = 4  # branches that are told apart by all that the others do not hold for
_MOST_CASES = 64  # of a branch, told apart so
_MOST_BRANCHES = 40
_DEPTH = 4  # schemas within schemas that are negated
_MOST_PARTS = 16  # alternatives to another branch that are looked at
_LARGEST = 64  # objects and arrays that one of those is made of
_MOST_TEXT = 128 << 10  # characters in the alternatives to all branches together


@dataclass(frozen=True)
class Apart:
    """For each branch, schemas that hold for nothing another branch holds for; ``exact``: and for all else."""

    parts: list[list[Any]]
    exact: bool


class Together(NamedTuple):
    """The numbers of two branches that may both hold."""

    first: int
    second: int


def apart(branches: list[Any], scope: Scope, at: str, effort: Effort, within: frozenset[str] = ALL) -> Apart | Together:
    """How each of ``branches`` is told from the others, or two of them that nothing is known to tell apart.

    Only values of the types ``within`` (of ``types_of``) count. ``effort`` is what is left to the document's proofs.
    """
    branches = [_typed(said(branch, scope.draft), scope, within) for branch in branches]
    meeting = [list[int]() for _ in branches]
    for i, j in combinations(range(len(branches)), 2):
        if not exclude(branches[i], branches[j], scope, effort):
            meeting[i].append(j)
            meeting[j].append(i)
    flat = [_resolved(branch, scope) for branch in branches]
    few = sum(map(bool, meeting)) <= _MOST_SPLIT
    parts, exact, text = list[list[Any]](), True, 0
    for i, found in enumerate(meeting):
        cases = []
        for j in found:
            without, whole = _without(flat[i], flat[j], scope, at, effort, within)
            text += _text(without)
            if (not without and not whole) or len(branches) > _MOST_BRANCHES or text > _MOST_TEXT:
                return Together(min(i, j), max(i, j))
            cases.append(without)
            exact &= whole
        if not few or prod(map(len, cases)) > _MOST_CASES:
            exact &= all(len(case) <= 1 for case in cases)
            cases = [[_best(case, flat[i])] if case else [] for case in cases]
        parts.append([either(case) for case in cases])
    return Apart(parts, exact)


def _typed(branch: Any, scope: Scope, within: frozenset[str]) -> Any:
    if not isinstance(branch, dict) or "type" in branch or ("$ref" in branch and scope.draft <= 7) or within == ALL:
        return branch
    return {**branch, "type": names_of(within)}


def _without(
    mine: Any, other: Any, scope: Scope, at: str, effort: Effort, within: frozenset[str]
) -> tuple[list[Any], bool]:
    """Alternatives that nothing valid under ``other`` is valid under, and that something of ``mine`` may be."""
    within = types_of(mine) & within if isinstance(mine, dict) else within
    found = negation(other, scope, at, within, _DEPTH)
    if found.schema is True:
        return [True], True
    parts = [] if found.schema is False else _parts(found.schema)
    small = [part for part in parts if _size(part) <= _LARGEST][:_MOST_PARTS]
    exact = found.exact and len(small) == len(parts)
    parts = small
    if not exact and isinstance(other, dict) and isinstance(mine, dict) and _closed(other):
        names = [name for name, schema in mine.get("properties", {}).items() if schema is not False]
        more = [name for name in names if name not in other.get("properties", {})]
        parts += [{"type": "object", "required": [name]} for name in more]
    return [part for part in parts if not exclude(mine, part, scope, effort)], exact


def _parts(schema: Any) -> list[Any]:
    """The alternatives that ``schema`` is made of."""
    if isinstance(schema, dict) and schema.keys() == {"anyOf"}:
        return [part for each in schema["anyOf"] for part in _parts(each)]
    return [schema]


def _size(schema: Any) -> int:
    match schema:
        case dict():
            return 1 + sum(map(_size, schema.values()))
        case list():
            return 1 + sum(map(_size, schema))
    return 0


def _text(schema: Any) -> int:
    """How many characters there are in the strings of ``schema``."""
    match schema:
        case dict():
            return _text(list(schema.values()))
        case list():
            return sum(map(_text, schema))
    return len(schema) if isinstance(schema, str) else 0


def _best(parts: list[Any], mine: Any) -> Any:
    """The one of ``parts`` that takes least away from ``mine``: first a property that it does not even name."""
    named = mine.get("properties", {}) if isinstance(mine, dict) else {}
    required = mine.get("required", ()) if isinstance(mine, dict) else ()

    def cost(part: Any) -> int:
        if part.get("properties", {}).keys() and "required" not in part:  # a property is absent
            name = next(iter(part["properties"]))
            return 2 if name in named else 0
        if part.get("required"):  # it is there, or there with another value
            return 1 if part["required"][0] in required else 3
        return 1

    return min(parts, key=cost)


def _closed(node: dict[str, Any]) -> bool:
    return node.get("additionalProperties") is False and not node.get("patternProperties")


def _resolved(node: Any, scope: Scope) -> Any:
    for _ in range(_DEPTH):
        if not isinstance(node, dict) or "$ref" not in node or (len(node) > 1 and scope.draft > 7):
            break
        node = said(scope.resolve(node["$ref"]), scope.draft)
    return node
