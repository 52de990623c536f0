"""Schemas that need themselves forever have no finite value: a decoder that enters one never gets out."""

from __future__ import annotations

from typing import Any

from mmserve.constraint.compile.values import names_of, types_of
from mmserve.constraint.findings import Refused

_PREFIX = "#/$defs/"


def without_endless(schema: Any, definitions: dict[str, Any]) -> Any:
    """``schema`` with ``definitions`` as its ``$defs``, every reference to one without a finite value made false.

    Both are as ``mmserve.constraint.compile.schema`` writes them. Raises ``Refused`` where nothing is left.
    """
    ending: set[str] = set()
    while grown := {name for name in definitions if name not in ending and _ends(definitions[name], ending)}:
        ending |= grown
    if not _ends(schema, ending):
        reason = "has no value" if _ends(schema, set(definitions)) is False else "every value would be infinitely deep"
        raise Refused.at("", "schema", reason)
    if not definitions:
        return schema
    endless = frozenset(definitions) - ending
    kept = {name: _pruned(each, endless) for name, each in definitions.items() if name in ending}
    pruned = _pruned(schema, endless)
    if not isinstance(pruned, dict) or not kept:
        return pruned
    return {**pruned, "$defs": kept}


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether ``schema`` may have a finite value, given the definitions that have one; false only if it has none."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix(_PREFIX) not in ending:
        return False
    if not all(_ends(part, ending) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_ends(part, ending) for part in schema["anyOf"]):
        return False
    kinds = set(names_of(types_of(schema)))
    if "object" in kinds and not _object_ends(schema, ending):
        kinds.discard("object")
    if "array" in kinds and not _array_ends(schema, ending):
        kinds.discard("array")
    return bool(kinds)


def _object_ends(schema: dict[str, Any], ending: set[str]) -> bool:
    properties = schema.get("properties", {})
    open_to_others = bool(schema.get("patternProperties")) or _ends(schema.get("additionalProperties", True), ending)
    for name in schema.get("required", ()):
        if not (_ends(properties[name], ending) if name in properties else open_to_others):
            return False
    return True


def _array_ends(schema: dict[str, Any], ending: set[str]) -> bool:
    least = schema.get("minItems", 0)
    prefix = schema.get("prefixItems", [])
    if not all(_ends(item, ending) for item in prefix[:least]):
        return False
    return least <= len(prefix) or _ends(schema.get("items", True), ending)


def _pruned(schema: Any, endless: frozenset[str]) -> Any:
    """``schema`` with references to ``endless`` definitions made false."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix(_PREFIX) in endless:
        return False
    result = dict(schema)
    for keyword in ("properties", "patternProperties"):
        if keyword in result:
            result[keyword] = {name: _pruned(each, endless) for name, each in result[keyword].items()}
    for keyword in ("allOf", "anyOf", "prefixItems"):
        if keyword in result:
            result[keyword] = [_pruned(each, endless) for each in result[keyword]]
    for keyword in ("items", "additionalProperties"):
        if keyword in result:
            result[keyword] = _pruned(result[keyword], endless)
    return result
