"""Frame sampling of models' own video processors, as implemented in transformers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class OwnFrames:
    """The frames that transformers' video processors (release 5.23) sample from a whole file by default.

    ``rule``: ``sample_frames`` of ``SmolVLMVideoProcessor`` (``skip_ends``), ``Qwen2VLVideoProcessor`` (``starts``;
    with the defaults below that of classes without one) or ``Qwen3VLVideoProcessor`` (``ends``). ``rate``: frames per
    second; ``frames``: number of frames, for ``skip_ends`` the maximum (0 = not given; at least one of the two is
    required, for ``skip_ends`` both). ``least``, ``most``: bounds of the number that ``rate`` gives; ``multiple``: for
    ``starts``, the number is a multiple of it.
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
        """Indices (ascending) of the frames that are sampled from ``count`` frames in ``seconds`` seconds."""
        if seconds <= 0:
            return [0]
        rule = {"skip_ends": self._skip_ends, "starts": self._starts, "ends": self._ends}[self.rule]
        return sorted({min(int(i), count - 1) for i in rule(count, seconds)})

    def _skip_ends(self, count: int, seconds: float) -> np.ndarray:
        """Evenly spaced from first to last frame; for a long video, without one second at either end."""
        number = max(1, min(round(self.rate * seconds), self.frames))
        first, last, second = 0, count - 1, count / seconds
        if seconds - 2 > self.frames * self.rate:
            first, last = int(second), min(int(count - second), count - 1)
        if first >= last:
            first, last = 0, count - 1
        return np.linspace(first, last, number, dtype=int)

    def _starts(self, count: int, seconds: float) -> np.ndarray:
        """The first frame of each of several equal intervals."""
        whole = self.multiple
        if self.frames:
            number = round(self.frames / whole) * whole
        else:
            most = min(self.most, count) // whole * whole
            number = int(min(max(seconds * self.rate, self.least), most)) // whole * whole
        number = min(number, count) or min(whole, count)
        return np.arange(number) * count // number

    def _ends(self, count: int, seconds: float) -> np.ndarray:
        """Evenly spaced from first to last frame."""
        number = min(max(int(seconds * self.rate), self.least), self.most)
        return np.linspace(0, count - 1, min(number, count)).round()
