"""JSON values: their types, their equality, and the finite sets of them that schemas name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mmserve.constraint.compile.shapes import TYPES

#: Every type; "integer" is a part of "number" and stands beside it.
ALL = frozenset(TYPES)


def type_of(value: Any) -> str:
    """The narrowest JSON type of ``value``."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def key(value: Any) -> str:
    """A text that two values share just when they are equal as JSON (``read_schema`` left no float 1.0)."""
    return json.dumps(value, sort_keys=True)


def distinct(values: Iterable[Any]) -> list[Any]:
    """``values`` without repetitions, in order."""
    return list({key(value): value for value in values}.values())


def types_of(node: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema's ``type`` and its constants leave; "number" comes with "integer"."""
    allowed = ALL
    if "type" in node:
        given = node["type"] if isinstance(node["type"], list) else [node["type"]]
        allowed = frozenset(given) | (frozenset({"integer"}) if "number" in given else frozenset())
    for values in (node.get("enum"), [node["const"]] if "const" in node else None):
        if values is not None:
            found = {type_of(value) for value in values}
            allowed &= found | ({"number"} if "integer" in found else set())
    return allowed


def finite(node: Any) -> list[Any] | None:
    """All values a schema can have, if its own keywords ``const``, ``enum`` and ``type`` name them; else None."""
    if not isinstance(node, dict):
        return None
    kinds = types_of(node)
    if "const" in node or "enum" in node:
        named = [node["const"]] if "const" in node else distinct(node["enum"])
        return [value for value in named if type_of(value) in kinds]
    if kinds <= {"null", "boolean"}:
        return [*([None] if "null" in kinds else []), *([False, True] if "boolean" in kinds else [])]
    return None


def names_of(kinds: Iterable[str]) -> list[str]:
    """``kinds`` as a value of ``type``: in order, and without "integer" beside "number"."""
    chosen = set(kinds)
    return [name for name in TYPES if name in chosen and not (name == "integer" and "number" in chosen)]


def writable(value: Any) -> bool:
    """Whether every string of ``value`` can be written with the escapes that a grammar has: not ``\\u``."""
    match value:
        case str():
            return all((char >= " " and char != "\x7f") or char in "\b\t\n\f\r" for char in value)
        case list():
            return all(map(writable, value))
        case dict():
            return all(map(writable, value.values()))
    return True
