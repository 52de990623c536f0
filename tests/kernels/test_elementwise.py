"""RMS norm and SiLU of rows: right to the last bits, and the same whatever is beside a row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mmserve_kernels.elementwise import rms_norm, silu, takes

EPS = torch.finfo(torch.float32).eps


@torch.inference_mode()
@pytest.mark.parametrize("width", [1, 15, 16, 17, 288, 1000])
def test_rms_norm(width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    x, weight = torch.randn(3, 40, width, generator=draw), torch.randn(width, generator=draw)
    made, exact = rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    assert ((made - exact).abs() <= 8 * EPS * exact.abs()).all()
    for rows in (1, 2, 7, 39):
        assert torch.equal(rms_norm(x[1, -rows:], weight, 1e-5), made[1, -rows:])
    joint = torch.randn(5, 3 * width, generator=draw)
    part = joint[:, width : 2 * width]
    assert torch.equal(rms_norm(part, weight, 1e-5), rms_norm(part.contiguous(), weight, 1e-5)), "a view"
    assert rms_norm(x[:, :0], weight, 1e-5).shape == (3, 0, width)


@torch.inference_mode()
def test_silu() -> None:
    x = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0, 1e30, -1e30, torch.inf, -86.9, -87.1])])
    made, exact = silu(x), F.silu(x.double())
    assert torch.allclose(made.double(), exact, rtol=4 * EPS, atol=1e-35)
    assert torch.equal(torch.cat([silu(one) for one in x.split(1)]), made)
    assert silu(torch.tensor([torch.nan])).isnan().all()
    assert silu(x.view(8, 501)[:, 3:100]).shape == (8, 97)


def test_only_plain_numbers_on_a_cpu_are_taken() -> None:
    assert not takes(torch.ones(2)), "gradients may be wanted"
    with torch.inference_mode():
        assert takes(torch.ones(2))
        assert not takes(torch.ones(2, dtype=torch.bfloat16))
        assert not takes(torch.ones(2, device="meta"))
