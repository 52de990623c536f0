"""Which frames of a video file a model's own video processor takes, as transformers has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class OwnFrames:
    """The frames that transformers' video processors take by themselves, of a whole file (release 5.23).

    ``rule``: that of ``sample_frames`` of ``SmolVLMVideoProcessor`` (``skip_ends``), ``Qwen2VLVideoProcessor``
    (``starts``) or ``Qwen3VLVideoProcessor`` (``ends``). ``rate``: frames a second, ``frames``: their number, at most
    so many of ``skip_ends`` (0 = not given; one is needed, of ``skip_ends`` both). ``least``, ``most``: bounds of the
    number that ``rate`` gives; ``multiple``: of ``starts``, what it is a multiple of.
    """

    rule: str
    rate: float = 0.0
    frames: int = 0
    least: int = 1
    most: int = 1 << 30
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.rule == "skip_ends" and not (self.rate and self.frames):
            raise ValueError("fps and num_frames go together")
        if not (self.rate or self.frames):
            raise ValueError("fps or num_frames must be set")

    def chosen(self, count: int, seconds: float) -> list[int]:
        """Indices (ascending) of the frames that are taken of ``count`` in so many ``seconds``."""
        if seconds <= 0:
            return [0]
        rule = {"skip_ends": self._skip_ends, "starts": self._starts, "ends": self._ends}[self.rule]
        return sorted({min(int(i), count - 1) for i in rule(count, seconds)})

    def _skip_ends(self, count: int, seconds: float) -> np.ndarray:
        """Evenly from the first frame to the last, or, of a long video, without a second at either end."""
        number = max(1, min(round(self.rate * seconds), self.frames))
        first, last, second = 0, count - 1, count / seconds
        if seconds - 2 > self.frames * self.rate:
            first, last = int(second), min(int(count - second), count - 1)
        if first >= last:
            first, last = 0, count - 1
        return np.linspace(first, last, number, dtype=int)

    def _starts(self, count: int, seconds: float) -> np.ndarray:
        """The first frame of each of as many equal spans."""
        whole = self.multiple
        if self.frames:
            number = round(self.frames / whole) * whole
        else:
            most = min(self.most, count) // whole * whole
            number = int(min(max(seconds * self.rate, self.least), most)) // whole * whole
        number = min(number, count) or min(whole, count)
        return np.arange(number) * (count / number)

    def _ends(self, count: int, seconds: float) -> np.ndarray:
        """Evenly from the first frame to the last."""
        number = min(max(int(seconds * self.rate), self.least), self.most)
        return np.linspace(0, count - 1, min(number, count)).round()
