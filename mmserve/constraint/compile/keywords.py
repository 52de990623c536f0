"""Keywords of JSON Schema (the draft and value type of each), and JSON values (types, equality, finite sets).

``malformed_keywords`` follows JSON Schema's meta-schema as far as values are used here; ``modern`` converts keywords of
older drafts to draft 2020-12.
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
#: In-place applicators: keywords whose subschemas apply to the same instance as the surrounding schema.
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
#: The first draft that has each keyword. In an older draft the keyword has no effect, so it is refused.
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

Schema = dict[str, Any]
Check = Callable[[Any], str | None]


def values_within(value: Any) -> Iterator[Any]:
    """The JSON ``value`` and all values within it, in the order of its text."""
    stack = [value]
    while stack:
        value = stack.pop()
        yield value
        if isinstance(value, list | dict):
            stack += reversed(value if isinstance(value, list) else value.values())


def objects_within(value: Any) -> Iterator[Schema]:
    """The JSON objects among ``values_within``."""
    return (each for each in values_within(value) if isinstance(each, dict))


def is_schema(value: Any) -> bool:
    """Whether ``value`` can be a schema."""
    return isinstance(value, dict | bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _must(holds: Callable[[Any], bool], reason: str) -> Check:
    return lambda value: None if holds(value) else f"must be {reason}"


def _bounded(holds: Callable[[float], bool], where: str) -> Check:
    """A number for which ``holds`` is true."""
    reasons = "must be a number", f"must {where}: beyond, numbers are not exact"
    return lambda value: None if is_number(value) and holds(value) else reasons[is_number(value)]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and is_number(value) and value >= 0


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_schema = _must(is_schema, "a schema: an object, true or false")
_schemas = _must(
    lambda value: isinstance(value, list) and value != [] and all(map(is_schema, value)),
    "a non-empty array of schemas",
)
_schema_map = _must(
    lambda value: isinstance(value, dict) and all(map(is_schema, value.values())), "an object of schemas"
)
#: A size limit that no answer reaches.
_most = _must(_is_size, "an integer of at least 0")
_number = _bounded(lambda value: abs(value) <= MAX_INTEGER, f"lie within ±{MAX_INTEGER}")
_lower = _bounded(lambda value: value <= MAX_INTEGER, f"be at most {MAX_INTEGER}")
_upper = _bounded(lambda value: value >= -MAX_INTEGER, f"be at least {-MAX_INTEGER}")
_text = _must(lambda value: isinstance(value, str), "a string")


def _size(value: Any) -> str | None:
    return _most(value) or (None if value <= MAX_REPEAT else f"must be at most {MAX_REPEAT}")


def _type(value: Any) -> str | None:
    given = value if isinstance(value, list) else [value]
    if not given or any(not isinstance(name, str) or name not in TYPES for name in given):
        return f"must be one or several of {', '.join(TYPES)}"
    return None


def _values(value: Any) -> str | None:
    return _value(value) if isinstance(value, list) and value else "must be a non-empty array"


def _value(value: Any) -> str | None:
    """Checks a constant: a grammar must be able to write every number in it exactly."""
    return next(filter(None, map(_exact, filter(is_number, values_within(value)))), None)


def _exact(number: Any) -> str | None:
    if isinstance(number, float) and (abs(number) < SMALLEST or len(Decimal(repr(number)).as_tuple().digits) > DIGITS):
        return f"numbers must have at most {DIGITS} digits, and be 0 or at least {SMALLEST} from it"
    return _number(number)


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
    "required": _must(_are_names, "an array of strings"),
    "dependentRequired": _must(
        lambda value: isinstance(value, dict) and all(map(_are_names, value.values())), "an object of arrays of strings"
    ),
    "uniqueItems": _must(lambda value: isinstance(value, bool), "true or false"),
    "type": _type,
    "enum": _values,
    "const": _value,
}

KNOWN = frozenset(_CHECKS) | ANNOTATIONS


def malformed_keywords(node: Mapping[str, Any], pointer: str) -> Iterator[Finding]:
    """The keywords of one schema whose values are malformed."""
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
    """A text that is equal for two values exactly if they are equal as JSON (``read_schema`` leaves no float 1.0)."""
    return json.dumps(value, sort_keys=True)


def distinct(values: Iterable[Any]) -> list[Any]:
    """``values`` without repetitions, in order."""
    return list({key(value): value for value in values}.values())


def types_of(node: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema's ``type`` and constants allow; "number" implies "integer"."""
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
    """All values of a schema, if its keywords ``const``, ``enum`` and ``type`` list them; else None."""
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
    """``kinds`` as a value of ``type``: sorted, and without "integer" if "number" is there."""
    chosen = set(kinds)
    return [name for name in TYPES if name in chosen and not (name == "integer" and "number" in chosen)]


#: Keywords with subschemas in schemas of ``compile.schema``: by name, in a list, and single.
_MAPS, _ROWS, _ONES = (
    ("properties", "patternProperties", "$defs"),
    ("anyOf", "allOf", "prefixItems"),
    ("items", "additionalProperties"),
)


def children(node: Schema) -> list[Any]:
    """The schemas directly in ``node`` (of ``compile.schema``)."""
    found = [node[keyword] for keyword in _ONES if keyword in node]
    found += [each for keyword in _MAPS for each in node.get(keyword, {}).values()]
    return found + [each for keyword in _ROWS for each in node.get(keyword, ())]


def nodes(schema: Any) -> Iterator[Schema]:
    """``schema`` (of ``compile.schema``) and all nested schemas, except for true and false."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack += children(node)


def with_children(node: Schema, change: Callable[[Any], Any]) -> Schema:
    """``node`` (of ``compile.schema``) with ``change`` applied to its direct subschemas."""
    made = dict(node)
    for keyword in made.keys() & _MAPS:
        made[keyword] = {name: change(each) for name, each in made[keyword].items()}
    for keyword in made.keys() & _ROWS:
        made[keyword] = [change(each) for each in made[keyword]]
    for keyword in made.keys() & _ONES:
        made[keyword] = change(made[keyword])
    return made


def target(node: Schema) -> str:
    """The name of the definition that ``node`` (of ``compile.schema``) refers to."""
    name: str = node["$ref"].rpartition("/")[2]
    return name


def writable(value: Any) -> bool:
    """Whether every string of ``value`` can be written with the escapes that grammars allow, without ``\\u``."""
    texts = (text for text in values_within(value) if isinstance(text, str))
    return all((char >= " " and char != "\x7f") or char in "\b\t\n\f\r" for text in texts for char in text)


def dialect(root: Any) -> int:
    """The draft of ``root``; the newest if it declares none. Raises ``Refused`` for an unknown one."""
    if not isinstance(root, dict) or "$schema" not in root:
        return 2020
    name = root["$schema"]
    bare = name.rstrip("#").partition("://")[2] if isinstance(name, str) else ""
    if bare not in DIALECTS:
        raise Refused.at("/$schema", "$schema", f"must be one of https://{', https://'.join(DIALECTS)}")
    return DIALECTS[bare]


def modern(node: dict[str, Any], draft: int, pointer: str) -> dict[str, Any]:
    """``node`` converted to draft 2020-12. Raises ``Refused`` if a keyword is of a later draft than ``draft``."""
    for keyword, since in _SINCE.items():
        if keyword in node and draft < since:
            raise Refused.at(
                child(pointer, keyword), keyword, f"is no keyword of the draft that $schema names ({draft})"
            )
    if "$ref" in node and draft <= 7:  # these drafts ignore siblings of a reference
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
    """Draft 4's ``exclusiveMinimum: true`` with ``minimum``."""
    node = dict(node)
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(flag), bool) and node.pop(flag) and is_number(node.get(bound)):
            node[flag] = node.pop(bound)
    return node
