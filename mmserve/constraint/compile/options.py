"""How a request wants its JSON schema read: the schema that is meant, and warnings that say what was changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

from mmserve.constraint.compile.document import read_schema
from mmserve.constraint.compile.resources import NAMED, ONE, ROW
from mmserve.constraint.compile.scalars import FORMATS, HINTS, NUMBERS
from mmserve.constraint.compile.shapes import IN_PLACE, is_schema
from mmserve.constraint.findings import child
from mmserve.core.constraint import JsonSchema, SchemaOption

Schema = dict[str, Any]
_MOST_NAMED = 5  # places that a warning names
#: Where a schema judges the same object as the one around it does, so that closing one would bar what the other names.
_JOINED = frozenset({"allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"})
_ALTERNATIVES = frozenset({"anyOf", "oneOf"})


def read(kind: JsonSchema) -> tuple[Any, list[str]]:
    """The schema that ``kind`` means, and warnings. Raises ``Refused`` as ``document.read_schema``."""
    root, warnings = read_schema(kind.text), list[str]()
    if SchemaOption.UNKNOWN_FORMATS in kind.options:
        root, places = _changed(root, _without_unknown_format)
        warnings += _warning("format", "is unknown and has no effect", places)
    if SchemaOption.ONE_OF_AS_ANY_OF in kind.options:
        root, places = _changed(root, _any_of)
        warnings += _warning("oneOf", "is read as anyOf", places)
    if SchemaOption.CLOSED_OBJECTS in kind.options:
        places = list(_open_objects(root, "", _joined_references(root), closable=True))
        root, _ = _changed(root, _closed, frozenset(places))
        warnings += _warning("additionalProperties", "is read as false", places)
    if SchemaOption.ANY_ORDER in kind.options:
        _, places = _changed(root, _with_members)
        warnings += _warning("properties", "may come in any order", places)
    return root, warnings


def meant(kind: JsonSchema) -> str:
    """The text of the schema that ``kind`` means."""
    return json.dumps(read(kind)[0]) if kind.options else kind.text


def _warning(keyword: str, what: str, places: list[str]) -> list[str]:
    if not places:
        return []
    named = ", ".join(place or "the root" for place in places[:_MOST_NAMED])
    more = f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
    return [f"{keyword} {what}, as asked: at {named}{more}"]


def _subschemas(node: Schema, pointer: str) -> Iterator[tuple[str, Any, str]]:
    """The keyword, schema and pointer of each schema directly within ``node``."""
    for keyword, value in node.items():
        at = child(pointer, keyword)
        if keyword in ONE and is_schema(value):
            yield keyword, value, at
        elif keyword in ROW and isinstance(value, list):
            yield from ((keyword, inner, child(at, i)) for i, inner in enumerate(value))
        elif keyword in NAMED and isinstance(value, dict):
            yield from ((keyword, inner, child(at, name)) for name, inner in value.items())


def _changed(
    root: Any, change: Callable[[Schema], Schema | None], only: Collection[str] | None = None
) -> tuple[Any, list[str]]:
    """``root`` with ``change`` made to its schemas, or to ``only`` some; and the pointers of those that it changed."""
    places: list[str] = []

    def of(node: Any, pointer: str) -> Any:
        if not isinstance(node, dict):
            return node
        new = change(node) if only is None or pointer in only else None
        if new is not None:
            places.append(pointer)
        made = dict(node if new is None else new)
        for keyword, value in node.items():
            at, now = child(pointer, keyword), _moved(keyword, made)
            if keyword in ONE and is_schema(value):
                made[now] = of(value, at)
            elif keyword in ROW and isinstance(value, list):
                made[now] = [of(inner, child(at, i)) for i, inner in enumerate(value)]
            elif keyword in NAMED and isinstance(value, dict):
                made[now] = {name: of(inner, child(at, name)) for name, inner in value.items()}
        return made

    return of(root, ""), places


def _moved(keyword: str, made: Schema) -> str:
    return keyword if keyword in made or keyword != "oneOf" else "anyOf"


def _without_unknown_format(node: Schema) -> Schema | None:
    name = node.get("format")
    if not isinstance(name, str) or name in FORMATS or name in NUMBERS or name in HINTS:
        return None
    return {keyword: value for keyword, value in node.items() if keyword != "format"}


def _any_of(node: Schema) -> Schema | None:
    """``oneOf`` as ``anyOf``; beside an ``anyOf`` it stays, as both must hold."""
    if not isinstance(node.get("oneOf"), list) or "anyOf" in node:
        return None
    return {"anyOf" if keyword == "oneOf" else keyword: value for keyword, value in node.items()}


def _closed(node: Schema) -> Schema:
    return {**node, "additionalProperties": False}


def _with_members(node: Schema) -> Schema | None:
    """``node`` where it names properties that may come before or after others."""
    named = node.get("properties")
    return dict(node) if isinstance(named, dict) and (len(named) > 1 or "additionalProperties" not in node) else None


def _open_objects(node: Any, pointer: str, joined: Collection[str], *, closable: bool) -> Iterator[str]:
    """The pointers of the schemas that declare properties, allow others, and alone say which there may be."""
    if not isinstance(node, dict):
        return
    closable = closable and pointer not in joined
    alone = not node.keys() & IN_PLACE
    said = node.keys() & {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
    if closable and alone and not said and isinstance(node.get("properties"), dict):
        yield pointer
    for keyword, inner, at in _subschemas(node, pointer):
        if keyword in _JOINED:
            within = False
        elif keyword in _ALTERNATIVES:
            within = closable and len(node.keys() & IN_PLACE) == 1 and "properties" not in node
        else:
            within = True
        yield from _open_objects(inner, at, joined, closable=within)


def _joined_references(root: Any) -> frozenset[str]:
    """The pointers of what is referred to by a schema that judges the same object as others do."""
    found: set[str] = set()

    def of(node: Any, pointer: str, alone: bool) -> None:
        if not isinstance(node, dict):
            return
        here = alone and len(node.keys() & (IN_PLACE | {"properties", "patternProperties"})) == 1
        if isinstance(target := node.get("$ref"), str) and not here:
            found.add(target.removeprefix("#"))
        for keyword, inner, at in _subschemas(node, pointer):
            of(inner, at, here if keyword in _ALTERNATIVES else keyword not in _JOINED)

    of(root, "", True)
    return frozenset(found)
