"""The schema of everything that another schema refuses, where one can be written without ``not``.

``not``, the negative side of ``if`` and the exclusiveness of ``oneOf`` are all made of this.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mmserve.constraint.draft import modern
from mmserve.constraint.excluded import all_but
from mmserve.constraint.limits import MAX_INTEGER, MAX_REPEAT
from mmserve.constraint.shapes import ANNOTATIONS, is_number, misshapen
from mmserve.constraint.values import ALL, distinct, names_of, type_of

_MOST_EXCLUDED = 200  # strings an automaton excludes at once
_LONGEST_EXCLUDED = 48  # characters of such a string: each nests a group


def complement(node: Any, draft: int, pointer: str, within: frozenset[str] = ALL) -> Any | None:
    """A schema valid for exactly the values that ``node`` is not valid for, or None where none is known.

    Only values of the types ``within`` (of ``types_of``) count; what is said of others is arbitrary. ``pointer``
    is where ``node`` stands, for refusals of what is malformed in it.
    """
    if isinstance(node, bool):
        return not node
    node = modern(node, draft, pointer)
    if any(misshapen(node, pointer)):
        return None
    parts = []
    for keyword, value in node.items():
        if keyword in ANNOTATIONS:
            continue
        part = _of_keyword(keyword, value, draft, pointer, within)
        if part is None:
            return None
        parts.append(part)
    return either(parts)


def either(schemas: Sequence[Any]) -> Any:
    """``anyOf`` of ``schemas``, shorter where it can be; false for none."""
    if any(schema is True for schema in schemas):
        return True
    kept = [schema for schema in schemas if schema is not False]
    if not kept:
        return False
    return kept[0] if len(kept) == 1 else {"anyOf": kept}


def both(*schemas: Any) -> Any:
    """``allOf`` of ``schemas``, shorter where it can be."""
    if any(schema is False for schema in schemas):
        return False
    kept = [schema for schema in schemas if schema is not True]
    if not kept:
        return True
    return kept[0] if len(kept) == 1 else {"allOf": kept}


def _of_keyword(keyword: str, value: Any, draft: int, pointer: str, within: frozenset[str]) -> Any | None:
    match keyword:
        case "type":
            return _other_types(value if isinstance(value, list) else [value], within)
        case "const":
            return _other_values([value])
        case "enum":
            return _other_values(distinct(value))
        case "required":
            return either([{"type": "object", "properties": {name: False}} for name in dict.fromkeys(value)])
        case "properties":
            return _other_properties(value, draft, pointer)
        case "not":
            return value
        case "allOf":
            return _joined([complement(part, draft, pointer, within) for part in value], either)
        case "anyOf":
            return _joined([complement(part, draft, pointer, within) for part in value], lambda parts: both(*parts))
    return _of_bound(keyword, value)


def _of_bound(keyword: str, value: Any) -> Any | None:
    if is_number(value) and abs(value) > (MAX_INTEGER if "imum" in keyword else MAX_REPEAT - 1):
        return None  # what is beyond such a bound cannot be told apart, or does not come
    match keyword:
        case "minimum":
            return {"type": "number", "exclusiveMaximum": value}
        case "maximum":
            return {"type": "number", "exclusiveMinimum": value}
        case "exclusiveMinimum" if is_number(value):
            return {"type": "number", "maximum": value}
        case "exclusiveMaximum" if is_number(value):
            return {"type": "number", "minimum": value}
        case "minLength" | "minItems" | "minProperties":
            kind = {"minLength": "string", "minItems": "array", "minProperties": "object"}[keyword]
            return {"type": kind, keyword.replace("min", "max"): value - 1} if value > 0 else False
        case "maxLength" | "maxItems":
            kind = {"maxLength": "string", "maxItems": "array"}[keyword]
            return {"type": kind, keyword.replace("max", "min"): value + 1}
    return None


def _joined(parts: list[Any | None], join: Any) -> Any | None:
    return None if any(part is None for part in parts) else join(parts)


def _other_types(given: list[str], within: frozenset[str]) -> Any | None:
    if "integer" in given and "number" not in given and "number" in within:
        return None  # numbers with a fraction: no keyword says that
    rest = within - set(given) - ({"integer"} if "number" in given else set())
    return {"type": names_of(rest)} if rest else False


def _other_properties(properties: dict[str, Any], draft: int, pointer: str) -> Any | None:
    """Some property is there and is not what it should be."""
    parts = []
    for name, schema in properties.items():
        other = complement(schema, draft, pointer)
        if other is None:
            return None
        if other is not False:
            parts.append({"type": "object", "required": [name], "properties": {name: other}})
    return either(parts)


def _other_values(values: list[Any]) -> Any | None:
    """Everything but ``values``; None if one is an array or object."""
    kinds = {type_of(value) for value in values}
    if kinds & {"array", "object"}:
        return None
    untouched = ALL - kinds - ({"number", "integer"} if kinds & {"number", "integer"} else set())
    parts: list[Any] = [{"type": names_of(untouched)}]
    flags = [value for value in (True, False) if not any(given is value for given in values)]
    if "boolean" in kinds and flags:
        parts.append({"enum": flags})
    numbers = sorted(value for value in values if is_number(value))
    if numbers:
        edges = [None, *numbers, None]
        parts += [_between(low, high) for low, high in itertools.pairwise(edges)]
    strings = [value for value in values if isinstance(value, str)]
    if len(strings) > _MOST_EXCLUDED or any(len(text) > _LONGEST_EXCLUDED for text in strings):
        return None
    if strings:
        parts.append({"type": "string", "pattern": all_but(strings)})
    return either(parts)


def _between(low: Any, high: Any) -> Any:
    bounds = {} if low is None else {"exclusiveMinimum": low}
    return {"type": "number", **bounds, **({} if high is None else {"exclusiveMaximum": high})}
