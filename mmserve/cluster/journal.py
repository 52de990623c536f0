"""The journal of a video stream on a cluster: the frames and questions since its last checkpoint, from which, together
with the checkpoint, another worker can continue it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmserve.cluster.messages import Parcel
from mmserve.core.request import RequestId
from mmserve.video.base import Scope

#: Bytes of frames after which a checkpoint is requested, however few frames; twice as many block further frames.
MOST_BYTES = 32 << 20


@dataclass(frozen=True)
class GivenFrame:
    """Frame ``number`` at ``seconds``; ``pixels``: its serialised form."""

    number: int
    seconds: float
    pixels: tuple[tuple[int, int], bytes, bool]

    @property
    def bytes(self) -> int:
        """Size of its serialised form."""
        return len(self.pixels[1])


@dataclass(eq=False)
class GivenQuestion:
    """A question about the frames up to number ``after``, kept until its prompt was handed over."""

    id: RequestId
    after: int
    scope: Scope | None
    asking: bool = True  # it has not been asked successfully yet
    lost: bool = False  # its worker has exited


class Journal:
    """Entries in the order in which they were added. ``every``: frames between two checkpoints; 0 = no journal: the
    stream ends with its worker. Not thread-safe."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.parcel: Parcel = None  # the last checkpoint; None = the stream's beginning
        self.number = 0  # of the newest frame in the checkpoint
        self._entries: list[GivenFrame | GivenQuestion] = []
        self._bytes = self._frames = 0
        self._asked_at = 0  # frame after which the last checkpoint was requested

    @property
    def kept(self) -> bool:
        """Whether another worker can continue from here."""
        return self._every > 0

    @property
    def full(self) -> bool:
        """Whether no frame should be added before a checkpoint."""
        return self._bytes > 2 * MOST_BYTES

    @property
    def questions(self) -> list[GivenQuestion]:
        """Questions that may have to be asked again."""
        return [each for each in self._entries if isinstance(each, GivenQuestion)]

    def next_after(self, frame: int) -> GivenFrame | GivenQuestion | None:
        """The first entry that must be replayed after frame number ``frame``: a later frame, or a lost question.

        By the frame's number, because entries that failed meanwhile are removed.
        """
        return next((e for e in self._entries if (e.number > frame if isinstance(e, GivenFrame) else e.lost)), None)

    def add(self, entry: GivenFrame | GivenQuestion) -> None:
        """Append an entry."""
        if not self.kept:
            return
        self._entries.append(entry)
        if isinstance(entry, GivenFrame):
            self._bytes += entry.bytes
            self._frames += 1

    def remove(self, entry: GivenQuestion) -> None:
        """Remove a question that need not be asked again."""
        if entry in self._entries:
            self._entries.remove(entry)

    def failed(self, number: int) -> None:
        """Remove frame ``number``, which failed, so that it is not replayed."""
        self._leave(lambda each: isinstance(each, GivenFrame) and each.number == number)

    def due(self, newest: int) -> bool:
        """Whether a checkpoint must be requested after frame ``newest``; True once for each."""
        since = newest - self._asked_at
        if not self.kept or not since or not self._frames:
            return False
        if since < self._every and self._bytes <= MOST_BYTES:
            return False
        self._asked_at = newest
        return True

    def resumed(self) -> None:
        """Another worker continues from the checkpoint: one that was requested since then will not arrive."""
        self._asked_at = self.number

    def saved(self, parcel: Parcel, number: int, open_: Callable[[RequestId], bool]) -> Parcel:
        """Record a new checkpoint. Returns the one that is no longer needed.

        ``open_``: whether a question would have to be asked again if its worker were lost. Such a question must not see
        later frames, so the older checkpoint is kept for it, unless frames become too many.
        """

        def wanted(each: GivenQuestion) -> bool:
            return each.asking or open_(each.id)

        before = [each for each in self.questions if each.after < number and wanted(each)]
        if before and not self.full and self._frames <= 2 * self._every:
            return parcel
        self._leave(lambda each: (each.number if isinstance(each, GivenFrame) else each.after + 1) <= number)
        self._entries = [each for each in self._entries if isinstance(each, GivenFrame) or wanted(each)]
        old, self.parcel, self.number = self.parcel, parcel, number
        return old

    def give_up(self) -> Parcel:
        """Keep nothing from now on: states cannot be saved; returns as ``clear``."""
        self._every = 0
        return self.clear()

    def clear(self) -> Parcel:
        """Clear the journal. Returns the checkpoint that is no longer needed."""
        old, self.parcel, self._entries, self._bytes, self._frames = self.parcel, None, [], 0, 0
        return old

    def _leave(self, gone: Callable[[Any], bool]) -> None:
        self._entries = [each for each in self._entries if not gone(each)]
        frames = [each for each in self._entries if isinstance(each, GivenFrame)]
        self._frames, self._bytes = len(frames), sum(each.bytes for each in frames)
