"""Products of a few rows with weights packed by oneDNN: a compiled loop, bitwise equal to oneDNN.

Such a product is bound by memory bandwidth: it reads each weight once and computes little. oneDNN's loops are made for
many rows. This one reads the packed weights in memory order, prefetches the next ones, and sums as oneDNN does: the
elements of a row in order, in parts of a fixed size, each product fused with its sum. (fp32, AVX-512, one thread, all
products of a 15 M LLaMA, of which the output layer is 9 M: 1, 4, 8 and 16 rows 3.1, 3.9, 5.3 and 6.7 ms, oneDNN's 5.6,
5.0, 6.3 and 8.3, and 32 rows 11.4 and 12.5; of layers 1,024 wide 2.6, 2.6, 5.0, 6.1 and 10.8, oneDNN's 5.0, 4.3, 5.4,
7.0 and 11.7.)
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from mmserve_kernels.compiled import compiled
from mmserve_kernels.tiles import COLUMNS, tile

#: Columns of a block in oneDNN's layout; a block holds the weights of one input element after another.
BLOCK = COLUMNS
#: Maximum rows for which the loop is faster.
MOST_ROWS = 32
#: Sizes of the parts that oneDNN may sum separately, in elements.
_PARTS = (512, 1024, 2048, 4096)
#: Input elements whose weights stay in the L1 cache (16 KiB) while all groups of rows use them.
_NEAR = 64
#: Prefetch distance in bytes.
_AHEAD = 32_768
_one, _two, _three, _four = tile(1), tile(2), tile(3), tile(4)


@compiled("void(f4[:, ::1], f4[:, :, ::1], i8, f4[:, ::1])", fused=False)
def product(x_RK: np.ndarray, blocks_BKC: np.ndarray, part: int, out_RN: np.ndarray) -> None:
    """The product of ``x_RK``, summed in parts of ``part`` elements; for compiled code."""
    rows, width = x_RK.shape
    sums = np.empty((rows, BLOCK), np.float32)
    x, weights, to = x_RK.ctypes.data, blocks_BKC.ctypes.data, sums.ctypes.data
    line = BLOCK * 4
    for b in range(blocks_BKC.shape[0]):
        begin = b * BLOCK
        count = min(BLOCK, out_RN.shape[1] - begin)
        block = weights + b * blocks_BKC.shape[1] * line
        for start in range(0, width, part):
            end = min(width, start + part)
            for k in range(start, end, _NEAR):
                near, fresh, own = min(end - k, _NEAR), k == start, block + k * line
                soon = own + _AHEAD
                for r in range(0, rows, 4):
                    left, row, into = rows - r, x + (r * width + k) * 4, to + r * line
                    if left >= 4:
                        _four(row, width, own, near, into, fresh, soon)
                    elif left == 3:
                        _three(row, width, own, near, into, fresh, soon)
                    elif left == 2:
                        _two(row, width, own, near, into, fresh, soon)
                    else:
                        _one(row, width, own, near, into, fresh, soon)
                    soon += near * 64
            for r in range(rows):
                for c in range(count):
                    out_RN[r, begin + c] = sums[r, c] if start == 0 else out_RN[r, begin + c] + sums[r, c]


def blocks_of(packed: Tensor, width: int, columns: int) -> np.ndarray | None:
    """The memory of weights ``[columns, width]`` (fp32) packed by oneDNN, as ``[blocks, width, BLOCK]``; None if its
    size does not match that layout. A view: the caller must keep ``packed`` alive."""
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
    product(rows.numpy(), blocks, part, made.numpy())
    return made.view(*x.shape[:-1], columns)


def part_of(packed: Tensor, blocks: np.ndarray, width: int, columns: int) -> int | None:
    """The part size with which the loop is bitwise equal to oneDNN's product of many rows; None if there is none.

    oneDNN exposes neither the layout of its weights nor its order of summation: both are determined by trial.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2 * MOST_ROWS, width, generator=draw)
    wanted = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    for part in _PARTS:
        if all(torch.equal(few_rows(x[:n], blocks, part, columns), wanted[:n]) for n in (1, 2, 3, MOST_ROWS)):
            return part
        if part >= width:
            return None
    return None
