"""The quick interpreter replaces Triton's builtins once a launch, however many device functions a kernel calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton_harness import DEVICE, INTERPRETED, poisoned, runs_kernels

pytestmark = runs_kernels


@triton.jit
def _sum(x):
    return tl.sum(x, 0)


@triton.jit
def _sums(x_ptr, out_ptr, N: tl.constexpr, TIMES: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    for i in range(TIMES):
        tl.store(out_ptr + i, _sum(x * i))


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels replace nothing")
def test_builtins_are_replaced_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[str] = []
    real = interpreter._patch_builtin

    def counted(package: Any, *rest: Any) -> None:
        replaced.append(package.__name__)
        real(package, *rest)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    x = torch.arange(16.0).to(DEVICE)
    each = []
    for times in (1, 1, 5):  # the first one reads the sources, too
        replaced.clear()
        out = poisoned(times)
        _sums[(1,)](x, out, N=16, TIMES=times)
        assert out.tolist() == [120.0 * i for i in range(times)]
        each.append(sorted(replaced))
    assert each[1] == each[2]
