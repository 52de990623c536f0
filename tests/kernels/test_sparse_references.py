"""What chooses blocks against transcriptions of the methods' own code, where blocks and heads are such that they agree:
one query head a K/V head, and pages of one token where the code chooses tokens."""

from __future__ import annotations

import math

import pytest
import torch
from mmserve_kernels.sparse_attention import Rows, estimates
from sparse_cases import page_bounds
from torch import Tensor

LENGTH, HEADS, SIZE = 96, 4, 16


def tensors(rows: int, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k = torch.randn(rows, HEADS, SIZE, generator=draw), torch.randn(length, HEADS, SIZE, generator=draw)
    return q, k * (1 + 3 * torch.rand(SIZE, generator=draw))


def chosen(estimate: Tensor, rows: Rows, count: int) -> list[list[int]]:
    """The blocks of the one row of each head, ``count`` of them."""
    blocks = len(rows.block_starts())
    mask = estimates.densest(estimate, rows, density=count / blocks)
    return [row.nonzero().flatten().tolist() for row in mask[:, 0]]


def decoding(page: int) -> Rows:
    return Rows(torch.tensor([LENGTH - 1]), LENGTH, torch.tensor([LENGTH]), 1, page)


@pytest.mark.parametrize("seed", range(6))
def test_pages_of_quest(seed: int) -> None:
    """mit-han-lab/Quest, ``evaluation/quest_attention.py`` (commit 01c1623): the chunks with the largest product of the
    query with the bound of the keys that its sign selects."""
    q, k = tensors(1, seed=seed)
    rows, page = decoding(8), 8
    made = chosen(estimates.by_bounds(q, *page_bounds(k, page), rows), rows, 5)
    for head in range(HEADS):
        sign = torch.where(q[0, head] > 0, 1.0, -1.0)
        bounds = (k[:, head] * sign).unflatten(0, (-1, page)).amax(1)
        products = bounds @ (q[0, head] * sign)
        assert made[head] == sorted(products.topk(5).indices.tolist())


@pytest.mark.parametrize("seed", range(6))
def test_tokens_of_tidal_decode(seed: int) -> None:
    """DerrickYLJ/TidalDecode, ``tidal_build/modify_llama.py`` (commit d67a1bd): the tokens of the largest scores."""
    q, k = tensors(1, seed=seed)
    rows = decoding(1)
    made = chosen(estimates.by_attention(q, k, rows), rows, 12)
    scores = torch.einsum("hk,lhk->hl", q[0], k) / math.sqrt(SIZE)
    assert made == [sorted(row.topk(12).indices.tolist()) for row in scores]


@pytest.mark.parametrize("seed", range(6))
def test_tokens_of_double_sparse(seed: int) -> None:
    """andy-yang-1/DoubleSparse (commit b0575e6): the channels with the largest mean of |query · key| over all pairs
    (method 2 of ``config/offline_calibration.py``), and the tokens of the largest scores by these channels
    (``AIME/modify_llama.py``). Its calibration set is here the request's own row and keys."""
    q, k = tensors(1, seed=seed)
    rows = decoding(1)
    made = chosen(estimates.by_channels(q, k, rows, channels=SIZE // 4), rows, 12)
    for head in range(HEADS):
        label = (q[0, head] * k[:, head]).abs().mean(0).topk(SIZE // 4).indices
        scores = k[:, head, label] @ q[0, head, label]
        assert made[head] == sorted(scores.topk(12).indices.tolist())


def profiled(q_HSBK: Tensor, k_HCBK: Tensor, before: Tensor | None) -> Tensor:
    """66RING/CritiPrefill, ``cache_profilling`` of ``criti_prefill/ops.py`` (commit 3067f1e), segments of one block:
    the weight of each block before a segment's own."""
    found = []
    for q, k in zip(q_HSBK, k_HCBK, strict=True):
        high = (q.amax(1) @ k.amax(1).T + q.amin(1) @ k.amax(1).T) / 2
        low = (q.amax(1) @ k.amin(1).T + q.amin(1) @ k.amin(1).T) / 2
        found.append(torch.maximum(high, low))
    weights = torch.stack(found)
    earlier = torch.ones(weights.shape[1:], dtype=torch.bool).tril(-1)
    weights = weights.masked_fill(~earlier, torch.finfo(torch.float32).min).softmax(-1)
    return weights if before is None else 0.25 * before + 0.75 * weights


def test_weights_of_criti_prefill() -> None:
    block = 16
    places = torch.arange(LENGTH)
    rows = Rows(places, LENGTH, (places // block + 1) * block, block, block)  # a segment sees itself and what is before
    wanted: Tensor | None = None
    made: Tensor | None = None
    for layer in range(1, 4):
        q, k = tensors(LENGTH, seed=layer)
        q_HSBK, k_HCBK = (x.transpose(0, 1).unflatten(1, (-1, block)) for x in (q, k))
        wanted = profiled(q_HSBK, k_HCBK, wanted)
        made = estimates.by_segments(q, k, rows, made)
        own = torch.eye(LENGTH // block)
        torch.testing.assert_close(
            made[:, 1:], ((own + wanted) / 2)[:, 1:], msg=f"layer {layer}: its own, and the code's"
        )


def test_heads_that_flex_prefill_takes_by_blocks() -> None:
    """bytedance/FlexPrefill, ``get_active_blocks`` of ``ops/flex_prefill_attention.py`` (commit a24b27b): those in
    which the mean of the last block's queries attends to means of blocks as its queries do."""
    block, length, heads = 64, 512, 12
    draw = torch.Generator().manual_seed(3)
    topics = torch.randn(length // block, SIZE, generator=draw).repeat_interleave(block, 0)[:, None]
    noise = torch.linspace(0, 2, heads)[:, None]
    q, k = (topics + noise * torch.randn(length, heads, SIZE, generator=draw) for _ in range(2))
    last = q[-block:] / math.sqrt(SIZE)
    distances = []
    for head in range(heads):
        scores = last[:, head] @ k[:, head].T
        scores[:, -block:].masked_fill_(~torch.ones(block, block, dtype=torch.bool).tril(), -torch.inf)
        true = scores.softmax(-1).mean(0).unflatten(0, (-1, block)).sum(1)
        said = (last[:, head].mean(0) @ k[:, head].unflatten(0, (-1, block)).mean(1).T).softmax(-1)
        middle = (true + said) / 2
        divergence = 0.5 * (true * (true / middle).log()).sum() + 0.5 * (said * (said / middle).log()).sum()
        distances.append(float(divergence.clamp(min=0).sqrt()))
    limit = sum(sorted(distances)[heads // 2 - 1 : heads // 2 + 1]) / 2
    places = torch.arange(length)
    rows = Rows(places, length, places + 1, block, block)
    made = estimates.by_means(q, k, rows, divergence=limit)
    lines = estimates.by_lines(q, k, rows)
    by_blocks = [not torch.equal(made[head], lines[head]) for head in range(heads)]
    assert by_blocks == [distance < limit for distance in distances] and sum(by_blocks) == heads // 2
