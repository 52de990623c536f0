"""Quantised pages: their error against the step of their range, by the reference and by the kernel, and their use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attention_cases import build, plain, plain_lse
from hypothesis import given, settings
from hypothesis import strategies as st
from mmserve_kernels.cached_attention import cpu as attention_cpu
from mmserve_kernels.cached_attention import kernel as attention_kernel
from mmserve_kernels.cached_attention import reference as attention_reference
from mmserve_kernels.cached_attention.tiles import Tiling
from mmserve_kernels.kv_quant import (
    QuantizedPages,
    dequantize,
    keep,
    kernel,
    reference,
)
from triton_harness import DEVICE, assert_near, poisoned, runs_kernels

pytestmark = runs_kernels
IMPLEMENTATIONS = {"pytorch": reference.kv_quant, "triton": kernel.kv_quant}
KINDS = ["int8", "int4", "fp8"]
RANGES = ["channel", "token"]
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])

implementations = pytest.mark.parametrize("kv_quant", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
Quantize = Callable[..., QuantizedPages]


def poisoned_pages(
    filled: list[int], page_size: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """Random pages of which only so many positions are filled; channels differ in size and centre, as keys do."""
    draw = torch.Generator().manual_seed(seed)
    pages = poisoned(len(filled), page_size, heads, head_dim, dtype=dtype)
    for page, count in enumerate(filled):
        size, centre = torch.rand(heads, head_dim, generator=draw) * 3, torch.randn(heads, head_dim, generator=draw)
        x = torch.randn(count, heads, head_dim, generator=draw) * size + centre
        pages[page, :count] = x.to(dtype).to(DEVICE)
    return pages


def check(kv_quant: Quantize, x: torch.Tensor, filled: list[int], kind: str, per: str) -> QuantizedPages:
    """Every filled value is within half a step of itself: of its range's 255 or 15, or of its own 3-bit fraction."""
    pages = kv_quant(x, torch.tensor(filled, device=DEVICE), kind=kind, per=per)
    assert pages.shape == x.shape
    assert pages.codes.dtype == torch.uint8
    back = dequantize(pages)
    for page, count in enumerate(filled):
        exact, got = x[page, :count].double(), back[page, :count].double()
        if not count:
            continue
        axis = 0 if per == "channel" else -1
        if kind == "fp8":
            largest = exact.abs().amax(axis, keepdim=True)
            half_step = torch.maximum(exact.abs() / 16, largest / 448 / 1024)
        else:
            span = exact.amax(axis, keepdim=True) - exact.amin(axis, keepdim=True)
            half_step = span / {"int8": 255, "int4": 15}[kind] / 2
        assert ((got - exact).abs() <= half_step * 1.001 + 1e-6).all()
    return pages


@implementations
@pytest.mark.parametrize("per", RANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_within_half_a_step(kv_quant: Quantize, kind: str, per: str) -> None:
    filled = [16, 1, 0, 9]
    x = poisoned_pages(filled, 16, 2, 24, torch.bfloat16)
    pages = check(kv_quant, x, filled, kind, per)
    assert dequantize(pages)[torch.arange(16)[None] < torch.tensor(filled)[:, None]].isfinite().all()


@implementations
@settings(max_examples=15)
@given(
    filled=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    slack=st.integers(0, 5),
    heads=st.integers(1, 3),
    half=st.integers(1, 40),
    kind=st.sampled_from(KINDS),
    per=st.sampled_from(RANGES),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_any_shape(
    kv_quant: Quantize,
    filled: list[int],
    slack: int,
    heads: int,
    half: int,
    kind: str,
    per: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x = poisoned_pages(filled, max(1, *filled, 0) + slack, heads, 2 * half, dtype, seed)
    check(kv_quant, x, filled, kind, per)


@pytest.mark.parametrize("per", RANGES)
def test_fp8_codes_are_those_of_pytorch(per: str) -> None:
    """Bit for bit: the kernel rounds by hand. The largest of each range makes the scale a power of two."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    between = (numbers[1:] + numbers[:-1]) / 2  # ties too
    values = torch.cat([numbers, between[between.isfinite()], torch.randn(18) * 100]).clamp(-448, 448)
    x = torch.cat([values, torch.zeros(-len(values) % 31)]).view(1, -1, 1, 31)
    x = torch.cat([x, torch.full((*x.shape[:3], 1), 448.0)], dim=-1)  # a token's largest
    x = torch.cat([x, torch.full((1, 1, 1, 32), 448.0)], dim=1).to(DEVICE)  # a channel's largest
    filled = torch.tensor([x.shape[1]], device=DEVICE)
    mine, theirs = (quantize(x, filled, kind="fp8", per=per) for quantize in IMPLEMENTATIONS.values())
    assert torch.equal(mine.scale, theirs.scale)
    # 0 and -0 are the same number
    decoded = [pages.codes.view(torch.float8_e4m3fn).float() for pages in (mine, theirs)]
    assert torch.equal(*decoded)


def test_fewer_bits_take_less_memory() -> None:
    x = torch.randn(4, 16, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    filled = torch.full((4,), 16)
    sizes = [reference.kv_quant(x, filled, kind=kind, per="token").bytes for kind in ("int8", "int4")]
    assert sizes[1] < sizes[0] < x.nbytes


def test_keys_with_large_channels_want_a_range_a_channel() -> None:
    x = torch.randn(2, 16, 2, 64, generator=torch.Generator().manual_seed(0))
    x[..., 5] *= 30
    filled = torch.full((2,), 16)
    errors = {per: (dequantize(reference.kv_quant(x, filled, kind="int4", per=per)) - x).abs().mean() for per in RANGES}
    assert errors["channel"] < errors["token"] / 2


@implementations
@pytest.mark.parametrize(
    ("kind", "per", "message"), [("int2", "token", "int8, int4, fp8"), ("int8", "head", "channel or token")]
)
def test_what_there_is_not_is_refused(kv_quant: Quantize, kind: str, per: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_quant(torch.zeros(1, 1, 1, 2), torch.ones(1), kind=kind, per=per)


def test_an_odd_head_size_is_refused_in_4_bits() -> None:
    with pytest.raises(ValueError, match="even, not 3"):
        reference.kv_quant(torch.zeros(1, 1, 1, 3), torch.ones(1), kind="int4", per="token")


def test_the_kernel_refuses_quantised_pages_of_larger_heads() -> None:
    x = torch.zeros(1, 1, 1, 256)
    pages = reference.kv_quant(x, torch.ones(1), kind="int8", per="token")
    one = build([(1, 1)], 1, "mha").ragged
    with pytest.raises(ValueError, match="up to 128 dimensions, not 256"):
        attention_kernel.cached_attention(x[0], pages, pages, one)


def test_kept_tokens_come_back_as_they_were() -> None:
    x = torch.randn(3, 4, 2, 8, generator=torch.Generator().manual_seed(0))
    rough = reference.kv_quant(x, torch.full((3,), 4), kind="int4", per="token")
    slots = torch.tensor([1, 6, 11])
    back = dequantize(keep(rough, x, slots)).flatten(0, 1)
    assert torch.equal(back[slots], x.flatten(0, 1)[slots])
    others = torch.ones(12, dtype=torch.bool)
    others[slots] = False
    assert torch.equal(back[others], dequantize(rough).flatten(0, 1)[others])
    assert not torch.equal(back[others], x.flatten(0, 1)[others])
    assert torch.equal(dequantize(keep(rough, x, slots[:0])), dequantize(rough))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [False, True])
def test_attention_over_quantised_pages_is_attention_over_what_they_stand_for(
    kind: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernel, "tiling", lambda *_, **__: Tiling(32, 32, 64, 4, 1))
    case = build([(5, 100), (1, 33)], 16, "gqa", kv_limit="block", dtype=torch.bfloat16)
    filled = torch.zeros(len(case.k_pages), dtype=torch.int64)
    for length, table in zip(case.ragged.kv_lengths, case.ragged.page_tables, strict=True):
        filled[table] = (length - torch.arange(len(table)) * 16).clamp(max=16)
    k = reference.kv_quant(case.k_pages, filled, kind=kind, per="channel")
    v = reference.kv_quant(case.v_pages, filled, kind=kind, per="token")
    if kept:
        some = torch.cat([table[:2] * 16 + 3 for table in case.ragged.page_tables])
        k, v = keep(k, case.k_pages, some), keep(v, case.v_pages, some)
    exact = attention_reference.cached_attention(case.q.float(), dequantize(k), dequantize(v), case.ragged)
    assert_near(attention_cpu.cached_attention(case.q, k, v, case.ragged), exact, torch.bfloat16)
    on = {name: _moved(pages) for name, pages in (("k", k), ("v", v))}
    ragged = replace(
        case.ragged,
        page_tables=tuple(table.to(DEVICE) for table in case.ragged.page_tables),
        slots=case.ragged.slots.to(DEVICE),
        kv_limit=case.ragged.kv_limit.to(DEVICE),
    )
    out = attention_kernel.cached_attention(case.q.to(DEVICE), on["k"], on["v"], ragged)
    assert_near(out, exact, torch.bfloat16)


lengths = st.integers(1, 70)
requests = lengths.flatmap(lambda length: st.tuples(st.integers(0, min(length, 9)), st.just(length)))


@pytest.mark.parametrize("path", ["reference", "cpu", "kernel"])
@settings(max_examples=8)
@given(data=st.data())
def test_attention_over_any_quantised_pages(path: str, data: st.DataObject) -> None:
    """Every kind, range, dtype and page size, with and without kept tokens, in order or not, against fp64."""
    draw = data.draw
    batch = draw(st.lists(requests, min_size=1, max_size=3).filter(lambda batch: any(rows for rows, _length in batch)))
    page, heads, dtype = draw(st.sampled_from([1, 7, 16])), draw(st.sampled_from(["mha", "gqa"])), draw(DTYPES)
    options = {
        "kv_limit": draw(st.sampled_from([None, "causal", "block"])),
        "head_dim": draw(st.sampled_from([16, 24])),
    }
    case = build(
        batch, page, heads, **options, dtype=dtype, in_order=draw(st.booleans()), seed=draw(st.integers(0, 99))
    )
    filled = torch.zeros(len(case.k_pages), dtype=torch.int64)
    for length, table in zip(case.ragged.kv_lengths, case.ragged.page_tables, strict=True):
        filled[table] = (length - torch.arange(len(table)) * page).clamp(max=page)
    kind, kept = draw(st.sampled_from(KINDS)), draw(st.booleans())
    pair = []
    for x in (case.k_pages, case.v_pages):
        pages = reference.kv_quant(x, filled, kind=kind, per=draw(st.sampled_from(RANGES)))
        first = torch.cat([table[:2] * page for table in case.ragged.page_tables])  # each page's first token
        pair.append(keep(pages, x, first) if kept else pages)
    case.keys, case.values = (
        [
            dequantize(pages.select(table)).flatten(0, 1)[:length].to(dtype).float()
            for table, length in zip(case.ragged.page_tables, case.ragged.kv_lengths, strict=True)
        ]
        for pages in pair
    )
    lse = poisoned(*case.q.shape[:2])
    if path != "kernel":
        lse = lse.cpu()
        op = attention_reference if path == "reference" else attention_cpu
        out = op.cached_attention(case.q, *pair, case.ragged, lse_TH=lse)
    else:
        limit = case.ragged.kv_limit
        ragged = replace(
            case.ragged,
            page_tables=tuple(table.to(DEVICE) for table in case.ragged.page_tables),
            slots=case.ragged.slots.to(DEVICE),
            kv_limit=None if limit is None else limit.to(DEVICE),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_kernel, "tiling", lambda *_, **__: Tiling(32, 32, 64, 4, 1))
            out = attention_kernel.cached_attention(case.q.to(DEVICE), *map(_moved, pair), ragged, lse_TH=lse)
    assert_near(out, plain(case), dtype)
    assert_near(lse, plain_lse(case), torch.float32, scale=8)


def _moved(pages: QuantizedPages) -> QuantizedPages:
    parts = ("codes", "scale", "low", "kept", "kept_at")
    return replace(pages, **{p: getattr(pages, p).to(DEVICE) for p in parts if getattr(pages, p) is not None})
