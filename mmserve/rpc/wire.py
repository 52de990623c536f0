"""Checks of serialised protobuf messages before they are parsed.

Two bytes of a serialised message can become an object of a hundred bytes, and creating millions of them blocks the
process for seconds. So fields are counted in the bytes first, up to the limit.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from mmserve.errors import InvalidArgument

#: Maximum total fields of a message, including nested ones, and how many of them may be messages.
MAX_FIELDS = 1 << 14
MAX_MESSAGES = 1 << 13
#: Maximum nesting depth of messages; protobuf's own limit.
MAX_DEPTH = 100

#: The fields of a message type that contain messages, by number.
Shape = dict[int, "Shape"]

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_TAG_BYTES, _VARINT_BYTES = 5, 10


def shape_of(descriptor: Any, known: dict[str, Shape] | None = None) -> Shape:
    """The shape of the message type of ``descriptor``; shapes of recursive types are recursive, too."""
    known = {} if known is None else known
    if descriptor.full_name not in known:
        shape = known[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None:
                shape[field.number] = shape_of(field.message_type, known)
    return known[descriptor.full_name]


def check_fields(data: bytes, shape: Shape) -> None:
    """Raises ``InvalidArgument`` if the message in ``data`` has more than ``MAX_FIELDS`` fields (including nested and
    unknown ones) or ``MAX_MESSAGES`` nested messages, and ``DecodeError`` if the scanned part is malformed.

    Takes time proportional to these limits, not to the length of ``data``.
    """
    try:
        fits = _fits(data, shape)
    except IndexError:
        raise DecodeError("the message is truncated") from None
    if not fits:
        raise InvalidArgument.of(
            "request",
            f"must have at most {MAX_FIELDS} fields, those of nested messages and unknown ones among them, and at most "
            f"{MAX_MESSAGES} nested messages",
        )


def _fits(data: bytes, shape: Shape) -> bool:
    """Whether the message is within the limits."""
    position, end, count, messages = 0, len(data), 0, 0
    outer: list[tuple[int, Shape]] = []  # ends and shapes of the surrounding messages
    while True:
        while position >= end:
            if position > end:
                raise DecodeError("a field is longer than its message")
            if not outer:
                return True
            end, shape = outer.pop()
        count += 1
        if count > MAX_FIELDS:
            return False
        tag = data[position]
        position += 1
        if tag > 0x7F:
            tag, position = _varint(data, position - 1, _TAG_BYTES)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            length = data[position]
            position += 1
            if length > 0x7F:
                length, position = _varint(data, position - 1, _VARINT_BYTES)
            inner = shape.get(tag >> 3)
            if inner is None:
                position += length
                continue
            messages += 1
            if messages > MAX_MESSAGES:
                return False
            if length:
                if position + length > end or len(outer) >= MAX_DEPTH:
                    raise DecodeError("a message is longer than the one around it, or too deep in others")
                outer.append((end, shape))
                end, shape = position + length, inner
        elif kind == _VARINT:
            if data[position] <= 0x7F:
                position += 1
            else:
                _, position = _varint(data, position, _VARINT_BYTES)
        elif kind == _FIXED32:
            position += 4
        elif kind == _FIXED64:
            position += 8
        else:
            raise DecodeError(f"wire type {kind} is not one of proto3")


def _varint(data: bytes, position: int, longest: int) -> tuple[int, int]:
    """The varint at ``position``, and the position after it."""
    value = shift = 0
    for _ in range(longest):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte <= 0x7F:
            return value, position
        shift += 7
    raise DecodeError("a varint is too long")
