"""Attention of single rows over pages, a compiled loop over positions: a step of next-token decoding.

PyTorch's SDPA is called once a request, and reads its keys head by head, with strides. Here all requests' rows are one
call, and pages are read in place in memory order. (fp32, one thread, pages in any order; 6 heads of 48: 1, 4, 16
requests of 61 positions 11, 33 and 127 us, with SDPA 25, 96 and 559; 16 of 500 positions 2.2 and 4.6 ms. 32 heads over
8 of 128, 500 positions: 1 and 16 requests 0.34 and 9.2 ms, with SDPA 0.33 and 12.2.)

Shapes in names: R rows, P pages, S positions a page, H query heads, G key/value heads, K head size.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from mmserve_kernels.cached_attention.batch import LoneRows
from mmserve_kernels.compiled import compiled

_ONE, _HALF, _ZERO = np.float32(1), np.float32(0.5), np.float32(0)
#: exp is 2^n times a polynomial (Cephes' ``expf``), here of arguments that are at most 0.
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_LEAST = np.float32(-87.0)  # below it, exp is subnormal
#: Multiplications of a call (rows × heads × head size × positions) from which threads are used: some 0.1 ms of one.
_SHARED = 1 << 20


@compiled("f4(f4[::1], f4[::1])", reordered=True)
def _dot(a: np.ndarray, b: np.ndarray) -> np.float32:
    total = _ZERO
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@compiled("f4(f4[::1])", reordered=True)
def _sum(a: np.ndarray) -> np.float32:
    total = _ZERO
    for i in range(len(a)):
        total += a[i]
    return total


@compiled("f4(f4[::1])", reordered=True)
def _largest(a: np.ndarray) -> np.float32:
    most = a[0]
    for i in range(len(a)):
        most = max(most, a[i])
    return most


@compiled("void(f4[::1], f4, i4[::1])")
def _exponentials(a: np.ndarray, most: np.float32, powers: np.ndarray) -> None:
    """``exp(a - most)`` in place; ``powers`` is a buffer of the length of ``a``."""
    for i in range(len(a)):
        x = max(a[i] - most, _LEAST)
        n = np.floor(x * _LOG2_E + _HALF)
        powers[i] = (np.int32(n) + np.int32(127)) << np.int32(23)  # the bits of 2^n
        x = x - n * _LN2_HIGH
        x = x - n * _LN2_LOW
        y = _P0 * x + _P1
        y = y * x + _P2
        y = y * x + _P3
        y = y * x + _P4
        y = y * x + _P5
        a[i] = y * x * x + x + _ONE
    scales = powers.view(np.float32)
    for i in range(len(a)):
        a[i] = a[i] * scales[i]


@compiled("void(f4, f4[::1], f4[::1])")
def _add(weight: np.float32, values: np.ndarray, to: np.ndarray) -> None:
    for i in range(len(to)):
        to[i] = to[i] + weight * values[i]


def _wide(stored: np.ndarray, room: np.ndarray) -> np.ndarray:
    """``stored`` if it is fp32, else (bf16, as its bits) the same numbers converted into the buffer ``room``."""
    raise NotImplementedError("compiled code only")


@overload(_wide)
def _widen(stored, room):  # type: ignore[no-untyped-def]
    if stored.dtype == types.float32:
        return lambda stored, room: stored

    def widen(stored, room):  # type: ignore[no-untyped-def]
        bits = room.view(np.int32)
        for g in range(stored.shape[0]):
            for i in range(stored.shape[1]):
                bits[g, i] = np.int32(stored[g, i]) << np.int32(16)
        return room

    return widen


_PAGES = "void(f4[:, :, ::1], {0}[:, :, :, ::1], {0}[:, :, :, ::1], i8[::1], i8[::1], i8[::1], f4[:, :, ::1], i8[::1])"


@compiled([_PAGES.format(kind) for kind in ("f4", "u2")])
def _attend(
    q_RHK: np.ndarray,
    k_PSGK: np.ndarray,
    v_PSGK: np.ndarray,
    pages: np.ndarray,
    starts_R: np.ndarray,
    lengths_R: np.ndarray,
    out_RHK: np.ndarray,
    part: np.ndarray,
) -> None:
    """Compute rows ``part[0]`` to ``part[1]`` and key/value heads ``part[2]`` to ``part[3]``."""
    heads, size = q_RHK.shape[1:]
    page_size, groups = k_PSGK.shape[1:3]
    share = heads // groups
    scale = np.float32(1 / np.sqrt(np.float64(size)))
    longest = max(lengths_R[part[0] : part[1]])
    scores, powers = np.empty((heads, longest), np.float32), np.empty(longest, np.int32)
    room = np.empty((groups, size), np.float32)
    for r in range(part[0], part[1]):
        start, length = starts_R[r], lengths_R[r]
        for at in range(length):
            key = _wide(k_PSGK[pages[start + at // page_size], at % page_size], room)
            for h in range(part[2] * share, part[3] * share):
                scores[h, at] = _dot(q_RHK[r, h], key[h // share]) * scale
        for h in range(part[2] * share, part[3] * share):
            weights = scores[h, :length]
            _exponentials(weights, _largest(weights), powers[:length])
            whole = _sum(weights)
            for at in range(length):
                weights[at] /= whole
            out_RHK[r, h] = _ZERO
        for at in range(length):
            value = _wide(v_PSGK[pages[start + at // page_size], at % page_size], room)
            for h in range(part[2] * share, part[3] * share):
                _add(scores[h, at], value[h // share], out_RHK[r, h])


def attend_in_place(
    q_RHK: np.ndarray, k_PSGK: np.ndarray, v_PSGK: np.ndarray, rows: LoneRows, out_RHK: np.ndarray
) -> None:
    """As ``attend_rows``, on the calling thread, into ``out_RHK``; bf16 pages as their bits."""
    part = np.array((0, len(q_RHK), 0, k_PSGK.shape[2]))
    _attend(q_RHK, k_PSGK, v_PSGK, rows.pages, rows.starts, rows.lengths, out_RHK, part)


def attend_rows(q_RHK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, rows: LoneRows) -> Tensor:
    """Attention ``[R, H, K]`` in fp32 of rotated queries (fp32), each over at least one position of its own.

    Keys and values are dense, and fp32 or bf16; intermediate results are not rounded to bf16. A row's bits depend only
    on the row and its keys and values, also if a large call is divided among PyTorch's number of threads.
    """
    q_RHK, out_RHK = q_RHK.contiguous(), torch.empty(q_RHK.shape)
    k, v = (_numbers(pages) for pages in (k_PSGK, v_PSGK))
    arguments = (q_RHK.numpy(), k, v, rows.pages, rows.starts, rows.lengths, out_RHK.numpy())
    count, groups = len(q_RHK), k_PSGK.shape[2]
    threads = torch.get_num_threads()
    if threads == 1 or int(rows.lengths.sum()) * q_RHK[0].numel() < _SHARED:
        _attend(*arguments, np.array((0, count, 0, groups)))
        return out_RHK
    by_row = count >= threads
    cuts = np.linspace(0, count if by_row else groups, min(threads, count if by_row else groups) + 1).astype(np.int64)
    parts = [np.array((a, b, 0, groups) if by_row else (0, count, a, b)) for a, b in pairwise(cuts)]
    list(_helpers(threads).map(lambda part: _attend(*arguments, part), parts))
    return out_RHK


def _numbers(pages: Tensor) -> np.ndarray:
    return (pages.view(torch.uint16) if pages.dtype == torch.bfloat16 else pages).numpy()


@lru_cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="mmserve-attention")
