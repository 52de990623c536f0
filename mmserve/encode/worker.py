"""A process that decodes images and videos for a server: killable, limited in time and memory, at low priority.

Run as ``python -m mmserve.encode.worker``; does not import torch. It reads files from standard input, one after another
(``wire.py``), until end of file or ``IDLE_SECONDS`` without a job.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from PIL import Image

from mmserve.config import MediaConfig
from mmserve.core.generators import Returning
from mmserve.core.timers import accept_timers, limited
from mmserve.encode import wire
from mmserve.encode.media import OUT_OF_MEMORY, decode_image
from mmserve.encode.sampling import Sampled, packed, unpacked
from mmserve.encode.segments import Segment, read_segment
from mmserve.encode.video import clip_frames
from mmserve.errors import InvalidArgument
from mmserve.memory import limit_address_space, resident
from mmserve.priority import lower_priority

#: Seconds without a job after which the process exits.
IDLE_SECONDS = 300.0
#: Memory that the process may keep after a file; above it, the process exits. Large buffers are returned to the system.
_KEPT_BYTES = 128 << 20
#: Address space: the process itself, and the pictures that a decoder references (17 frames of a video) or converts
#: between. Measured: 16-bit grey takes 20 bytes a pixel, RGBA 16.
_BASE_BYTES, _BYTES_A_PIXEL = 768 << 20, 48


class Stopped(BaseException):
    """The server cancelled the job; not an ``Exception``, which decoders would treat as damage."""


class Watched:
    """One job, as the decoders' ``watch.Watch``."""

    def __init__(self, seconds: float, name: str) -> None:
        self._begun, self._seconds, self._name = time.process_time(), seconds, name
        self.decoded = 0  # frames
        self._stopped = False
        self._lock = threading.Lock()  # decoding may use several threads

    def reserve(self, pixels: int) -> None:
        with self._lock:
            self._check_stop()  # the server sends no GO after STOP
            _send({"pixels": pixels})
            if _exactly(1) != wire.GO:
                self._stopped = True
                raise Stopped

    def check(self) -> None:
        with self._lock:
            self.decoded += 1
        self.check_stop()
        if time.process_time() - self._begun > self._seconds:
            raise InvalidArgument.of(self._name, decode_limit_message(self._seconds))

    def check_stop(self) -> None:
        """Raise ``Stopped`` if the server has sent ``STOP``, then in every thread."""
        with self._lock:
            self._check_stop()

    def _check_stop(self) -> None:
        self._stopped = self._stopped or (_readable(0.0) and _exactly(1) == wire.STOP)
        if self._stopped:
            raise Stopped


def decode_limit_message(seconds: float) -> str:
    """The error text for a file that takes longer than ``seconds``."""
    return f"takes more than {seconds:g} s of processor time to decode ([media] decode_seconds of the server)"


def main() -> None:
    """Serve jobs from standard input."""
    lower_priority()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    accept_timers()
    _return_memory()
    while _readable(IDLE_SECONDS):
        mark = os.read(0, 1)
        if not mark:
            return
        if mark != wire.JOB:
            continue  # STOP for a job that had already ended
        message = _message()
        data = _exactly(message["bytes"])
        limits = MediaConfig(**message["limits"])
        resize = tuple(message["resize"]) if message["resize"] else None
        piece = wire.Piece(**message["piece"]) if message["piece"] else None
        kept = {name: message[name] for name in ("clip", "name", "frames", "rate", "sampler", "window")}
        part = tuple(message["part"]) if message["part"] else None
        file = wire.MediaFile(data, resize=resize, piece=piece, part=part, **kept)
        with limited(limits.decode_seconds + 1):  # in case a decoder does not reach its next frame
            most = _BASE_BYTES + _BYTES_A_PIXEL * limits.max_pixels
            limit_address_space(most)
            ending = _decode(file, limits)
        last = resident() > _KEPT_BYTES
        _send({**ending, "last": last})
        if last:
            return


def _decode(file: wire.MediaFile, limits: MediaConfig) -> dict[str, Any]:
    """Send the pictures of ``file``; returns the final message."""
    watch = Watched(limits.decode_seconds, file.name)
    try:
        if file.piece is not None:
            return {"done": watch.decoded, **_decode_piece(file, file.piece, limits, watch)}
        if not file.clip:
            image = decode_image(file.data, limits, field=file.name, watch=watch)
            _send_picture(_resized(image, file), Sampled(0.0, image), watch)
            return {"done": watch.decoded}
        plan = _send_plan if file.window else lambda _seconds, _length: None
        frames = Returning(clip_frames(file, limits, watch, plan))
        for frame in frames:
            _send_picture(_resized(frame.image, file), frame, watch)
        return {"done": watch.decoded, "length": frames.returned}
    except Stopped:
        return {"stopped": watch.decoded}
    except InvalidArgument as error:
        return {"refused": [[v.field, v.description] for v in error.violations]}
    except MemoryError:
        return {"refused": [[file.name, OUT_OF_MEMORY]]}
    except Exception:  # noqa: BLE001 - a bug here is for the server's log
        return {"failed": traceback.format_exc()}


def _decode_piece(file: wire.MediaFile, piece: wire.Piece, limits: MediaConfig, watch: Watched) -> dict[str, Any]:
    """Send the pictures of a piece of a stream; returns the fields of ``wire.PieceRead``."""
    sampler, details = unpacked(piece.sampler), list[bool]()
    segment = Segment(file.data[piece.init_bytes :], file.data[: piece.init_bytes])
    frames = Returning(read_segment(segment, limits, begin=piece.begin, sampler=sampler, field=file.name, watch=watch))
    for frame in frames:
        details.append(frame.detail)
        _send_picture(_resized(frame.image, file), frame, watch)
    return {"details": details, "end": frames.returned, "sampler": packed(sampler)}


def _send_plan(seconds: Sequence[float] | None, length: float) -> None:
    _send({"plan": None if seconds is None else list(seconds), "length": length})


def _resized(image: Image.Image, file: wire.MediaFile) -> Image.Image:
    if file.resize is None:
        return image
    width, height, resample = file.resize
    return image.resize((width, height), resample)


def _send_picture(image: Image.Image, frame: Sampled, watch: Watched) -> None:
    _send({"size": image.size, "seconds": frame.seconds, "detail": frame.detail})
    rows = wire.rows_of_band(image.width)
    for top in range(0, image.height, rows):
        _write(image.crop((0, top, image.width, min(top + rows, image.height))).tobytes())
        try:
            watch.check_stop()
        except Stopped:
            _write(wire.CUT)
            raise
        _write(wire.MORE)


def _return_memory() -> None:
    """Make the C library, if it supports it, return blocks of at least a megabyte to the system when they are freed."""
    try:
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD, of glibc's malloc.h
    except (AttributeError, OSError):
        return


def _readable(seconds: float) -> bool:
    poll = select.poll()
    poll.register(0, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _exactly(size: int) -> bytes:
    """The next ``size`` bytes; exits the process if the server has exited."""
    parts = bytearray()
    while len(parts) < size:
        part = os.read(0, min(1 << 20, size - len(parts)))
        if not part:
            sys.exit(0)
        parts += part
    return bytes(parts)


def _message() -> Any:
    return wire.unpacked(_exactly(wire.length_of(_exactly(wire.HEADER_BYTES))))


def _send(message: dict[str, Any]) -> None:
    _write(wire.packed(message))


def _write(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    main()
