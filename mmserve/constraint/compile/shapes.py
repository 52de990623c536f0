"""What each keyword's value must look like (JSON Schema's meta-schema, as far as values are used here)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from mmserve.constraint.findings import Finding, child
from mmserve.constraint.limits import DIGITS, MAX_INTEGER, MAX_REPEAT, SMALLEST

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")

#: Keywords that say something about a schema and nothing about its instances.
ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$schema",
        "$vocabulary",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "example",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    }
)
#: Keywords whose subschemas judge the very instance that their schema judges.
IN_PLACE = frozenset(
    {"$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "dependentSchemas", "else", "if", "not", "oneOf", "then"}
)

Check = Callable[[Any], str | None]


def is_schema(value: Any) -> bool:
    """Whether ``value`` can be a schema."""
    return isinstance(value, dict | bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _schema(value: Any) -> str | None:
    return None if is_schema(value) else "must be a schema: an object, true or false"


def _schemas(value: Any) -> str | None:
    ok = isinstance(value, list) and value and all(map(is_schema, value))
    return None if ok else "must be a non-empty array of schemas"


def _schema_map(value: Any) -> str | None:
    ok = isinstance(value, dict) and all(map(is_schema, value.values()))
    return None if ok else "must be an object of schemas"


def _size(value: Any) -> str | None:
    if not is_number(value) or not isinstance(value, int) or value < 0:
        return "must be an integer of at least 0"
    return None if value <= MAX_REPEAT else f"must be at most {MAX_REPEAT}"


def _most(value: Any) -> str | None:
    """A size that need not be reached: nothing comes near the larger ones."""
    if not is_number(value) or not isinstance(value, int) or value < 0:
        return "must be an integer of at least 0"
    return None


def _number(value: Any) -> str | None:
    if not is_number(value):
        return "must be a number"
    return None if abs(value) <= MAX_INTEGER else f"must lie within ±{MAX_INTEGER}: beyond, numbers are not exact"


def _lower(value: Any) -> str | None:
    if not is_number(value):
        return "must be a number"
    return None if value <= MAX_INTEGER else f"must be at most {MAX_INTEGER}: beyond, numbers are not exact"


def _upper(value: Any) -> str | None:
    if not is_number(value):
        return "must be a number"
    return None if value >= -MAX_INTEGER else f"must be at least {-MAX_INTEGER}: beyond, numbers are not exact"


def _names(value: Any) -> str | None:
    ok = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return None if ok else "must be an array of strings"


def _name_lists(value: Any) -> str | None:
    ok = isinstance(value, dict) and not any(map(_names, value.values()))
    return None if ok else "must be an object of arrays of strings"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be a string"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _type(value: Any) -> str | None:
    given = value if isinstance(value, list) else [value]
    if not given or any(not isinstance(name, str) or name not in TYPES for name in given):
        return f"must be one or several of {', '.join(TYPES)}"
    return None


def _values(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "must be a non-empty array"
    return next(filter(None, map(_value, value)), None)


def _value(value: Any) -> str | None:
    """A constant: every number in it must be one that a grammar can write exactly."""
    match value:
        case list():
            return next(filter(None, map(_value, value)), None)
        case dict():
            return next(filter(None, map(_value, value.values())), None)
    if not is_number(value):
        return None
    if isinstance(value, float) and (abs(value) < SMALLEST or len(Decimal(repr(value)).as_tuple().digits) > DIGITS):
        return f"numbers must have at most {DIGITS} digits, and be 0 or at least {SMALLEST} from it"
    return _number(value)


_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(["allOf", "anyOf", "oneOf", "prefixItems"], _schemas),
    **dict.fromkeys(["properties", "patternProperties", "dependentSchemas", "$defs", "definitions"], _schema_map),
    **dict.fromkeys(["minLength", "minItems", "minProperties", "minContains"], _size),
    **dict.fromkeys(["maxLength", "maxItems", "maxProperties", "maxContains"], _most),
    **dict.fromkeys(["minimum", "exclusiveMinimum"], _lower),
    **dict.fromkeys(["maximum", "exclusiveMaximum"], _upper),
    "multipleOf": _number,
    **dict.fromkeys(["if", "then", "else", "not", "items", "additionalProperties", "propertyNames"], _schema),
    **dict.fromkeys(["contains", "unevaluatedItems", "unevaluatedProperties"], _schema),
    **dict.fromkeys(["$ref", "$dynamicRef", "$recursiveRef", "pattern", "format"], _text),
    **dict.fromkeys(["contentEncoding", "contentMediaType"], _text),
    "required": _names,
    "dependentRequired": _name_lists,
    "uniqueItems": _flag,
    "type": _type,
    "enum": _values,
    "const": _value,
}

KNOWN = frozenset(_CHECKS) | ANNOTATIONS


def misshapen(node: Mapping[str, Any], pointer: str) -> Iterator[Finding]:
    """The keywords of one schema whose values are not what they must be."""
    for keyword, check in _CHECKS.items():
        if keyword in node and (reason := check(node[keyword])):
            yield Finding(child(pointer, keyword), keyword, reason)
    if is_number(node.get("multipleOf")) and node["multipleOf"] <= 0:
        yield Finding(child(pointer, "multipleOf"), "multipleOf", "must be above 0")
