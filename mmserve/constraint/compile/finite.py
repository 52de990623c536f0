"""The last passes over a rewritten schema (of ``compile.schema``): every value is finite, and so is every number.

``without_endless`` removes references to definitions that every value would enter without end. ``with_finite_numbers``
bounds the numbers of values that the schema leaves open, such as ``1e999``, which readers take for an infinity.

``longest_document`` and ``shortest_document`` are bounds in bytes. A token has at least one byte, so the upper bound
also bounds the tokens of an answer; it has at most a known number of bytes, so the lower bound gives a least number of
tokens: where that is far above a request's budget, no answer is searched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from decimal import Decimal
from itertools import chain, product
from math import inf, prod
from typing import Any

from mmserve.constraint.compile.expression import BadPattern, longest_match
from mmserve.constraint.compile.keywords import ALL, Schema, names_of, nodes, target, types_of, with_children
from mmserve.constraint.compile.negation import both, either
from mmserve.constraint.compile.pattern import parsed
from mmserve.constraint.findings import Notes, Refused
from mmserve.constraint.limits import LARGEST

FINITE: Schema = {"minimum": -LARGEST, "maximum": LARGEST}
_NAME = "any"  # other definitions are named r0, r1, …
_REFERENCE: Schema = {"$ref": f"#/$defs/{_NAME}"}
_ANY: Schema = {"type": names_of(ALL), **FINITE, "items": _REFERENCE, "additionalProperties": _REFERENCE}
_ALONE = ("anyOf", "$ref")
_MOST_CASES = 64  # of several anyOf that all hold


def without_endless(schema: Any, definitions: dict[str, Any]) -> Any:
    """``schema`` with ``definitions`` as its ``$defs``, every reference to one without a finite value made false.

    Both are as ``mmserve.constraint.compile.schema`` writes them. Raises ``Refused`` where nothing is left.
    """
    ending = grown_to_all(definitions, lambda name, found: _ends(definitions[name], found))
    if not _ends(schema, ending):
        reason = "has no value" if _ends(schema, set(definitions)) is False else "every value would be infinitely deep"
        raise Refused.at("", "schema", reason)
    kept = {name: _pruned(each, ending) for name, each in definitions.items() if name in ending}
    pruned = _pruned(schema, ending)
    return {**pruned, "$defs": kept} if isinstance(pruned, dict) and kept else pruned


def grown_to_all(names: Collection[str], belongs: Callable[[str, set[str]], bool]) -> set[str]:
    """The least set of ``names`` with each one that ``belongs`` to it, given the set so far.

    One that depends on others mostly comes before them: a chain of them takes one pass.
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
    """``schema`` with references to other definitions than those ``ending`` made false."""
    if isinstance(schema, bool) or ("$ref" in schema and target(schema) not in ending):
        return schema is True
    return with_children(schema, lambda inner: _pruned(inner, ending))


def with_finite_numbers(schema: Any, notes: Notes, *, apart: bool = False) -> Any:
    """``schema``, of ``without_endless``, whose open values have numbers within ±``LARGEST``.

    Where schemas are joined, the whole is joined with a schema of these bounds. llguidance cannot join two
    definitions that refer to themselves: in a schema with such, each place is narrowed where it is left open. So it is,
    if it can be, where schemas are better kept ``apart``. Raises ``Refused`` where nothing is left.
    """
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    root = {name: value for name, value in schema.items() if name != "$defs"} if isinstance(schema, dict) else schema
    recurring = _recurring(definitions)
    joined = {"allOf": [root, _REFERENCE], "$defs": {**definitions, _NAME: _ANY}}
    may_join = not recurring and any(_joins(node) for node in nodes(schema))
    if may_join and not apart:
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
    ending = grown_to_all(left, lambda name, found: left[name] <= found)
    return left.keys() - ending


def _joins(node: Schema) -> bool:
    return "allOf" in node or any(keyword in node and node.keys() - {keyword, "$defs"} for keyword in _ALONE)


class _Narrower:
    """Narrows what schemas leave open; ``plain``: the definitions that are not recursive."""

    def __init__(self, plain: dict[str, Any]) -> None:
        self._plain = plain
        self.gave_up = False  # whether something is left open

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
        if "integer" in kinds:  # which comes with "number", too
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
        """Schemas that all hold where ``node`` does: each a reference to one that recurs, ``anyOf``, or plain.

        ``seen``: definitions that are among them already; a definition counts once, however often it is referred to.
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
        """``parts``, which all hold, narrowed: at each place by one of them only, since two recursive
        schemas cannot be joined."""
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
        """The value of ``keyword``, narrowed, from the one of ``parts`` that has it; else the schema of open values."""
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


#: Bytes of ``, `` and of ``: ``, as a document may be spaced (``attempts.JSON_LAYOUT``).
_SPACED = 2
_QUOTES = _BRACKETS = 2
#: Bytes that a character has at most, in UTF-8.
_WIDEST = 4
_LITERALS = {"null": len("null"), "boolean": len("false")}
#: Characters of patterns that are read of one schema: 3 ms a thousand.
_READ = 20_000


def longest_document(schema: Any) -> float:
    """Most bytes of a document under ``schema``, as ``mmserve.constraint.compile.schema`` writes it."""
    return _Longest(schema).root


def shortest_document(schema: Any) -> int:
    """Fewest bytes of a document under ``schema``, as ``mmserve.constraint.compile.schema`` writes it."""
    return int(_Shortest(schema).root)


class _Bounds:
    """Bounds of documents: ``all_of`` joins those of keywords that all hold, ``any_of`` those of alternatives."""

    all_of: Callable[..., float]
    any_of: Callable[..., float]
    unknown: float
    value: Callable[[Any], int]
    _of_type: Callable[[str, Schema], float]

    def __init__(self, schema: Any) -> None:
        self._definitions: Schema = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        self._known: dict[str, float] = {}
        self._left = _READ
        try:
            self.root = self._of(schema)
        except RecursionError:  # definitions that refer to one another in a long row
            self.root = self.unknown

    def _of(self, schema: Any) -> float:
        if not isinstance(schema, dict):
            return 0 if schema is False else self.unknown
        bounds = [self._typed(schema)]
        if schema.get("enum"):
            bounds.append(self.any_of(map(self.value, schema["enum"])))
        if schema.get("anyOf"):
            bounds.append(self.any_of(map(self._of, schema["anyOf"])))
        bounds += map(self._of, schema.get("allOf", ()))
        if "$ref" in schema:
            bounds.append(self._referred(target(schema)))
        return self.all_of(bounds)

    def _referred(self, name: str) -> float:
        if name not in self._known:
            self._known[name] = self.unknown  # until it is known: a definition may be recursive
            self._known[name] = self._of(self._definitions[name])
        return self._known[name]

    def _typed(self, schema: Schema) -> float:
        """The bound by the keywords of each type."""
        if "type" not in schema:
            return self.unknown
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return self.any_of((self._of_type(kind, schema) for kind in kinds), default=self.unknown)


def _listed(count: int, inner: float) -> float:
    """Bytes of ``count`` parts between brackets, themselves of ``inner`` bytes."""
    return _BRACKETS + inner + _SPACED * max(0, count - 1)


def _longest_value(value: Any) -> int:
    """Most bytes of ``value`` written out; numbers never have an exponent."""
    match value:
        case float():
            return len(format(Decimal(repr(value)), "f"))
        case list():
            return int(_listed(len(value), sum(map(_longest_value, value))))
        case dict():
            inner = sum(_longest_value(name) + _SPACED + _longest_value(each) for name, each in value.items())
            return int(_listed(len(value), inner))
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


class _Longest(_Bounds):
    all_of, any_of = staticmethod(min), staticmethod(max)
    unknown, value = inf, staticmethod(_longest_value)

    def _of_type(self, kind: str, schema: Schema) -> float:
        match kind:
            case "null" | "boolean":
                return _LITERALS[kind]
            case "integer":
                if not {"minimum", "maximum"} <= schema.keys():
                    return inf
                bounds = schema["minimum"], schema["maximum"]  # without an exponent, and without zeros in front
                return max(len(str(int(abs(bound)))) for bound in bounds) + (bounds[0] < 0)
            case "string":
                return self._strings(schema)
            case "array":
                return self._arrays(schema)
            case "object":
                if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
                    return inf
                there = [name for name, each in schema.get("properties", {}).items() if each is not False]
                inner = (_longest_value(name) + _SPACED + self._of(schema["properties"][name]) for name in there)
                return _listed(len(there), sum(inner))
        return inf  # a number has any number of decimals

    def _strings(self, schema: Schema) -> float:
        """Most bytes of a string, whose ``pattern`` is anchored."""
        most, pattern = _WIDEST * schema.get("maxLength", inf), schema.get("pattern", "")
        self._left -= len(pattern)
        if pattern and self._left >= 0:
            with suppress(BadPattern):  # written out, it may be larger than any that is read
                most = min(most, longest_match(parsed(pattern.removeprefix("^").removesuffix("$")), quoted=True))
        return _QUOTES + most

    def _arrays(self, schema: Schema) -> float:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        count = min(schema.get("maxItems", inf), len(first) if rest is False else inf)
        if count == inf:
            return inf
        items = list(map(self._of, first[: int(count)]))
        others = int(count) - len(items)
        return _listed(len(items) + others, sum(items) + (others * self._of(rest) if others else 0))


class _Shortest(_Bounds):
    all_of, any_of, unknown = staticmethod(max), staticmethod(min), 0

    @staticmethod
    def value(value: Any) -> int:
        """No more than the fewest bytes of ``value`` written out."""
        return 1 if isinstance(value, float) else len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    def _of_type(self, kind: str, schema: Schema) -> float:
        match kind:
            case "string":
                return _QUOTES + int(schema.get("minLength", 0))
            case "array":
                return self._arrays(schema)
            case "object":
                required = schema.get("required", ())
                properties = schema.get("properties", {})
                inner = (len(name) + _QUOTES + 1 + self._of(properties.get(name, True)) for name in required)
                return _BRACKETS + sum(inner) + max(0, len(required) - 1)
        return 1

    def _arrays(self, schema: Schema) -> float:
        count = int(schema.get("minItems", 0))
        first = schema.get("prefixItems", [])[:count]
        others = count - len(first)
        inner = sum(map(self._of, first)) + (others * self._of(schema.get("items", True)) if others else 0)
        return _BRACKETS + inner + max(0, count - 1)
