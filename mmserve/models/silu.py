"""SiLU whose bits depend on the element alone, however many rows and threads there are.

PyTorch shares a large tensor on a CPU out among threads in parts that end at any element, and computes what is left of
a vector register at the end of a part with other code. Of SiLU that has other last bits (not of GELU, exponentials,
sines and cosines): on 5 threads, 204 of the batches of 1 to 255 rows of 768 elements had a row with other bits than in
256 rows. Tensors too small to be shared out have no such ends within them. Numbers in fp32 go through a loop of this
project's (``mmserve_kernels/elementwise.py``), which compiled layers share (``mmserve_kernels/layer_rows.py``).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from mmserve_kernels import elementwise
from torch import Tensor

#: Elements from which on PyTorch shares a tensor out (``at::internal::GRAIN_SIZE``).
_SHARED_OUT = 32_768
#: Bytes that its loops take at a time: two vectors of 64.
_TAKEN = 128


def silu(x: Tensor) -> Tensor:
    """SiLU of ``x [..., D]``: on one thread where several would move bits.

    That is some hundredth of a pass at most: 256 rows of 2,048 take about 0.2 ms.
    """
    if elementwise.takes(x):
        return elementwise.silu(x)
    width = x.shape[-1]
    few = x.numel() < _SHARED_OUT or torch.get_num_threads() == 1
    if few or x.device.type != "cpu" or torch.is_grad_enabled() or width >= _SHARED_OUT:
        return F.silu(x)
    whole = _TAKEN // math.gcd(width * x.itemsize, _TAKEN)  # so many rows end with a whole pair of vectors
    rows = (_SHARED_OUT - 1) // width
    parts = x.flatten(0, -2).split(max(1, rows - rows % whole))
    return torch.cat([F.silu(part) for part in parts]).view(x.shape)
