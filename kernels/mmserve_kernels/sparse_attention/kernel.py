"""``sparse_attention`` in Triton: a program iterates over the block list of its tile of rows.

Query heads that share an index head are in one tile, so that keys and values are read once for them. A program
processes a whole list, in order: a request's bits are independent of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmserve_kernels.aot import Variant
from mmserve_kernels.cached_attention import Ragged
from mmserve_kernels.cached_attention.tiles import Tiling, gpu_of, tiling
from mmserve_kernels.sparse_attention.index import BlockIndex


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, programs_ptr, table_ptr, limit_ptr, starts_ptr, blocks_ptr,
    row_blocks, table_width, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, INDEX_HEADS: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr,
    KV_BLOCK: tl.constexpr, HAS_LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Process one tile of a block of rows. ``scale``: of the scores, in base 2."""
    SHARE: tl.constexpr = HEADS // INDEX_HEADS  # query heads of an index head
    PIECES: tl.constexpr = KV_BLOCK // BLOCK_N
    record = programs_ptr + tl.program_id(0) * 6
    head = tl.program_id(1)
    group = head // (INDEX_HEADS // GROUPS)
    first_row, rows, length, request = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    block, first = tl.load(record + 4), tl.load(record + 5)

    m = first + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_K)
    row = m // SHARE
    live = row < rows
    at = ((first_row + row).to(tl.int64) * HEADS + head * SHARE + m % SHARE) * K
    mask = live[:, None] & (channel < K)[None, :]
    q = tl.load(q_ptr + at[:, None] + channel[None, :], mask=mask, other=0.0)
    limit = tl.where(live, length, 0)
    if HAS_LIMIT:
        limit = tl.minimum(limit, tl.load(limit_ptr + first_row + row, mask=live, other=0).to(tl.int32))
    last = tl.max(limit, 0)

    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    listed = starts_ptr + head * row_blocks + block
    for i in range(tl.load(listed) * PIECES, tl.load(listed + 1) * PIECES):
        n = tl.load(blocks_ptr + i // PIECES) * KV_BLOCK + i % PIECES * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = n < last
        page = tl.load(table_ptr + request * table_width + n // PAGE, mask=seen, other=0)
        place = ((page.to(tl.int64) * PAGE + n % PAGE) * GROUPS + group) * K
        there = seen[:, None] & (channel < K)[None, :]
        k = tl.load(k_ptr + place[:, None] + channel[None, :], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(n[None, :] < limit[:, None], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        v = tl.load(v_ptr + place[:, None] + channel[None, :], mask=there, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = highest
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + at[:, None] + channel[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def sparse_attention(q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, ragged: Ragged, index: BlockIndex) -> Tensor:
    """See ``reference.sparse_attention``."""
    heads, head_size = q_THK.shape[1:]
    page, groups = k_PSGK.shape[1:3]
    index.check(ragged.row_counts, heads, groups)
    if not len(q_THK):
        return torch.empty_like(q_THK)
    sizes = _tiling(q_THK.dtype, head_size, gpu_of(q_THK.device))
    options = _options(index, heads, groups, head_size, page, ragged.kv_limit is not None, sizes)
    programs, table = _programs(ragged, index.q_block, heads // index.heads, options["BLOCK_M"])
    q_THK, k_PSGK, v_PSGK = (x.contiguous() for x in (q_THK, k_PSGK, v_PSGK))
    limit = table if ragged.kv_limit is None else ragged.kv_limit.contiguous()
    out = _room(q_THK)
    if len(programs):
        _attend[(len(programs), index.heads)](
            q_THK, k_PSGK, v_PSGK, out, programs, table, limit, index.starts.contiguous(), index.blocks.contiguous(),
            (len(index.starts) - 1) // index.heads, table.shape[1], head_size**-0.5 / math.log(2),
            **options, num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        )  # fmt: skip
    return out


def _tiling(dtype: torch.dtype, head_size: int, gpu: str) -> Tiling:
    """Dense attention's block sizes, except in fp32, where the list iteration needs more registers than they leave."""
    return Tiling(16, 16, 1024, 4, 1) if dtype == torch.float32 else tiling(dtype, head_size, backend=gpu, lean=True)


def _room(q_THK: Tensor) -> Tensor:
    return torch.empty_like(q_THK)


@lru_cache(maxsize=4)
def _programs(ragged: Ragged, q_block: int, share: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Programs (int32 ``[n, 6]``), and the page tables as one tensor.

    A program: first row of the request, the rows up to the end of its block, positions, request index, index of its
    block of rows, and its first packed row (a row once for each of ``share`` query heads), counted within the
    request.
    """
    programs = []
    start = block = 0
    for request, (rows, length) in enumerate(zip(ragged.row_counts, ragged.kv_lengths, strict=True)):
        for first in range(0, rows, q_block):
            end = min(rows, first + q_block)
            for packed in range(first * share, end * share, block_m):
                programs.append((start, end, length, request, block, packed))
            block += 1
        start += rows
    table = pad_sequence(list(ragged.page_tables), batch_first=True).to(torch.int32)
    return torch.tensor(np.array(programs, np.int32).reshape(-1, 6), device=table.device), table


def _options(
    index: BlockIndex, heads: int, groups: int, head_size: int, page: int, has_limit: bool, sizes: Tiling
) -> dict[str, int]:
    """Compile-time constants of the kernel."""
    return {
        "HEADS": heads,
        "GROUPS": groups,
        "INDEX_HEADS": index.heads,
        "K": head_size,
        "PAGE": page,
        "KV_BLOCK": index.kv_block,
        "HAS_LIMIT": has_limit,
        "BLOCK_M": max(16, min(sizes.block_m, triton.next_power_of_2(index.q_block * heads // index.heads))),
        "BLOCK_N": min(sizes.block_n, index.kv_block),
        "BLOCK_K": max(16, triton.next_power_of_2(head_size)),
    }


def variants() -> Iterator[Variant]:
    """Prefill by blocks of 64, a list for each of 28 query heads; decode of 32 rows or one by pages of 16, a list for
    each of 4."""
    nothing = torch.empty(0, dtype=torch.int32)
    sizes_of = {"prefill": (64, 64, 28), "decode": (32, 16, 4), "decode of one row": (1, 16, 4)}
    cases = {use: BlockIndex(*of, nothing, nothing) for use, of in sizes_of.items()}
    dtypes = ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32"))
    for (dtype, name), head_size, gpu in product(dtypes, (64, 128, 256), ("", "sm_90")):
        sizes = _tiling(dtype, head_size, gpu or "cuda")
        if gpu and sizes == _tiling(dtype, head_size, "cuda"):
            continue  # as on the others
        types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{name}")
        types |= dict.fromkeys(("programs_ptr", "table_ptr", "starts_ptr", "blocks_ptr"), "*i32")
        types |= {"limit_ptr": "*i64", "row_blocks": "i32", "table_width": "i32", "scale": "fp32"}
        for use, index in cases.items():
            options = _options(index, 28, 4, head_size, 16, True, sizes)
            launch = (sizes.num_warps, sizes.num_stages, gpu or None)
            yield Variant(f"{use} {name} {head_size}", _attend, types, options, *launch)
