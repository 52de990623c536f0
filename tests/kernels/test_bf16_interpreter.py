"""The mended interpreter computes with bfloat16 as PyTorch does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from bf16_interpreter import narrow, widen
from triton_harness import DEVICE, assert_near, poisoned, runs_kernels

pytestmark = runs_kernels


@triton.jit
def _arithmetic(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x, y = tl.load(x_ptr + n), tl.load(y_ptr + n)
    tl.store(out_ptr + n, x + y)
    tl.store(out_ptr + N + n, x * y)
    tl.store(out_ptr + 2 * N + n, tl.where(x < y, x, y))


@triton.jit
def _convert(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, tl.load(x_ptr + n).to(out_ptr.dtype.element_ty))


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    at = n[:, None] * N + n[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def test_sums_products_and_comparisons_are_bitwise_those_of_pytorch() -> None:
    x, y = (torch.randn(512, generator=torch.Generator().manual_seed(s)).bfloat16().to(DEVICE) for s in (0, 1))
    out = poisoned(3, 512, dtype=torch.bfloat16)
    _arithmetic[(1,)](x, y, out, N=512)
    assert torch.equal(out, torch.stack([x + y, x * y, torch.minimum(x, y)]))


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_conversions_are_bitwise_those_of_pytorch(source: torch.dtype, to: torch.dtype) -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(source).to(DEVICE)
    out = poisoned(1024, dtype=to)
    _convert[(1,)](x, out, N=1024)
    assert torch.equal(out, x.to(to))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrix_products_add_up_in_fp32(dtype: torch.dtype) -> None:
    a, b = (torch.randn(32, 32, generator=torch.Generator().manual_seed(s)).to(dtype).to(DEVICE) for s in (0, 1))
    out = poisoned(32, 32)
    _product[(1,)](a, b, out, N=32)
    assert_near(out, a.double() @ b.double(), torch.float32, scale=10)


def test_every_bfloat16_survives_and_halves_round_to_even() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = bits[~np.isnan(widen(bits))]
    assert np.array_equal(narrow(widen(numbers)), numbers)
    between = (np.array([0x3F80, 0x3F81], np.uint32) << 16) + 0x8000  # half way up to the next bfloat16
    assert narrow(between.view(np.float32)).tolist() == [0x3F80, 0x3F82]
