"""The server's end of one process that decodes media (``worker.py``): started, given a file, stopped or ended."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

import mmserve
from mmserve.config import MediaConfig
from mmserve.encode import wire
from mmserve.encode.sampling import Sampled
from mmserve.encode.watch import Watch
from mmserve.errors import FieldViolation, InvalidArgument

#: How often a waiting thread looks whether its request was cancelled (seconds).
_GLANCE = 0.02
#: For a process to end a job that is not wanted any more, before it is killed (seconds).
_GRACE = 0.3
#: By the clock, without any word from a process (seconds): a decoder's processor time has a limit of its own.
_PATIENCE = 60.0
_PIPE_BYTES = 1 << 20


class Ended(Exception):
    """The process ended, or was ended, before it was done."""


class _Failed(RuntimeError):
    """A bug in the process; the message is its traceback."""


@dataclass(frozen=True)
class Pictures:
    """An image, or frames of a clip in order: mode RGB, upright; ``seconds`` since the clip's first frame.

    ``piece``: what else is known of a piece of a stream; its ``seconds`` are on the stream's clock. ``details``:
    whether each frame is in detail (``Sampled.detail``); empty = all are. ``length``: seconds of the
    whole video, None of images and pieces.
    """

    frames: tuple[Image.Image, ...]
    seconds: tuple[float, ...]
    piece: wire.PieceRead | None = None
    details: tuple[bool, ...] = ()
    length: float | None = None


@dataclass(frozen=True)
class Planned:
    """The times of the frames to come, None where they are not known, of a clip of so many seconds."""

    seconds: tuple[float, ...] | None
    length: float


#: Takes the frames of a clip as they come; before the first of them, when they will be.
Take = Callable[[Planned | Sampled], None]


class Child:
    """One process, of one owner at a time."""

    def __init__(self) -> None:
        root = str(Path(mmserve.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mmserve.encode.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # what is in the working directory is no part of the program
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # a terminal's Ctrl-C is for the server to handle
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):  # on Linux: fewer turns for the same pixels
            fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.decoded = 0  # frames of the last file

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    @property
    def killed(self) -> bool:
        """Whether it was ended from outside, and not by the file that it decoded; for its owner, after ``end``."""
        return self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM, 0)

    @property
    def overtime(self) -> bool:
        """Whether it was ended for the processor time that it took; for its owner, after ``end``."""
        return self._process.returncode == -signal.SIGPROF

    def decode(self, file: wire.MediaFile, limits: MediaConfig, watch: Watch, take: Take | None = None) -> Pictures:
        """The pictures of ``file``; with ``take`` none of them, and each goes there as it comes.

        Raises ``InvalidArgument`` for bad files and ``Ended`` where the process ends; what ``watch`` raises is
        raised once the process has stopped decoding.
        """
        message: dict[str, Any] = {"clip": file.clip, "name": file.name, "frames": file.frames, "rate": file.rate}
        message["piece"] = None if file.piece is None else dataclasses.asdict(file.piece)
        message |= {"sampler": file.sampler, "window": file.window, "resize": file.resize}
        head = {**message, "bytes": len(file.data), "limits": dataclasses.asdict(limits)}
        images: list[Image.Image] = []
        seconds: list[float] = []
        details: list[bool] = []
        check, sent = watch.check, False
        try:
            self._write(wire.JOB + wire.packed(head), check)
            self._write(file.data, check)
            sent = True
            while True:
                match self._message(check):
                    case {"pixels": pixels}:
                        watch.reserve(pixels)
                        self._write(wire.GO, check)
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
        except Ended:
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

    def kill(self) -> None:
        """End the process; its owner, if it waits, gets ``Ended``. For any thread."""
        self._process.kill()

    def end(self) -> None:
        """End the process and give back what belongs to it; for its owner."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _finish(self, last: dict[str, Any]) -> None:
        """A job's last message: raise its error."""
        if last["last"]:
            self._process.wait(_PATIENCE)
        if "refused" in last:
            raise InvalidArgument(*(FieldViolation(*each) for each in last["refused"]))
        if "failed" in last:
            raise _Failed(last["failed"])
        self.decoded = last.get("done", last.get("stopped", 0))

    def _stop(self) -> None:
        """Have the process stop decoding; one that continues is killed."""
        until = time.monotonic() + _GRACE

        def check() -> None:
            if time.monotonic() > until:
                raise Ended

        try:
            self._write(wire.STOP, check)
            while True:
                match self._message(check):
                    case {"size": [width, height]}:
                        self._picture(width, height, check)
                    case {"pixels": _} | {"plan": _}:
                        continue
                    case last:
                        self._finish(last)
                        return
        except (InvalidArgument, _Failed):
            return
        except Ended:
            self.end()

    def _picture(self, width: int, height: int, check: Callable[[], None]) -> Image.Image:
        """The next picture; what is held beside it is one band."""
        image = Image.new("RGB", (width, height), None)  # not filled: that takes long, and no other thread runs then
        rows = wire.rows_of_band(width)
        for top in range(0, height, rows):
            check()
            count = min(rows, height - top)
            band = self._exactly(3 * width * count, check)
            image.paste(Image.frombytes("RGB", (width, count), band), (0, top))
        return image

    def _message(self, check: Callable[[], None]) -> Any:
        length = wire.length_of(self._exactly(wire.HEADER_BYTES, check))
        return wire.unpacked(self._exactly(length, check))

    def _exactly(self, size: int, check: Callable[[], None]) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._wait(self._out, select.POLLIN, check)
            part = os.read(self._out, size - len(parts))
            if not part:
                raise Ended
            parts += part
        return bytes(parts)

    def _write(self, data: bytes, check: Callable[[], None]) -> None:
        left = memoryview(data)
        try:
            while left:
                self._wait(self._in, select.POLLOUT, check)
                left = left[os.write(self._in, left[: 1 << 20]) :]
        except OSError as error:
            raise Ended from error

    def _wait(self, descriptor: int, event: int, check: Callable[[], None]) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        until = time.monotonic() + _PATIENCE
        while not poll.poll(_GLANCE * 1000):
            check()
            if time.monotonic() > until:
                raise Ended
