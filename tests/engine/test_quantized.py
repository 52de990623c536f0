"""Keys and values stored in 8 or 4 bits: close to full precision, each token by itself, salient ones as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import Bench
from helpers import ask, blank, dkv, picture
from torch import Tensor

from mmserve.config import from_mapping
from mmserve.core.request import Policy
from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.errors import ConfigError
from mmserve.kv.quantized import QuantizedStore
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]
PAGE, SIZE = 8, 50


def stores(model: LoadedModel, **numbers: Any) -> KVStore:
    shape = {"pages": 10, "page_size": PAGE, "dtype": model.dtype, "device": model.device}
    kind: Any = QuantizedStore if numbers else KVStore
    store: KVStore = kind(model.decoder.config, **shape, **numbers)
    return store


@torch.inference_mode()
def logits(model: LoadedModel, store: KVStore, cuts: tuple[int, ...] = ()) -> Tensor:
    """Of one request in one pass or, where attention is to the left only, in several, then of its last rows again."""
    pages = np.random.default_rng(1).permutation(10)[: -(-SIZE // PAGE)]
    embeddings = model.decoder.embed(torch.from_numpy(np.random.default_rng(0).integers(0, 400, SIZE)))
    for rows in (*np.split(np.arange(SIZE), cuts), np.arange(SIZE - 9, SIZE)):
        one = Pass(blank(1, SIZE - 1, 4), pages, embeddings, rows, rows, rows, int(rows[-1]) + 1)
        [found] = forward(model, store, [one], row_floor(model))
        made = torch.cat(list(found.slices()))
    return made


def off(model: LoadedModel, **numbers: Any) -> float:
    """Root mean square of the change of logits, as a share of their spread."""
    exact = logits(model, stores(model))
    return float((logits(model, stores(model, **numbers)) - exact).pow(2).mean().sqrt() / exact.std())


def test_more_bits_and_more_kept_tokens_are_nearer_to_full_precision(text_model: LoadedModel) -> None:
    eight, four = off(text_model, bits=8), off(text_model, bits=4)
    kept = off(text_model, bits=4, kept=0.9)
    print(f"8 bits {eight:.2g}, 4 bits {four:.2g}, 4 bits with nine tenths kept {kept:.2g}")
    assert 0 < eight < four / 4
    assert kept < four * 0.9


def test_all_tokens_kept_is_full_precision(text_model: LoadedModel) -> None:
    assert off(text_model, bits=4, kept=1.0) < 1e-5


def test_what_is_stored_is_smaller(text_model: LoadedModel) -> None:
    full = stores(text_model)
    size = sum(x.nbytes for x in (*full.keys, *full.values))
    for bits, most in ((8, 0.55), (4, 0.42)):  # heads of 16 dimensions: two fp32 for each 16 codes
        store = stores(text_model, bits=bits)
        assert isinstance(store, QuantizedStore)
        assert store.bytes < most * size


@torch.inference_mode()
def test_salient_are_the_smallest_keys_of_a_page_in_whatever_order_they_come(text_model: LoadedModel) -> None:
    draw = torch.Generator().manual_seed(3)
    c = text_model.decoder.config
    k, v = (torch.randn(2 * PAGE, c.num_kv_heads, c.head_dim, generator=draw) for _ in range(2))
    wanted = k.flatten(1).norm(dim=-1).view(2, PAGE).topk(3, largest=False).indices
    for order in (torch.arange(2 * PAGE), torch.randperm(2 * PAGE, generator=draw)):
        store = stores(text_model, bits=4, kept=3 / PAGE)
        assert isinstance(store, QuantizedStore)
        keys, values = store._layers[0]
        for slots in order.split(5):
            pages = (slots // PAGE).unique()
            store._keep(keys, values, k[slots], v[slots], slots, (pages, torch.full_like(pages, PAGE)))
        assert keys.kept_at is not None and keys.kept is not None and values.kept is not None
        for page in range(2):
            there = (keys.kept_at[page] >= 0).nonzero()[:, 0]
            assert there.tolist() == wanted[page].sort().values.tolist()
            for place in there.tolist():
                at = int(keys.kept_at[page, place])
                assert torch.equal(keys.kept[at], k[page * PAGE + place])
                assert torch.equal(values.kept[at], v[page * PAGE + place])
        assert (keys.kept_at[2:] == -1).all()


@torch.inference_mode()
def test_what_a_page_held_before_has_no_say(text_model: LoadedModel) -> None:
    """Salient tokens of an earlier request stand where this one has not yet written."""
    made = []
    for earlier in ([], [8]):
        store = stores(text_model, bits=4, kept=0.25)
        for seed, size in [*((seed, PAGE) for seed in earlier), (0, 3)]:
            ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 400, size))
            rows = np.arange(size)
            one = Pass(blank(1, size - 1, 4), np.array([2]), text_model.decoder.embed(ids), rows, rows, rows, size)
            [found] = forward(text_model, store, [one], row_floor(text_model))
        made.append(found.whole())
    assert torch.equal(*made)


@pytest.mark.parametrize(("bits", "kept"), [(8, 0.0), (4, 0.25)])
def test_a_request_has_its_own_tokens_in_any_batch_and_cache_policies_agree(
    bench: Make, bits: int, kept: float
) -> None:
    b = bench(stages="inline", kv_bits=bits, kv_kept=kept)
    policies = [None, dkv(1), Policy(name="dual"), Policy(name="adaptive")]

    def requests(names: str) -> list[Any]:
        question = "what is left of the red circle?"
        return [
            ask(f"{names}{i}", question, images=(picture(1),), max_new_tokens=16, recompute=policy)
            for i, policy in enumerate(policies)
        ]

    alone = [b.ask(request).text for request in requests("alone")]
    together = [call.finished().text for call in b.submit(*requests("batch"))]
    assert alone == together
    assert alone[0] == alone[1], "a cache that is refreshed every step is none"
    assert b.engine.stages.describe().kernels["kv_quant"] == "pytorch"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_bits": 6}, r"kv_bits must be 8, 4 or 0 .*not 6"),
        ({"kv_bits": 8, "kv_kept": 1.0}, r"kv_kept must be at least 0 and below 1"),
        ({"kv_bits": 8, "sparse_decode": "quest"}, r"set kv_bits = 0, or sparse_\* = ''"),
    ],
)
def test_wrong_numbers_are_refused_with_what_is_right(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping({"engine": values})
