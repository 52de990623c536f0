"""How long an answer can be at most: a bound in bytes, infinite where none is known.

No token has fewer bytes than one, so an answer of so many bytes has no more tokens, however it is spelled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from math import inf
from typing import Any

from mmserve.constraint.compile.pattern import BadPattern, Chars, Group, Item, Repeat, parsed

Schema = dict[str, Any]
#: Bytes of ``, `` and of ``: ``, as a document may be spaced (``grammar.JSON_LAYOUT``).
_SPACED = 2
_QUOTES = _BRACKETS = 2
#: Bytes that a character has at most, in UTF-8.
_WIDEST = 4
_LITERALS = {"null": len("null"), "boolean": len("false")}
#: Characters of patterns that are read of one schema: 3 ms a thousand.
_READ = 20_000
#: Characters that stand in a string with a backslash: controls, the quote and the backslash itself.
_ESCAPED = ((0x00, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\")))


def of_pattern(pattern: str) -> float:
    """Most bytes of a text that ``pattern`` matches whole. Raises ``BadPattern``."""
    return _of_item(parsed(pattern), quoted=False)


def of_expression(item: Item) -> float:
    """Most bytes of a text that ``item`` matches."""
    return _of_item(item, quoted=False)


def of_schema(schema: Any) -> float:
    """Most bytes of a document under ``schema``, as ``mmserve.constraint.compile.schema`` writes it."""
    try:
        return _Documents(schema.get("$defs", {}) if isinstance(schema, dict) else {}).most(schema)
    except RecursionError:  # definitions that refer to one another in a long row
        return inf


class _Documents:
    """Bounds of documents, given the definitions that schemas refer to."""

    def __init__(self, definitions: Schema) -> None:
        self._definitions = definitions
        self._known: dict[str, float] = {}
        self._left = _READ

    def most(self, schema: Any) -> float:
        """Most bytes of a document under ``schema``: whatever it says holds, so that the least bound does."""
        if not isinstance(schema, dict):
            return 0 if schema is False else inf
        return min(self._bounds(schema))

    def _bounds(self, schema: Schema) -> Iterator[float]:
        yield self._typed(schema)
        if "enum" in schema:
            yield max(map(_size, schema["enum"]), default=0)
        if "anyOf" in schema:
            yield max(map(self.most, schema["anyOf"]), default=0)
        if "allOf" in schema:
            yield from map(self.most, schema["allOf"])
        if "$ref" in schema:
            yield self._referred(schema["$ref"].rpartition("/")[2])

    def _referred(self, name: str) -> float:
        if name not in self._known:
            self._known[name] = inf  # as long as it is not known: a definition may come to itself
            self._known[name] = self.most(self._definitions[name])
        return self._known[name]

    def _typed(self, schema: Schema) -> float:
        """By what ``schema`` says of each type."""
        if "type" not in schema:
            return inf
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return max((self._of_type(kind, schema) for kind in kinds), default=inf)

    def _of_type(self, kind: str, schema: Schema) -> float:
        match kind:
            case "null" | "boolean":
                return _LITERALS[kind]
            case "integer":
                return _integers(schema)
            case "string":
                return self._strings(schema)
            case "array":
                return self._arrays(schema)
            case "object":
                return self._objects(schema)
        return inf  # a number has any number of decimals

    def _strings(self, schema: Schema) -> float:
        most = _WIDEST * schema.get("maxLength", inf)
        return _QUOTES + min(most, self._matching(schema["pattern"]) if "pattern" in schema else inf)

    def _matching(self, pattern: str) -> float:
        """Most bytes, as written in a JSON string, of a text that an anchored ``pattern`` matches."""
        self._left -= len(pattern)
        if self._left < 0:
            return inf
        try:
            return _of_item(parsed(pattern.removeprefix("^").removesuffix("$")), quoted=True)
        except BadPattern:  # written out, it may be larger than any that is read
            return inf

    def _arrays(self, schema: Schema) -> float:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        count = min(schema.get("maxItems", inf), len(first) if rest is False else inf)
        if count == inf:
            return inf
        items = list(map(self.most, first[: int(count)]))
        others = int(count) - len(items)
        return _listed(len(items) + others, sum(items) + (others * self.most(rest) if others else 0))

    def _objects(self, schema: Schema) -> float:
        if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
            return inf
        there = {name: self.most(each) for name, each in schema.get("properties", {}).items() if each is not False}
        return _listed(len(there), sum(_size(name) + _SPACED + most for name, most in there.items()))


def _listed(count: int, inner: float) -> float:
    """Bytes of ``count`` parts between brackets, themselves of ``inner`` bytes."""
    return _BRACKETS + inner + _SPACED * max(0, count - 1)


def _integers(schema: Schema) -> float:
    """Without an exponent, and without zeros in front."""
    if not {"minimum", "maximum"} <= schema.keys():
        return inf
    bounds = schema["minimum"], schema["maximum"]
    return max(len(str(int(abs(bound)))) for bound in bounds) + (bounds[0] < 0)


def _size(value: Any) -> int:
    """Most bytes of ``value`` written out; numbers never have an exponent."""
    match value:
        case float():
            return len(format(Decimal(repr(value)), "f"))
        case list():
            return int(_listed(len(value), sum(map(_size, value))))
        case dict():
            return int(_listed(len(value), sum(_size(name) + _SPACED + _size(each) for name, each in value.items())))
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _of_item(item: Item, *, quoted: bool) -> float:
    """Most bytes of what ``item`` matches; ``quoted``: as it is written in a JSON string."""
    match item:
        case Chars(ranges):
            return max((_width(low, high, quoted=quoted) for low, high in ranges), default=0)
        case Group(branches):
            return max(sum(_of_item(inner, quoted=quoted) for inner in branch) for branch in branches)
        case Repeat(inner, _low, high):
            once = _of_item(inner, quoted=quoted)
            return once * (inf if high is None else high) if once and high != 0 else 0
    return 0  # an anchor


def _width(low: int, high: int, *, quoted: bool) -> int:
    """Most bytes of a character from ``low`` to ``high``."""
    plain = 1 + (high > 0x7F) + (high > 0x7FF) + (high > 0xFFFF)
    escaped = quoted and any(low <= last and first <= high for first, last in _ESCAPED)
    return max(plain, 2) if escaped else plain
