"""SiLU whose bits depend only on the element, not on the number of rows and threads.

On a CPU, PyTorch splits a large tensor among threads at any element, and computes the elements after the last full
vector of each part with other code. For SiLU that gives other last bits (not for GELU, exponentials, sines and
cosines): on 5 threads, 204 of the batches of 1 to 255 rows of 768 elements had a row with other bits than in 256 rows.
Small tensors are not split. fp32 uses this project's loop (``mmserve_kernels/elementwise.py``), which compiled layers
share (``mmserve_kernels/layer_rows.py``).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from mmserve_kernels import elementwise
from torch import Tensor

#: Number of elements from which PyTorch splits a tensor (``at::internal::GRAIN_SIZE``).
_SHARED_OUT = 32_768
#: Bytes per iteration of its loops: two vectors of 64.
_TAKEN = 128


def silu(x: Tensor) -> Tensor:
    """SiLU of ``x [..., D]``; on one thread if several would change bits.

    That costs at most about a hundredth of a pass: 256 rows of 2,048 take about 0.2 ms.
    """
    if elementwise.takes(x):
        return elementwise.silu(x)
    width = x.shape[-1]
    few = x.numel() < _SHARED_OUT or torch.get_num_threads() == 1
    if few or x.device.type != "cpu" or torch.is_grad_enabled() or width >= _SHARED_OUT:
        return F.silu(x)
    whole = _TAKEN // math.gcd(width * x.itemsize, _TAKEN)  # this number of rows ends with a full pair of vectors
    rows = (_SHARED_OUT - 1) // width
    parts = x.flatten(0, -2).split(max(1, rows - rows % whole))
    return torch.cat([F.silu(part) for part in parts]).view(x.shape)
