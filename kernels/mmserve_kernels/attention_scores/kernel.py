"""``attention_scores`` in Triton: recomputes the product of queries and keys, and stores only sums.

A program sums the columns of one block of positions, row after row, without atomic additions, so that the sums of a
request are bitwise independent of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmserve_kernels.aot import Variant
from mmserve_kernels.cached_attention import Ragged
from mmserve_kernels.cached_attention.tiles import Tiling, tiling


@triton.jit
def _scores(
    q_ptr, k_ptr, table_ptr, limit_ptr, request, table_width, first_row, row, rows, n, length, head, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 ``[N, M]`` of rows ``row [M]`` for positions ``n [N]``; -inf for masked pairs."""
    group = head // (HEADS // GROUPS)
    channel = tl.arange(0, BLOCK_K)
    live, there = row < rows, n < length
    at = ((first_row + row).to(tl.int64) * HEADS + head) * K
    q = tl.load(q_ptr + at[:, None] + channel[None, :], mask=live[:, None] & (channel < K)[None, :], other=0.0)
    page = tl.load(table_ptr + request * table_width + n // PAGE, mask=there, other=0)
    place = ((page.to(tl.int64) * PAGE + n % PAGE) * GROUPS + group) * K
    k = tl.load(k_ptr + place[:, None] + channel[None, :], mask=there[:, None] & (channel < K)[None, :], other=0.0)
    limit = tl.where(live, length, 0)
    if HAS_LIMIT:
        limit = tl.minimum(limit, tl.load(limit_ptr + first_row + row, mask=live, other=0).to(tl.int32))
    scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
    return tl.where(n[:, None] < limit[None, :], scores, float("-inf"))


@triton.jit
def _log_sum_exp(
    q_ptr, k_ptr, table_ptr, limit_ptr, programs_ptr, lse_ptr, table_width, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Natural log-sum-exp of the scores of a tile of rows."""
    record = programs_ptr + tl.program_id(0) * 5
    head = tl.program_id(1)
    first_row, rows, length, request = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    row = tl.load(record + 4) + tl.arange(0, BLOCK_M)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, length, BLOCK_N):
        scores = _scores(
            q_ptr, k_ptr, table_ptr, limit_ptr, request, table_width,
            first_row, row, rows, start + tl.arange(0, BLOCK_N), length, head, scale,
            HEADS, GROUPS, K, PAGE, BLOCK_K, HAS_LIMIT,
        )  # fmt: skip
        highest = tl.maximum(top, tl.max(scores, 0))
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(scores - safe[None, :]), 0)
        top = highest
    ln2: tl.constexpr = 0.6931471805599453
    lse = (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * ln2
    tl.store(lse_ptr + (first_row + row).to(tl.int64) * HEADS + head, lse, mask=row < rows)


@triton.jit
def _column_sums(
    q_ptr, k_ptr, table_ptr, limit_ptr, programs_ptr, lse_ptr, out_ptr, table_width, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums of the attention of all rows of a request to a block of its positions."""
    record = programs_ptr + tl.program_id(0) * 6
    head = tl.program_id(1)
    first_row, rows, length, request = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    n = tl.load(record + 4) + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, rows, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        scores = _scores(
            q_ptr, k_ptr, table_ptr, limit_ptr, request, table_width,
            first_row, row, rows, n, length, head, scale,
            HEADS, GROUPS, K, PAGE, BLOCK_K, HAS_LIMIT,
        )  # fmt: skip
        at = (first_row + row).to(tl.int64) * HEADS + head
        lse = tl.load(lse_ptr + at, mask=row < rows, other=0.0) * 1.4426950408889634
        total += tl.sum(tl.exp2(scores - tl.where(lse == float("-inf"), 0.0, lse)[None, :]), 1)
    at = (tl.load(record + 5) + n).to(tl.int64) * HEADS + head
    tl.store(out_ptr + at, total, mask=n < length)


def attention_scores(q_THK: Tensor, k_PSGK: Tensor, ragged: Ragged, *, lse_TH: Tensor | None = None) -> Tensor:
    """See ``reference.attention_scores``."""
    heads, head_size = q_THK.shape[1:]
    page, groups = k_PSGK.shape[1:3]
    if not ragged.kv_lengths:
        return _room(0, heads, device=q_THK.device)
    sizes = tiling(q_THK.dtype, head_size, lean=True)
    tiles, blocks, table = _programs(ragged, sizes)
    q_THK, k_PSGK, limit = (
        q_THK.contiguous(),
        k_PSGK.contiguous(),
        table if ragged.kv_limit is None else ragged.kv_limit.contiguous(),
    )
    out = _room(sum(ragged.kv_lengths), heads, device=q_THK.device)
    options = _options(heads, groups, head_size, page, ragged.kv_limit is not None, sizes)
    scale = head_size**-0.5 / math.log(2)
    launch = {"num_warps": sizes.num_warps, "num_stages": sizes.num_stages}
    if lse_TH is None:
        lse_TH = _room(*q_THK.shape[:2], device=q_THK.device)
        if len(tiles):
            _log_sum_exp[(len(tiles), heads)](
                q_THK, k_PSGK, table, limit, tiles, lse_TH, table.shape[1], scale, **options, **launch
            )
    if len(blocks):
        _column_sums[(len(blocks), heads)](
            q_THK, k_PSGK, table, limit, blocks, lse_TH.contiguous(), out, table.shape[1], scale, **options, **launch
        )
    return out


def _room(*shape: int, device: torch.device) -> Tensor:
    """An uninitialized fp32 tensor for results."""
    return torch.empty(shape, device=device)


@lru_cache(maxsize=4)
def _programs(ragged: Ragged, sizes: Tiling) -> tuple[Tensor, Tensor, Tensor]:
    """Programs (int32) of both kernels, and the page tables as one tensor.

    Tiles of rows: first row of the request, its rows, its positions, request index, first row of the tile within the
    request. Blocks of positions: first row, rows, positions, request index, the block's first position, offset of the
    request's sums in the output.
    """
    tiles, blocks = [], []
    row = position = 0
    for request, (rows, length) in enumerate(zip(ragged.row_counts, ragged.kv_lengths, strict=True)):
        shared = (row, rows, length, request)
        tiles += [(*shared, first) for first in range(0, rows, sizes.block_m)]
        blocks += [(*shared, first, position) for first in range(0, length, sizes.block_n)]
        row, position = row + rows, position + length
    table = pad_sequence(list(ragged.page_tables), batch_first=True).to(torch.int32)
    made = (np.array(tiles, np.int32).reshape(-1, 5), np.array(blocks, np.int32).reshape(-1, 6))
    return torch.tensor(made[0], device=table.device), torch.tensor(made[1], device=table.device), table


def _options(
    heads: int, groups: int, head_size: int, page: int, has_limit: bool, sizes: Tiling
) -> dict[str, int | bool]:
    """Compile-time constants of both kernels."""
    return {
        "HEADS": heads,
        "GROUPS": groups,
        "K": head_size,
        "PAGE": page,
        "BLOCK_K": max(16, triton.next_power_of_2(head_size)),
        "HAS_LIMIT": has_limit,
        "BLOCK_M": sizes.block_m,
        "BLOCK_N": sizes.block_n,
    }


def variants() -> Iterator[Variant]:
    """Both kernels in every tiling, for 28 query heads over 4, limits, and pages of 16."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        for head_size in (64, 128, 256):
            sizes = tiling(dtype, head_size, lean=True)
            types = {"q_ptr": f"*{name}", "k_ptr": f"*{name}", "limit_ptr": "*i64", "table_width": "i32"}
            types |= {"table_ptr": "*i32", "programs_ptr": "*i32", "lse_ptr": "*fp32", "scale": "fp32"}
            options = _options(28, 4, head_size, 16, True, sizes)
            warps, stages = sizes.num_warps, sizes.num_stages
            yield Variant(f"lse {name} {head_size}", _log_sum_exp, types, options, warps, stages)
            yield Variant(
                f"columns {name} {head_size}", _column_sums, types | {"out_ptr": "*fp32"}, options, warps, stages
            )
