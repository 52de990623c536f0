"""Values that a schema leaves open: any JSON, but for numbers that readers take for an infinity, such as ``1e999``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmserve.constraint.limits import LARGEST
from mmserve.constraint.values import ALL, names_of, types_of

Schema = dict[str, Any]
FINITE: Schema = {"minimum": -LARGEST, "maximum": LARGEST}
_NAME = "any"  # other definitions are named r0, r1, …
_REFERENCE: Schema = {"$ref": f"#/$defs/{_NAME}"}
_ANY: Schema = {"type": names_of(ALL), **FINITE, "items": _REFERENCE, "additionalProperties": _REFERENCE}
_ALONE = ("anyOf", "$ref")


def with_finite_numbers(schema: Any) -> Any:
    """``schema``, of ``mmserve.constraint.recursion``, whose open values have numbers within ±``LARGEST``.

    Where schemas are joined, all of it is joined with a schema that says no more than that. llguidance cannot join two
    definitions that refer to themselves: a schema that does so, and joins others, stays as it is.
    """
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    root = {name: value for name, value in schema.items() if name != "$defs"} if isinstance(schema, dict) else schema
    if any(_joins(node) for node in _subschemas(schema)):
        if _recurs(definitions):
            return schema
        return {"allOf": [root, _REFERENCE], "$defs": {**definitions, _NAME: _ANY}}
    opened = {name: _narrowed(each) for name, each in definitions.items()}
    return {**_narrowed(root), "$defs": {**opened, _NAME: _ANY}}


def _subschemas(schema: Any) -> Iterator[Schema]:
    """``schema`` and all within it, but for true and false."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword in ("properties", "patternProperties", "$defs"):
        for each in schema.get(keyword, {}).values():
            yield from _subschemas(each)
    for keyword in ("anyOf", "allOf", "prefixItems"):
        for each in schema.get(keyword, ()):
            yield from _subschemas(each)
    for keyword in ("items", "additionalProperties"):
        yield from _subschemas(schema.get(keyword))


def _recurs(definitions: dict[str, Any]) -> bool:
    """Whether any definition comes to itself by references."""
    left = {name: _referred(each) for name, each in definitions.items()}
    while leaves := [name for name, others in left.items() if not others & left.keys()]:
        for name in leaves:
            del left[name]
    return bool(left)


def _referred(schema: Any) -> set[str]:
    """The definitions that ``schema`` refers to."""
    return {node["$ref"].rpartition("/")[2] for node in _subschemas(schema) if "$ref" in node}


def _joins(node: Schema) -> bool:
    return "allOf" in node or any(keyword in node and node.keys() - {keyword, "$defs"} for keyword in _ALONE)


def _narrowed(node: Any) -> Any:
    if node is True or node == {}:
        return _REFERENCE
    if node is False or "$ref" in node or "enum" in node:
        return node
    if "anyOf" in node:
        return {"anyOf": [_narrowed(each) for each in node["anyOf"]]}
    kinds, made = types_of(node), dict(node)
    if "integer" in kinds:  # which comes with "number", too
        made = {**FINITE, **made}
    for keyword in ("properties", "patternProperties"):
        if keyword in made:
            made[keyword] = {name: _narrowed(each) for name, each in made[keyword].items()}
    if "prefixItems" in made:
        made["prefixItems"] = [_narrowed(each) for each in made["prefixItems"]]
    if "array" in kinds:
        made["items"] = _narrowed(made.get("items", True))
    if "object" in kinds:
        made["additionalProperties"] = _narrowed(made.get("additionalProperties", True))
    return made
