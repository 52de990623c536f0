"""Scaling of rotary position embedding to contexts longer than those of the original training (``rope_type``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RopeScaling(Protocol):
    """A change of the rotary frequencies, and a factor of the cosine and sine tables."""

    amplitude: float  # factor of cosine and sine

    def check(self, frequencies: int) -> None:
        """Raises ``ValueError`` if it does not fit the number of frequencies."""
        return

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """The scaled ``frequencies`` (radians per position, fp32 ``[n]``, fastest first) of the base ``theta``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Slower rotation for longer contexts, as in Llama 3.1 (``rope_type`` ``llama3``).

    Wavelengths above ``original_positions / low_freq_factor`` are scaled by ``factor``, those below
    ``original_positions / high_freq_factor`` are unchanged, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError("low_freq_factor must be below high_freq_factor")

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """See ``RopeScaling``."""
        waves = self.original_positions * frequencies / (2 * math.pi)  # turns within the original context
        share = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = share.clamp(0, 1)
        return share * frequencies + (1 - share) * frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Position interpolation (arXiv 2306.15595): all frequencies are divided by ``factor``."""

    factor: float
    amplitude: float = 1.0

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """See ``RopeScaling``."""
        return frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (arXiv 2309.00071): high frequencies are unchanged, low ones interpolated, with a ramp between.

    A frequency with at least ``beta_fast`` turns within ``original_positions`` is unchanged, one with at most
    ``beta_slow`` turns is divided by ``factor``; ``truncate`` rounds the ramp's ends to whole dimensions.
    """

    factor: float
    original_positions: int
    amplitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @staticmethod
    def usual_amplitude(factor: float, weight: float = 1.0) -> float:
        """The paper's factor of the tables: 0.1 ln(factor) + 1, if ``weight`` is 1."""
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """See ``RopeScaling``."""
        width = 2 * len(frequencies)

        def dimension(turns: float) -> float:
            return width * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        at = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
        slowed = ((at - low) / ((high - low) or 0.001)).clamp(0, 1)
        return frequencies / self.factor * slowed + frequencies * (1 - slowed)


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (arXiv 2402.13753): each frequency has its own factor; ``factors`` are those of short contexts."""

    factors: tuple[float, ...]
    amplitude: float

    def check(self, frequencies: int) -> None:
        """See ``RopeScaling``."""
        if len(self.factors) != frequencies:
            raise ValueError(f"{len(self.factors)} factors for {frequencies} frequencies")

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """See ``RopeScaling``."""
        return frequencies / torch.tensor(self.factors, dtype=torch.float32, device=frequencies.device)
