"""Pages that go from one store to another: to other places, with the same bits, and only where the stores are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from helpers import tiny_model
from mmserve_kernels.kv_quant import dequantize

from mmserve.errors import TransferError
from mmserve.kv.quantized import QuantizedStore
from mmserve.kv.store import Fork, KVStore
from mmserve.models.decoder_config import DecoderConfig

PAGE, FROM, TO = 4, np.array([5, 1, 8]), np.array([2, 3, 0])
MODEL = tiny_model(vision=False)
CONFIG = MODEL.decoder.config
#: Stores of another form than ``quantized(8, 0.75)``.
OTHERS = (lambda: plain(page_size=8), lambda: quantized(), lambda: quantized(4), lambda: quantized(8, 0.5))


def plain(config: DecoderConfig = CONFIG, page_size: int = PAGE) -> KVStore:
    return KVStore(config, pages=9, page_size=page_size, dtype=torch.float32, device=torch.device("cpu"))


def quantized(bits: int = 8, kept: float = 0.25) -> QuantizedStore:
    device = torch.device("cpu")
    return QuantizedStore(CONFIG, pages=9, page_size=PAGE, dtype=torch.float32, device=device, bits=bits, kept=kept)


def fill(store: KVStore, seed: int) -> None:
    """Run rows of random keys and values through every page."""
    generator = torch.Generator().manual_seed(seed)
    rows = np.arange(9 * PAGE)
    ragged = store.ragged([rows], [np.arange(9)], [len(rows)])
    attend = store.attend(ragged)
    cos, sin = (x.unsqueeze(-2) if x.dim() == 2 else x for x in MODEL.decoder.rotary(torch.from_numpy(rows)))
    for layer in range(CONFIG.num_layers):
        q = torch.randn(len(rows), CONFIG.num_heads, CONFIG.head_dim, generator=generator)
        k, v = (torch.randn(len(rows), CONFIG.num_kv_heads, CONFIG.head_dim, generator=generator) for _ in range(2))
        attend(layer, q, k, v, cos, sin)


def write(store: KVStore, rows: dict[int, np.ndarray], tables: list[np.ndarray], forks: Sequence[Fork] = ()) -> None:
    """Run the positions ``rows`` of each seed, whose keys and values are its own, in one pass."""
    ragged = store.ragged(list(rows.values()), tables, [int(each[-1]) + 1 for each in rows.values()])
    attend = store.attend(ragged, forks=forks)
    places = MODEL.decoder.rotary(torch.from_numpy(np.concatenate(list(rows.values()))))
    cos, sin = (x.unsqueeze(-2) if x.dim() == 2 else x for x in places)
    draws = [torch.Generator().manual_seed(seed) for seed in rows]
    for layer in range(CONFIG.num_layers):
        q, k, v = (
            torch.cat(
                [
                    torch.randn(len(each), heads, CONFIG.head_dim, generator=draw)
                    for each, draw in zip(rows.values(), draws, strict=True)
                ]
            )
            for heads in (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.num_kv_heads)
        )
        attend(layer, q, k, v, cos, sin)


def held(store: KVStore, pages: np.ndarray) -> list[torch.Tensor]:
    """What attention reads of ``pages``."""
    at = torch.from_numpy(pages)
    if isinstance(store, QuantizedStore):
        return [dequantize(x.select(at)) for pair in store._layers for x in pair]
    return [x[at] for x in (*store.keys, *store.values)]


@pytest.mark.parametrize("make", [plain, quantized, lambda: quantized(4, 0.5), lambda: quantized(8, 0.0)])
def test_pages_are_the_same_at_other_places(make: Callable[[], KVStore]) -> None:
    one, other = make(), make()
    fill(one, 1)
    fill(other, 2)
    wanted, kept = held(one, FROM), held(other, np.array([1, 4, 5, 6, 7, 8]))
    other.write_pages(TO, one.read_pages(FROM))
    assert all(torch.equal(a, b) for a, b in zip(held(other, TO), wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held(other, np.array([1, 4, 5, 6, 7, 8])), kept, strict=True))


@pytest.mark.parametrize("make", [plain, quantized, lambda: quantized(4, 0.5), lambda: quantized(8, 0.0)])
@pytest.mark.parametrize("before", [False, True], ids=["in the same pass", "in the pass before"])
def test_forked_pages_are_those_that_had_the_rows_themselves(make: Callable[[], KVStore], before: bool) -> None:
    """Two branches of 3 and 4 positions after a prompt of 6, whose last 2 are copied, beside each branch alone."""
    prompt, own, fork = np.arange(6), [np.arange(6, 9), np.arange(6, 10)], Fork(7, 2, np.array([3, 8]))
    tables = [np.array([2, 7]), np.array([2, 3, 5]), np.array([2, 8, 0])]
    seeds = {0: prompt, 1: own[0], 2: own[1]}
    store = make()
    fill(store, 3)  # what is left of others
    if before:
        write(store, {0: prompt}, tables[:1])
        del seeds[0]
    write(store, seeds, tables[-len(seeds) :], forks=[fork])
    for branch in (1, 2):
        alone = make()
        fill(alone, 4)
        whole = {0: prompt, branch: seeds[branch]}
        write(alone, whole, [tables[branch]] * 2)
        filled = slice(0, len(prompt) + len(seeds[branch]))
        for mine, other in zip(held(store, tables[branch]), held(alone, tables[branch]), strict=True):
            assert torch.equal(mine.flatten(0, 1)[filled], other.flatten(0, 1)[filled])


@pytest.mark.parametrize("other", OTHERS)
def test_stores_that_differ_take_nothing_from_each_other(other: Callable[[], KVStore]) -> None:
    here, there = quantized(8, 0.75), other()
    for store in (here, there):
        if store.page_size == PAGE:
            fill(store, 3)
    before = held(here, np.arange(9))
    with pytest.raises(TransferError, match="this store has"):
        here.write_pages(TO, there.read_pages(FROM))
    with pytest.raises(TransferError, match="this store has"):
        here.write_pages(TO[:2], here.read_pages(FROM))
    assert all(torch.equal(a, b) for a, b in zip(held(here, np.arange(9)), before, strict=True))
