"""What every document under a JSON schema must hold, as a template: keys and punctuation, and holes for the values.

Written are, in the order of the schema, objects whose declared properties are all required, arrays of a fixed length,
and constants; every other value is a hole. Documents are compact. What a schema allows beyond that is left out of them:
properties that it does not declare, and white space.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mmserve.constraint.document import read_schema
from mmserve.constraint.draft import dialect, modern
from mmserve.constraint.limits import MAX_CHOICES, MAX_DEPTH, MAX_HOLES
from mmserve.constraint.references import References
from mmserve.constraint.resources import located
from mmserve.core.constraint import Choice, ConstraintKind, JsonSchema, Regex

Part = str | ConstraintKind

#: Keywords that say nothing about a value.
_SILENT = frozenset({"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated"})
_SILENT |= {"readOnly", "writeOnly", "$defs", "definitions"}
_DEFINITIONS = ("$defs", "definitions")
_MOST_PIECES = 4096
#: What stands between the quotes of a JSON string.
_INNER = r'(?:[^"\\\x00-\x1f]|\\["\\nrtbf])*'


def scaffold(schema: str) -> tuple[Part, ...]:
    """Texts and holes by turns, for a schema that has a grammar; empty where it leaves nothing to be written, or
    nothing to be filled in, or where there would be too many of either."""
    root = located(read_schema(schema))
    parts: list[Part] = []
    holes = 0
    for pieces, part in enumerate(_Writer(root).value(root, (), 0)):
        last = parts[-1] if parts else None
        if isinstance(part, str) and isinstance(last, str):
            parts[-1] = last + part
        else:
            parts.append(part)
        holes += not isinstance(part, str)
        if holes > MAX_HOLES or pieces == _MOST_PIECES:  # references multiply
            return ()
    return tuple(parts) if len(parts) > 1 else ()


class _Writer:
    def __init__(self, root: Any) -> None:
        self._references, self._draft = References(root), dialect(root)
        self._definitions = {name: root[name] for name in _DEFINITIONS if isinstance(root, dict) and name in root}

    def value(self, node: Any, path: tuple[str, ...], depth: int) -> Iterator[Part]:
        """The parts of a value under ``node``; ``path``: the references that were followed to it."""
        if not isinstance(node, dict) or depth > MAX_DEPTH:
            yield self._hole(node)
            return
        node = modern(node, self._draft, "")
        said = {name: value for name, value in node.items() if name not in _SILENT}
        match said:
            case {"$ref": str(to)} if len(said) == 1 and to not in path:
                yield from self.value(self._references.schema(to, ""), (*path, to), depth + 1)
            case {"const": value} | {"enum": [value]} if said.keys() <= {"const", "enum", "type"} and _plain(value):
                yield _written(value)
            case {"enum": [*values]} if said.keys() <= {"enum", "type"} and all(map(_plain, values)):
                yield from _one_of(values, said.get("type"))
            case {"type": "boolean"} if len(said) == 1:
                yield Choice(("true", "false"))
            case {"type": "string"} if len(said) == 1:
                yield from ('"', Regex(_INNER), '"')
            case {"type": "object"} if _closed(said):
                yield from self._object(said, path, depth + 1)
            case {"type": "array"} if _counted(said):
                yield from self._array(said, path, depth + 1)
            case _:
                yield self._hole(node)

    def _object(self, said: dict[str, Any], path: tuple[str, ...], depth: int) -> Iterator[Part]:
        lead = "{"
        for name, inner in said["properties"].items():
            yield f"{lead}{_written(name)}:"
            yield from self.value(inner, path, depth)
            lead = ","
        yield "}"

    def _array(self, said: dict[str, Any], path: tuple[str, ...], depth: int) -> Iterator[Part]:
        first = said.get("prefixItems", [])
        lead = "["
        for i in range(said["minItems"]):
            yield lead
            yield from self.value(first[i] if i < len(first) else said.get("items", True), path, depth)
            lead = ","
        yield "]"

    def _hole(self, node: Any) -> JsonSchema:
        """Any value under ``node``; references into the definitions take them along."""
        text = json.dumps(node)
        if '"$ref"' in text:
            text = json.dumps({**self._definitions, **node})
        return JsonSchema(text)


def _closed(said: dict[str, Any]) -> bool:
    """Whether the declared properties of an object must all be there, and may be all that is."""
    names = said.get("properties")
    known = said.keys() <= {"type", "properties", "required", "additionalProperties"}
    return known and bool(names) and set(said.get("required", [])) == set(names or ())


def _counted(said: dict[str, Any]) -> bool:
    """Whether an array has a fixed number of items, one at least."""
    known = said.keys() <= {"type", "items", "prefixItems", "minItems", "maxItems"}
    most = said.get("maxItems", MAX_HOLES + 1)
    return known and 0 < said.get("minItems", 0) == most <= MAX_HOLES


def _one_of(values: list[Any], kind: Any) -> Iterator[Part]:
    """One of several plain values; the quotes of strings are written beforehand, as they are the same for all."""
    if kind in (None, "string") and all(isinstance(value, str) and value for value in values):
        yield from ('"', Choice(_distinct(_written(value)[1:-1] for value in values)), '"')
    elif kind is None and len(values) <= MAX_CHOICES:
        yield Choice(_distinct(map(_written, values)))
    else:
        yield JsonSchema(json.dumps({"enum": values, "type": kind}))


def _distinct(options: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(options))


def _plain(value: Any) -> bool:
    """Whether there is one way to write ``value``."""
    return value is None or isinstance(value, str | bool | int)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
