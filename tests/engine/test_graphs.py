"""A decode pass padded to a bucket over fixed buffers: the same hidden states, and nothing written outside scratch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from harness import Bench
from helpers import ask, blank, dkv, threshold, tiny_model
from mmserve_kernels import cached_attention as attention
from mmserve_kernels import rope_scatter as rope
from mmserve_kernels.cached_attention import kernel as attention_kernel
from mmserve_kernels.rope_scatter import kernel as rope_kernel
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mmserve.decode.graphs
from mmserve.config import EngineConfig, from_mapping
from mmserve.core.request import Policy, Request
from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.decode.graphs import MOST_ROWS, Bucket, Graphs, Run, graphs_for, obstacle
from mmserve.errors import ConfigError
from mmserve.kv.quantized import QuantizedStore
from mmserve.kv.sparse import Sparse
from mmserve.kv.store import KVStore
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.decoder import Decoder

Make = Callable[..., Bench]
PAGE, PAGES = 8, 60
SIZES = [20, 33, 64, 100, 21, 48]


def again(run: Run) -> Run:
    """A graph that calls the function again."""
    return run


def causal(model: LoadedModel) -> LoadedModel:
    spec = dataclasses.replace(model.spec, attention=Attention.CAUSAL, logit_shift=1)
    return dataclasses.replace(model, spec=spec)


def in_blocks(model: LoadedModel) -> LoadedModel:
    spec = dataclasses.replace(model.spec, attention=Attention.BLOCK_CAUSAL)
    return dataclasses.replace(model, spec=spec)


def three_axes(model: LoadedModel) -> LoadedModel:
    decoder = Decoder(dataclasses.replace(model.decoder.config, rope_axes=(0, 0, 0, 1, 1, 1, 2, 2)))
    decoder.load_state_dict(model.decoder.state_dict())
    return dataclasses.replace(model, decoder=decoder.eval().requires_grad_(False))


MODELS: dict[str, Callable[[LoadedModel], LoadedModel]] = {
    "full": lambda model: model,
    "causal": causal,
    "block_causal": in_blocks,
    "three axes": three_axes,
}


def store_of(model: LoadedModel) -> KVStore:
    """A store full of poison."""
    store = KVStore(model.decoder.config, pages=PAGES, page_size=PAGE, dtype=model.dtype, device=model.device)
    for pages in (*store.keys, *store.values):
        pages.fill_(torch.nan)
    return store


def passes(model: LoadedModel, batch: list[int], counts: list[int] | None, seed: int) -> list[Pass]:
    """Passes of the requests ``batch``, over all of their positions or so many at random."""
    pages = np.split(np.random.default_rng(1).permutation(PAGES), np.cumsum([-(-size // PAGE) for size in SIZES]))
    made = []
    for place, i in enumerate(batch):
        draw = np.random.default_rng([seed, i])
        embeddings = model.decoder.embed(torch.from_numpy(draw.integers(0, 400, SIZES[i])))
        rows = np.arange(SIZES[i])
        if counts is not None:
            rows = np.sort(draw.choice(rows, counts[place], replace=False))
        made.append(Pass(blank(1, SIZES[i] - 1, 4), pages[i], embeddings, rows, rows, rows, SIZES[i]))
    return made


def logits(model: LoadedModel, store: KVStore, batch: list[Pass], graphs: Graphs | None = None) -> Tensor:
    found = forward(model, store, batch, row_floor(model), graphs=graphs)
    return torch.cat([part for of in found for part in of.slices()])


def near(found: Tensor, wanted: Tensor) -> bool:
    """Equal but for roundings of sums whose terms are as large as the largest."""
    return bool((found - wanted).abs().max() < 1e-5 * wanted.abs().max())


BATCHES = [([3], [1]), ([0, 1, 2], [1, 2, 64]), ([5, 3, 1, 4], [17, 3, 33, 1]), ([2, 0], [5, 20])]


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_a_padded_pass_is_the_pass_and_writes_nowhere_else(kind: str, text_model: LoadedModel) -> None:
    model = MODELS[kind](text_model)
    plain, fixed = store_of(model), store_of(model)
    graphs = Graphs(model, fixed, again)
    for store in (plain, fixed):
        logits(model, store, passes(model, [0, 1, 2, 3, 4, 5], None, 0))
    for seed, (batch, counts) in enumerate(BATCHES, 1):
        before = [pages.clone() for pages in (*fixed.keys, *fixed.values)]
        asked = passes(model, batch, counts, seed)
        wanted = logits(model, plain, asked)
        found = logits(model, fixed, asked, graphs)
        assert graphs.runs == seed
        assert near(found, wanted)
        written = {at for p in asked for at in (p.pages[p.rows // PAGE] * PAGE + p.rows % PAGE).tolist()}
        for was, now, theirs in zip(before, (*fixed.keys, *fixed.values), (*plain.keys, *plain.values), strict=True):
            pairs = [x[: fixed.scratch].flatten(0, 1).nan_to_num(7.0) for x in (was, now, theirs)]
            changed = (pairs[0] != pairs[1]).flatten(1).any(1).nonzero()[:, 0].tolist()
            assert set(changed) <= written and changed, "nothing but the rows' own places"
            assert near(pairs[1], pairs[2])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores run the Triton kernels, here in the interpreter."""
    first = KVStore.__init__

    def with_kernels(self: KVStore, *arguments: object, **options: object) -> None:
        first(self, *arguments, **options)  # type: ignore[arg-type]
        self._rope_scatter, self._cached_attention = rope_kernel.rope_scatter, attention_kernel.cached_attention

    monkeypatch.setattr(KVStore, "__init__", with_kernels)


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on the CPU")
@pytest.mark.parametrize("kind", ["full", "causal"])
@torch.inference_mode()
def test_with_the_kernels_a_padded_pass_is_the_pass_bit_for_bit(kind: str, text_model: LoadedModel) -> None:
    """Matrix products of ``row_floor`` rows or more, and attention by a row's own data: padding moves no bit."""
    model = MODELS[kind](text_model)
    plain, fixed = store_of(model), store_of(model)
    graphs = Graphs(model, fixed, again)
    prompt = passes(model, [0, 4], None, 0)
    for store in (plain, fixed):
        logits(model, store, prompt)
    for seed, (batch, counts) in enumerate([([0, 4], [3, 9]), ([4], [2])], 1):
        asked = passes(model, batch, counts, seed)
        assert torch.equal(logits(model, fixed, asked, graphs), logits(model, plain, asked))
    assert graphs.runs == 2
    for one, other in zip((*plain.keys, *plain.values), (*fixed.keys, *fixed.values), strict=True):
        assert torch.equal(one[: plain.scratch].nan_to_num(7.0), other[: fixed.scratch].nan_to_num(7.0))
