"""What a stream of video on a cluster was given since its last saved state: with both, another worker goes on with
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmserve.cluster.messages import Parcel
from mmserve.core.request import RequestId
from mmserve.video.base import Scope

#: Bytes of frames from which a state is saved, however few they are; with twice as many no further one is taken in.
MOST_BYTES = 32 << 20


@dataclass(frozen=True)
class GivenFrame:
    """Frame ``number`` at ``seconds``; ``pixels``: what it is sent as."""

    number: int
    seconds: float
    pixels: tuple[tuple[int, int], bytes, bool]

    @property
    def bytes(self) -> int:
        """That are kept of it."""
        return len(self.pixels[1])


@dataclass(eq=False)
class GivenQuestion:
    """A question about the frames up to number ``after``, until its prompt is elsewhere."""

    id: RequestId
    after: int
    scope: Scope | None
    asking: bool = True  # it has no answer yet
    lost: bool = False  # the worker that had it does not have it any more


class Journal:
    """In the order in which it was given. ``every``: frames between two states; 0 = nothing is kept, and a stream ends
    with its worker. Not for several threads at once."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.parcel: Parcel = None  # the last saved state; None = the stream's beginning
        self.number = 0  # of the newest frame in it
        self._entries: list[GivenFrame | GivenQuestion] = []
        self._bytes = self._frames = 0
        self._asked_at = 0  # number of the frame after which a state was last asked for

    @property
    def kept(self) -> bool:
        """Whether another worker could go on from here."""
        return self._every > 0

    @property
    def full(self) -> bool:
        """Whether no frame should come before a state is saved."""
        return self._bytes > 2 * MOST_BYTES

    @property
    def entries(self) -> tuple[GivenFrame | GivenQuestion, ...]:
        """All that was given."""
        return tuple(self._entries)

    @property
    def questions(self) -> list[GivenQuestion]:
        """Those that may have to be asked again."""
        return [each for each in self._entries if isinstance(each, GivenQuestion)]

    def add(self, entry: GivenFrame | GivenQuestion) -> None:
        """It was given after all others."""
        if not self.kept:
            return
        self._entries.append(entry)
        if isinstance(entry, GivenFrame):
            self._bytes += entry.bytes
            self._frames += 1

    def remove(self, entry: GivenQuestion) -> None:
        """It is not to be asked again."""
        if entry in self._entries:
            self._entries.remove(entry)

    def failed(self, number: int) -> None:
        """Frame ``number`` was not taken in: nobody is to take it in later."""
        self._leave(lambda each: isinstance(each, GivenFrame) and each.number == number)

    def due(self, newest: int) -> bool:
        """Whether a state is to be saved after frame ``newest``; asked for once."""
        since = newest - self._asked_at
        if not self.kept or not since or not self._frames:
            return False
        if since < self._every and self._bytes <= MOST_BYTES:
            return False
        self._asked_at = newest
        return True

    def resumed(self) -> None:
        """Another worker goes on from the saved state: one that was asked for since then does not come."""
        self._asked_at = self.number

    def saved(self, parcel: Parcel, number: int, open_: Callable[[RequestId], bool]) -> Parcel:
        """A state is there; returns the one that is not needed any more.

        ``open_``: whether a question must be asked again were its worker lost. Such a question sees no frame after it,
        so the older state is kept for its sake, as long as frames are not too many.
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
        """Let go of all of it; returns the state that is not needed any more."""
        old, self.parcel, self._entries, self._bytes, self._frames = self.parcel, None, [], 0, 0
        return old

    def _leave(self, gone: Callable[[Any], bool]) -> None:
        self._entries = [each for each in self._entries if not gone(each)]
        frames = [each for each in self._entries if isinstance(each, GivenFrame)]
        self._frames, self._bytes = len(frames), sum(each.bytes for each in frames)
