"""How short an answer can be at least: a bound in bytes from below, 0 where none is known.

A token has a known number of bytes at most, so that an answer of so many bytes needs a known number of tokens. Where
these are far more than a request may have, no answer need be looked for.
"""

from __future__ import annotations

import json
from typing import Any

from mmserve.constraint.compile.pattern import Chars, Group, Item, Repeat, parsed

Schema = dict[str, Any]
_QUOTES = _BRACKETS = 2


def of_pattern(pattern: str) -> int:
    """Fewest bytes of a text that ``pattern`` matches whole. Raises ``BadPattern``."""
    return _of_item(parsed(pattern))


def of_expression(item: Item) -> int:
    """Fewest bytes of a text that ``item`` matches; 0 where it matches none."""
    return _of_item(item)


def of_schema(schema: Any) -> int:
    """Fewest bytes of a document under ``schema``, as ``mmserve.constraint.compile.schema`` writes it."""
    try:
        return _Documents(schema.get("$defs", {}) if isinstance(schema, dict) else {}).least(schema)
    except RecursionError:  # definitions that refer to one another in a long row
        return 0


class _Documents:
    """Bounds of documents, given the definitions that schemas refer to."""

    def __init__(self, definitions: Schema) -> None:
        self._definitions = definitions
        self._known: dict[str, int] = {}

    def least(self, schema: Any) -> int:
        """Fewest bytes of a document under ``schema``: all that it says holds, so the greatest bound does."""
        if not isinstance(schema, dict):
            return 0
        bounds = [self._typed(schema)]
        if schema.get("enum"):
            bounds.append(min(map(_size, schema["enum"])))
        if schema.get("anyOf"):
            bounds.append(min(map(self.least, schema["anyOf"])))
        bounds += map(self.least, schema.get("allOf", ()))
        if "$ref" in schema:
            bounds.append(self._referred(schema["$ref"].rpartition("/")[2]))
        return max(bounds)

    def _referred(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = 0  # as long as it is not known: a definition may come to itself
            self._known[name] = self.least(self._definitions.get(name))
        return self._known[name]

    def _typed(self, schema: Schema) -> int:
        if "type" not in schema:
            return 0
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return min((self._of_type(kind, schema) for kind in kinds), default=0)

    def _of_type(self, kind: str, schema: Schema) -> int:
        match kind:
            case "string":
                return _QUOTES + int(schema.get("minLength", 0))
            case "array":
                return self._arrays(schema)
            case "object":
                required = schema.get("required", ())
                properties = schema.get("properties", {})
                inner = (len(name) + _QUOTES + 1 + self.least(properties.get(name, True)) for name in required)
                return _BRACKETS + sum(inner) + max(0, len(required) - 1)
        return 1

    def _arrays(self, schema: Schema) -> int:
        count = int(schema.get("minItems", 0))
        first = schema.get("prefixItems", [])[:count]
        others = count - len(first)
        inner = sum(map(self.least, first)) + (others * self.least(schema.get("items", True)) if others else 0)
        return _BRACKETS + inner + max(0, count - 1)


def _size(value: Any) -> int:
    """No more than the fewest bytes of ``value`` written out."""
    return 1 if isinstance(value, float) else len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _of_item(item: Item) -> int:
    """Fewest bytes of what ``item`` matches; a character has one at least."""
    match item:
        case Chars():
            return 1
        case Group(branches):
            return min((sum(map(_of_item, branch)) for branch in branches), default=0)
        case Repeat(inner, low, _high):
            return low * _of_item(inner)
    return 0  # an anchor
