"""Fields of JSON bodies: read one by one with type checks; remaining fields are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Self

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from mmserve.errors import FieldViolation, InvalidArgument
from mmserve.v1 import generation_pb2 as pb

#: JSON's names of Python types.
_NAMES = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
}
_TYPES: Mapping[int, type] = {
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_STRING: str,
}
#: Negative values that bodies may have for fields of ``GenerateRequest``: the minimum, and their meaning. OpenAI's
#: seeds are signed; -1 is vLLM's "all" for ``top_k``.
WIDER: Mapping[str, tuple[int, Callable[[int], int]]] = {
    "sampling.seed": (-(1 << 63), lambda seed: seed % (1 << 64)),
    "sampling.top_k": (-1, lambda _: 0),
}
#: Fields of ``GenerateRequest`` that the ``mmserve`` object of a body may set, also by their JSON names of protobuf.
OWN = ("diffusion", "vision", "kv_reduction", "image_reuse", "constraint", "stream", "slo_class")
JSON_NAMES = tuple(pb.GenerateRequest.DESCRIPTOR.fields_by_name[name].json_name for name in OWN)
#: Maximum number of unknown fields in an error.
_NAMED = 32
#: Fields of its ``stream`` that have no other name in bodies.
OWN_STREAM = ("drafts", "alternatives")


class Fields:
    """The fields of a JSON object at ``path``; each ``take`` removes one. A ``with`` block calls ``end``."""

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._path = path

    @classmethod
    def of(cls, value: Any, path: str) -> Self:
        """The fields of ``value``, which must be an object."""
        return cls(typed(value, dict, path), path)

    def path(self, name: str) -> str:
        """``name`` prefixed by the path of the object; only that path if ``name`` is empty."""
        return f"{self._path}.{name}" if self._path and name else self._path or name

    def has(self, name: str) -> bool:
        """Whether ``name`` is present, not null, and not taken yet."""
        return name in self._left

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """The value of ``name``; ``default`` if absent or null. Raises ``InvalidArgument`` if it is not a ``kind``."""
        value = self._left.pop(name, None)
        return default if value is None else typed(value, kind, self.path(name))

    def any(self, name: str) -> Any:
        """The value of ``name``, of any type; None if it is absent or null."""
        return self._left.pop(name, None)

    def nested(self, name: str) -> Fields | None:
        """The fields of the object ``name``; None if it is absent or null."""
        value = self.take(name, dict)
        return None if value is None else Fields(value, self.path(name))

    def within(self, name: str) -> Fields:
        """The fields of the object ``name``; without fields if it is absent or null."""
        return self.nested(name) or Fields({}, self.path(name))

    def each(self, name: str) -> Iterator[Fields]:
        """The fields of each object in the array ``name``; none if it is absent or null."""
        for i, value in enumerate(self.take(name, list, [])):
            yield Fields.of(value, f"{self.path(name)}[{i}]")

    def end(self, why: str = "is not a field of this API") -> None:
        """Raises ``InvalidArgument`` with every field that was not taken."""
        if self._left:
            wrong = [FieldViolation(self.path(name[:200] or '""'), why) for name in islice(self._left, _NAMED)]
            if (more := len(self._left) - len(wrong)) > 0:
                wrong.append(FieldViolation(self._path or "body", f"has {more} more fields that are not known"))
            raise InvalidArgument(*wrong)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()


def typed(value: Any, kind: type, path: str) -> Any:
    """``value``, which must have the JSON type ``kind``; an integer is also a number."""
    if kind is float and type(value) is int:
        return float(value) if abs(value) < 1 << 63 else _wrong(path, float)
    return value if type(value) is kind else _wrong(path, kind)


def _wrong(path: str, kind: type) -> Any:
    raise InvalidArgument.of(path, f"must be {_NAMES[kind]}")


def copy_fields(fields: Fields, message: pb.GenerateRequest, table: Mapping[str, str]) -> None:
    """Set the fields of ``message`` (dotted paths) by ``table``, which maps JSON names to fields, from those
    present."""
    for name, path in table.items():
        if not fields.has(name):
            continue
        *outer, leaf = path.split(".")
        target: Any = message
        for part in outer:
            target = getattr(target, part)
        value = fields.take(name, _TYPES[target.DESCRIPTOR.fields_by_name[leaf].cpp_type])
        if path in WIDER and WIDER[path][0] <= value < 0:
            value = WIDER[path][1](value)
        try:
            setattr(target, leaf, value)
        except ValueError:
            raise InvalidArgument.of(fields.path(name), "is out of range") from None


def stops(fields: Fields, name: str) -> list[str]:
    """The strings of ``name``, which is a string or an array of them."""
    value = fields.any(name)
    if value is None:
        return []
    path = fields.path(name)
    found = [value] if isinstance(value, str) else typed(value, list, path)
    return [typed(stop, str, f"{path}[{i}]") for i, stop in enumerate(found)]


def merge_own(fields: Fields, message: pb.GenerateRequest) -> dict[str, str]:
    """Merge the ``mmserve`` object into ``message``: fields of ``GenerateRequest`` in protobuf's JSON form.

    Returns the names in errors of fields of ``message``. Raises ``InvalidArgument`` for other fields, for a second
    constraint, and for drafts without streaming.
    """
    own = fields.take("mmserve", dict)
    if not own:
        return {}
    for name in own:
        if name not in (*OWN, *JSON_NAMES):
            raise InvalidArgument.of(f"mmserve.{name}"[:200], f"must be one of {', '.join(OWN)}")
    try:
        given = json_format.ParseDict(own, pb.GenerateRequest(), max_recursion_depth=30)
    except (json_format.ParseError, OverflowError) as error:  # the latter: of integers beyond all floats
        raise InvalidArgument.of("mmserve", str(error)[:400]) from None
    for field, _value in given.stream.ListFields():
        if field.name not in OWN_STREAM:
            raise InvalidArgument.of(f"mmserve.stream.{field.name}", f"must be one of {', '.join(OWN_STREAM)}")
    if given.stream.drafts and not message.stream.deltas:
        raise InvalidArgument.of("mmserve.stream.drafts", "is only for stream = true")
    constrained = given.constraint.WhichOneof("kind") is not None
    if constrained and message.constraint.WhichOneof("kind") is not None:
        raise InvalidArgument.of("mmserve.constraint", "cannot be combined with another constraint")
    message.MergeFrom(given)
    names = {"stream.alternatives": "mmserve.stream.alternatives"} if given.stream.HasField("alternatives") else {}
    return names | ({"constraint": "mmserve.constraint"} if constrained else {})
