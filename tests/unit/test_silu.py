"""A row's bits on several threads: the same whatever the number of rows beside it, and as on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers import tiny_model

from mmserve.models.decoder import Decoder
from mmserve.models.packed import pack
from mmserve.models.silu import silu

ROWS, WIDTH = 256, 2048


@pytest.fixture(params=[2, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize("width", [768, WIDTH, 1568])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu(threads: int, dtype: torch.dtype, width: int) -> None:
    wide = torch.randn(ROWS, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = wide[:, :width]  # as a part of a joint product
    torch.set_num_threads(1)
    whole = silu(x)
    exact = torch.nn.functional.silu(x.double())
    assert ((whole - exact).abs() <= 4 * torch.finfo(dtype).eps * exact.abs()).all(), "as PyTorch's, to the last bits"
    torch.set_num_threads(threads)
    for rows in range(2, ROWS + 1, 6):
        assert torch.equal(silu(x[:rows]), whole[:rows]), rows
    assert torch.equal(silu(x.view(16, 16, width)), whole.view(16, 16, width))


@torch.inference_mode()
def test_a_layer_after_attention(threads: int) -> None:
    config = replace(tiny_model(vision=False).decoder.config, intermediate_size=WIDTH)
    torch.manual_seed(0)
    decoder = Decoder(config).eval()
    pack(decoder)
    x = torch.randn(ROWS, config.hidden_size)
    attended = torch.randn(ROWS, config.num_heads, config.head_dim)
    torch.set_num_threads(threads)
    whole = decoder.layers[0].after_attention(x, attended)
    for rows in range(16, ROWS, 16):
        assert torch.equal(decoder.layers[0].after_attention(x[:rows], attended[:rows]), whole[:rows]), rows
