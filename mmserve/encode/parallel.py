"""Multithreaded decoding of a long video's frames, each thread from a keyframe on, with results in order.

PyAV releases the GIL while it decodes and converts (intervals as in QuickDecoder, arXiv 2505.16175).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from PIL import Image

from mmserve.encode.watch import Watch

if TYPE_CHECKING:
    from mmserve.encode.frames import VideoFile

#: Maximum pixels of frames that wait for earlier ones.
_AHEAD_PIXELS = 48_000_000


def in_parallel(
    video: VideoFile, runs: Sequence[Sequence[int]], threads: int, watch: Watch, ahead: int | None = None
) -> Generator[tuple[int, Image.Image], None, None]:
    """As ``VideoFile.sequence``, for the frames in ``runs`` (``Index.runs``). ``watch.check`` is called by any thread.

    ``ahead``: maximum number of frames that wait for earlier ones; None = limited by pixels.
    """
    room = max(2 * threads, _AHEAD_PIXELS // (video.width * video.height)) if ahead is None else ahead
    order = _Order(runs, room, watch)
    workers = [threading.Thread(target=order.work, args=(video, i > 0), daemon=True) for i in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for place in range(sum(len(run) for run in runs)):
            frame = order.get(place)
            if frame is None:
                return
            yield frame
    finally:
        order.end()
        for worker in workers:
            if worker.ident is not None:
                worker.join()


class _Ended(BaseException):
    """The consumer has stopped; not an ``Exception``, which decoders would treat as damage."""


class _Order:
    """Assigns runs to threads and returns their frames in order; also the threads' ``Watch``, which stops them."""

    def __init__(self, runs: Sequence[Sequence[int]], room: int, watch: Watch) -> None:
        self._watch, self._room = watch, room  # maximum number of waiting frames
        self._changed = threading.Condition()
        self._runs: deque[tuple[int, Sequence[int]]] = deque()
        place = 0
        for run in runs:
            self._runs.append((place, run))
            place += len(run)
        self._frames: dict[int, tuple[int, Image.Image] | None] = {}
        self._place = 0  # index of the frame that is needed next
        self._error: BaseException | None = None
        self._ended = False

    def reserve(self, pixels: int) -> None:
        self._watch.reserve(pixels)

    def check(self) -> None:
        if self._ended:
            raise _Ended
        self._watch.check()

    def work(self, video: VideoFile, reopened: bool) -> None:
        """Decode runs until there are no more, on ``video`` or on the same file opened ``reopened``."""
        try:
            if reopened:
                with video.reopened() as own:
                    self._decode(own)
            else:
                self._decode(video)
        except _Ended:
            return
        except BaseException as error:  # noqa: BLE001 - raised where the frames are waited for
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def get(self, place: int) -> tuple[int, Image.Image] | None:
        """The frame with this index, once it is decoded; None = the stream ends before it."""
        with self._changed:
            self._place = place
            self._changed.notify_all()
            self._changed.wait_for(lambda: place in self._frames or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._frames.pop(place)

    def end(self) -> None:
        """Stop the threads."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _decode(self, video: VideoFile) -> None:
        decoder = video.decoder(self)
        while True:
            with self._changed:
                if not self._runs:
                    return
                first, run = self._runs.popleft()
            for place, number in enumerate(run, first):
                with self._changed:  # the thread that decodes the next frame never waits
                    self._changed.wait_for(lambda place=place: place < self._place + self._room or self._ended)  # type: ignore[misc]
                frame = video.frame(decoder, number)
                with self._changed:
                    self._frames[place] = frame
                    self._changed.notify_all()
