"""The loop for few rows: a sum in fp64 says what is right, oneDNN's own product which bits."""

from __future__ import annotations

import pytest
import torch
from mmserve_kernels.few_rows import MOST_ROWS, blocks_of, few_rows, part_of

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="nothing is packed here")


def packed(columns: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(columns, width, generator=torch.Generator().manual_seed(width))
    return weight, torch.ops.mkldnn._reorder_linear_weight(weight, 16)


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("width", [1, 16, 17, 100, 288, 700, 2500])
@pytest.mark.parametrize("part", [512, 1024])
def test_every_row_is_the_product_in_whatever_parts(columns: int, width: int, part: int) -> None:
    weight, laid_out = packed(columns, width)
    blocks = blocks_of(laid_out, width, columns)
    if blocks is None:
        pytest.skip("oneDNN lays these weights out in another way here")
    assert torch.equal(torch.from_numpy(blocks[:, :width]).transpose(1, 2).reshape(-1, width)[:columns], weight)
    x = torch.randn(2, MOST_ROWS, width)
    made = few_rows(x, blocks, part, columns)
    exact = x.double() @ weight.double().T
    assert made.shape == (2, MOST_ROWS, columns)
    assert (made - exact).abs().max() < 1e-5 * width**0.5
    assert torch.equal(few_rows(x[1:, 2:3], blocks, part, columns), made[1:, 2:3]), "a row alone"
    assert few_rows(x[:, :0], blocks, part, columns).shape == (2, 0, columns)


@pytest.mark.parametrize(("columns", "width"), [(64, 288), (300, 768), (100, 4096), (1000, 64)])
def test_a_part_is_found_only_with_onednns_bits(columns: int, width: int) -> None:
    _weight, laid_out = packed(columns, width)
    blocks = blocks_of(laid_out, width, columns)
    part = None if blocks is None else part_of(laid_out, blocks, width, columns)
    if blocks is None or part is None:
        pytest.skip("oneDNN sums in another way here")
    x = torch.randn(200, width)
    whole = torch.ops.mkldnn._linear_pointwise(x, laid_out, None, "none", [], "")
    for size in range(1, MOST_ROWS + 1):
        assert torch.equal(few_rows(x[-size:], blocks, part, columns), whole[-size:])


def test_other_sums_are_not_taken_for_onednns() -> None:
    """Weights that lie otherwise give other sums: there is no part then."""
    _weight, laid_out = packed(128, 96)
    blocks = blocks_of(laid_out, 96, 128)
    if blocks is None:
        pytest.skip("oneDNN lays these weights out in another way here")
    assert part_of(laid_out, blocks[:, ::-1].copy(), 96, 128) is None


def test_what_lies_otherwise_is_left_to_onednn() -> None:
    assert blocks_of(packed(64, 64)[1], 128, 64) is None
    assert blocks_of(packed(64, 64)[1], 32, 64) is None
