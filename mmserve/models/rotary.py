"""Angles of rotary position embedding (arXiv 2104.09864); ``mmserve_kernels.rope_scatter`` turns by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mmserve_kernels.rope_scatter import by_axis
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slower rotation for longer contexts, as Llama 3.1 has it (``rope_type`` ``llama3`` of its configuration).

    Waves longer than ``original_positions / low_freq_factor`` turn ``factor`` times slower, those shorter than
    ``original_positions / high_freq_factor`` as before, and those between by a share of both.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def __post_init__(self) -> None:
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError("low_freq_factor must be below high_freq_factor")

    def scaled(self, frequencies: Tensor) -> Tensor:
        """The frequencies (radians a position, any shape) after scaling."""
        waves = self.original_positions * frequencies / (2 * math.pi)  # within the original context
        share = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = share.clamp(0, 1)
        return share * frequencies + (1 - share) * frequencies / self.factor


def frequency_axes(sections: Sequence[int], *, interleaved: bool) -> tuple[int, ...]:
    """The axis of position (0 = time, 1 = row, 2 = column) that turns each rotary frequency, fastest first.

    ``sections``: frequencies of each axis. M-RoPE (Qwen2-VL, arXiv 2409.12191) gives each axis a run of them;
    ``interleaved`` (Qwen3-VL, arXiv 2511.21631) takes turns, and what is over is the first axis's.
    """
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = len(sections)
    return tuple(i % axes if i < axes * sections[i % axes] else 0 for i in range(sum(sections)))


def rotary_table(
    positions: Tensor,
    width: int,
    theta: float,
    scaling: Llama3Scaling | None = None,
    axes: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, fp32 ``[..., 1, width]``, for integer ``positions [...]``.

    With ``axes``, the axis of position of each frequency, ``positions`` are ``[axes, ...]``.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    if scaling is not None:
        frequencies = scaling.scaled(frequencies)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    if axes:
        turned = torch.tensor(axes, device=positions.device)
        return by_axis(cos, turned), by_axis(sin, turned)
    return cos, sin
