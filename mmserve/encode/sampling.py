"""Sampling of video frames: rules based on the times of frames, and on their contents.

A sampler receives the frames of consecutive pieces of video (a whole file is one piece), in presentation order, with
times in seconds. Its state between pieces is plain data, so that it can be sent to the process that decodes the next
piece (``packed``, ``unpacked``).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
from PIL import Image

from mmserve.core.own_frames import OwnFrames

#: Maximum seconds by which a frame may begin before its sampling time: containers round times to a millisecond.
TOLERANCE = 0.65e-3
#: Side in pixels of the thumbnails by which frames are compared.
_FEATURE_SIDE = 16
#: The default similarity threshold between scenes (see ``Scene``).
SCENE_RATE, SCENE_FRAMES, SCENE_SIMILARITY = 2.0, 4, 0.97


@dataclass(frozen=True)
class Sampled:
    """A sampled frame: its time in seconds of the stream, and the picture, RGB and upright.

    ``detail`` is False for a frame with few tokens (``SlowFast``, and ``Scene`` after its first frame).
    """

    seconds: float
    image: Image.Image
    detail: bool = True


class Sampler(Protocol):
    """Selects frames of a video, piece by piece."""

    @property
    def interval(self) -> float:
        """Duration of a still image in seconds if the start of the next one is unknown."""
        ...

    def select(self, times: Sequence[float], end: float) -> list[int]:
        """Indices (ascending) of the frames to decode, for a piece whose frames begin at ``times`` (ascending)."""
        ...

    def take(self, seconds: float, image: Image.Image) -> Sampled | None:
        """The sampled form of a frame selected by ``select``; None = it is discarded."""
        ...

    def from_image(self, seconds: float, image: Image.Image) -> Sampled:
        """The sampled form of a still image pushed by a client: never discarded, with its own time."""
        ...


def spread(times: Sequence[int], end: int, count: int) -> list[int]:
    """Indices of at most ``count`` frames spread evenly over a clip whose frames begin at ``times`` (ascending).

    The clip, ``times[0]`` to ``end``, is divided into ``count`` equal spans, and the frame shown in the middle of each
    is selected, once. The middle and not the start: if a span is as long as a frame, its start is at the boundary of
    two frames, and rounding of the container's times would decide between them. All frames are selected if there are at
    most ``count``.
    """
    if len(times) <= count:
        return list(range(len(times)))
    first, length = times[0], end - times[0]
    middles = (first + Fraction((2 * i + 1) * length, 2 * count) for i in range(count))
    return sorted({bisect_right(times, middle) - 1 for middle in middles})


@dataclass
class FixedRate:
    """``rate`` frames a second: for each time ``k / rate`` of the stream, the first frame that begins at it or after.

    A frame is selected immediately, and once, however the video is divided into pieces. Its time is the sampling time
    if it begins up to ``TOLERANCE`` before it, otherwise its own.
    """

    rate: float
    next: int = 0  # index of the first sampling time without a frame

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1000:
            raise ValueError("a rate is between 0 and 1000 frames a second")

    @property
    def interval(self) -> float:
        return 1 / self.rate

    def select(self, times: Sequence[float], end: float) -> list[int]:
        del end
        found: list[int] = []
        moment = self.next
        for index, seconds in enumerate(times):
            if seconds + TOLERANCE >= moment / self.rate:
                found.append(index)
                moment = self._after(seconds)
        return found

    def take(self, seconds: float, image: Image.Image) -> Sampled | None:
        if seconds + TOLERANCE < self.next / self.rate:
            return None
        return self.from_image(seconds, image)

    def from_image(self, seconds: float, image: Image.Image) -> Sampled:
        self.next = max(self.next, self._after(seconds))
        return Sampled(self._moment(seconds), image)

    def planned(self, times: Sequence[float]) -> list[float]:
        """The resulting times of the frames selected by ``select``, which begin at ``times``."""
        return [self._moment(seconds) for seconds in times]

    def _moment(self, seconds: float) -> float:
        """The resulting time of a frame at ``seconds``: its sampling time if it begins just before it."""
        moment = (self._after(seconds) - 1) / self.rate
        return moment if seconds < moment <= seconds + TOLERANCE else seconds

    def _after(self, seconds: float) -> int:
        """The index of the first sampling time after that of a frame at ``seconds``."""
        return int((seconds + TOLERANCE) * self.rate) + 1


@dataclass
class Scene:
    """At most ``frames`` frames of each scene; a scene ends if a frame differs from the previous one.

    ``rate`` frames a second are compared by the cosine similarity of their thumbnails (``feature``); a value below
    ``similarity`` starts a new scene (segments by similarity of consecutive frames: TDC, arXiv 2504.10443). A scene's
    first frame is selected immediately, with ``detail``; the others, without, after 1, 2, 4... intervals, so that the
    length of a scene need not be known.

    The default similarity was measured on 60 consecutive generated clips, 764 frames, 2 a second: 98.3% of frames have
    a similarity of at least 0.97 to the previous one in the same clip, and 78% of the cuts are below it (0.9: 100% and
    8%; 0.95: 99.3% and 56%; 0.98: 94.3% and 90%); the same after H.264 at CRF 35 with noise. Cuts of these clips keep
    the background, which is rare in films.
    """

    rate: float = SCENE_RATE
    frames: int = SCENE_FRAMES
    similarity: float = SCENE_SIMILARITY
    pace: FixedRate | None = None
    feature: list[float] = field(default_factory=list)  # of the previous frame
    seen: int = 0  # frames of the current scene

    def __post_init__(self) -> None:
        if self.frames < 1 or not -1 <= self.similarity <= 1:
            raise ValueError("a scene has at least one frame, and a similarity is between -1 and 1")
        self.pace = self.pace or FixedRate(self.rate)

    @property
    def interval(self) -> float:
        return 1 / self.rate

    def select(self, times: Sequence[float], end: float) -> list[int]:
        assert self.pace is not None
        return self.pace.select(times, end)

    def take(self, seconds: float, image: Image.Image) -> Sampled | None:
        assert self.pace is not None
        on_pace = self.pace.take(seconds, image)
        if on_pace is None:
            return None
        found = self._compared(on_pace)
        wanted = self.seen in {0, *(1 << i for i in range(self.frames - 1))}
        self.seen += 1
        return found if wanted else None

    def from_image(self, seconds: float, image: Image.Image) -> Sampled:
        assert self.pace is not None
        found = self._compared(self.pace.from_image(seconds, image))
        self.seen += 1
        return found

    def _compared(self, frame: Sampled) -> Sampled:
        new = feature(frame.image)
        if not self.feature or float(np.dot(new, self.feature)) < self.similarity:
            self.seen = 0
        self.feature = [round(float(value), 6) for value in new]
        return dataclasses.replace(frame, detail=self.seen == 0)


@dataclass
class SlowFast:
    """The frames of ``inner``, every ``every``-th one with ``detail`` and the others without."""

    inner: FixedRate | Scene
    every: int = 8
    taken: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError("every frame, or every second, third... one is in detail")

    @property
    def interval(self) -> float:
        return self.inner.interval

    def select(self, times: Sequence[float], end: float) -> list[int]:
        return self.inner.select(times, end)

    def take(self, seconds: float, image: Image.Image) -> Sampled | None:
        found = self.inner.take(seconds, image)
        return None if found is None else self._marked(found)

    def from_image(self, seconds: float, image: Image.Image) -> Sampled:
        return self._marked(self.inner.from_image(seconds, image))

    def _marked(self, frame: Sampled) -> Sampled:
        detail = self.taken % self.every == 0
        self.taken += 1
        return dataclasses.replace(frame, detail=detail)


@dataclass(frozen=True)
class ProcessorFrames(OwnFrames):
    """The frames selected by a model's own processor, for a whole file."""

    @property
    def interval(self) -> float:
        return 1 / self.rate if self.rate else 1.0

    def select(self, times: Sequence[float], end: float) -> list[int]:
        """As ``Sampler.select``; ``end - times[0]`` is the length of the file."""
        return self.chosen(len(times), end - times[0])

    def take(self, seconds: float, image: Image.Image) -> Sampled | None:
        return Sampled(seconds, image)

    def from_image(self, seconds: float, image: Image.Image) -> Sampled:
        return Sampled(seconds, image)


def feature(image: Image.Image) -> np.ndarray:
    """A thumbnail of a frame, relative to mid-grey, as a unit vector (float64)."""
    small = image.convert("RGB").resize((_FEATURE_SIDE, _FEATURE_SIDE), Image.Resampling.BOX, reducing_gap=2.0)
    values = np.asarray(small, dtype=np.float64).ravel() - 127.5
    return np.asarray(values / np.linalg.norm(values))


def packed(sampler: Sampler) -> dict[str, Any]:
    """A sampler and its state as JSON data."""
    kind = type(sampler)
    assert dataclasses.is_dataclass(sampler) and kind.__name__ in _KINDS
    values = {f.name: getattr(sampler, f.name) for f in dataclasses.fields(sampler)}
    return {"kind": kind.__name__, **{k: packed(v) if type(v).__name__ in _KINDS else v for k, v in values.items()}}


def unpacked(message: Mapping[str, Any]) -> Sampler:
    """The sampler in a message of ``packed``."""
    values = {k: unpacked(v) if isinstance(v, Mapping) else v for k, v in message.items() if k != "kind"}
    sampler: Sampler = _KINDS[message["kind"]](**values)
    return sampler


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (FixedRate, ProcessorFrames, Scene, SlowFast)}
