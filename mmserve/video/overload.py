"""The queue of frames that wait for the model, and its overflow policies: pure bookkeeping."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from PIL import Image

from mmserve.video.base import Frame

#: Bytes of a decoded pixel: pillow stores RGB in 32 bits.
_PIXEL_BYTES = 4


def pixel_bytes(image: Image.Image) -> int:
    """Size of the pixels of ``image`` in bytes."""
    return image.width * image.height * _PIXEL_BYTES


class Overload(Enum):
    """The policy for frames that arrive faster than they are processed."""

    BLOCK = "block"  # grant the client no more credit
    DROP_OLDEST = "drop_oldest"
    THIN = "thin"  # drop every second waiting frame


@dataclass(eq=False)
class Origin:
    """The push ``index``, which arrived at ``arrived`` (monotonic clock, seconds)."""

    index: int
    arrived: float
    failed: bool = False  # it failed, which was reported


@dataclass(frozen=True)
class WaitingFrame:
    """A frame of a push."""

    frame: Frame
    origin: Origin

    @property
    def bytes(self) -> int:
        """Size of its pixels in bytes."""
        return pixel_bytes(self.frame.image)


class Waiting:
    """A queue of frames, and of other items that keep their position among them.

    It is full at ``frames`` frames or ``size`` bytes. It still accepts frames of a push that is being decoded; with
    policies other than ``BLOCK``, older frames are then dropped.
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
        """Append ``item``. Returns the number of frames dropped for it."""
        self._queue.append(item)
        if not isinstance(item, WaitingFrame):
            return 0
        self._count(item, 1)
        dropped = 0
        while self._policy is not Overload.BLOCK and self.frames > 1 and self._over():
            dropped += self._drop()
        return dropped

    def pop(self) -> object:
        """Remove and return the first item."""
        item = self._queue.popleft()
        if isinstance(item, WaitingFrame):
            self._count(item, -1)
        return item

    def clear(self) -> None:
        """Remove all items."""
        self._queue.clear()
        self.frames = self.bytes = 0

    def _over(self) -> bool:
        return self.frames > self._frames or self.bytes > self._size

    def _drop(self) -> int:
        """Drop the oldest frame, or every second one from the oldest; never the newest. Returns the number of
        frames."""
        old = [item for item in self._queue if isinstance(item, WaitingFrame)][:-1]
        dropped = old[:1] if self._policy is Overload.DROP_OLDEST else old[::2]
        for item in dropped:
            self._count(item, -1)
        dropped_ids = {id(item) for item in dropped}
        self._queue = deque(item for item in self._queue if id(item) not in dropped_ids)
        return len(dropped)

    def _count(self, item: WaitingFrame, sign: int) -> None:
        self.frames += sign
        self.bytes += sign * item.bytes
