"""Merging of attention over two sets of positions into one over both, by their log-sum-exps; for a CPU.

Shapes in names: R rows, H query heads, K head size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmserve_kernels.compiled import compiled
from mmserve_kernels.elementwise import exp_of

_ONE = np.float32(1)


@compiled("void(f4[:, :, ::1], f4[:, ::1], f4[:, :, ::1], f4[:, ::1])", fused=False)
def _merge(a_RHK: np.ndarray, a_lse_RH: np.ndarray, b_RHK: np.ndarray, b_lse_RH: np.ndarray) -> None:
    """Merge the second into the first, in place."""
    rows, heads, size = a_RHK.shape
    for r in range(rows):
        for h in range(heads):
            of_a = _ONE / (_ONE + exp_of(b_lse_RH[r, h] - a_lse_RH[r, h]))
            of_b = _ONE - of_a
            for i in range(size):
                a_RHK[r, h, i] = a_RHK[r, h, i] * of_a + b_RHK[r, h, i] * of_b


def merged(a_RHK: Tensor, a_lse_RH: Tensor, b_RHK: Tensor, b_lse_RH: Tensor) -> Tensor:
    """Attention ``[R, H, K]`` over the positions of ``a`` and ``b`` together, from the attention over each set and the
    log-sum-exps (fp32, all finite) of its scaled scores. A row's bits depend on the row only."""
    made = torch.empty(a_RHK.shape).copy_(a_RHK)
    rest, sums = b_RHK.float().contiguous(), (a_lse_RH.contiguous(), b_lse_RH.contiguous())
    _merge(made.numpy(), sums[0].numpy(), rest.numpy(), sums[1].numpy())
    return made.to(a_RHK.dtype)
