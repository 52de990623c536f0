"""Products of a few rows with weights that oneDNN has packed: a compiled loop, with oneDNN's bits.

Such a product reads each weight once and computes little, so it takes as long as memory does. oneDNN's loops are made
for many rows. This one goes through the packed weights in the order in which they lie, and adds up as oneDNN does: the
elements of a row in order, in parts of so many, each product fused with its sum. (fp32, AVX-512, one thread, all
products of a 15 M LLaMA, of which the output layer is 9 M: 1, 2 and 4 rows 2.7, 3.1 and 3.7 ms, oneDNN's 5.1, 5.8 and
4.5; of layers 1,024 wide 13.5, 15.6 and 18.1, oneDNN's 21.6, 24.9 and 18.4.)
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from mmserve_kernels.compiled import compiled

#: Columns of a block of oneDNN's layout; a block holds the weights of one element of the input after another.
BLOCK = 64
#: Most rows for which the loop is the faster one.
MOST_ROWS = 4
#: Elements that oneDNN may add up before it goes on from zero.
_PARTS = (512, 1024, 2048, 4096)
_ZERO = np.float32(0)


@compiled("void(f4[:, ::1], f4[:, :, ::1], i8, f4[:, ::1])")
def _product(x_RK: np.ndarray, blocks_BKC: np.ndarray, part: int, out_RN: np.ndarray) -> None:
    rows, width = x_RK.shape
    sums = np.empty((rows, BLOCK), np.float32)
    for b in range(blocks_BKC.shape[0]):
        weights, begin = blocks_BKC[b], b * BLOCK
        count = min(BLOCK, out_RN.shape[1] - begin)
        for start in range(0, width, part):
            end = min(width, start + part)
            for r in range(rows):
                for c in range(BLOCK):
                    sums[r, c] = _ZERO
            k = start
            while k + 2 <= end:  # two at a time: the sums are read and written half as often
                first, second = weights[k], weights[k + 1]
                for r in range(rows):
                    x, y = x_RK[r, k], x_RK[r, k + 1]
                    own = sums[r]
                    for c in range(BLOCK):
                        total = own[c] + x * first[c]
                        own[c] = total + y * second[c]
                k += 2
            if k < end:
                for r in range(rows):
                    for c in range(BLOCK):
                        sums[r, c] = sums[r, c] + x_RK[r, k] * weights[k, c]
            for r in range(rows):
                for c in range(count):
                    out_RN[r, begin + c] = sums[r, c] if start == 0 else out_RN[r, begin + c] + sums[r, c]


def blocks_of(packed: Tensor, width: int, columns: int) -> np.ndarray | None:
    """The memory of weights ``[columns, width]`` (fp32) that oneDNN packed, as ``[blocks, width, BLOCK]``; None where
    it has another size than that layout. It is ``packed``'s own: keep that."""
    ops = torch.ops.mkldnn
    if packed.dtype != torch.float32 or not (hasattr(ops, "data_ptr") and hasattr(ops, "_nbytes")):
        return None
    count, size = -(-columns // BLOCK), ops._nbytes(packed) // 4
    if size % (count * BLOCK) or not width <= size // (count * BLOCK) < width + 16:
        return None
    at = ctypes.cast(ops.data_ptr(packed), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(at, (size,)).reshape(count, -1, BLOCK)


def few_rows(x: Tensor, blocks: np.ndarray, part: int, columns: int) -> Tensor:
    """The product ``[..., columns]`` of ``x [..., width]`` (fp32), summed in parts of ``part`` elements."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    made = torch.empty(len(rows), columns)
    _product(rows.numpy(), blocks, part, made.numpy())
    return made.view(*x.shape[:-1], columns)


def part_of(packed: Tensor, blocks: np.ndarray, width: int, columns: int) -> int | None:
    """The part with which the loop has the bits of oneDNN's own product of many rows; None: with none of them.

    oneDNN reports neither the layout of its weights nor its order of summation: both are measured on the weights.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(16, width, generator=draw)
    wanted = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    for part in _PARTS:
        if all(torch.equal(few_rows(x[:n], blocks, part, columns), wanted[:n]) for n in (1, 2, MOST_ROWS)):
            return part
        if part >= width:
            return None
    return None
