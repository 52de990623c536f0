"""Single rows of several requests through compiled layers: the bits of the layers as they run otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmserve.kv.store import KVStore
from mmserve.models.decoder import Decoder
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.packed import linears, pack, packs

PAGE = 4
CONFIG = DecoderConfig(
    vocab_size=70, hidden_size=64, intermediate_size=100, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=20
)
pytestmark = pytest.mark.skipif(not packs(torch.float32, torch.device("cpu")), reason="nothing is packed here")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decoder_of(config: DecoderConfig) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config).requires_grad_(False)
    for each in decoder.parameters():
        each.normal_(std=0.3)
    pack(decoder)
    decoder.set_row_floor(1)
    if config == CONFIG and decoder._rows is None:
        pytest.skip("oneDNN lays these weights out in another way here")
    return decoder


def store_of(decoder: Decoder) -> KVStore:
    store = KVStore(decoder.config, pages=40, page_size=PAGE, dtype=torch.float32, device=torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    for each in (*store.keys, *store.values):
        each.normal_(generator=draw)
    return store


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [[1], [5, 17, 4], [3, 30, 8, 9, 12, 1, 20]])
@pytest.mark.parametrize(
    "changes",
    [{}, {"rotary_width": 8}, {"qkv_bias": True, "out_bias": True, "mlp_bias": True}, {"num_kv_heads": 4}],
    ids=["plain", "partly rotated", "biases", "a head each"],
)
def test_rows_and_what_they_store_have_the_same_bits(lengths: list[int], changes: dict[str, object]) -> None:
    decoder = decoder_of(replace(CONFIG, **changes))
    assert decoder._rows is not None
    pages = np.random.default_rng(0).permutation(40)
    tables, taken = [], 0
    for length in lengths:
        tables.append(pages[taken : taken + -(-length // PAGE)])
        taken += len(tables[-1])
    x = torch.randn(len(lengths), CONFIG.hidden_size)
    positions = torch.tensor([length - 1 for length in lengths])
    stores = store_of(decoder), store_of(decoder)
    ragged = [
        store.placed(store.layout([np.array([n - 1]) for n in lengths], tables, lengths, block=1)) for store in stores
    ]
    wanted = decoder(x, positions, stores[0].attend(ragged[0]))
    stored, calls = stores[1].stored(ragged[1]), []
    assert stored is not None
    before = x.clone()
    made = decoder.hidden_rows(x, positions, stored, lambda: calls.append(None))
    assert made is not None
    assert torch.equal(made, wanted)
    assert torch.equal(x, before), "the input is left as it was"
    for one, other in zip((*stores[0].keys, *stores[0].values), (*stores[1].keys, *stores[1].values), strict=True):
        assert torch.equal(one, other)
    assert len(calls) == CONFIG.num_layers


@torch.inference_mode()
def test_others_go_their_own_way() -> None:
    decoder = decoder_of(CONFIG)
    store = store_of(decoder)
    table = np.array([0, 1])
    several = store.placed(store.layout([np.array([4, 5])], [table], [6], block=1))
    assert store.stored(several) is None, "two rows of a request"
    one = store.stored(store.placed(store.layout([np.array([4])], [table], [5], block=1)))
    assert one is not None
    torch.set_num_threads(2)
    assert decoder.hidden_rows(torch.randn(1, 64), torch.tensor([4]), one) is None, "two threads"
    torch.set_num_threads(1)
    for changes in ({"activation": "gelu_tanh"}, {"qk_norm": True}, {"windows": (4, 4, 4)}, {"query_scale": 0.5}):
        assert decoder_of(replace(CONFIG, **changes))._rows is None


@torch.inference_mode()
def test_a_copy_has_weights_of_its_own() -> None:
    decoder = decoder_of(CONFIG)
    copied = deepcopy(decoder)
    assert copied._rows is None
    assert all(isinstance(each, torch.nn.Linear) for each in linears(copied))
