"""The rows of a request, and the blocks near them."""

from __future__ import annotations

import pytest
import torch
from mmserve_kernels.sparse_attention import Rows, sink_and_window
from sparse_cases import rows_of


def test_sink_and_window_by_its_definition() -> None:
    for causal in (True, False):
        rows = rows_of(83, causal=causal, block=16)
        position, other = torch.arange(83)[:, None], torch.arange(83)
        seen = other < rows.limits()[:, None]
        wanted = ((other < 20) | ((position - other).abs() < 9)) & seen
        assert torch.equal(sink_and_window(rows, 20, 9)[0], by_blocks(wanted, 16))
        assert torch.equal(sink_and_window(rows, 20, 0)[0], by_blocks((other < 20) & seen, 16))


def by_blocks(dense: torch.Tensor, block: int) -> torch.Tensor:
    """Which blocks of a boolean matrix hold anything."""
    pad = -len(dense) % block
    padded = torch.nn.functional.pad(dense, (0, -dense.shape[1] % block, 0, pad))
    return padded.unflatten(1, (-1, block)).any(-1).unflatten(0, (-1, block)).any(1)


def test_a_request_without_rows_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="empty mask"):
        Rows(torch.empty(0, dtype=torch.int64), 10)
