"""Serialized ``GenerateRequest`` messages that cost a server more to read than a client to send.

Field numbers are those of ``protos/mmserve/v1/generation.proto``.
"""

from __future__ import annotations

from collections.abc import Callable

from mmserve.bench.hostile_messages import MESSAGES, empty_messages, field, filled

HEALTH = "/grpc.health.v1.Health/Check"
_SAMPLING, _CONSTRAINT = 3, 6


def valid(text: str = "What is 2 + 2?") -> bytes:
    """A request that a server answers: one user message with ``text``."""
    return field(MESSAGES, b"\x08\x02" + field(2, field(1, text.encode())))


def empty_parts(size: int) -> bytes:
    """One user message with some ``size`` bytes of empty ``parts``, two bytes each."""
    return field(MESSAGES, b"\x08\x02" + filled(2, b"", size))


def empty_stops(size: int) -> bytes:
    """A valid chat with some ``size`` bytes of empty ``sampling.stop`` strings, two bytes each."""
    return valid() + field(_SAMPLING, filled(6, b"", size))


def empty_options(size: int) -> bytes:
    """A valid chat with some ``size`` bytes of empty options of a ``choice`` constraint, two bytes each."""
    return valid() + field(_CONSTRAINT, field(3, filled(1, b"", size)))


def empty_template_parts(size: int) -> bytes:
    """A valid chat with some ``size`` bytes of empty parts of a ``template`` constraint, two bytes each."""
    return valid() + field(_CONSTRAINT, field(7, filled(1, b"", size)))


def empty_holes(size: int) -> bytes:
    """A valid chat with some ``size`` bytes of holes without a length in a ``template``, four bytes each."""
    return valid() + field(_CONSTRAINT, field(7, filled(1, field(2, b""), size)))


def unknown_fields(size: int) -> bytes:
    """A valid chat with ``size`` bytes of fields that the message does not have, two bytes each."""
    return valid() + b"\x78\x00" * (size // 2)


def merged_fields(size: int) -> bytes:
    """A valid chat with ``size`` bytes of one singular field that each occurrence is merged into, two bytes each."""
    return valid() + filled(_SAMPLING, b"", size)


def nested(depth: int) -> bytes:
    """A valid chat with a template in a hole of a template, and so on: ``depth`` templates."""
    constraint = field(2, b"x")
    for _ in range(depth):
        constraint = field(7, field(1, field(2, field(1, constraint))))
        if len(constraint) > 1 << 24:
            raise ValueError("depth is too large: each level adds its own lengths")
    return valid() + field(_CONSTRAINT, constraint)


def long_text(size: int) -> bytes:
    """A valid chat whose text has ``size`` bytes."""
    return valid("x" * size)


def long_schema(size: int) -> bytes:
    """A valid chat with a JSON schema of ``size`` bytes."""
    return valid() + field(_CONSTRAINT, field(1, b'{"title": "' + b"x" * size + b'"}'))


def large_image(size: int) -> bytes:
    """A valid chat with an inline image of ``size`` bytes that is no image."""
    return field(MESSAGES, b"\x08\x02" + field(2, field(2, field(1, bytes(size)))))


#: Messages of ``size`` bytes that are all but one thing, by what that is.
BOMBS: dict[str, Callable[[int], bytes]] = {
    make.__name__: make
    for make in (
        empty_messages,
        empty_parts,
        empty_stops,
        empty_options,
        empty_template_parts,
        empty_holes,
        unknown_fields,
        merged_fields,
        long_text,
        long_schema,
        large_image,
    )
}
