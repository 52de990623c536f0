"""``$ref`` within one document, by JSON Pointer; and schemas that refer to themselves without end.

A schema that needs itself forever has no finite value: a decoder that enters it never leaves.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from mmserve.constraint.compile.shapes import is_schema, names_of, types_of
from mmserve.constraint.findings import Refused, child

_MOST_REFERENCES = 2_000


class References:
    """The targets of references, by name; each is named once and can be rewritten when it is first met.

    ``barred`` are JSON Pointers that no reference may lead to (``resources.obscure``).
    """

    def __init__(self, root: Any, barred: frozenset[str] = frozenset()) -> None:
        self._root, self._barred = root, barred
        self._names: dict[str, str] = {}

    def name(self, reference: str, pointer: str) -> str:
        """A name for the target of ``reference``, which stands at ``pointer``. Raises ``Refused``."""
        target = self.target(reference, pointer)
        self._checked(target, reference, pointer)
        if len(self._names) >= _MOST_REFERENCES:
            raise Refused.at(child(pointer, "$ref"), "$ref", f"more than {_MOST_REFERENCES} schemas are referred to")
        return self._names.setdefault(target, f"r{len(self._names)}")

    def target(self, reference: str, pointer: str) -> str:
        """The JSON Pointer that ``reference`` is. Raises ``Refused`` for one that leaves the document."""
        path = reference.removeprefix("#")
        if path == reference or (path and not path.startswith("/")):
            reason = "must lead to a schema in this document, like #/$defs/name: nothing is fetched"
            raise Refused.at(child(pointer, "$ref"), "$ref", reason)
        return unquote(path)

    def schema(self, reference: str, pointer: str) -> Any:
        """The schema that ``reference`` names. Raises ``Refused`` where there is none."""
        return self._checked(self.target(reference, pointer), reference, pointer)

    def at(self, target: str) -> Any:
        """The schema at ``target``, a JSON Pointer. Raises ``Refused`` where there is none."""
        return self._checked(target, "#" + target, "")

    def named(self) -> list[tuple[str, str]]:
        """All targets so far with their names."""
        return list(self._names.items())

    def _checked(self, target: str, reference: str, pointer: str) -> Any:
        found, at = self._root, ""
        for step in target.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and step in found:
                found, at = found[step], child(at, step)
            elif isinstance(found, list) and step.isascii() and step.isdigit() and int(step[:6]) < len(found):
                found, at = found[int(step[:6])], child(at, int(step[:6]))
            else:
                raise Refused.at(child(pointer, "$ref"), "$ref", f"{reference[:100]!r} names nothing in the schema")
        if not is_schema(found):
            raise Refused.at(child(pointer, "$ref"), "$ref", f"{reference[:100]!r} names no schema")
        if at in self._barred:
            reason = f"{reference[:100]!r} crosses what is no schema, near a name: put it into $defs"
            raise Refused.at(child(pointer, "$ref"), "$ref", reason)
        return found


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
