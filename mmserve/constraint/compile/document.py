"""A schema's text as a value, within the limits: nothing later has to fear its size, depth or numbers."""

from __future__ import annotations

import json
import math
from typing import Any

from mmserve.constraint.findings import Refused, child
from mmserve.constraint.limits import (
    MAX_DEPTH,
    MAX_ENUM_BYTES,
    MAX_ENUM_VALUES,
    MAX_PROPERTIES,
    MAX_SCHEMA_BYTES,
)

_LONGEST_NUMBER = 40  # characters; the largest float in full has 17 significant digits


def read_schema(text: str) -> Any:
    """The value of the JSON ``text``: a dict or a bool.

    Raises ``Refused`` for text that is no JSON, names an object's member twice, holds a lone surrogate, NaN, an
    infinity or a number too long to be exact, or passes a limit of ``mmserve.constraint.limits``.
    """
    if len(text) > MAX_SCHEMA_BYTES or len(text.encode(errors="replace")) > MAX_SCHEMA_BYTES:
        raise Refused.at("", "schema", f"must be at most {MAX_SCHEMA_BYTES} bytes")
    if _depth(text) > MAX_DEPTH:
        raise Refused.at("", "schema", f"must be nested at most {MAX_DEPTH} deep")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_members,
            parse_constant=_no_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except Refused:
        raise
    except ValueError as error:
        raise Refused.at("", "schema", f"is no JSON: {error}") from error
    if not isinstance(value, dict | bool):
        raise Refused.at("", "schema", "must be a JSON object, true or false")
    _check_texts(value, "")
    _check_counts(value)
    return value


def _depth(text: str) -> int:
    """How deep brackets nest in ``text``, outside of its strings."""
    depth = deepest = 0
    quoted = escaped = False
    for char in text:
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Refused.at("", "schema", f"an object has two members named {twice[:60]!r}")
    return members


def _no_constant(name: str) -> Any:
    raise Refused.at("", "schema", f"{name} is no JSON number")


def _float(text: str) -> float | int:
    value = float(text)
    if len(text) > _LONGEST_NUMBER or not math.isfinite(value):
        raise Refused.at("", "schema", f"the number {text[:_LONGEST_NUMBER]} is too long or too large")
    return int(value) if value.is_integer() else value  # JSON Schema: 1.0 is the integer 1


def _int(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise Refused.at("", "schema", f"the number {text[:_LONGEST_NUMBER]}… is too long")
    return int(text)


def _check_texts(value: Any, pointer: str) -> None:
    match value:
        case str():
            _check_text(value, pointer)
        case dict():
            for name, inner in value.items():
                _check_text(name, pointer)
                _check_texts(inner, child(pointer, name))
        case list():
            for index, inner in enumerate(value):
                _check_texts(inner, child(pointer, index))


def _check_text(text: str, pointer: str) -> None:
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        safe = pointer.encode(errors="replace").decode()
        raise Refused.at(safe, "schema", "a string holds half of a surrogate pair")


def _check_counts(root: Any) -> None:
    """Properties and enum values of the whole schema, wherever they stand."""
    properties = values = size = 0
    pending: list[tuple[Any, str]] = [(root, "")]
    while pending:
        value, pointer = pending.pop()
        if isinstance(value, list):
            pending += [(inner, child(pointer, i)) for i, inner in enumerate(value)]
        if not isinstance(value, dict):
            continue
        if isinstance(found := value.get("properties"), dict):
            properties += len(found)
            if properties > MAX_PROPERTIES:
                raise Refused.at(pointer, "properties", f"a schema may have at most {MAX_PROPERTIES} properties")
        if isinstance(found := value.get("enum"), list):
            values += len(found)
            size += len(json.dumps(found, ensure_ascii=False).encode())
            if values > MAX_ENUM_VALUES:
                raise Refused.at(pointer, "enum", f"a schema may have at most {MAX_ENUM_VALUES} enum values")
            if size > MAX_ENUM_BYTES:
                raise Refused.at(pointer, "enum", f"a schema's enum values may have at most {MAX_ENUM_BYTES} bytes")
        pending += [(inner, child(pointer, name)) for name, inner in value.items()]
