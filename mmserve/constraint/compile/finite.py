"""The last passes over a rewritten schema (of ``compile.schema``): values and numbers are made finite.

``without_endless`` removes references to definitions that have no finite value. ``with_finite_numbers`` bounds the
numbers of values that the schema leaves open, such as ``1e999``, which parsers read as infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain, product
from math import prod
from typing import Any

from mmserve.constraint.compile.keywords import ALL, Schema, names_of, nodes, target, types_of, with_children
from mmserve.constraint.compile.negation import both, either
from mmserve.constraint.findings import Notes, Refused
from mmserve.constraint.limits import LARGEST

FINITE: Schema = {"minimum": -LARGEST, "maximum": LARGEST}
_NAME = "any"  # other definitions are named r0, r1, …
_REFERENCE: Schema = {"$ref": f"#/$defs/{_NAME}"}
_ANY: Schema = {"type": names_of(ALL), **FINITE, "items": _REFERENCE, "additionalProperties": _REFERENCE}
_ALONE = ("anyOf", "$ref")
_MOST_CASES = 64  # of several anyOf that all hold


def without_endless(schema: Any, definitions: dict[str, Any]) -> Any:
    """``schema`` with ``definitions`` as its ``$defs``; references to definitions without a finite value become false.

    Both are outputs of ``mmserve.constraint.compile.schema``. Raises ``Refused`` if no value is left.
    """
    ending = least_fixpoint(definitions, lambda name, found: _ends(definitions[name], found))
    if not _ends(schema, ending):
        reason = "has no value" if _ends(schema, set(definitions)) is False else "every value would be infinitely deep"
        raise Refused.at("", "schema", reason)
    kept = {name: _pruned(each, ending) for name, each in definitions.items() if name in ending}
    pruned = _pruned(schema, ending)
    return {**pruned, "$defs": kept} if isinstance(pruned, dict) and kept else pruned


def least_fixpoint(names: Collection[str], belongs: Callable[[str, set[str]], bool]) -> set[str]:
    """The least fixpoint: the set of those ``names`` for which ``belongs`` holds, given the set so far.

    Names usually come after those that depend on them: a chain of dependencies then takes one pass.
    """
    found, before = set[str](), -1
    while len(found) > before:
        before = len(found)
        for name in reversed(list(names)):
            if name not in found and belongs(name, found):
                found.add(name)
    return found


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether ``schema`` may have a finite value, given the definitions that have one; false only if it has none."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and target(schema) not in ending:
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
    patterns = schema.get("patternProperties", {}).values()
    rest = schema.get("additionalProperties", True)
    others = bool(patterns) or rest
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if not all(_ends(properties.get(name, others), ending) for name in required):
        return False
    optional = (each for name, each in properties.items() if name not in required)
    return schema.get("minProperties", 0) <= len(required) or any(
        _ends(each, ending) for each in (*optional, *patterns, rest)
    )


def _array_ends(schema: dict[str, Any], ending: set[str]) -> bool:
    least = schema.get("minItems", 0)
    prefix = schema.get("prefixItems", [])
    if not all(_ends(item, ending) for item in prefix[:least]):
        return False
    return least <= len(prefix) or _ends(schema.get("items", True), ending)


def _pruned(schema: Any, ending: set[str]) -> Any:
    """``schema`` with references to definitions not in ``ending`` replaced by false."""
    if isinstance(schema, bool) or ("$ref" in schema and target(schema) not in ending):
        return schema is True
    return with_children(schema, lambda inner: _pruned(inner, ending))


def with_finite_numbers(schema: Any, notes: Notes, *, unjoined: bool = False) -> Any:
    """``schema`` (of ``without_endless``) with the numbers of open values limited to ±``LARGEST``.

    If schemas are joined, the whole schema is joined with a schema of these bounds. llguidance cannot join two
    recursive definitions: a schema that has them is narrowed at each open value instead. The same is done, if possible,
    if ``unjoined``. Raises ``Refused`` if no value is left.
    """
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    root = {name: value for name, value in schema.items() if name != "$defs"} if isinstance(schema, dict) else schema
    recurring = _recurring(definitions)
    joined = {"allOf": [root, _REFERENCE], "$defs": {**definitions, _NAME: _ANY}}
    may_join = not recurring and any(_joins(node) for node in nodes(schema))
    if may_join and not unjoined:
        return joined
    narrower = _Narrower({name: each for name, each in definitions.items() if name not in recurring})
    opened = {name: narrower.of(each) for name, each in definitions.items()}
    narrowed = narrower.of(root)
    if narrower.gave_up and may_join:
        return joined
    if narrower.gave_up:
        notes.cannot("", "$ref", "a schema that refers to itself joins too many others to bound their numbers")
    if not isinstance(narrowed, dict):
        raise Refused.at("", "schema", "has no value")
    return {**narrowed, "$defs": {**opened, _NAME: _ANY}}


def _recurring(definitions: dict[str, Any]) -> set[str]:
    """The recursive definitions, and those that refer to them, directly or not."""
    left = {name: {target(node) for node in nodes(each) if "$ref" in node} for name, each in definitions.items()}
    ending = least_fixpoint(left, lambda name, found: left[name] <= found)
    return left.keys() - ending


def _joins(node: Schema) -> bool:
    return "allOf" in node or any(keyword in node and node.keys() - {keyword, "$defs"} for keyword in _ALONE)


class _Narrower:
    """Narrows open values of schemas; ``plain``: the definitions that are not recursive."""

    def __init__(self, plain: dict[str, Any]) -> None:
        self._plain = plain
        self.gave_up = False  # whether an open value remains

    def of(self, node: Any) -> Any:
        """``node`` with numbers within bounds wherever it leaves them open."""
        if node is True or node == {}:
            return _REFERENCE
        if node is False or "enum" in node or ("$ref" in node and not _joins(node)):
            return node
        if "anyOf" in node and not _joins(node):
            return {"anyOf": [self.of(each) for each in node["anyOf"]]}
        if _joins(node):
            return self._together(list(self._parts(node)))
        kinds, made = types_of(node), dict(node)
        if "integer" in kinds:  # ``type_of`` always gives "number" with it
            made = {**FINITE, **made}
        for keyword in ("properties", "patternProperties"):
            if keyword in made:
                made[keyword] = {name: self.of(each) for name, each in made[keyword].items()}
        if "prefixItems" in made:
            made["prefixItems"] = [self.of(each) for each in made["prefixItems"]]
        if "array" in kinds:
            made["items"] = self.of(made.get("items", True))
        if "object" in kinds:
            made["additionalProperties"] = self.of(made.get("additionalProperties", True))
        return made

    def _parts(self, node: Any, seen: set[str] | None = None) -> Iterator[Any]:
        """Schemas that all hold if ``node`` does: each is a reference to a recursive definition, ``anyOf``, or plain.

        ``seen``: definitions that were returned already; each is returned once.
        """
        seen = set() if seen is None else seen
        if not isinstance(node, dict):
            yield node
            return
        body = {name: value for name, value in node.items() if name not in ("allOf", "anyOf", "$ref")}
        if body:
            yield body
        for part in node.get("allOf", ()):
            yield from self._parts(part, seen)
        if "anyOf" in node:
            yield {"anyOf": node["anyOf"]}
        if "$ref" in node and target(node) in self._plain:
            if target(node) not in seen:
                seen.add(target(node))
                yield from self._parts(self._plain[target(node)], seen)
        elif "$ref" in node:
            yield {"$ref": node["$ref"]}

    def _together(self, parts: list[Any]) -> Any:
        """``parts``, which all hold, narrowed: each value by one of them only, because two recursive schemas cannot be
        joined."""
        groups = [part["anyOf"] for part in parts if isinstance(part, dict) and "anyOf" in part]
        plain = [part for part in parts if not isinstance(part, dict) or "anyOf" not in part]
        if groups and prod(map(len, groups)) > _MOST_CASES:
            self.gave_up = True
            return both(*parts)
        if groups:
            cases = (chain(plain, *map(self._parts, chosen)) for chosen in product(*groups))
            return either(*(self._together(list(case)) for case in cases))
        if any(part is False or (part is not True and part.keys() & {"enum", "$ref"}) for part in plain):
            return both(*plain)  # one of them has no open value
        return both(*self._of_plain([part for part in plain if part is not True]))

    def _of_plain(self, parts: list[Schema]) -> list[Schema]:
        parts = [dict(part) for part in parts]
        rest: Schema = dict(FINITE)
        for keyword in ("properties", "patternProperties"):
            names = dict.fromkeys(name for part in parts for name in part.get(keyword, ()))
            moved = {name: [part[keyword][name] for part in parts if name in part.get(keyword, ())] for name in names}
            for part in parts:
                if keyword in part:
                    part[keyword] = dict.fromkeys(part[keyword], True)
            if moved:
                rest[keyword] = {name: self._joined(each) for name, each in moved.items()}
        rest["additionalProperties"] = self._only(parts, "additionalProperties")
        if sum(bool(part.keys() & {"items", "prefixItems"}) for part in parts) > 1:
            self.gave_up = True
        elif found := [part for part in parts if part.keys() & {"items", "prefixItems"}]:
            row = found[0].pop("prefixItems", None)
            if row is not None:
                rest["prefixItems"] = [self.of(each) for each in row]
            rest["items"] = self.of(found[0].pop("items", True))
        else:
            rest["items"] = _REFERENCE
        return [part for part in parts if part] + [rest]

    def _only(self, parts: list[Schema], keyword: str) -> Any:
        """The narrowed value of ``keyword`` from the one of ``parts`` that has it; else the schema of open values."""
        found = [part for part in parts if part.get(keyword, True) is not True]
        if not found:
            return _REFERENCE
        found[0][keyword] = self.of(found[0][keyword])
        return True

    def _joined(self, schemas: list[Any]) -> Any:
        constraining = [each for each in schemas if each is not True and each != {}]
        if len(constraining) < 2:
            return self.of(constraining[0] if constraining else True)
        return self._together([part for each in constraining for part in self._parts(each)])
