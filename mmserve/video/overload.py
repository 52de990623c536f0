"""Frames that wait for the model, and what happens where there are too many of them: pure bookkeeping."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from PIL import Image

from mmserve.video.base import Frame

#: What a decoded pixel takes: pillow keeps RGB in 32 bits.
_PIXEL_BYTES = 4


def pixel_bytes(image: Image.Image) -> int:
    """That the pixels of ``image`` take."""
    return image.width * image.height * _PIXEL_BYTES


class Overload(Enum):
    """What happens to frames that come faster than they are taken."""

    BLOCK = "block"  # the client gets no more credit
    DROP_OLDEST = "drop_oldest"
    THIN = "thin"  # every second one of those that wait is dropped


@dataclass(eq=False)
class Origin:
    """The push ``index``, which came at ``arrived`` (monotonic clock, seconds)."""

    index: int
    arrived: float
    failed: bool = False  # and that is reported


@dataclass(frozen=True)
class WaitingFrame:
    """A frame of a push."""

    frame: Frame
    origin: Origin

    @property
    def bytes(self) -> int:
        """That its pixels take."""
        return pixel_bytes(self.frame.image)


class Waiting:
    """A queue of frames, and of other things that keep their place among them.

    It is full with ``frames`` frames or ``size`` bytes. What is full takes more frames all the same, of a push that is
    being decoded; with another policy than ``BLOCK`` older ones are then dropped.
    """

    def __init__(self, policy: Overload, frames: int, size: int) -> None:
        self._policy, self._frames, self._size = policy, frames, size
        self._queue: deque[object] = deque()
        self.frames = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether no further push should be decoded now."""
        return self._policy is Overload.BLOCK and (self.frames >= self._frames or self.bytes >= self._size)

    def put(self, item: object) -> int:
        """Add ``item`` to the queue; returns how many frames were dropped for it."""
        self._queue.append(item)
        if not isinstance(item, WaitingFrame):
            return 0
        self._count(item, 1)
        dropped = 0
        while self._policy is not Overload.BLOCK and self.frames > 1 and self._over():
            dropped += self._drop()
        return dropped

    def pop(self) -> object:
        """The first of the queue."""
        item = self._queue.popleft()
        if isinstance(item, WaitingFrame):
            self._count(item, -1)
        return item

    def clear(self) -> None:
        """Let go of everything."""
        self._queue.clear()
        self.frames = self.bytes = 0

    def _over(self) -> bool:
        return self.frames > self._frames or self.bytes > self._size

    def _drop(self) -> int:
        """Drop the oldest frame, or every second one from the oldest; never the newest. Returns how many."""
        old = [item for item in self._queue if isinstance(item, WaitingFrame)][:-1]
        gone = old[:1] if self._policy is Overload.DROP_OLDEST else old[::2]
        for item in gone:
            self._count(item, -1)
        kept = {id(item) for item in gone}
        self._queue = deque(item for item in self._queue if id(item) not in kept)
        return len(gone)

    def _count(self, item: WaitingFrame, sign: int) -> None:
        self.frames += sign
        self.bytes += sign * item.bytes
