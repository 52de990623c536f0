"""Reading the text of a JSON schema: limits on size, depth and numbers, the request's options, and the canonical form.

``read`` applies the options of a request and returns warnings of what they changed. ``canonical`` is the form of
jsonschema-rs: the same values, and mostly neither ``not`` nor ``oneOf``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

import jsonschema_rs

from mmserve.constraint.compile.keywords import IN_PLACE, Schema, is_schema, objects_within
from mmserve.constraint.compile.references import NAMED, ONE, ROW, located, subschemas
from mmserve.constraint.compile.scalars import FORMATS, HINTS, NUMBERS
from mmserve.constraint.findings import Refused, child
from mmserve.constraint.limits import MAX_DEPTH, MAX_ENUM_BYTES, MAX_ENUM_VALUES, MAX_PROPERTIES, MAX_SCHEMA_BYTES
from mmserve.core.constraint import JsonSchema, SchemaOption

_MOST_NAMED = 5  # pointers that a warning lists
#: Keywords whose schemas apply to the same object as the surrounding schema: closing one of them would forbid the
#: properties that the other declares.
_JOINED = frozenset({"allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"})
_ALTERNATIVES = frozenset({"anyOf", "oneOf"})
_LONGEST_NUMBER = 40  # characters; the largest float in full has 17 significant digits


def read_schema(text: str) -> Any:
    """The value of the JSON ``text``: a dict or a bool.

    Raises ``Refused`` for invalid JSON, duplicate member names, lone surrogates, NaN, infinities, numbers too long to
    be exact, and texts beyond a limit of ``mmserve.constraint.limits``.
    """
    if len(text) > MAX_SCHEMA_BYTES or len(text.encode(errors="replace")) > MAX_SCHEMA_BYTES:
        raise Refused.at("", "schema", f"must be at most {MAX_SCHEMA_BYTES} bytes")
    if _depth(text) > MAX_DEPTH:
        raise Refused.at("", "schema", f"must be nested at most {MAX_DEPTH} deep")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_members,
            parse_constant=_no_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except Refused:
        raise
    except ValueError as error:
        raise Refused.at("", "schema", f"is no JSON: {error}") from error
    if not isinstance(value, dict | bool):
        raise Refused.at("", "schema", "must be a JSON object, true or false")
    _check_texts(value, ())
    _check_counts(value)
    return value


def _depth(text: str) -> int:
    """The nesting depth of brackets in ``text``, outside of its strings."""
    depth = deepest = 0
    quoted = escaped = False
    for char in text:
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise Refused.at("", "schema", f"an object has two members named {twice[:60]!r}")
    return members


def _no_constant(name: str) -> Any:
    raise Refused.at("", "schema", f"{name} is no JSON number")


def _float(text: str) -> float | int:
    value = float(text)
    if len(text) > _LONGEST_NUMBER or not math.isfinite(value):
        raise Refused.at("", "schema", f"the number {text[:_LONGEST_NUMBER]} is too long or too large")
    return int(value) if value.is_integer() else value  # JSON Schema: 1.0 is the integer 1


def _int(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise Refused.at("", "schema", f"the number {text[:_LONGEST_NUMBER]}… is too long")
    return int(text)


#: Names and indices that lead to a value. They are joined to a pointer only in errors: with long names, the pointers of
#: all values would take gigabytes.
_Steps = tuple[str | int, ...]


def _check_texts(value: Any, steps: _Steps) -> None:
    match value:
        case str():
            _check_text(value, steps)
        case dict():
            for name, inner in value.items():
                _check_text(name, steps)
                _check_texts(inner, (*steps, name))
        case list():
            for index, inner in enumerate(value):
                _check_texts(inner, (*steps, index))


def has_surrogate(text: str) -> bool:
    """Whether ``text`` holds half of a surrogate pair."""
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def _check_text(text: str, steps: _Steps) -> None:
    if has_surrogate(text):
        safe = child("", *steps).encode(errors="replace").decode()
        raise Refused.at(safe, "schema", "a string holds half of a surrogate pair")


def _check_counts(root: Any) -> None:
    """Check the number of properties and enum values in the whole schema. Raises ``Refused``."""
    properties = values = size = 0
    pending: list[tuple[Any, _Steps]] = [(root, ())]
    while pending:
        value, steps = pending.pop()
        if isinstance(value, list):
            pending += [(inner, (*steps, i)) for i, inner in enumerate(value)]
        if not isinstance(value, dict):
            continue
        if isinstance(found := value.get("properties"), dict):
            properties += len(found)
            if properties > MAX_PROPERTIES:
                raise Refused.at(
                    child("", *steps), "properties", f"a schema may have at most {MAX_PROPERTIES} properties"
                )
        if isinstance(found := value.get("enum"), list):
            values += len(found)
            size += len(json.dumps(found, ensure_ascii=False).encode())
            if values > MAX_ENUM_VALUES:
                raise Refused.at(child("", *steps), "enum", f"a schema may have at most {MAX_ENUM_VALUES} enum values")
            if size > MAX_ENUM_BYTES:
                why = f"a schema's enum values may have at most {MAX_ENUM_BYTES} bytes"
                raise Refused.at(child("", *steps), "enum", why)
        pending += [(inner, (*steps, name)) for name, inner in value.items()]


def canonical(root: Any) -> Any | None:
    """The canonical form of ``root`` (of ``read_schema``), with properties in the order of ``root``.

    None if jsonschema-rs has no exact one, or if it is too large. Runs native code whose time grows with the cases of
    the schema: only for the child process.
    """
    try:
        found = jsonschema_rs.canonicalize(root, validate_formats=True, offline=True)
        if found.kind == jsonschema_rs.canonical.CanonicalKind.RAW:
            return None
        text = json.dumps(found.to_json_schema(), default=_number)
        if len(text) > MAX_SCHEMA_BYTES:
            return None
        return _ordered(read_schema(text), Orders(root))
    except (ValueError, jsonschema_rs.ReferencingError, jsonschema_rs.ValidationError, Refused, RecursionError):
        return None


def _number(value: Any) -> float:
    """Converts a ``Decimal`` of jsonschema-rs to a number; raises ``ValueError`` if no double equals it."""
    if not isinstance(value, Decimal):
        raise TypeError(f"no JSON: {value!r}")
    near = int(value) if value == value.to_integral_value() else float(value)
    if Decimal(repr(near)) != value:
        raise ValueError(f"{value} is no double")
    return near


class Orders:
    """The orders in which the schemas of a document declare properties."""

    def __init__(self, root: Any) -> None:
        found = (each.get("properties") for each in objects_within(root))
        self._lists = [tuple(names) for names in found if isinstance(names, dict)]
        self._place = {name: i for i, name in enumerate(dict.fromkeys(n for names in self._lists for n in names))}

    def sorted(self, names: list[str]) -> list[str]:
        """``names`` in the order of the list that has most of them, then in that of all lists together."""
        wanted = set(names)
        best = max(self._lists, key=lambda each: len(wanted & set(each)), default=())
        place = {name: i for i, name in enumerate(best)}
        late = len(place) + len(self._place)
        return sorted(names, key=lambda name: (place.get(name, late), self._place.get(name, late)))


def _ordered(value: Any, orders: Orders) -> Any:
    if isinstance(value, list):
        return [_ordered(each, orders) for each in value]
    if not isinstance(value, dict):
        return value
    made = {name: _ordered(each, orders) for name, each in value.items()}
    if isinstance(found := made.get("properties"), dict):
        made["properties"] = {name: found[name] for name in orders.sorted(list(found))}
    return made


def read(kind: JsonSchema) -> tuple[Any, list[str]]:
    """The schema of ``kind`` with its options applied, and warnings. Raises ``Refused`` as ``document.read_schema``."""
    root, warnings = read_schema(kind.text), list[str]()
    if SchemaOption.UNKNOWN_FORMATS in kind.options:
        root, places = _changed(root, _without_unknown_format)
        warnings += _warning("format", "is unknown and has no effect", places)
    if SchemaOption.ONE_OF_AS_ANY_OF in kind.options:
        root, places = _changed(root, _any_of)
        warnings += _warning("oneOf", "is read as anyOf", places)
    if SchemaOption.CLOSED_OBJECTS in kind.options:
        places = list(_open_objects(root, "", _joined_references(root), closable=True))
        root, _ = _changed(root, lambda node: {**node, "additionalProperties": False}, frozenset(places))
        warnings += _warning("additionalProperties", "is read as false", places)
    if SchemaOption.ANY_ORDER in kind.options:
        _, places = _changed(root, _with_members)
        warnings += _warning("properties", "may come in any order", places)
    return root, warnings


def effective_schema(kind: JsonSchema) -> str:
    """The text of the schema of ``kind`` with its options applied."""
    return json.dumps(read(kind)[0]) if kind.options else kind.text


def _warning(keyword: str, what: str, places: list[str]) -> list[str]:
    if not places:
        return []
    named = ", ".join(place or "the root" for place in places[:_MOST_NAMED])
    more = f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
    return [f"{keyword} {what}, as asked: at {named}{more}"]


def _changed(
    root: Any, change: Callable[[Schema], Schema | None], only: Collection[str] | None = None
) -> tuple[Any, list[str]]:
    """``root`` with ``change`` applied to its schemas, or only to those at ``only``, and the pointers of changed
    ones."""
    places: list[str] = []

    def of(node: Any, pointer: str) -> Any:
        if not isinstance(node, dict):
            return node
        new = change(node) if only is None or pointer in only else None
        if new is not None:
            places.append(pointer)
        made = dict(node if new is None else new)
        for keyword, value in node.items():
            at = child(pointer, keyword)
            now = "anyOf" if keyword == "oneOf" and "oneOf" not in made else keyword
            if keyword in ONE and is_schema(value):
                made[now] = of(value, at)
            elif keyword in ROW and isinstance(value, list):
                made[now] = [of(inner, child(at, i)) for i, inner in enumerate(value)]
            elif keyword in NAMED and isinstance(value, dict):
                made[now] = {name: of(inner, child(at, name)) for name, inner in value.items()}
        return made

    return of(root, ""), places


def _without_unknown_format(node: Schema) -> Schema | None:
    name = node.get("format")
    if not isinstance(name, str) or name in FORMATS or name in NUMBERS or name in HINTS:
        return None
    return {keyword: value for keyword, value in node.items() if keyword != "format"}


def _any_of(node: Schema) -> Schema | None:
    """``oneOf`` as ``anyOf``; unchanged next to an ``anyOf``, because both must hold."""
    if not isinstance(node.get("oneOf"), list) or "anyOf" in node:
        return None
    return {"anyOf" if keyword == "oneOf" else keyword: value for keyword, value in node.items()}


def _with_members(node: Schema) -> Schema | None:
    """``node`` if it declares properties whose order may vary."""
    named = node.get("properties")
    return dict(node) if isinstance(named, dict) and (len(named) > 1 or "additionalProperties" not in node) else None


def _open_objects(node: Any, pointer: str, joined: Collection[str], *, closable: bool) -> Iterator[str]:
    """The pointers of schemas that declare properties and allow others, with no other schema for the same object."""
    if not isinstance(node, dict):
        return
    closable = closable and pointer not in joined
    alone = not node.keys() & IN_PLACE
    decided = node.keys() & {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
    if closable and alone and not decided and isinstance(node.get("properties"), dict):
        yield pointer
    for keyword, inner, at in subschemas(node, pointer):
        if keyword in _JOINED:
            within = False
        elif keyword in _ALTERNATIVES:
            within = closable and len(node.keys() & IN_PLACE) == 1 and "properties" not in node
        else:
            within = True
        yield from _open_objects(inner, at, joined, closable=within)


def _joined_references(root: Any) -> frozenset[str]:
    """The pointers of schemas referenced, directly or not, by a schema that shares its object with other schemas."""
    joined: list[str] = []
    same: dict[str, list[str]] = {}  # by a schema's pointer: schemas that it applies to the same object

    def of(node: Any, pointer: str, alone: bool) -> None:
        if not isinstance(node, dict):
            return
        here = alone and len(node.keys() & (IN_PLACE | {"properties", "patternProperties"})) == 1
        others = same.setdefault(pointer, [])
        if isinstance(reference := node.get("$ref"), str):
            target = unquote(reference.removeprefix("#"))
            others.append(target)
            if not here:
                joined.append(target)
        for keyword, inner, at in subschemas(node, pointer):
            if keyword in _ALTERNATIVES | _JOINED:
                others.append(at)
            of(inner, at, here if keyword in _ALTERNATIVES else keyword not in _JOINED)

    with suppress(Refused):  # raised again when the schema is rewritten
        root = located(root)
    of(root, "", True)
    found: set[str] = set()
    while joined:
        if (pointer := joined.pop()) not in found:
            found.add(pointer)
            joined += same.get(pointer, ())
    return frozenset(found)
