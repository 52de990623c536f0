"""Passes of several requests over poisoned stores, for models of every kind of attention, and a graph that is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from helpers import blank
from torch import Tensor

from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.decode.graphs import Graphs, Run
from mmserve.kv.store import KVStore
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.decoder import Decoder

PAGE, PAGES = 8, 60
SIZES = [20, 33, 64, 100, 21, 48]


def again(run: Run) -> Run:
    """A graph that calls the function again."""
    return run


def attending(attention: Attention, shift: int = 0) -> Callable[[LoadedModel], LoadedModel]:
    def made(model: LoadedModel) -> LoadedModel:
        spec = dataclasses.replace(model.spec, attention=attention, logit_shift=shift)
        return dataclasses.replace(model, spec=spec)

    return made


def three_axes(model: LoadedModel) -> LoadedModel:
    decoder = Decoder(dataclasses.replace(model.decoder.config, rope_axes=(0, 0, 0, 1, 1, 1, 2, 2)))
    decoder.load_state_dict(model.decoder.state_dict())
    return dataclasses.replace(model, decoder=decoder.eval().requires_grad_(False))


MODELS: dict[str, Callable[[LoadedModel], LoadedModel]] = {
    "full": attending(Attention.FULL),
    "causal": attending(Attention.CAUSAL, 1),
    "block_causal": attending(Attention.BLOCK_CAUSAL),
    "prefix": attending(Attention.PREFIX),
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
        embeddings = model.decoder.embed(torch.from_numpy(draw.integers(0, 400, SIZES[i])).to(model.device))
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
