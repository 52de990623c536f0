"""Wider and wider schemas, for those that the grammar engine cannot compile: each accepts all that the one before does.

They widen schemas as ``compile.schema`` writes them, in which every keyword narrows, so that a subschema may
be replaced by a wider one anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_DEPTHS = (8, 5, 3, 2, 1)
_MAPS = ("properties", "patternProperties", "$defs")
_ROWS = ("anyOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties")


def widened(schema: Any) -> Iterator[tuple[Any, str]]:
    """Schemas that accept all that ``schema`` does, the narrowest first, and what each leaves out; any JSON is last."""
    single = _everywhere(schema, _first_of_all)
    yield single, "what several schemas say together is not enforced, only what the first one does"
    plain = _everywhere(single, _without_text)
    yield plain, "nor are patterns, formats and lengths of strings"
    for depth in _DEPTHS:
        yield _cut(plain, depth), f"nor is what stands more than {depth} levels deep"
    yield True, "any JSON is taken"


def _everywhere(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """``schema`` with ``change`` made to it and to all within it."""
    if not isinstance(schema, dict):
        return schema
    return _within(change(schema), lambda inner: _everywhere(inner, change))


def _within(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    made = dict(schema)
    for keyword in _MAPS:
        if keyword in made:
            made[keyword] = {name: change(each) for name, each in made[keyword].items()}
    for keyword in _ROWS:
        if keyword in made:
            made[keyword] = [change(each) for each in made[keyword]]
    for keyword in _ONES:
        if keyword in made:
            made[keyword] = change(made[keyword])
    return made


def _first_of_all(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` by its own keywords; by its first ``anyOf``, reference or part of ``allOf`` where it has none."""
    own = {name: value for name, value in schema.items() if name not in ("allOf", "anyOf", "$ref", "$defs")}
    kept = {name: schema[name] for name in ("$defs",) if name in schema}
    if own:
        return own | kept
    for keyword in ("anyOf", "$ref"):
        if keyword in schema:
            return {keyword: schema[keyword]} | kept
    parts = [part for part in schema.get("allOf", ()) if isinstance(part, dict)]
    return (_first_of_all(max(parts, key=_says)) if parts else {}) | kept


def _says(schema: dict[str, Any]) -> int:
    """How specific a schema is: of several, the one that constrains a value's structure most is kept."""
    if schema.keys() & {"properties", "items", "enum", "prefixItems"}:
        return 2
    return int(bool(schema.keys() & {"$ref", "allOf", "anyOf", "type"}))


def _without_text(schema: dict[str, Any]) -> dict[str, Any]:
    made = {name: value for name, value in schema.items() if name not in ("pattern", "minLength", "maxLength")}
    if "patternProperties" in made:
        del made["patternProperties"]
        made.pop("additionalProperties", None)  # it is about other names than before
    return made


def _cut(schema: Any, depth: int) -> Any:
    """``schema`` to a depth; references are not followed any more where it is cut."""
    if not isinstance(schema, dict):
        return schema
    if depth == 0:
        return True
    return _within(schema, lambda inner: _cut(inner, depth - 1))
