"""``cached_attention`` in Triton: one pass over the pages for all query heads that share them.

A row's bits depend only on its query, its limit and its request's keys and values: blocks and splits begin at fixed
positions, positions beyond a row's limit add exact zeros, and splits are combined in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmserve_kernels.aot import Variant
from mmserve_kernels.cached_attention.batch import FixedBatch, Ragged
from mmserve_kernels.cached_attention.tiles import QUANTIZED_HEAD_SIZE, Tiling, fixed_schedule, gpu_of, schedule, tiling
from mmserve_kernels.kv_quant.kernel import read_pages
from mmserve_kernels.kv_quant.pages import LEVELS, QuantizedPages

#: Rows that a program combines: few enough that no registers are spilled.
FOLDED = 16
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@triton.jit
def _fold(acc, top, total, acc_more, top_more, total_more):
    """Combine two partial softmaxes: numerators ``[M, K]``, maximum scores (base 2) and denominators ``[M]``."""
    highest = tl.maximum(top, top_more)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    a, b = tl.exp2(top - safe), tl.exp2(top_more - safe)
    total = tl.fma(total, a, total_more * b)
    acc = tl.fma(acc, tl.broadcast_to(a[:, None], acc.shape), acc_more * b[:, None])
    return acc, highest, total


@triton.jit
def _finish(out_ptr, lse_ptr, at, live, channel, acc, top, total, K: tl.constexpr, HAS_LSE: tl.constexpr):
    """Write a tile's results; rows with no visible position are zeros, with a log-sum-exp of -inf."""
    blind = total == 0.0
    rows = acc / tl.where(blind, 1.0, total)[:, None]
    mask = live[:, None] & (channel < K)[None, :]
    tl.store(out_ptr + at[:, None] * K + channel[None, :], rows.to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_LSE:
        ln2: tl.constexpr = 0.6931471805599453
        lse = (top + tl.log2(tl.where(blind, 1.0, total))) * ln2
        tl.store(lse_ptr + at, tl.where(blind, float("-inf"), lse), mask=live)


@triton.jit
def _slots(
    table_ptr, start, n, seen, table_width, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE_PAGES: tl.constexpr
):  # fmt: skip
    """Slots and pages (int64) of the positions ``n`` (a block from ``start``) by a request's page table."""
    if WHOLE_PAGES:  # blocks begin at page boundaries
        listed = start // PAGE + tl.arange(0, BLOCK_N // PAGE)
        pages = tl.load(table_ptr + listed, mask=listed < table_width, other=0)
        slot = tl.reshape((pages.to(tl.int64) * PAGE)[:, None] + tl.arange(0, PAGE)[None, :], (BLOCK_N,))
        page = slot // PAGE
    else:
        page = tl.load(table_ptr + n // PAGE, mask=seen, other=0).to(tl.int64)
        slot = page * PAGE + n % PAGE
    return slot, page


@triton.jit
def _scores(q, k, n, limit, end, scale, WINDOW: tl.constexpr, CAP: tl.constexpr):
    """Scores in base 2, -inf at positions ``n`` that a row does not attend to."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAP != 0:
        ln2: tl.constexpr = 0.6931471805599453
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is exact in both limits
        scores = (CAP / ln2) * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / CAP)) + 1.0))
    seen = n[None, :] < limit[:, None]
    if WINDOW:
        seen = seen & (n[None, :] >= end[:, None] - WINDOW)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _accumulate(acc, top, total, scores, v):
    """Add a block of positions to a partial softmax (see ``_fold``)."""
    highest = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, highest, total


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, acc_ptr, stats_ptr, programs_ptr, table_ptr, limit_ptr, end_ptr,
    table_width, scale,
    k_scale_ptr, k_low_ptr, k_kept_ptr, k_kept_at_ptr, v_scale_ptr, v_low_ptr, v_kept_ptr, v_kept_at_ptr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr,
    K_KIND: tl.constexpr, K_PER: tl.constexpr, K_KEPT: tl.constexpr,
    V_KIND: tl.constexpr, V_PER: tl.constexpr, V_KEPT: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_END: tl.constexpr, HAS_LSE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    WHOLE_PAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Process one tile of rows over one split or all of them. ``scale``: of the scores, in base 2."""
    GROUP: tl.constexpr = HEADS // GROUPS
    record = programs_ptr + tl.program_id(0) * 8
    group = tl.program_id(1)
    first_row, rows, first, request = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    length, split_begin, split_end = tl.load(record + 4), tl.load(record + 5), tl.load(record + 6)
    partial = tl.load(record + 7)

    m = first + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_K)
    row = m // GROUP
    live = row < rows
    at = (first_row + row).to(tl.int64) * HEADS + group * GROUP + m % GROUP
    q = tl.load(q_ptr + at[:, None] * K + channel[None, :], mask=live[:, None] & (channel < K)[None, :], other=0.0)
    limit = tl.where(live, length, 0)
    if HAS_LIMIT:
        limit = tl.minimum(limit, tl.load(limit_ptr + first_row + row, mask=live, other=0).to(tl.int32))
    last = tl.max(limit, 0)
    begin = 0
    end = limit
    if HAS_END:
        end = tl.minimum(limit, tl.load(end_ptr + first_row + row, mask=live, other=0).to(tl.int32))
    if WINDOW:  # skip blocks left of the first row's window: they would add exact zeros
        least = tl.min(tl.where(live, end, length), 0)
        begin = tl.maximum(least - WINDOW, 0) // BLOCK_N * BLOCK_N

    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for split in range(split_begin, split_end):
        acc_s = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        top_s = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total_s = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(tl.maximum(split * SPLIT, begin), tl.minimum(split * SPLIT + SPLIT, last), BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            seen = n < last
            slot, page = _slots(
                table_ptr + request * table_width, start, n, seen, table_width, PAGE, BLOCK_N, WHOLE_PAGES
            )
            k = read_pages(
                k_ptr, k_scale_ptr, k_low_ptr, k_kept_ptr, k_kept_at_ptr, slot, page, group, seen, channel,
                GROUPS, K, K_KIND, K_PER, K_KEPT,
            ).to(q.dtype)  # fmt: skip
            v = read_pages(
                v_ptr, v_scale_ptr, v_low_ptr, v_kept_ptr, v_kept_at_ptr, slot, page, group, seen, channel,
                GROUPS, K, V_KIND, V_PER, V_KEPT,
            ).to(q.dtype)  # fmt: skip
            scores = _scores(q, k, n, limit, end, scale, WINDOW, CAP)
            acc_s, top_s, total_s = _accumulate(acc_s, top_s, total_s, scores, v)
        acc, top, total = _fold(acc, top, total, acc_s, top_s, total_s)

    if partial < 0:
        _finish(out_ptr, lse_ptr, at, live, channel, acc, top, total, K, HAS_LSE)
    else:
        here = (partial.to(tl.int64) * GROUPS + group) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(acc_ptr + here[:, None] * BLOCK_K + channel[None, :], acc, mask=live[:, None])
        tl.store(stats_ptr + here * 2, top, mask=live)
        tl.store(stats_ptr + here * 2 + 1, total, mask=live)


@triton.jit
def _combine(
    out_ptr, lse_ptr, acc_ptr, stats_ptr, folds_ptr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, HAS_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """Combine the splits of FOLDED rows of a tile in order."""
    GROUP: tl.constexpr = HEADS // GROUPS
    record = folds_ptr + tl.program_id(0) * 8
    group = tl.program_id(1)
    first_row, rows, first = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    partial, count = tl.load(record + 3), tl.load(record + 4)
    of_tile = tl.program_id(2) * FOLDED + tl.arange(0, FOLDED)
    m = first + of_tile
    channel = tl.arange(0, BLOCK_K)
    row = m // GROUP
    live = row < rows
    acc = tl.zeros((FOLDED, BLOCK_K), tl.float32)
    top = tl.full((FOLDED,), float("-inf"), tl.float32)
    total = tl.zeros((FOLDED,), tl.float32)
    for i in range(count):
        here = ((partial + i).to(tl.int64) * GROUPS + group) * BLOCK_M + of_tile
        acc_s = tl.load(acc_ptr + here[:, None] * BLOCK_K + channel[None, :], mask=live[:, None], other=0.0)
        top_s = tl.load(stats_ptr + here * 2, mask=live, other=float("-inf"))
        total_s = tl.load(stats_ptr + here * 2 + 1, mask=live, other=0.0)
        acc, top, total = _fold(acc, top, total, acc_s, top_s, total_s)
    at = (first_row + row).to(tl.int64) * HEADS + group * GROUP + m % GROUP
    _finish(out_ptr, lse_ptr, at, live, channel, acc, top, total, K, HAS_LSE)


def cached_attention(
    q_THK: Tensor,
    k_PSGK: Tensor | QuantizedPages,
    v_PSGK: Tensor | QuantizedPages,
    ragged: Ragged | FixedBatch,
    *,
    lse_TH: Tensor | None = None,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """See ``reference.cached_attention``."""
    heads, head_size = q_THK.shape[1:]
    page, groups = k_PSGK.shape[1:3]
    quantized = isinstance(k_PSGK, QuantizedPages)
    gpu = gpu_of(q_THK.device)
    sizes = tiling(q_THK.dtype, head_size, quantized=quantized, backend=gpu, windowed=window > 0)
    if lse_TH is not None and not (lse_TH.is_contiguous() and lse_TH.dtype == torch.float32):
        raise ValueError("lse_TH is filled in place: it must be contiguous, and fp32")
    q_THK, out = q_THK.contiguous(), torch.empty_like(q_THK, memory_format=torch.contiguous_format)
    if not len(q_THK):
        return out
    k_PSGK, v_PSGK = (x if isinstance(x, QuantizedPages) else x.contiguous() for x in (k_PSGK, v_PSGK))
    if isinstance(ragged, FixedBatch):
        plan = fixed_schedule(ragged, heads // groups, groups, sizes, page)
        out.zero_()  # rows of no request, not written by any program
        if lse_TH is not None:
            lse_TH.fill_(-torch.inf)
    else:
        plan = schedule(ragged, heads // groups, groups, sizes)
    block_k = max(16, triton.next_power_of_2(head_size))
    partial = q_THK.new_empty((plan.partials, groups, sizes.block_m, block_k), dtype=torch.float32)
    stats = q_THK.new_empty((plan.partials, groups, sizes.block_m, 2), dtype=torch.float32)
    shared = {
        "HEADS": heads,
        "GROUPS": groups,
        "K": head_size,
        "HAS_LSE": lse_TH is not None,
        "BLOCK_M": sizes.block_m,
        "BLOCK_K": block_k,
    }
    end = ragged.window_end if window and isinstance(ragged, Ragged) else None
    if len(plan.programs):
        _attend[(len(plan.programs), groups)](
            q_THK, _codes(k_PSGK), _codes(v_PSGK), out, out if lse_TH is None else lse_TH, partial, stats,
            plan.programs, plan.table, plan.table if ragged.kv_limit is None else ragged.kv_limit.contiguous(),
            plan.table if end is None else end.contiguous(),
            plan.table.shape[1], head_size**-0.5 / math.log(2), *_parts(k_PSGK), *_parts(v_PSGK),
            **_kinds(k_PSGK, v_PSGK), PAGE=page, HAS_LIMIT=ragged.kv_limit is not None, HAS_END=end is not None,
            WINDOW=window, CAP=cap, WHOLE_PAGES=_whole_pages(page, sizes, quantized), BLOCK_N=sizes.block_n,
            SPLIT=sizes.split, num_warps=sizes.num_warps, num_stages=sizes.num_stages, **shared,
        )  # fmt: skip
    if len(plan.folds):
        _combine[(len(plan.folds), groups, sizes.block_m // FOLDED)](
            out, out if lse_TH is None else lse_TH, partial, stats, plan.folds, FOLDED=FOLDED, num_warps=4, **shared
        )
    return out


def _whole_pages(page: int, sizes: Tiling, quantized: bool) -> bool:
    """Whether a block of positions consists of whole pages, so that each page is looked up once."""
    return not quantized and sizes.block_n % page == 0


def _codes(pages: Tensor | QuantizedPages) -> Tensor:
    return pages.codes if isinstance(pages, QuantizedPages) else pages


def _parts(pages: Tensor | QuantizedPages) -> tuple[Tensor, ...]:
    """The arguments of ``read_pages`` besides the codes; for plain pages, placeholders."""
    if not isinstance(pages, QuantizedPages):
        return (pages,) * 4
    return tuple(pages.scale if x is None else x for x in (pages.scale, pages.low, pages.kept, pages.kept_at))


def _kinds(k: Tensor | QuantizedPages, v: Tensor | QuantizedPages) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, pages in (("K", k), ("V", v)):
        out[f"{name}_KIND"] = pages.kind if isinstance(pages, QuantizedPages) else "plain"
        out[f"{name}_PER"] = pages.per if isinstance(pages, QuantizedPages) else "none"
        out[f"{name}_KEPT"] = isinstance(pages, QuantizedPages) and pages.kept is not None
    return out


def variants() -> Iterator[Variant]:
    """Every tiling, with all options that cost registers, for 28 query heads over 4 and pages of 16.

    Windows and caps are separate variants, for plain pages and NVIDIA: on gfx942 they spill (108 bytes).
    """
    quantized = product(LEVELS, ("channel", "token"))
    gpus = ("cuda", "sm_90", "hip")
    choices = product(("bf16", "fp16", "fp32"), (64, 128, 256), (("plain", "none"), *quantized), gpus)
    for name, head_size, (kind, keys_per), backend in choices:
        if kind != "plain" and head_size > QUANTIZED_HEAD_SIZE:
            continue
        sizes = tiling(_DTYPES[name], head_size, quantized=kind != "plain", backend=backend)
        if backend == "sm_90" and sizes == tiling(_DTYPES[name], head_size, quantized=kind != "plain"):
            continue  # as on NVIDIA's others
        shared = {"HEADS": 28, "GROUPS": 4, "K": head_size, "HAS_LSE": True}
        shared |= {"BLOCK_M": sizes.block_m, "BLOCK_K": head_size}
        label = f"{name} {head_size}" + ("" if kind == "plain" else f" over {kind}, keys by {keys_per}")
        results = {"out_ptr": f"*{name}"} | dict.fromkeys(("lse_ptr", "acc_ptr", "stats_ptr"), "*fp32")
        launch = (sizes.num_warps, sizes.num_stages, backend)
        constants = shared | _settings(sizes, kind, keys_per)
        yield Variant(f"attend {label}", _attend, results | _types(name, kind), constants, *launch)
        if kind == "plain" and backend == "cuda":
            sizes = tiling(_DTYPES[name], head_size, windowed=True)
            windowed = constants | _settings(sizes, kind, keys_per) | {"WINDOW": 1024, "CAP": 50.0, "HAS_END": True}
            windowed["BLOCK_M"], own = sizes.block_m, (sizes.num_warps, sizes.num_stages, backend)
            yield Variant(f"attend {label}, windowed", _attend, results | _types(name, kind), windowed, *own)
        if kind == "plain":
            folds = {"folds_ptr": "*i32"}
            yield Variant(f"combine {label}", _combine, results | folds, shared | {"FOLDED": FOLDED}, backend=backend)


def _types(name: str, kind: str) -> dict[str, str]:
    """Types of the arguments of ``_attend``."""
    types = {"q_ptr": f"*{name}", "programs_ptr": "*i32", "table_ptr": "*i32", "limit_ptr": "*i64"}
    types |= {"end_ptr": "*i64"}
    for x in ("k", "v"):
        types |= {f"{x}_ptr": f"*{name}" if kind == "plain" else "*u8"}
        types |= {f"{x}_kept_ptr": f"*{name}", f"{x}_kept_at_ptr": "*i32"}
        types |= {f"{x}_scale_ptr": "*fp32", f"{x}_low_ptr": "*fp32"}
    return types | {"table_width": "i32", "scale": "fp32"}


def _settings(sizes: Tiling, kind: str, keys_per: str) -> dict[str, Any]:
    """Constants of ``_attend``; keys have a range a channel (KIVI) or a token (as in the K/V store), values one a
    token."""
    ranges = {"K_KIND": kind, "K_PER": keys_per, "V_KIND": kind, "V_PER": "token"}
    kept = {"K_KEPT": kind != "plain", "V_KEPT": kind != "plain"}
    blocks = {"PAGE": 16, "HAS_LIMIT": True, "HAS_END": False, "BLOCK_N": sizes.block_n, "SPLIT": sizes.split}
    whole = {"WHOLE_PAGES": _whole_pages(16, sizes, kind != "plain")}
    return blocks | whole | {"WINDOW": 0, "CAP": 0.0} | ranges | kept
