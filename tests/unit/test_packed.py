"""Packed layers are the plain ones, and a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import blank, tiny_model
from torch import Tensor, nn

from mmserve.core.canvas import Canvas
from mmserve.core.request import Sampling
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.commit.base import ENTROPY, GAP
from mmserve.decode.commit.early_commit import EarlyCommit
from mmserve.decode.commit.entropy_bound import EntropyBound
from mmserve.decode.commit.low_confidence import LowConfidence
from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.decode.logits import padded_rows
from mmserve.decode.sampler import candidates
from mmserve.kv.pool import PagePool
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel
from mmserve.models.decoder import Decoder
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.packed import PackedLinear, has_few_rows, linears, pack, packs

CPU = torch.device("cpu")
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not packs(dtype, CPU), reason="nothing is packed here"))
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_is_the_plain_one(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(72, 40, bias=bias).to(dtype).requires_grad_(False)
    packed = PackedLinear(linear)
    x = torch.randn(2, 5, 72).to(dtype)
    assert torch.allclose(packed(x), linear(x), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert torch.equal(packed.weight, linear.weight)
    saved = packed.state_dict()
    assert saved.keys() == linear.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in linear.state_dict().items())
    assert sum(p.numel() for p in packed.parameters()) == sum(p.numel() for p in linear.parameters())
    copied = copy.deepcopy(packed)
    assert type(copied) is nn.Linear
    copied.weight.neg_()
    assert torch.equal(packed.weight, linear.weight), "a copy shares nothing"


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_keeps_no_plain_weights_but_those_of_a_shared_embedding(dtype: torch.dtype) -> None:
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2}
    decoder = Decoder(DecoderConfig(**shape, num_kv_heads=2, head_dim=16, tie_embeddings=True)).to(dtype)
    embedded = decoder.embed.weight.detach().clone()
    pack(decoder)
    pack(decoder)  # packed layers stay
    assert {type(m) for m in linears(decoder)} == {PackedLinear}
    assert len(linears(decoder)) == 5, "those of one input are joined"
    assert not [n for n, p in decoder.named_parameters() if n.endswith("proj.weight")]
    assert torch.equal(decoder.embed.weight, embedded)
    assert torch.equal(decoder.head.weight, embedded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_layers_of_one_input_are_one_product_and_remain_themselves(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 4}
    config = DecoderConfig(**shape, num_kv_heads=2, head_dim=16, qkv_bias=bias, mlp_bias=bias, qk_norm=True)
    decoder = Decoder(config).to(dtype).eval().requires_grad_(False)
    plain, names = copy.deepcopy(decoder), decoder.state_dict().keys()
    pack(decoder)
    layer = decoder.layers[0]
    x, ask = torch.randn(6, 32).to(dtype), slice(2, 5)
    q, k, v = layer.qkv(x)
    for joint, alone in ((q, layer.q_proj), (k, layer.k_proj), (v, layer.v_proj)):
        assert torch.equal(joint, alone(x))
    assert torch.equal(layer.gate_up(x)[1], layer.up_proj(x))
    asked, keys = layer.queries_and_keys(x, ask)
    assert torch.equal(keys, layer.keys_and_values(x)[0])
    assert torch.equal(layer.values(x), layer.keys_and_values(x)[1])
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    assert torch.allclose(asked, plain.layers[0].queries_and_keys(x, ask)[0], **near)
    assert decoder.state_dict().keys() == names
    assert all(torch.equal(decoder.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    assert sum(p.numel() for p in decoder.parameters()) == sum(p.numel() for p in plain.parameters())
    copied = copy.deepcopy(decoder)
    assert {type(m) for m in linears(copied)} == {nn.Linear}
    assert len(linears(copied)) == 8
    assert all(torch.equal(copied.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())


def made(dtype: torch.dtype) -> LoadedModel:
    model = tiny_model(vision=False)
    model.decoder.to(dtype)
    pack(model.decoder)
    return replace(model, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_rows_bits_depend_on_neither_the_batch_nor_the_number_of_threads(threads: None, dtype: torch.dtype) -> None:
    model = made(dtype)
    sizes, counts = [20, 33, 64, 100, 21, 48], [1, 2, 64, 3, 1, 17]
    pages = np.split(np.arange(60), np.cumsum([-(-size // 8) for size in sizes]))[:-1]
    generator = np.random.default_rng(0)
    embeddings = [model.decoder.embed(torch.from_numpy(generator.integers(0, 400, size))) for size in sizes]
    rows = [np.sort(generator.choice(size, count, replace=False)) for size, count in zip(sizes, counts, strict=True)]

    def run(batch: list[int]) -> list[Tensor]:
        store = KVStore(model.decoder.config, pages=60, page_size=8, dtype=dtype, device=CPU)
        for which in ([np.arange(size) for size in sizes], rows):
            passes = [
                Pass(
                    Canvas.create(np.arange(sizes[i]), new_tokens=0, block_length=1, mask_id=3),
                    pages[i],
                    embeddings[i],
                    which[i],
                    which[i],
                    which[i],
                    sizes[i],
                )
                for i in batch
            ]
            logits = forward(model, store, passes, floor)
        return [torch.cat(list(of.slices())) for of in logits]

    for count in (1, 2):
        torch.set_num_threads(count)
        floor = row_floor(model)
        for index, logits in enumerate(run([0, 1, 2, 3, 4, 5])):
            [alone] = run([index])
            assert torch.equal(logits, alone), (index, count)


@pytest.mark.parametrize("width", [36, 44, 56])
def test_a_pass_ends_with_whole_vectors_whatever_the_widths(width: int) -> None:
    """Of 36 wide rows alone the last elements go through other code than beside a second row."""
    model = tiny_model(vision=False)
    decoder = Decoder(replace(model.decoder.config, intermediate_size=width)).eval().requires_grad_(False)
    pack(decoder)
    floor = row_floor(replace(model, decoder=decoder))
    x = torch.linspace(-8, 8, 64 * width).view(64, width)
    whole = torch.nn.functional.silu(x)
    assert all(torch.equal(torch.nn.functional.silu(x[:n]), whole[:n]) for n in range(floor, 64, floor))


@pytest.mark.parametrize(
    ("rows", "floor", "padded"), [(0, 1, 0), (1, 1, 4), (2, 2, 4), (5, 1, 5), (5, 2, 6), (1, 8, 8)]
)
def test_no_product_has_fewer_rows_than_are_fast(rows: int, floor: int, padded: int) -> None:
    assert padded_rows(rows, floor) == padded


# --- figures that no policy reads ---


def judged(reads: frozenset[str], **sampling: float) -> Candidates:
    logits = torch.randn(4, 77, generator=torch.Generator().manual_seed(0))
    canvas = blank(3, 4, 4)
    return candidates(logits, canvas.all_masked(), canvas, Sampling(**sampling), (3,), None, None, reads)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_figures_are_made_only_where_they_are_read(temperature: float) -> None:
    every = judged(frozenset({GAP, ENTROPY}), temperature=temperature)
    none = judged(frozenset(), temperature=temperature)
    gap = judged(frozenset({GAP}), temperature=temperature)
    assert none.gap is None
    assert none.entropy is None
    assert gap.entropy is None
    assert np.array_equal(gap.read_gap(), every.read_gap())
    for found in (none, gap):
        assert np.array_equal(found.tokens, every.tokens)
        assert np.array_equal(found.confidence, every.confidence)
    with pytest.raises(ValueError, match="'entropy'"):
        gap.read_entropy()
    joined = none.and_then(every).where(np.arange(8) < 5)
    assert joined.gap is None
    assert len(joined.tokens) == 5


@pytest.mark.parametrize(
    ("policy", "reads"),
    [
        (LowConfidence(), set()),
        (EntropyBound(), {ENTROPY}),
        (EarlyCommit(base=LowConfidence()), {GAP}),
        (EarlyCommit(base=EntropyBound()), {GAP, ENTROPY}),
    ],
)
def test_a_policy_gets_along_with_what_it_says_it_reads(policy: Commit, reads: set[str]) -> None:
    assert policy.reads == reads
    assert policy.choose(blank(3, 4, 4), judged(policy.reads)).any()


# --- pages ---


def test_pages_are_handed_out_in_runs_where_there_are_any() -> None:
    pool = PagePool(12)
    taken = [pool.allocate(2) for _ in range(6)]
    pool.release(taken[0])
    pool.release(taken[3])
    pool.release(taken[2])
    assert pool.allocate(4) == (4, 5, 6, 7), "not the first four that are free"
    assert pool.allocate(1) == (0,)
    pool.release(taken[5])
    assert pool.allocate(3) == (1, 10, 11), "no run is left"
    assert pool.allocate(0) == ()


@pytest.mark.skipif(not packs(torch.float32, CPU), reason="nothing is packed here")
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_have_the_bits_of_many_whichever_way_they_go(bias: bool, threads: None) -> None:
    """On one thread a loop takes them, on two oneDNN; a pass runs fewer rows where all layers have the loop."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    packed = PackedLinear(nn.Linear(96, 200, bias=bias).requires_grad_(False))
    x = torch.randn(64, 96)
    whole = packed(x)
    few = [packed(x[:rows]) for rows in range(1, 40)]
    torch.set_num_threads(2)
    for rows, made in enumerate(few, start=1):
        assert torch.equal(made, whole[:rows])
    assert all(torch.equal(packed(x[:rows]), whole[:rows]) for rows in range(4, 40))
    assert has_few_rows(packed) == packed.has_few_rows
    assert not has_few_rows(nn.Sequential(packed, nn.Linear(200, 8)))


def test_a_pass_runs_few_rows_only_where_they_take_less_time(threads: None) -> None:
    torch.set_num_threads(1)
    decoder = Decoder(
        DecoderConfig(
            vocab_size=40, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16
        )
    ).requires_grad_(False)
    assert decoder.fewest_rows == 4
    pack(decoder)
    decoder.set_row_floor(1)
    assert decoder.fewest_rows == (1 if has_few_rows(decoder) else 4)
    torch.set_num_threads(2)
    assert decoder.fewest_rows == 4
