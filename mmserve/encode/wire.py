"""Messages between the server and the processes that decode media.

The server sends ``JOB`` and a message (the file follows its header), then ``GO`` after each ``pixels`` message, or
``STOP`` at any time, after which it answers nothing. The process answers with messages: ``plan`` (of a clip with a
``window``: its length, and seconds of the frames that will come, where they are known), ``pixels`` (so many will be
held), ``size`` (a picture; its RGB bytes follow, ``rows_of_band`` rows at a time, each time with ``MORE`` or, where the
rest of the picture does not come, ``CUT`` after them), and last ``done``, ``stopped``, ``refused`` or ``failed``. For a
piece of a stream, ``done`` has the fields of ``PieceRead`` beside it; for a video, its ``length`` in seconds.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

JOB, GO, STOP = b"j", b"g", b"x"
#: After a band of a picture: whether the job goes on.
MORE, CUT = b"+", b"-"
_HEADER = struct.Struct(">I")
HEADER_BYTES = _HEADER.size
#: Of a picture that are sent, and received, in one piece.
BAND_BYTES = 1 << 20


@dataclass(frozen=True)
class Piece:
    """That a file is a piece of a stream (``segments.read_segment``).

    ``init_bytes`` of its data are the initialisation segment; ``begin``: where it begins, in seconds of the stream;
    ``sampler``: the stream's sampler (``sampling.packed``).
    """

    init_bytes: int
    begin: float
    sampler: dict[str, Any]


@dataclass(frozen=True)
class PieceRead:
    """Of a piece that was decoded: whether each picture is one in detail, where it ends (seconds of the stream), and
    the sampler for the next piece."""

    details: tuple[bool, ...]
    end: float
    sampler: dict[str, Any]


@dataclass(frozen=True)
class MediaFile:
    """A file to decode. ``frames`` and ``rate``: as ``read_video`` takes them; ``name``: the field of the request.

    ``resize``: width and height that every picture is resized to by this filter of pillow, where that is the first
    thing done to it anyway; a decoder may leave it to the receiver of the pictures. ``piece``: decoded is then a
    piece of a stream. ``sampler`` (``sampling.packed``): chooses the frames of a clip, in place of ``frames`` and
    ``rate``. ``window``: of a clip whose frames are used as they come, how many the server holds at once; 0 = all.
    ``part``: only one part of so many of a clip's frames, cut at multiples of so many (``Index.shared``).
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
    """A message with its length in front."""
    data = json.dumps(message).encode()
    return _HEADER.pack(len(data)) + data


def length_of(header: bytes) -> int:
    """Bytes of the message after ``header``."""
    (length,) = _HEADER.unpack(header)
    return int(length)


def rows_of_band(width: int) -> int:
    """Rows of a picture that are sent at once."""
    return max(1, BAND_BYTES // (3 * width))


def unpacked(data: bytes) -> Any:
    """The message in ``data``."""
    return json.loads(data)
