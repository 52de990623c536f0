"""``unevaluatedProperties`` and ``unevaluatedItems`` as ``additionalProperties`` and ``items``.

A value is valid if, for one of the ways through the schemas that apply to it (``compile.evaluated``), the keyword's
schema holds for all properties or items that the way does not evaluate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmserve.constraint.compile.evaluated import EVERY, Condition, Evaluation, Unknown, Way, evaluation
from mmserve.constraint.compile.keywords import Schema
from mmserve.constraint.compile.negation import Scope, either
from mmserve.constraint.compile.one_of import Effort
from mmserve.constraint.findings import Notes, Refused

_INSTEAD = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}


@dataclass(frozen=True)
class Case:
    """``conditions`` and ``closed`` together; ``rest`` and the schemas in ``matching`` are alternatives for the members
    or items that ``additionalProperties`` or ``items`` of ``closed`` forbids."""

    conditions: tuple[Condition, ...]
    closed: Any
    matching: tuple[Condition, ...]


@dataclass(frozen=True)
class Cases:
    """The meaning of ``keyword`` with the value ``rest``: one of ``cases``."""

    keyword: str
    rest: Any
    cases: tuple[Case, ...]

    @property
    def instead(self) -> str:
        """The keyword that has ``rest`` in each case."""
        return _INSTEAD[self.keyword]


def without_unevaluated(
    node: Schema, pointer: str, notes: Notes, scope: Scope, effort: Effort
) -> tuple[Schema, list[Cases]]:
    """``node``, with well-formed keywords, without ``unevaluatedProperties`` and ``unevaluatedItems``; and cases, all
    of which must hold.

    The keywords are left out if it is not known which members or items they apply to.
    """
    if not node.keys() & _INSTEAD.keys():
        return node, []
    whole = {name: value for name, value in node.items() if name not in _INSTEAD}
    made, cases, implied = whole, list[Cases](), set[str]()
    for keyword, instead in _INSTEAD.items():
        rest = node.get(keyword, True)
        if rest is True or rest == {} or instead in whole:
            continue
        try:
            found = evaluation(whole, pointer, keyword, scope, effort)
        except (Unknown, Refused) as reason:  # refused again when that schema is rewritten
            notes.cannot(pointer, keyword, f"use {instead}: {reason}")
            continue
        if not any(way.conditions for way in found.ways):
            [way] = found.ways
            made = made if EVERY in way.tokens else {**made, **_merged(whole, rest, way, found, instead)}
            continue
        implied |= found.implied
        cases.append(Cases(keyword, rest, tuple(_case(way, found, instead, scope.draft) for way in found.ways)))
    return {name: value for name, value in made.items() if name not in implied}, cases


def _merged(node: Schema, rest: Any, way: Way, found: Evaluation, instead: str) -> Schema:
    """The keywords of ``node`` with ``rest`` for everything that ``way`` does not evaluate."""
    if instead == "items":
        row = list(node.get("prefixItems", ()))
        row += [{}] * (len(found.of(way, "place")) - len(row))
        rest = either(rest, *(each.schema for each in _matching(way, found)))
        return {**({"prefixItems": row} if row else {}), "items": rest}
    own = {keyword: {**names, **node.get(keyword, {})} for keyword, names in _names(way, found).items()}
    return {**own, "additionalProperties": rest}


def _case(way: Way, found: Evaluation, instead: str, draft: int) -> Case:
    if EVERY in way.tokens:
        return Case(way.conditions, True, ())
    if instead == "additionalProperties":
        return Case(way.conditions, {**_names(way, found), "additionalProperties": False}, ())
    row: list[Any] = [{}] * len(found.of(way, "place"))
    if not row:
        return Case(way.conditions, {"items": False}, _matching(way, found))
    keywords = ("prefixItems", "items") if draft >= 2020 else ("items", "additionalItems")
    return Case(way.conditions, dict(zip(keywords, (row, False), strict=True)), _matching(way, found))


def _names(way: Way, found: Evaluation) -> Schema:
    """Keywords that allow the names and patterns of ``way``."""
    kinds = {"properties": "name", "patternProperties": "pattern"}
    made: Schema = {keyword: {each.what: {} for each in found.of(way, kind)} for keyword, kind in kinds.items()}
    return {keyword: names for keyword, names in made.items() if names}


def _matching(way: Way, found: Evaluation) -> tuple[Condition, ...]:
    """The schemas of ``contains`` whose items are evaluated."""
    return tuple(Condition(str(each.what), found.found[each]) for each in found.of(way, "matching"))
