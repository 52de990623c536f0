"""Bounds of the documents under a schema, in bytes.

A token has at least one byte, so the upper bound also bounds the tokens of an answer. A token's bytes are bounded, so
the lower bound gives a minimum number of tokens: if that is far above a request's budget, no answer is searched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from math import inf
from typing import Any

from mmserve.constraint.compile.expression import BadPattern, longest_match
from mmserve.constraint.compile.keywords import Schema, target
from mmserve.constraint.compile.pattern import parsed

#: Bytes of ``, `` and of ``: ``, the longest separators of a document (``attempts.JSON_LAYOUT``).
_SPACED = 2
_QUOTES = _BRACKETS = 2
#: Maximum bytes of a character in UTF-8.
_WIDEST = 4
_LITERALS = {"null": len("null"), "boolean": len("false")}
#: Maximum total length of patterns that are analysed in one schema: 3 ms per thousand characters.
_READ = 20_000


def longest_document(schema: Any) -> float:
    """Most bytes of a document under ``schema``, as ``mmserve.constraint.compile.schema`` writes it."""
    return _Longest(schema).root


def shortest_document(schema: Any) -> int:
    """Fewest bytes of a document under ``schema``, as ``mmserve.constraint.compile.schema`` writes it."""
    return int(_Shortest(schema).root)


class _Bounds:
    """Bounds of documents: ``all_of`` combines those of keywords that all hold, ``any_of`` those of alternatives."""

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
        except RecursionError:  # a long chain of references
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
            self._known[name] = self.unknown  # default for recursive definitions
            self._known[name] = self._of(self._definitions[name])
        return self._known[name]

    def _typed(self, schema: Schema) -> float:
        """The bound from the keywords of each type."""
        if "type" not in schema:
            return self.unknown
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return self.any_of((self._of_type(kind, schema) for kind in kinds), default=self.unknown)


def _listed(count: int, inner: float) -> float:
    """Bytes of an array or object of ``count`` parts with ``inner`` bytes in total."""
    return _BRACKETS + inner + _SPACED * max(0, count - 1)


def _longest_value(value: Any) -> int:
    """Maximum bytes of ``value`` as text; numbers have no exponent."""
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
                bounds = schema["minimum"], schema["maximum"]  # without exponent and leading zeros
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
        return inf  # numbers have any number of decimals

    def _strings(self, schema: Schema) -> float:
        """Maximum bytes of a string, whose ``pattern`` is anchored."""
        most, pattern = _WIDEST * schema.get("maxLength", inf), schema.get("pattern", "")
        self._left -= len(pattern)
        if pattern and self._left >= 0:
            with suppress(BadPattern):  # expanded, it may be too large
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
        """A lower bound of the bytes of ``value`` as text."""
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
