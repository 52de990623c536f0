"""The interface of media decoders, and an implementation that decodes in the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

from mmserve.config import MediaConfig
from mmserve.encode.child import Pictures, Planned
from mmserve.encode.media import decode_image
from mmserve.encode.sampling import Sampled, packed, unpacked
from mmserve.encode.segments import Segment, collected, read_segment
from mmserve.encode.video import clip_frames
from mmserve.encode.wire import MediaFile, Piece, PieceRead

T = TypeVar("T")
#: Called frequently during decoding; raises to stop it.
Check = Callable[[], None]
Decode = Callable[[MediaFile], Pictures]
#: A function that uses a file's pixels, which count against the memory budget until it returns.
Work = Callable[[Decode], T]


class Decoders(Protocol):
    """Runs functions on decoded media files."""

    def map(self, works: Sequence[Work[T]], check: Check) -> Generator[T, None, None]:
        """Results in order. ``check`` is called frequently, from any thread, and raises to cancel all of the work."""
        ...

    def chunks(
        self, file: MediaFile, size: int, make: Callable[[list[Sampled]], T], check: Check
    ) -> Generator[Planned | T, None, None]:
        """Yields the planned frames of a clip, then the result of ``make`` for every ``size`` frames, while later
        frames are decoded; at most a few chunks are queued. ``check`` as for ``map``."""
        ...

    def open(self) -> None:
        """Increment the number of users."""
        ...

    def close(self) -> None:
        """Decrement the number of users; the last one cancels running work and stops the threads."""
        ...


class InPlace:
    """Decodes in the calling thread, one file after another, with limits on sizes only."""

    def __init__(self, limits: MediaConfig) -> None:
        self._limits = limits

    def map(self, works: Sequence[Work[T]], check: Check) -> Generator[T, None, None]:
        for work in works:
            check()
            yield work(self._decode)

    def chunks(
        self, file: MediaFile, size: int, make: Callable[[list[Sampled]], T], check: Check
    ) -> Generator[Planned | T, None, None]:
        plans: list[Planned] = []
        frames: list[Sampled] = []

        def plan(seconds: Sequence[float] | None, length: float) -> None:
            plans.append(Planned(None if seconds is None else tuple(seconds), length))

        for frame in clip_frames(file, self._limits, plan=plan):
            yield from plans
            plans.clear()
            check()
            frames.append(frame)
            if len(frames) == size:
                yield make(frames)
                frames = []
        yield from plans  # for a part without frames
        if frames:
            yield make(frames)

    def open(self) -> None:
        return

    def close(self) -> None:
        return

    def _decode(self, file: MediaFile) -> Pictures:
        if file.piece is not None:
            return _read_piece(file, file.piece, self._limits)
        if not file.clip:
            return Pictures((decode_image(file.data, self._limits, field=file.name),), (0.0,))
        frames, length = collected(clip_frames(file, self._limits))
        details = tuple(frame.detail for frame in frames)
        times = tuple(f.seconds for f in frames)
        return Pictures(tuple(f.image for f in frames), times, details=details, length=length)


def _read_piece(file: MediaFile, piece: Piece, limits: MediaConfig) -> Pictures:
    sampler = unpacked(piece.sampler)
    segment = Segment(file.data[piece.init_bytes :], file.data[: piece.init_bytes])
    frames, end = collected(read_segment(segment, limits, begin=piece.begin, sampler=sampler, field=file.name))
    read = PieceRead(tuple(frame.detail for frame in frames), end, packed(sampler))
    return Pictures(tuple(frame.image for frame in frames), tuple(frame.seconds for frame in frames), read)
