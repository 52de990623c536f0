"""Angles of rotary position embedding (arXiv 2104.09864); ``mmserve_kernels.rope_scatter`` applies them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmserve_kernels.rope_scatter import by_axis
from torch import Tensor

from mmserve.models.rope_scaling import RopeScaling


def frequency_axes(sections: Sequence[int], *, interleaved: bool) -> tuple[int, ...]:
    """The position axis (0 = time, 1 = row, 2 = column) of each rotary frequency, fastest first.

    ``sections``: number of frequencies of each axis. In M-RoPE (Qwen2-VL, arXiv 2409.12191) each axis has consecutive
    frequencies; if ``interleaved`` (Qwen3-VL, arXiv 2511.21631) they alternate, and the rest belong to the first
    axis.
    """
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = len(sections)
    return tuple(i % axes if i < axes * sections[i % axes] else 0 for i in range(sum(sections)))


class Rotary:
    """Rotary angles of integer positions, for heads of which ``width`` channels are rotated, with the base ``theta``.

    ``axes``: the position axis of each frequency, if there are several. What does not depend on the positions is
    computed once for each device.
    """

    def __init__(self, width: int, theta: float, scaling: RopeScaling | None = None, axes: Sequence[int] = ()) -> None:
        self._width, self._theta, self._scaling, self._axes = width, theta, scaling, axes
        self._constants: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles, fp32 ``[..., 1, width]``, of ``positions [...]``; with axes,
        ``[axes, ...]``."""
        frequencies, turned = self._on(positions.device)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        if self._scaling is not None and self._scaling.amplitude != 1.0:
            cos, sin = cos * self._scaling.amplitude, sin * self._scaling.amplitude
        return (cos, sin) if turned is None else (by_axis(cos, turned), by_axis(sin, turned))

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The frequencies (radians per position, fp32 ``[width / 2]``, fastest first), and the axis of each."""
        if device not in self._constants:
            with torch.inference_mode(mode=False):  # training reads the same tensors
                steps = torch.arange(0, self._width, 2, device=device, dtype=torch.float32)
                frequencies = 1.0 / self._theta ** (steps / self._width)
                if self._scaling is not None:
                    frequencies = self._scaling.scaled(frequencies, self._theta)
                turned = torch.tensor(self._axes, device=device) if self._axes else None
            self._constants[device] = frequencies, turned
        return self._constants[device]
