"""Rotation and the write into pages, by the reference and by the kernel, against rotations of the complex plane."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmserve_kernels.rope_scatter import by_axis, cpu, kernel, reference
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding, apply_rotary_pos_emb
from triton_harness import DEVICE, assert_near, poisoned, runs_kernels

from mmserve.models.rotary import Rotary

IMPLEMENTATIONS = {"pytorch": reference.rope_scatter, "cpu": cpu.rope_scatter, "triton": kernel.rope_scatter}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

implementations = pytest.mark.parametrize("rope_scatter", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
pytestmark = runs_kernels


def angles_of(positions: torch.Tensor, width: int) -> torch.Tensor:
    return positions[:, None].double() * 10_000.0 ** (-torch.arange(0, width, 2).double() / width)


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Dimensions i and i + width/2 as a complex number, turned by the i-th angle, in fp64."""
    half = angles.shape[-1]
    first, second, rest = x.double().cpu().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    out = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([out.real, out.imag, rest], dim=-1)


def check(
    rope_scatter: Callable[..., torch.Tensor],
    rows: int,
    heads: tuple[int, int],
    head_dim: int,
    width: int,
    page_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    query_heads, kv_heads = heads
    q = torch.randn(rows, query_heads, head_dim, generator=draw).to(dtype).to(DEVICE)
    k, v = (torch.randn(rows, kv_heads, head_dim, generator=draw).to(dtype).to(DEVICE) for _ in range(2))
    positions = torch.randperm(300, generator=draw)[:rows]
    pages = -(-rows // page_size) + 2
    slots = torch.randperm(pages * page_size, generator=draw)[:rows]
    k_pages, v_pages = (poisoned(pages, page_size, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    before = [x.clone() for x in (q, k, v)]
    angles = angles_of(positions, width)
    cos, sin = (table.float().repeat(1, 2)[:, None].to(DEVICE) for table in (angles.cos(), angles.sin()))
    out = rope_scatter(q, k, v, cos, sin, k_pages, v_pages, slots.to(DEVICE))
    assert_near(out, turned(q, angles), dtype, scale=4)
    assert_near(k_pages.flatten(0, 1)[slots], turned(k, angles), dtype, scale=4)
    assert torch.equal(v_pages.flatten(0, 1)[slots], v)
    for written in (k_pages, v_pages):
        assert int(written.isnan().sum()) == written.numel() - k.numel(), "poisoned places stay poisoned"
    for was, now in zip(before, (q, k, v), strict=True):
        assert torch.equal(was, now)


@implementations
@pytest.mark.parametrize(("rows", "dtype"), [(0, DTYPES[0]), (1, DTYPES[1]), (63, DTYPES[2]), (100, DTYPES[0])])
def test_agrees_with_rotation_of_the_plane(
    rope_scatter: Callable[..., torch.Tensor], rows: int, dtype: torch.dtype
) -> None:
    check(rope_scatter, rows, (6, 2), 16, 16, 16, dtype)


@implementations
@settings(max_examples=6)
@given(
    rows=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (6, 2), (9, 9), (28, 4)]),
    half=st.integers(1, 24),
    rest=st.sampled_from([0, 1, 2, 40]),
    page_size=st.integers(1, 33),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_any_shape_whole_or_in_part(
    rope_scatter: Callable[..., torch.Tensor],
    rows: int,
    heads: tuple[int, int],
    half: int,
    rest: int,
    page_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    check(rope_scatter, rows, heads, 2 * half + rest, 2 * half, page_size, dtype, seed)


@implementations
def test_several_axes_agree_with_transformers(rope_scatter: Callable[..., torch.Tensor]) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, head_dim, sections = 33, 32, [4, 6, 6]
    q, k = (torch.randn(rows, heads, head_dim, generator=draw) for heads in (6, 2))
    positions = torch.randint(0, 50, (3, rows), generator=draw)
    cos, sin = Rotary(head_dim, 10_000.0).table(positions)
    axes = torch.arange(3).repeat_interleave(torch.tensor(sections))
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    config = Qwen2_5_VLTextConfig(hidden_size=6 * head_dim, num_attention_heads=6, rope_parameters=rope)
    theirs = Qwen2_5_VLRotaryEmbedding(config)(q, positions[:, None])
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *theirs)
    k_pages, v_pages = (poisoned(3, 16, 2, head_dim) for _ in range(2))
    tables = (by_axis(cos, axes).to(DEVICE), by_axis(sin, axes).to(DEVICE))
    slots = torch.arange(rows)
    out = rope_scatter(q.to(DEVICE), k.to(DEVICE), k.to(DEVICE), *tables, k_pages, v_pages, slots.to(DEVICE))
    assert_near(out, expected_q[0].transpose(0, 1), torch.float32, scale=4)
    assert_near(k_pages.flatten(0, 1)[slots], expected_k[0].transpose(0, 1), torch.float32, scale=4)


@settings(max_examples=15)
@given(
    rows=st.integers(0, 40),
    heads=st.sampled_from([(1, 1), (6, 2), (9, 9), (28, 4)]),
    size=st.sampled_from([(16, 16), (48, 48), (64, 32), (128, 128), (10, 6)]),
    seed=st.integers(0, 99),
)
def test_the_loop_for_a_cpu_has_the_references_bits(
    rows: int, heads: tuple[int, int], size: tuple[int, int], seed: int
) -> None:
    """Whoever computes a page's keys: one pass over all rows, or one for each; of rows that lie apart, too."""
    draw, (head_dim, width) = torch.Generator().manual_seed(seed), size
    joint = torch.randn(rows, sum(heads) + heads[1], head_dim, generator=draw)
    fresh = joint.split([*heads, heads[1]], 1)
    angles = torch.randn(rows, 1, width // 2, generator=draw).repeat(1, 1, 2)
    slots = torch.randperm(64, generator=draw)[:rows]
    made = []
    for each in (reference.rope_scatter, cpu.rope_scatter):
        pages = [torch.zeros(4, 16, heads[1], head_dim) for _ in range(2)]
        made.append((each(*fresh, angles.cos(), angles.sin(), *pages, slots), *pages))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
