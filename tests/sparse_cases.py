"""Queries and keys whose attention has a known shape, and how much of it a mask of blocks keeps."""

from __future__ import annotations

import torch
from mmserve_kernels.attention_scores.reference import weights
from mmserve_kernels.sparse_attention import Rows, sink_and_window

HEADS, LENGTH, SIZE, BLOCK = 2, 1024, 32, 16


def rows_of(length: int = LENGTH, *, causal: bool = True, block: int = BLOCK) -> Rows:
    positions = torch.arange(length)
    return Rows(positions, length, positions + 1 if causal else None, block, block)


def structured(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys ``[L, HEADS, SIZE]`` whose attention has a known shape over noise."""
    generator = torch.Generator().manual_seed(11)
    q, k = (torch.randn(LENGTH, HEADS, SIZE, generator=generator) for _ in range(2))
    if kind == "needles":  # two stretches of keys that all queries look for
        q[:, :, 0] += 8
        for start in (20, 330):
            k[start : start + 12, :, 0] += 8
    elif kind == "vertical lines":  # single positions that every query looks at
        q[:, :, 0] += 8
        k[torch.tensor([2, 100, 257, 400, 555, 800]), :, 0] += 8
    elif (
        kind == "local bands"
    ):  # each position turns a little further than the last: near ones have the largest product
        angle = torch.arange(LENGTH) / 200
        turned = torch.stack([angle.cos(), angle.sin()], -1)[:, None] * 14
        q[:, :, :2], k[:, :, :2] = turned, turned
    elif kind == "blocks":  # topics that come and go: what a block's mean says well
        topics = torch.randn(8, SIZE, generator=generator) * 2
        of = torch.randint(8, (LENGTH // BLOCK,), generator=generator).repeat_interleave(BLOCK)
        q, k = q * 0.3 + topics[of][:, None], k * 0.3 + topics[of][:, None]
    return q, k


def kept(q: torch.Tensor, k: torch.Tensor, rows: Rows, mask: torch.Tensor) -> tuple[float, float]:
    """Share of the attention that the mask keeps, and share of the visible blocks that it names."""
    wide = mask.repeat_interleave(rows.q_block, 1).repeat_interleave(rows.kv_block, 2)
    wide = wide[:, : len(rows.positions), : rows.length]
    attention = weights(q, k, rows.limits(), None)
    return float((attention * wide).sum(-1).mean()), float(mask.sum() / (rows.visible().sum() * len(mask)))


def at_random(rows: Rows, density: float) -> torch.Tensor:
    """Blocks taken at random, as many of those there are, and each row's own."""
    generator = torch.Generator().manual_seed(1)
    visible = rows.visible()
    chosen = torch.rand(HEADS, *visible.shape, generator=generator) < density
    return (chosen | sink_and_window(rows, 0, 1)) & visible


def page_bounds(k_LGK: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest keys ``[C, G, K]`` of each page of a request, channel by channel."""
    pages = k_LGK.split(page)
    return torch.stack([p.amin(0) for p in pages]), torch.stack([p.amax(0) for p in pages])
