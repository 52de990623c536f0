"""``rope_scatter`` in Triton: each new query, key and value is read once and written once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmserve_kernels.aot import Variant

#: Heads that a program rotates at once.
BLOCK_HEADS = 4


@triton.jit
def _turn(
    x_ptr, out_ptr, cos, sin,
    HEADS: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Write a row's heads ``[HEADS, K]``, with their first 2 × HALF dimensions rotated. HALF = 0: unchanged."""
    for start in tl.static_range(0, HEADS, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS))[:, None]
        if HALF:
            i = tl.arange(0, BLOCK_HALF)[None, :]
            mask = (head < HEADS) & (i < HALF)
            first = tl.load(x_ptr + head * K + i, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(x_ptr + head * K + HALF + i, mask=mask, other=0.0).to(tl.float32)
            kind = out_ptr.dtype.element_ty
            tl.store(out_ptr + head * K + i, (first * cos - second * sin).to(kind), mask=mask)
            tl.store(out_ptr + head * K + HALF + i, (second * cos + first * sin).to(kind), mask=mask)
        if 2 * HALF < K:
            i = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            mask = (head < HEADS) & (i < K)
            rest = tl.load(x_ptr + head * K + i, mask=mask, other=0.0)
            tl.store(out_ptr + head * K + i, rest.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_scatter(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_pages_ptr, v_pages_ptr, slots_ptr, out_ptr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Process one row's queries, keys or values: program (row, 0, 1 or 2)."""
    row = tl.program_id(0).to(tl.int64)
    what = tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + row * 2 * HALF + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * 2 * HALF + i, mask=i < HALF, other=0.0)[None, :]
    slot = tl.load(slots_ptr + row) * GROUPS * K
    if what == 0:
        _turn(
            q_ptr + row * HEADS * K, out_ptr + row * HEADS * K, cos, sin,
            HEADS, K, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    elif what == 1:
        _turn(
            k_ptr + row * GROUPS * K, k_pages_ptr + slot, cos, sin,
            GROUPS, K, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        _turn(
            v_ptr + row * GROUPS * K, v_pages_ptr + slot, cos, sin,
            GROUPS, K, 0, BLOCK_HEADS, BLOCK_HALF, BLOCK_K,
        )  # fmt: skip


def rope_scatter(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    cos_T1W: Tensor,
    sin_T1W: Tensor,
    k_PSGK: Tensor,
    v_PSGK: Tensor,
    slots: Tensor,
) -> Tensor:
    """See ``reference.rope_scatter``; raises ``ValueError`` for pages that are not contiguous."""
    if not (k_PSGK.is_contiguous() and v_PSGK.is_contiguous()):
        raise ValueError("pages are written in place: they must be contiguous, so give the store's own tensors")
    rows, heads, head_size = q_THK.shape
    out = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
    if rows:
        _rope_scatter[(rows, 3)](
            q_THK.contiguous(), k_TGK.contiguous(), v_TGK.contiguous(), cos_T1W.contiguous(), sin_T1W.contiguous(),
            k_PSGK, v_PSGK, slots.contiguous(), out,
            **_constants(heads, k_TGK.shape[1], head_size, cos_T1W.shape[-1]), num_warps=4,
        )  # fmt: skip
    return out


def _constants(heads: int, groups: int, head_size: int, width: int) -> dict[str, int]:
    return {
        "HEADS": heads,
        "GROUPS": groups,
        "K": head_size,
        "HALF": width // 2,
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_HALF": triton.next_power_of_2(width // 2),
        "BLOCK_REST": triton.next_power_of_2(max(1, head_size - width)),
        "BLOCK_K": triton.next_power_of_2(head_size),
    }


def variants() -> Iterator[Variant]:
    """Full and partial rotation (half of the dimensions) for each dtype, for 28 query heads over 4."""
    for dtype in ("bf16", "fp16", "fp32"):
        for head_size in (64, 128, 256):
            for width in (head_size, head_size // 2):
                names = ("q_ptr", "k_ptr", "v_ptr", "k_pages_ptr", "v_pages_ptr", "out_ptr")
                types = dict.fromkeys(names, f"*{dtype}") | {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
                yield Variant(
                    f"rope_scatter {dtype} {head_size}, {width} turned",
                    _rope_scatter,
                    types | {"slots_ptr": "*i64"},
                    _constants(28, 4, head_size, width),
                )
