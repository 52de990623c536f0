"""Messages between the server and the processes that decode media.

The server sends ``JOB`` and a message (the file follows its header), then ``GO`` after each ``pixels`` message, or
``STOP`` at any time, after which it sends nothing more for the job. The process sends messages: ``plan`` (for a clip
with a ``window``: its length, and the times of the planned frames, if known), ``pixels`` (number that will be in
memory), ``size`` (of a picture; its RGB bytes follow, ``rows_of_band`` rows at a time, each followed by ``MORE`` or, if
the rest of the picture is cancelled, ``CUT``), and last ``done``, ``stopped``, ``refused`` or ``failed``. For a piece
of a stream, ``done`` also has the fields of ``PieceRead``; for a video, its ``length`` in seconds.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

JOB, GO, STOP = b"j", b"g", b"x"
#: Sent after a band of a picture: whether the job continues.
MORE, CUT = b"+", b"-"
_HEADER = struct.Struct(">I")
HEADER_BYTES = _HEADER.size
#: Maximum bytes of a picture that are sent, and received, at once.
BAND_BYTES = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Marks a file as a piece of a stream (``segments.read_segment``).

    The first ``init_bytes`` of its data are the initialisation segment; ``begin``: its start in seconds of the stream;
    ``sampler``: the stream's sampler (``sampling.packed``).
    """

    init_bytes: int
    begin: float
    sampler: dict[str, Any]


@dataclass(frozen=True)
class PieceRead:
    """Results for a decoded piece: whether each picture is in detail, its end (seconds of the stream), and the sampler
    for the next piece."""

    details: tuple[bool, ...]
    end: float
    sampler: dict[str, Any]


@dataclass(frozen=True)
class MediaFile:
    """A file to decode. ``frames`` and ``rate``: see ``read_video``; ``name``: the field of the request.

    ``resize``: width and height to which every picture is resized with the given pillow filter, if that is the first
    step of preprocessing; a decoder may leave it to the receiver of the pictures. ``piece``: set for a piece of a
    stream. ``sampler`` (``sampling.packed``): selects the frames of a clip, instead of ``frames`` and ``rate``.
    ``window``: for a clip whose frames are used as they are decoded, number of frames that the server holds at once; 0
    = all. ``part``: the index of a part of the clip's frames, the number of parts, and the frame count at whose
    multiples they are split (``Index.shared``).
    """

    data: bytes = field(repr=False)
    clip: bool
    name: str
    frames: int = 1
    rate: float = 0.0
    resize: tuple[int, int, int] | None = None
    piece: Piece | None = None
    sampler: dict[str, Any] | None = None
    window: int = 0
    part: tuple[int, int, int] | None = None


def packed(message: dict[str, Any]) -> bytes:
    """A message with its length as a prefix."""
    data = json.dumps(message).encode()
    return _HEADER.pack(len(data)) + data


def length_of(header: bytes) -> int:
    """Bytes of the message after ``header``."""
    (length,) = _HEADER.unpack(header)
    return int(length)


def rows_of_band(width: int) -> int:
    """Rows of a picture of ``width`` pixels that are sent at once."""
    return max(1, BAND_BYTES // (3 * width))


def unpacked(data: bytes) -> Any:
    """The message in ``data``."""
    return json.loads(data)
