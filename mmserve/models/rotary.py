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


def rotary_table(
    positions: Tensor,
    width: int,
    theta: float,
    scaling: RopeScaling | None = None,
    axes: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, fp32 ``[..., 1, width]``, for integer ``positions [...]``.

    With ``axes``, the position axis of each frequency, ``positions`` are ``[axes, ...]``.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    if scaling is not None:
        frequencies = scaling.scaled(frequencies, theta)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.amplitude != 1.0:
        cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
    if axes:
        turned = torch.tensor(axes, device=positions.device)
        return by_axis(cos, turned), by_axis(sin, turned)
    return cos, sin
