"""Descriptions of request body fields: the JSON schema of a field's values, its effect, and an example for tests.

Fields in the tables of modules that read bodies (``SAMPLING``, ``NEUTRAL``, ``LABELS``) are described by these
tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from mmserve.core.request import Sampling, Streaming
from mmserve.core.values import Range, values
from mmserve.http.api import Neutral
from mmserve.http.fields import WIDER
from mmserve.v1 import generation_pb2 as pb

Schema = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A field: the JSON schema of its values besides null, its effect, and a valid example."""

    schema: Schema
    meaning: str
    example: Any = None
    required: bool = False


TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
LABEL = "accepted; has no effect on the answer"
HINT = "a hint; has no effect on the answer"
_KINDS = {
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_UINT32: "integer",
    FieldDescriptor.CPPTYPE_UINT64: "integer",
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
}
#: Schemas of fields for which bodies accept more than messages (``WIDER``).
_RULES = {"sampling.seed": "from -2**63 to 2**64 - 1", "sampling.top_k": "at least 0, or -1 for all"}
_KNOWN = {f"sampling.{name}": v for name, v in values(Sampling).items()} | {
    f"stream.{name}": v for name, v in values(Streaming).items()
}


def _bounds(accepted: Range | None) -> Schema:
    if accepted is None:
        return {}
    low = {} if accepted.least is None else {"exclusiveMinimum" if accepted.above else "minimum": accepted.least}
    return low | ({} if accepted.most is None else {"maximum": accepted.most})


def numbers(table: Mapping[str, str], examples: Mapping[str, Any]) -> dict[str, Field]:
    """Fields of ``GenerateRequest`` (dotted paths), by their names in ``table``."""
    found = {}
    for name, path in table.items():
        *outer, leaf = path.split(".")
        message = pb.GenerateRequest.DESCRIPTOR
        for part in outer:
            message = message.fields_by_name[part].message_type
        known = _KNOWN[path]
        schema = {"type": _KINDS[message.fields_by_name[leaf].cpp_type], **_bounds(known.range)}
        if path in WIDER:
            schema["minimum"] = WIDER[path][0]
        rule = f", {_RULES.get(path, known.range.words)}" if known.range else ""
        meaning = f"{known.meaning}{rule}; default {known.default_words}"
        found[name] = Field(schema, meaning, examples.get(name))
    return found


def neutral(table: Neutral) -> dict[str, Field]:
    """Fields that accept only a few values, or none."""
    return {
        name: Field(
            {"enum": list(accepted)}, f'{_shown(accepted)}; others are refused ("{why}")', next(iter(accepted), None)
        )
        for name, (accepted, why) in table.items()
    }


def _shown(accepted: Iterable[Any]) -> str:
    """Values as a table of the documentation has them."""
    return " or ".join(f"`{json.dumps(value)}`" for value in accepted) or "null"


def labels(names: Iterable[str]) -> dict[str, Field]:
    """Fields with strings of the caller."""
    return {name: Field(TEXT, LABEL, "a") for name in names}


def hint(accepted: Sequence[str], meaning: str = "") -> Field:
    """A field that accepts some values, without effect."""
    return Field({"enum": list(accepted)}, f"{_shown(accepted)}: {meaning or HINT}", accepted[-1])


def any_of(*schemas: Schema) -> Schema:
    """A schema that accepts what any of ``schemas`` does."""
    return {"anyOf": list(schemas)}


def array(items: Schema, **more: Any) -> Schema:
    """Arrays of ``items``; ``more``: further keywords."""
    return {"type": "array", "items": items, **more}


def object_of(required: Iterable[str] = (), **properties: Schema) -> Schema:
    """Objects with these ``properties`` and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def part_of(kind: str, required: str, **properties: Schema) -> Schema:
    """Content parts of the type ``kind``, whose ``required`` property has the content."""
    return object_of(["type", required], type={"const": kind}, **properties)
