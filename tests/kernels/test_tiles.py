"""Sums in registers: a loop in plain Python says what is right, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from mmserve_kernels.compiled import compiled
from mmserve_kernels.tiles import COLUMNS, tile

_three = tile(3)


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], b1)")
def _add(x: np.ndarray, weights: np.ndarray, sums: np.ndarray, fresh: bool) -> None:
    at = weights.ctypes.data
    _three(x.ctypes.data, x.shape[1], at, len(weights), sums.ctypes.data, fresh, at)


def _fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a · b + c, rounded once: of fp32, the product of integers this small is exact in fp64, and so is the sum."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("fresh", [True, False])
def test_each_product_is_fused_with_its_sum_in_order(count: int, fresh: bool) -> None:
    draw = np.random.default_rng(count)
    x, weights = (draw.integers(-(1 << 20), 1 << 20, shape).astype(np.float32) for shape in ((3, 9), (count, COLUMNS)))
    sums = draw.integers(-(1 << 20), 1 << 20, (3, COLUMNS)).astype(np.float32) + np.float32(0.5)
    wanted = np.zeros_like(sums) if fresh else sums.copy()
    for k in range(count):
        for r in range(3):
            for c in range(COLUMNS):
                wanted[r, c] = _fused(x[r, k], weights[k, c], wanted[r, c])
    _add(x, weights, sums, fresh)
    assert np.array_equal(sums, wanted)
