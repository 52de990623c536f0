"""How much memory a store takes, told before it is made, and what is said where there is too little."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import tiny_model

import mmserve.decoders
from mmserve.config import EngineConfig, resolve
from mmserve.errors import ConfigError
from mmserve.kv.capacity import check_capacity, pool_bytes
from mmserve.kv.quantized import QuantizedStore
from mmserve.models.base import Attention

GIB = 1 << 30
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"kv_bits": 8},
        {"kv_bits": 4},
        {"kv_bits": 4, "kv_kept": 0.25},
        {"kv_bits": 8, "kv_kept": 0.25, "page_size": 32},
    ],
)
def test_a_store_takes_what_was_told(engine: dict[str, float], dtype: torch.dtype) -> None:
    settings = EngineConfig(pages=5, **engine)  # type: ignore[arg-type]
    model = dataclasses.replace(tiny_model(vision=False), dtype=dtype)
    store = mmserve.decoders._store(model, settings)
    taken = store.bytes if isinstance(store, QuantizedStore) else sum(x.nbytes for x in (*store.keys, *store.values))
    assert pool_bytes(model.decoder.config, settings, dtype) == taken


def test_pages_may_not_take_what_is_set_aside_for_images() -> None:
    check_capacity([6 * GIB, GIB], 3 * GIB, 10 * GIB, DEVICE)
    check_capacity([10 * GIB], 0, 10 * GIB, DEVICE)
    with pytest.raises(ConfigError) as refused:
        check_capacity([7 * GIB, GIB], 3 * GIB, 10 * GIB, DEVICE)
    assert str(refused.value) == (
        "[engine] the K/V pages take 8.00 GiB, and [encoder_cache] kv_bytes reserves 3.00 GiB, but 10.00 GiB are "
        "free on cuda:0: lower max_running, max_tokens or pages, or kv_bytes"
    )
    with pytest.raises(ConfigError, match=r"take 11\.00 GiB, but 10\.00 GiB.*max_tokens or pages$"):
        check_capacity([11 * GIB], 0, 10 * GIB, DEVICE)


@pytest.mark.parametrize(
    ("attention", "vision", "bits"),
    [
        (Attention.CAUSAL, True, 0),
        (Attention.FULL, True, 0),
        (Attention.BLOCK_CAUSAL, True, 0),
        (Attention.CAUSAL, False, 0),
        (Attention.CAUSAL, True, 8),
    ],
)
def test_only_models_that_reuse_images_set_something_aside(
    attention: Attention, vision: bool, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny_model(vision=vision)
    model = dataclasses.replace(made, spec=dataclasses.replace(made.spec, attention=attention, logit_shift=1))
    engine = resolve(EngineConfig(pages=5, kv_bits=bits))
    pool = pool_bytes(model.decoder.config, engine, model.dtype)
    monkeypatch.setattr(mmserve.decoders, "free_bytes", lambda _device: pool + 100)
    mmserve.decoders._check_capacity([model], engine, 100)
    if vision and not bits and attention is not Attention.BLOCK_CAUSAL:
        with pytest.raises(ConfigError, match="kv_bytes reserves"):
            mmserve.decoders._check_capacity([model], engine, 101)
    else:
        mmserve.decoders._check_capacity([model], engine, 101)
    with pytest.raises(ConfigError, match="the K/V pages take"):
        mmserve.decoders._check_capacity([model, model], engine, 0)
