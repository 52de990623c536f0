"""``unevaluatedProperties`` and ``unevaluatedItems`` as ``additionalProperties`` and ``items``.

They are about what no schema that applies to the same value evaluates (JSON Schema 2020-12, core 11). Which properties
are evaluated is known where all such schemas always hold: those of ``allOf`` and ``$ref``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from mmserve.constraint.compile.keywords import IN_PLACE, Schema, misshapen, modern
from mmserve.constraint.compile.negation import Scope
from mmserve.constraint.findings import Notes, Refused

_DEPTH = 8  # schemas and references followed
#: Those that always hold, and that which evaluates nothing.
_FOLLOWED = frozenset({"allOf", "$ref", "not"})
#: Keywords that evaluate the names that they have, and keywords that evaluate every name.
_NAMES, _EVERY = ("properties", "patternProperties"), frozenset({"additionalProperties", "unevaluatedProperties"})


def without_unevaluated(node: Schema, pointer: str, notes: Notes, scope: Scope) -> Schema:
    """``node``, of well-formed keywords, without ``unevaluatedProperties`` and ``unevaluatedItems``.

    Where they depend on schemas that may hold or not, they are left out.
    """
    for keyword, rewritten in (("unevaluatedProperties", _properties), ("unevaluatedItems", _items)):
        if keyword not in node:
            continue
        node = dict(node)
        rest = node.pop(keyword)
        if rest is True or rest == {}:
            continue
        found = rewritten(node, rest, scope)
        if isinstance(found, str):
            notes.cannot(pointer, keyword, found)
        else:
            node = found
    return node


def _properties(node: Schema, rest: Any, scope: Scope) -> Schema | str:
    """``node`` where ``rest`` holds for properties that are not evaluated, or why that is not known."""
    if "additionalProperties" in node:
        return node
    found = evaluated(node, scope)
    if found is None:
        return "use additionalProperties: only what allOf and $ref evaluate is followed"
    if found.keys() & _EVERY:
        return node
    own = {keyword: {**found[keyword], **node.get(keyword, {})} for keyword in _NAMES if found[keyword]}
    return {**node, **own, "additionalProperties": rest}


def _items(node: Schema, rest: Any, _scope: Scope) -> Schema | str:
    """As ``_properties``, of items."""
    if "items" in node:
        return node
    if node.keys() & (IN_PLACE | {"contains"}):
        return "use items: what other schemas evaluate is not followed"
    return {**node, "items": rest}


def evaluated(schema: Schema, scope: Scope, depth: int = _DEPTH) -> Schema | None:
    """The names and patterns that ``schema`` always evaluates, as ``properties`` and ``patternProperties`` of true.

    With ``additionalProperties`` where it evaluates every name; None where that is not known.
    """
    found: Schema = {keyword: {} for keyword in _NAMES}
    with suppress(Refused):  # raised again when that schema is rewritten
        body = modern(schema, scope.draft, "")
        if depth == 0 or any(misshapen(body, "")) or body.keys() & (IN_PLACE - _FOLLOWED):
            return None
        if body.keys() & _EVERY:
            return {**found, "additionalProperties": True}
        parts = [*body.get("allOf", ()), *([scope.resolve(body["$ref"])] if "$ref" in body else [])]
        inner = [evaluated(part, scope, depth - 1) for part in parts if isinstance(part, dict)]
        known = [each for each in inner if each is not None]
        if len(known) < len(inner):
            return None
        for each in [body, *known]:
            for keyword in _NAMES:
                found[keyword] |= dict.fromkeys(each.get(keyword, ()), True)
            found |= dict.fromkeys(each.keys() & _EVERY, True)
        return found
    return None
