"""Attention to positions of images, by the op ``attention_scores``, for pruners that use a tower's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from mmserve_kernels.cached_attention import Ragged
from mmserve_kernels.dispatch import pick
from torch import Tensor


def mean_attention(q_THK: Tensor, k_NHK: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Attention to each position of several consecutive images: fp32 ``[N]``, mean over rows and heads.

    ``rows`` and ``lengths``: query rows and positions of each image, with totals T and N. In O(N) memory.
    """
    places = torch.arange(len(k_NHK), device=k_NHK.device)
    # Pages of one position: keys are read in place, and one kernel serves images of every size.
    ragged = Ragged(tuple(rows), tuple(lengths), places.split(list(lengths)), places[:0])
    summed_NH: Tensor = _op(q_THK.device, q_THK.dtype, q_THK.shape[2])(q_THK, k_NHK[:, None], ragged)
    counts = torch.tensor(rows, device=places.device).repeat_interleave(torch.tensor(lengths, device=places.device))
    return summed_NH.mean(1) / counts


@cache
def _op(device: torch.device, dtype: torch.dtype, head_size: int) -> Callable[..., Tensor]:
    """Cached: selected once for each kind of tower."""
    return pick("attention_scores", device, dtype, head_size).run
