"""Keywords of JSON Schema: the draft and the value type of each; and JSON values: types, equality, finite sets of them.

``misshapen`` follows JSON Schema's meta-schema as far as values are used here; ``modern`` writes the keywords of older
drafts as draft 2020-12 has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from mmserve.constraint.findings import Finding, Refused, child
from mmserve.constraint.limits import DIGITS, MAX_INTEGER, MAX_REPEAT, SMALLEST

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")

#: Annotations: keywords that describe a schema and do not constrain its instances.
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
#: In-place applicators: keywords whose subschemas apply to the same instance as the schema around them.
IN_PLACE = frozenset(
    {"$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "dependentSchemas", "else", "if", "not", "oneOf", "then"}
)

#: Drafts by ``$schema`` without scheme and fragment, oldest first.
DIALECTS = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}
#: The first draft that has each keyword; an older draft would ignore the keyword, so it is refused there.
_SINCE = {
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "then": 7,
    "else": 7,
    "dependentRequired": 2019,
    "dependentSchemas": 2019,
    "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019,
    "minContains": 2019,
    "maxContains": 2019,
    "prefixItems": 2020,
    "$dynamicRef": 2020,
}
#: Keywords that validate strings in these drafts only; in all others they are annotations.
_CONTENT = ("contentEncoding", "contentMediaType")
_CONTENT_DRAFTS = (6, 7)

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


#: Every type; sets of types with "number" have "integer" too.
ALL = frozenset(TYPES)


def type_of(value: Any) -> str:
    """The narrowest JSON type of ``value``."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def key(value: Any) -> str:
    """A text that two values share just when they are equal as JSON (``read_schema`` left no float 1.0)."""
    return json.dumps(value, sort_keys=True)


def distinct(values: Iterable[Any]) -> list[Any]:
    """``values`` without repetitions, in order."""
    return list({key(value): value for value in values}.values())


def types_of(node: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema's ``type`` and its constants leave; "number" comes with "integer"."""
    allowed = ALL
    if "type" in node:
        given = node["type"] if isinstance(node["type"], list) else [node["type"]]
        allowed = frozenset(given) | (frozenset({"integer"}) if "number" in given else frozenset())
    for values in (node.get("enum"), [node["const"]] if "const" in node else None):
        if values is not None:
            found = {type_of(value) for value in values}
            allowed &= found | ({"number"} if "integer" in found else set())
    return allowed


def finite(node: Any) -> list[Any] | None:
    """All values a schema can have, if its own keywords ``const``, ``enum`` and ``type`` name them; else None."""
    if not isinstance(node, dict):
        return None
    kinds = types_of(node)
    if "const" in node or "enum" in node:
        named = [node["const"]] if "const" in node else distinct(node["enum"])
        return [value for value in named if type_of(value) in kinds]
    if kinds <= {"null", "boolean"}:
        return [*([None] if "null" in kinds else []), *([False, True] if "boolean" in kinds else [])]
    return None


def names_of(kinds: Iterable[str]) -> list[str]:
    """``kinds`` as a value of ``type``: in order, and without "integer" beside "number"."""
    chosen = set(kinds)
    return [name for name in TYPES if name in chosen and not (name == "integer" and "number" in chosen)]


def writable(value: Any) -> bool:
    """Whether every string of ``value`` can be written with the escapes that a grammar has: not ``\\u``."""
    match value:
        case str():
            return all((char >= " " and char != "\x7f") or char in "\b\t\n\f\r" for char in value)
        case list():
            return all(map(writable, value))
        case dict():
            return all(map(writable, value.values()))
    return True


def dialect(root: Any) -> int:
    """The draft that ``root`` is written in; the newest where it names none. Raises ``Refused`` for an unknown one."""
    if not isinstance(root, dict) or "$schema" not in root:
        return 2020
    name = root["$schema"]
    bare = name.rstrip("#").partition("://")[2] if isinstance(name, str) else ""
    if bare not in DIALECTS:
        raise Refused.at("/$schema", "$schema", f"must be one of https://{', https://'.join(DIALECTS)}")
    return DIALECTS[bare]


def modern(node: dict[str, Any], draft: int, pointer: str) -> dict[str, Any]:
    """``node`` in the words of draft 2020-12. Raises ``Refused`` where a keyword is of a later draft than ``draft``."""
    for keyword, since in _SINCE.items():
        if keyword in node and draft < since:
            raise Refused.at(
                child(pointer, keyword), keyword, f"is no keyword of the draft that $schema names ({draft})"
            )
    if "$ref" in node and draft <= 7:  # siblings of a reference are ignored there
        return {"$ref": node["$ref"]}
    if draft not in _CONTENT_DRAFTS:
        node = {name: value for name, value in node.items() if name not in _CONTENT}
    node = _modern_items(node, draft, pointer)
    if "dependencies" in node:
        node = _dependencies(node, pointer)
    return _exclusive(node) if draft == 4 else node


def _modern_items(node: dict[str, Any], draft: int, pointer: str) -> dict[str, Any]:
    rest = {name: value for name, value in node.items() if name != "additionalItems"}
    if not isinstance(node.get("items"), list):
        return rest if draft < 2020 else node
    if draft == 2020 and "$schema" in node:
        raise Refused.at(child(pointer, "items"), "items", "must be a schema; a row of schemas is prefixItems")
    row = rest.pop("items")
    if row:
        rest["prefixItems"] = row
    if "additionalItems" in node:
        rest["items"] = node["additionalItems"]
    return rest


def _dependencies(node: dict[str, Any], pointer: str) -> dict[str, Any]:
    found = node["dependencies"]
    if not isinstance(found, dict):
        raise Refused.at(child(pointer, "dependencies"), "dependencies", "must be an object")
    names = {name: value for name, value in found.items() if isinstance(value, list)}
    schemas = {name: value for name, value in found.items() if is_schema(value)}
    if len(names) + len(schemas) < len(found):
        raise Refused.at(child(pointer, "dependencies"), "dependencies", "must hold schemas or arrays of names")
    rest = {name: value for name, value in node.items() if name != "dependencies"}
    for keyword, value in (("dependentRequired", names), ("dependentSchemas", schemas)):
        if value and keyword in rest:
            raise Refused.at(child(pointer, "dependencies"), "dependencies", f"cannot be combined with {keyword}")
        if value:
            rest[keyword] = value
    return rest


def _exclusive(node: dict[str, Any]) -> dict[str, Any]:
    """Draft 4's ``exclusiveMinimum: true`` beside ``minimum``."""
    node = dict(node)
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(flag), bool) and node.pop(flag) and is_number(node.get(bound)):
            node[flag] = node.pop(bound)
    return node
