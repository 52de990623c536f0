"""Pages that go from one store to another: to other places, with the same bits, and only where the stores are alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import tiny_model
from mmserve_kernels.kv_quant import dequantize

from mmserve.errors import TransferError
from mmserve.kv.quantized import QuantizedStore
from mmserve.kv.store import KVStore
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
