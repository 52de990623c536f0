"""Two parts of attention as one, and a batch whose requests begin with the same pages read in two parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import tiny_model
from mmserve_kernels.cached_attention.merged import merged

from mmserve.kv.store import KVStore

PAGE, PROMPT, SHARED = 8, 300, 37
OWN = [np.arange(SHARED * PAGE, end) for end in (312, 297, 305, 330)]
CONFIG = tiny_model(vision=False).decoder.config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_make_the_whole(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 4, 32, generator=draw, dtype=torch.float64) for n in (33, 50, 50))
    scores = torch.einsum("rhk,lhk->rhl", q, k)
    scores[0, :, :20] += 1000  # one part may have all the weight
    scores[1, :, 20:] += 1000
    parts = []
    for here in (slice(0, 20), slice(20, 50)):
        lse = scores[..., here].logsumexp(-1)
        out = torch.einsum("rhl,lhk->rhk", (scores[..., here] - lse[..., None]).exp(), v[here])
        parts += [out.to(dtype), lse.float()]
    whole = torch.einsum("rhl,lhk->rhk", scores.softmax(-1), v)
    made = merged(*parts)
    assert made.dtype == dtype
    torch.testing.assert_close(made.double(), whole, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 5e-5)
    for rows in (slice(3, 4), slice(7, 30)):
        assert torch.equal(merged(*(part[rows] for part in parts)), made[rows])


def attention(kind: str, *, shared: bool, own: list[np.ndarray]) -> list[torch.Tensor]:
    """What each of the requests ``own`` gets, beside another request, of a store that holds the same for all."""
    draw = torch.Generator().manual_seed(1)
    store = KVStore(CONFIG, pages=90, page_size=PAGE, dtype=torch.float32, device=torch.device("cpu"))
    prefix = np.random.default_rng(2).permutation(SHARED)
    for x in (store.keys[0], store.values[0]):
        x.copy_(torch.randn(x.shape, generator=draw))
    tables = [np.concatenate([prefix, SHARED + 6 * at.sum() % 7 + np.arange(5)]) for at in own]
    rows = [np.arange(20), *own, np.arange(3)]
    tables = [np.arange(80, 83), *tables, np.arange(70, 71)]
    lengths = [20, *(int(each[-1]) + 1 for each in own), 3]
    layout = store.layout(
        rows,
        tables,
        lengths,
        block=1 if kind == "causal" else None,
        prompts=[length - 1 for length in lengths] if kind == "prefix" else None,
        whole=[False, *[True] * len(own), False],
        shared=[0, *[SHARED] * len(own), 0] if shared else None,
    )
    queries = [
        torch.randn(len(r), CONFIG.num_heads, CONFIG.head_dim, generator=draw.manual_seed(int(r.sum()))) for r in rows
    ]
    read = store.cascaded(layout) or (lambda _layer, q, k, v: store.dense(q, k, v, store.placed(layout)))
    assert shared == (layout.cascade is not None)
    return list(read(0, torch.cat(queries), store.keys[0], store.values[0]).split([len(r) for r in rows]))


@pytest.mark.parametrize("kind", ["full", "causal", "prefix"])
def test_pages_that_requests_share_are_read_once(kind: str) -> None:
    apart, together = (attention(kind, shared=shared, own=OWN) for shared in (False, True))
    for one, other in zip(apart, together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["full", "causal", "prefix"])
def test_a_row_has_the_same_bits_alone_and_beside_others_that_share_its_pages(kind: str) -> None:
    others, *together, last = attention(kind, shared=True, own=OWN)
    for index, rows in enumerate(OWN):  # one of them has a single row, fewer than products are stable for
        alone = attention(kind, shared=True, own=[rows])
        assert torch.equal(alone[1], together[index])
        assert torch.equal(alone[0], others) and torch.equal(alone[2], last)
