"""Weights stored as 8-bit numbers with scales: for a tensor, for each channel, for groups, or for blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmserve.models.formats.base import Files, Made, served, wrong

#: Kinds of fp8.
FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def scaled(files: Files, name: str, scale: str, block: Sequence[int] | None, zero: str = "") -> Made:
    """The weight ``name`` times its scales ``scale``: a single one, one per channel, or one per ``block`` ``[out,
    in]``.

    ``zero``, of the scales' shape, is subtracted before. Scales also have the weight's leading dimensions (experts).
    Raises ``ConfigError`` if the scales have another shape.
    """
    weight, scales = files.header(name), files.header(scale)
    shape = tuple(weight.shape)
    sizes = _sizes(shape, tuple(scales.shape), block)
    if sizes is None:
        wrong(files, scale, f"of shape {list(scales.shape)} is no scale of {list(shape)} in blocks of {block}")

    def make(stored: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
        made = stored.float()
        if zeros is not None:
            made = made - _spread(zeros.float(), sizes, shape)
        return made * _spread(scales.float(), sizes, shape)

    return Made(shape, served(scales.dtype), (name, scale, *([zero] if zero else [])), make)


def _sizes(shape: tuple[int, ...], scales: tuple[int, ...], block: Sequence[int] | None) -> tuple[int, ...] | None:
    """Along each dimension, the number of weights per scale; None if the shape ``scales`` does not fit."""
    if scales in ((), (1,)):
        return ()
    scales = (*scales, 1) if len(scales) == len(shape) - 1 else scales
    if len(scales) != len(shape):
        return None
    most = [1] * (len(shape) - 2) + list(block or (1, shape[-1]))
    sizes = [size if count == 1 else given for size, count, given in zip(shape, scales, most, strict=True)]
    fits = all(-(-size // each) == count for size, each, count in zip(shape, sizes, scales, strict=True))
    return tuple(sizes) if fits else None


def _spread(scales: Tensor, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    if not sizes:
        return scales.reshape(())
    scales = scales[..., None] if scales.ndim == len(shape) - 1 else scales
    for dim, (size, each) in enumerate(zip(shape, sizes, strict=True)):
        if scales.shape[dim] != 1:
            scales = scales.repeat_interleave(each, dim).narrow(dim, 0, size)
    return scales
