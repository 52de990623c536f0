"""The server's end of a process that decodes media (``worker.py``): start, decode, cancel and stop."""

from __future__ import annotations

import dataclasses
import fcntl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mmserve.config import MediaConfig
from mmserve.core.child_process import ChildExited, ChildProcess
from mmserve.encode import wire
from mmserve.encode.sampling import Sampled
from mmserve.encode.watch import Watch
from mmserve.errors import FieldViolation, InvalidArgument

#: Seconds for a process to end a cancelled job before it is killed.
_GRACE = 0.3
#: Wall-clock timeout without any message from a process (seconds); CPU time of a decoder is limited separately.
_PATIENCE = 60.0
_PIPE_BYTES = 1 << 20


class _Failed(RuntimeError):
    """A bug in the process; the message is its traceback."""


@dataclass(frozen=True)
class Pictures:
    """An image, or frames of a clip in order: mode RGB, upright; ``seconds`` since the clip's first frame.

    ``piece``: further results for a piece of a stream; its ``seconds`` are stream time. ``details``: whether each frame
    is in detail (``Sampled.detail``); empty = all are. ``length``: seconds of the whole video, None for images and
    pieces.
    """

    frames: tuple[Image.Image, ...]
    seconds: tuple[float, ...]
    piece: wire.PieceRead | None = None
    details: tuple[bool, ...] = ()
    length: float | None = None


@dataclass(frozen=True)
class Planned:
    """The times of the frames that will be decoded, None if unknown, and the length of the clip in seconds."""

    seconds: tuple[float, ...] | None
    length: float


#: Called with the frames of a clip as they are decoded; before the first of them, with a ``Planned``.
Take = Callable[[Planned | Sampled], None]


class Child(ChildProcess):
    """One process that decodes media."""

    def __init__(self) -> None:
        super().__init__("mmserve.encode.worker")
        if hasattr(fcntl, "F_SETPIPE_SZ"):  # on Linux: fewer context switches
            fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.decoded = 0  # number of frames of the last file
        # announced and unread data, so that reading can be interrupted anywhere and resumed by ``_stop``
        self._body: int | None = None  # bytes of the message whose length has been read
        self._width = self._rows = 0  # of the picture in transfer; rows still to come

    @property
    def killed(self) -> bool:
        """As in ``ChildProcess``, or asked to exit; not because of the decoded file."""
        return super().killed or self._process.returncode == 0

    def decode(self, file: wire.MediaFile, limits: MediaConfig, watch: Watch, take: Take | None = None) -> Pictures:
        """The pictures of ``file``; with ``take`` an empty result, and each frame is passed to it when decoded.

        Raises ``InvalidArgument`` for bad files and ``ChildExited`` if the process exits; exceptions of ``watch`` are
        raised once the process has stopped decoding.
        """
        message: dict[str, Any] = {"clip": file.clip, "name": file.name, "frames": file.frames, "rate": file.rate}
        message["piece"] = None if file.piece is None else dataclasses.asdict(file.piece)
        message |= {"sampler": file.sampler, "window": file.window, "resize": file.resize, "part": file.part}
        head = {**message, "bytes": len(file.data), "limits": dataclasses.asdict(limits)}
        images: list[Image.Image] = []
        seconds: list[float] = []
        details: list[bool] = []
        check, sent = watch.check, False
        try:
            self._send(wire.JOB + wire.packed(head), check)
            self._send(file.data, check)
            sent = True
            while True:
                match self._message(check):
                    case {"pixels": pixels}:
                        watch.reserve(pixels)
                        self._send(wire.GO, check)
                    case {"size": [width, height], "seconds": at, "detail": detail}:
                        image = self._picture(width, height, check)
                        if take is not None:
                            take(Sampled(at, image, detail))
                            continue
                        images.append(image)
                        seconds.append(at)
                        details.append(detail)
                    case {"plan": plan, "length": length}:
                        if take is not None:
                            take(Planned(None if plan is None else tuple(plan), length))
                    case last:
                        break
        except ChildExited:
            raise
        except BaseException:
            if sent:
                self._stop()
            else:
                self.end()
            raise
        self._finish(last)
        piece = None if file.piece is None else wire.PieceRead(tuple(last["details"]), last["end"], last["sampler"])
        return Pictures(tuple(images), tuple(seconds), piece, tuple(details), last.get("length"))

    def _finish(self, last: dict[str, Any]) -> None:
        """Raise the error in the last message of a job, if any."""
        if last["last"]:
            self._process.wait(_PATIENCE)
        if "refused" in last:
            raise InvalidArgument(*(FieldViolation(*each) for each in last["refused"]))
        if "failed" in last:
            raise _Failed(last["failed"])
        self.decoded = last.get("done", last.get("stopped", 0))

    def _stop(self) -> None:
        """Make the process stop decoding; it is killed if it continues."""
        until = time.monotonic() + _GRACE

        def check() -> None:
            if time.monotonic() > until:
                raise ChildExited

        try:
            self._send(wire.STOP, check)
            while True:
                while self._rows:
                    self._band(check)
                match self._message(check):
                    case {"size": _}:
                        continue
                    case {"pixels": _} | {"plan": _}:
                        continue
                    case last:
                        self._finish(last)
                        return
        except (InvalidArgument, _Failed):
            return
        except BaseException as error:  # it did not confirm the end of the job, so it is not reused
            self.end()
            if not isinstance(error, ChildExited):
                raise

    def _picture(self, width: int, height: int, check: Callable[[], None]) -> Image.Image:
        """The next picture; only one band is buffered in addition to it."""
        image = Image.new("RGB", (width, height), None)  # uninitialized: filling takes long and holds the GIL
        while self._rows:
            check()
            top = height - self._rows
            band = self._band(check)
            image.paste(Image.frombytes("RGB", (width, len(band) // (3 * width)), band), (0, top))
        return image

    def _band(self, check: Callable[[], None]) -> memoryview:
        """The next rows of the picture."""
        rows = min(wire.rows_of_band(self._width), self._rows)
        found = memoryview(self._exactly(3 * self._width * rows + 1, check))
        self._rows = self._rows - rows if found[-1:] == wire.MORE else 0
        return found[:-1]

    def _message(self, check: Callable[[], None]) -> Any:
        if self._body is None:
            self._body = wire.length_of(self._exactly(wire.HEADER_BYTES, check))
        message = wire.unpacked(self._exactly(self._body, check))
        self._body = None
        if "size" in message:
            self._width, self._rows = message["size"]
        return message

    def _exactly(self, size: int, check: Callable[[], None]) -> bytes:
        return self._read(size, _with_timeout(check))

    def _send(self, data: bytes, check: Callable[[], None]) -> None:
        self._write(data, _with_timeout(check))


def _with_timeout(check: Callable[[], None]) -> Callable[[], None]:
    """``check``, extended to raise after a timeout without any message from the process."""
    until = time.monotonic() + _PATIENCE

    def checked() -> None:
        check()
        if time.monotonic() > until:
            raise ChildExited

    return checked
