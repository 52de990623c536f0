"""A server for video sessions, and a session that plays a stream of clips."""

from __future__ import annotations

import argparse
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from mmserve.bench.served import ServedProcess
from mmserve.bench.video_clips import CLIPS, PART, StreamedClip, clip_at, picture
from mmserve.client.blocking_video import VideoSession
from mmserve.reference.clips import Clip
from mmserve.reference.scenes import png

#: Seconds between two readings of the number of visible frames.
_POLL = 0.005
#: Timeout of every operation in seconds.
PATIENCE = 120.0


def served(arguments: argparse.Namespace) -> ServedProcess:
    """A server of the bundled causal model, or of the ``--model`` ones, in a separate process."""
    values = vars(arguments)
    return ServedProcess(argparse.Namespace(**{**values, "model": arguments.model or ["bundled-causal"]}))


@lru_cache(8 * CLIPS)
def file_of(clip: Clip, second: int) -> bytes:
    """The frame of a clip in its ``second``-th second, as a PNG file."""
    return png(picture(clip, second))


def push(session: VideoSession, clips: Sequence[StreamedClip], second: int) -> None:
    """Push the frame of a stream at ``second``."""
    shown = clip_at(clips, second)
    session.push(file_of(shown.clip, second - shown.begin), second + PART, timeout=PATIENCE)


class ReadyTimes:
    """Client-side times from the push of a frame until it is visible to questions; a thread polls all sessions."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._in_flight: dict[VideoSession, deque[float]] = {}
        self._taken: dict[VideoSession, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def pushed(self, session: VideoSession) -> None:
        """Record that a frame of ``session`` is about to be pushed."""
        with self._lock:
            self._taken.setdefault(session, session.frames_taken)
            self._in_flight.setdefault(session, deque()).append(time.monotonic())

    def stop(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(_POLL):
            now = time.monotonic()
            with self._lock:
                for session, waiting in self._in_flight.items():
                    taken = session.frames_taken
                    for _frame in range(min(taken - self._taken[session], len(waiting))):
                        self.seconds.append(now - waiting.popleft())
                    self._taken[session] = taken
