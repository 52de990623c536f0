"""``kv_quant`` in Triton, and reading of quantized pages in kernels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmserve_kernels.aot import Variant
from mmserve_kernels.kv_quant.pages import LEVELS, QuantizedPages, checked


@triton.jit
def _to_e4m3(x):
    """E4M3 bits (uint8) of fp32 numbers up to ±448, rounded to nearest even, also on GPUs without fp8."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.abs(x)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((size * 512.0 + 8388608.0) - 8388608.0).to(tl.uint32)  # adding 2^23 rounds to an integer
    return (tl.where(size < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def _from_e4m3(bits):
    """fp32 numbers of E4M3 bits (uint8): as fp16 the same bits are 2^-8 times the number."""
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _divisor(scale, x):
    """``scale`` as a divisor of ``x`` with correctly rounded division, so that codes equal those of the reference. A
    GPU's default division may be off by two bits."""
    return tl.broadcast_to(tl.where(scale == 0.0, 1.0, scale), x.shape)


@triton.jit
def _quantize(
    x_ptr, filled_ptr, codes_ptr, scale_ptr, low_ptr,
    S: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, IS_FP8: tl.constexpr, PACKED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Quantize one head of one page."""
    page, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, channel = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_K)
    filled = tl.load(filled_ptr + page)
    there = (s < S)[:, None] & (channel < K)[None, :]
    valid = (s < filled)[:, None] & there
    at = (page * S + s) * GROUPS + group
    x = tl.load(x_ptr + at[:, None] * K + channel[None, :], mask=valid, other=0.0).to(tl.float32)
    axis: tl.constexpr = 0 if PER_CHANNEL else 1
    if IS_FP8:
        scale = tl.expand_dims(tl.div_rn(tl.max(tl.abs(x), axis), LEVELS * 1.0), axis)
        codes = _to_e4m3(tl.clamp(tl.div_rn(x, _divisor(scale, x)), -LEVELS, LEVELS))
    else:
        lowest = tl.min(tl.where(valid, x, float("inf")), axis)
        highest = tl.max(tl.where(valid, x, float("-inf")), axis)
        empty = lowest > highest
        low = tl.expand_dims(tl.where(empty, 0.0, lowest), axis)
        span = tl.where(empty, 0.0, highest) - tl.where(empty, 0.0, lowest)
        scale = tl.expand_dims(tl.div_rn(span, LEVELS * 1.0), axis)
        codes = tl.clamp(tl.floor(tl.div_rn(x - low, _divisor(scale, x)) + 0.5), 0.0, LEVELS)
        codes = tl.where(valid, codes, 0.0).to(tl.uint8)
    if PER_CHANNEL:
        range_at = (page * GROUPS + group) * K + channel[None, :]
        in_range = (channel < K)[None, :]
    else:
        range_at = at[:, None]
        in_range = (s < S)[:, None]
    tl.store(scale_ptr + range_at, scale, mask=in_range)
    if not IS_FP8:
        tl.store(low_ptr + range_at, low, mask=in_range)
    if PACKED:
        even, odd = tl.split(tl.reshape(codes, (BLOCK_S, BLOCK_K // 2, 2)))
        pair = tl.arange(0, BLOCK_K // 2)
        there = (s < S)[:, None] & (pair < K // 2)[None, :]
        tl.store(codes_ptr + at[:, None] * (K // 2) + pair[None, :], even | (odd << 4), mask=there)
    else:
        tl.store(codes_ptr + at[:, None] * K + channel[None, :], codes, mask=there)


@triton.jit
def read_pages(
    ptr, scale_ptr, low_ptr, kept_ptr, kept_at_ptr, slot, page, group, there, channel,
    GROUPS: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, PER: tl.constexpr, HAS_KEPT: tl.constexpr,
):  # fmt: skip
    """Keys or values ``[N, K]`` at ``slot [N]`` (page × S + offset) of ``page [N]``, zeros where ``there [N]`` is
    false.

    ``KIND``: ``plain``, or the kind of quantized pages with a range ``PER`` channel or token. Plain ones are returned
    in their own dtype, others in fp32.
    """
    i = channel[None, :]
    mask = there[:, None] & (i < K)
    at = (slot * GROUPS + group)[:, None]
    if KIND == "plain":
        x = tl.load(ptr + at * K + i, mask=mask, other=0.0)
    else:
        if KIND == "int4":
            codes = tl.load(ptr + at * (K // 2) + i // 2, mask=mask, other=0)
            codes = (codes >> ((i % 2) * 4).to(tl.uint8)) & 15
        else:
            codes = tl.load(ptr + at * K + i, mask=mask, other=0)
        x = _from_e4m3(codes) if KIND == "fp8" else codes.to(tl.float32)
        if PER == "channel":
            of_channel = (page * GROUPS + group)[:, None] * K + i
            x *= tl.load(scale_ptr + of_channel, mask=mask, other=0.0)
            if KIND != "fp8":
                x += tl.load(low_ptr + of_channel, mask=mask, other=0.0)
        else:
            x *= tl.load(scale_ptr + slot * GROUPS + group, mask=there, other=0.0)[:, None]
            if KIND != "fp8":
                x += tl.load(low_ptr + slot * GROUPS + group, mask=there, other=0.0)[:, None]
        if HAS_KEPT:
            row = tl.load(kept_at_ptr + slot, mask=there, other=-1).to(tl.int64)[:, None]
            kept = tl.load(kept_ptr + (row * GROUPS + group) * K + i, mask=mask & (row >= 0), other=0.0)
            x = tl.where(row >= 0, kept.to(tl.float32), x)
    return x


def kv_quant(x_PSGK: Tensor, filled_P: Tensor, *, kind: str, per: str) -> QuantizedPages:
    """See ``reference.kv_quant``."""
    pages, size, groups, head_size = x_PSGK.shape
    checked(kind, per, head_size)
    codes = x_PSGK.new_empty((pages, size, groups, head_size // (2 if kind == "int4" else 1)), dtype=torch.uint8)
    ranges = (pages, 1, groups, head_size) if per == "channel" else (pages, size, groups, 1)
    scale = x_PSGK.new_empty(ranges, dtype=torch.float32)
    low = None if kind == "fp8" else torch.empty_like(scale)
    if pages:
        _quantize[(pages, groups)](
            x_PSGK.contiguous(), filled_P.contiguous(), codes, scale, scale if low is None else low,
            **_constants(kind, per, size, groups, head_size), num_warps=4,
        )  # fmt: skip
    return QuantizedPages(kind, codes, scale, low)


def _constants(kind: str, per: str, page_size: int, groups: int, head_size: int) -> dict[str, Any]:
    return {
        "S": page_size,
        "GROUPS": groups,
        "K": head_size,
        "LEVELS": LEVELS[kind],
        "PER_CHANNEL": per == "channel",
        "IS_FP8": kind == "fp8",
        "PACKED": kind == "int4",
        "BLOCK_S": triton.next_power_of_2(page_size),
        "BLOCK_K": triton.next_power_of_2(head_size),
    }


def variants() -> Iterator[Variant]:
    """Every kind, range and dtype, of pages of 16 positions and 4 heads."""
    types = {"filled_ptr": "*i64", "codes_ptr": "*u8", "scale_ptr": "*fp32", "low_ptr": "*fp32"}
    choices = product(LEVELS, ("channel", "token"), (64, 128, 256), ("bf16", "fp16", "fp32"))
    for kind, per, head_size, dtype in choices:
        constants = _constants(kind, per, 16, 4, head_size)
        yield Variant(
            f"quantize {dtype} {head_size} to {kind} per {per}", _quantize, types | {"x_ptr": f"*{dtype}"}, constants
        )
