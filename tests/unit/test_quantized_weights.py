"""Weights of 8 and of 4 bits: what the integers say, whatever stands beside a row, in every form that layers take."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers import tiny_model
from mmserve_kernels.byte_rows import ZERO, byte_rows
from torch import nn

from mmserve.config import ModelConfig
from mmserve.decode.forward import floor_of, row_floor
from mmserve.errors import ConfigError
from mmserve.models.decoder import Decoder, DecoderConfig, dense_attention
from mmserve.models.four_bits import GROUP, FourBitLinear
from mmserve.models.moe import MoEConfig
from mmserve.models.packed import linears, pack
from mmserve.models.quantized import QuantizedEmbedding, QuantizedLinear, kind_of, quantize, stored_bytes, why_not
from mmserve.models.registry import load_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(bool(why_not(CPU)), reason=f"no bytes are multiplied here: {why_not(CPU)}")


def layer(width: int, columns: int, *, bias: bool) -> nn.Linear:
    torch.manual_seed(width)
    return nn.Linear(width, columns, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "columns"), [(1, 1), (17, 5), (96, 200), (700, 64), (4100, 33)])
def test_a_product_is_that_of_the_integers(width: int, columns: int, bias: bool) -> None:
    """Each row and each channel by its own largest element, rounded; then exact integers, then two scales."""
    linear = layer(width, columns, bias=bias)
    x = torch.randn(3, 2, width) * torch.tensor([1e-6, 1.0, 1e4])[:, None, None]
    weights, rows = linear.weight.double(), x.double()
    channel, row = (each.abs().amax(-1, keepdim=True) / 127 for each in (weights, rows))
    integers = (rows / row).round() @ (weights / channel).round().T
    exact = integers * row * channel.T + (linear.bias.double() if bias else 0)
    made = QuantizedLinear(linear)(x)
    assert made.shape == (3, 2, columns) and made.dtype == torch.float32
    # A half may be rounded to either side: one integer of a row, times the largest weight.
    assert ((made - exact).abs() <= 1e-5 * exact.abs() + 128 * row * channel.T * 1.01).all()
    assert (made - exact).abs().median() <= 1e-5 * exact.abs().median()
    assert ((made - linear(x)).abs().mean((1, 2)) < 0.02 * linear(x).abs().mean((1, 2)).clamp_min(1e-9)).all() or bias


def test_bytes_of_a_row() -> None:
    rows = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5], [-3e-30, 1e-30, 3e-30]])
    made, scales = byte_rows(rows)
    assert made.dtype == torch.uint8 and made.tolist() == [[128, 128, 128], [192, 1, 160], [1, 170, 255]]
    assert scales.shape == (3, 1) and scales[0] == 0
    assert torch.allclose((made.float() - ZERO) * scales, rows, atol=2 / 127 / 2)


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it_nor_on_threads() -> None:
    made = QuantizedLinear(layer(1200, 300, bias=True))
    x = torch.randn(130, 1200)
    before, whole = torch.get_num_threads(), made(x)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (1, 2, 3, 5, 16, 33, 129):
                assert torch.equal(made(x[-rows:]), whole[-rows:])
    finally:
        torch.set_num_threads(before)


def test_a_decoder_is_quantised_whole_and_once() -> None:
    """Joint layers too; packing leaves them, copies and saved weights are plain."""
    model = tiny_model(vision=False)
    plain, quantised = copy.deepcopy(model.decoder), model.decoder
    assert kind_of(model) == "float32"
    quantize(quantised)
    found = linears(quantised)
    pack(quantised)
    assert linears(quantised) == found and all(isinstance(m, QuantizedLinear) for m in found)
    assert isinstance(quantised.embed, QuantizedEmbedding) and kind_of(model) == "int8"
    assert quantised.layers[0].qkv is not None and quantised.layers[0].gate_up is not None
    assert stored_bytes(quantised) < 0.6 * stored_bytes(plain)
    assert row_floor(replace(model, decoder=quantised)) in (1, 2, 4, 8)
    saved, original = quantised.state_dict(), plain.state_dict()
    assert saved.keys() == original.keys()
    for name, tensor in original.items():
        most = tensor.abs().amax(-1, keepdim=True)
        assert ((saved[name] - tensor).abs() <= most / 127 * 0.51).all(), name
    copied = copy.deepcopy(quantised)
    assert {type(m) for m in linears(copied)} == {nn.Linear}
    ids, positions = torch.arange(9)[None], torch.arange(9)[None]
    states = [d(d.embed(ids), positions, dense_attention()) for d in (plain, quantised, copied)]
    scale = states[0].abs().mean()
    for one, other in ((0, 1), (1, 2)):  # weights 32 wide: 6%
        assert (states[one] - states[other]).abs().mean() < 0.1 * scale
    assert not torch.equal(states[0], states[1])


def test_experts_and_scaled_embeddings_are_quantised_too() -> None:
    """What Gemma and mixtures of experts have beside: near the plain decoder, and each row by itself."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    moe = MoEConfig(experts=4, top_k=2, expert_size=48, shared_size=32)
    config = DecoderConfig(vocab_size=50, head_dim=16, embed_scale=8.0, tie_embeddings=True, moe=moe, **sizes)
    plain = Decoder(config).requires_grad_(False)
    made = copy.deepcopy(plain)
    quantize(made)
    assert not any(isinstance(m, nn.Linear | nn.Embedding) for m in made.modules())
    routers = [layer.moe.router for layer in made.layers]
    products = [(m.in_features, m) for m in linears(made)] + [(64, router.scores) for router in routers]
    floor = floor_of(products, torch.float32, torch.device("cpu"))
    made.set_row_floor(floor)
    ids, positions = torch.arange(8)[None], torch.arange(8)[None]
    rows = plain.embed(ids)
    assert ((made.embed(ids) - rows).abs() <= rows.abs().amax(-1, keepdim=True) / 127 * 0.51).all()
    states = [d.logits(d(d.embed(ids), positions, dense_attention())) for d in (plain, made)]
    assert 0 < (states[0] - states[1]).abs().mean() < 0.1 * states[0].abs().mean()
    rows, seen = torch.randn(4 * floor, 64), torch.randn(4 * floor, 4, 16)
    together, some = made.layers[1].after_attention(rows, seen), slice(floor, 2 * floor)
    assert torch.equal(made.layers[1].after_attention(rows[some], seen[some]), together[some])


@pytest.mark.parametrize(("dtype", "share"), [("int8", 0.27), ("int4", 0.17)])
def test_a_model_is_loaded_so_and_says_so(dtype: str, share: float) -> None:
    model = load_model(ModelConfig(path="bundled", dtype=dtype))
    assert kind_of(model) == dtype and model.dtype == torch.float32
    plain = load_model(ModelConfig(path="bundled"))
    assert stored_bytes(model.decoder) < share * stored_bytes(plain.decoder)
    assert model.parameters == plain.parameters


@pytest.mark.parametrize(("width", "columns"), [(32, 16), (96, 200), (700, 33), (17, 5)])
def test_weights_of_four_bits_are_near_and_multiplied_as_they_are(width: int, columns: int) -> None:
    """Half a step of its group's scale from each weight; products with those weights, of rows and results in bf16."""
    linear = layer(width, columns, bias=True)
    made = FourBitLinear(linear)
    padded = torch.nn.functional.pad(linear.weight, (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    steps = (padded.amax(2) - padded.amin(2)).repeat_interleave(GROUP, 1)[:, :width] / 15
    furthest = linear.weight.abs().amax()  # scale and middle are rounded to bf16
    assert ((made.weight - linear.weight).abs() <= 0.52 * steps + furthest / 64).all()
    assert (made.weight - linear.weight).abs().mean() < 0.4 * steps.mean()
    x = torch.randn(3, 2, width)
    exact = x.bfloat16().double() @ made.weight.double().T
    assert made(x).shape == (3, 2, columns) and made(x).dtype == torch.float32
    bound = exact.abs() * 2**-8 + 1e-5 * (x.abs() @ made.weight.abs().T)
    assert ((made(x) - linear.bias - exact).abs() <= bound + 1e-6).all()
    assert torch.equal(made.plain().weight, made.weight) and torch.equal(made.plain().bias, linear.bias)


def test_a_rows_bits_of_four_bit_products_do_not_depend_on_the_rows_beside_it() -> None:
    made = FourBitLinear(layer(288, 96, bias=True))
    x = torch.randn(70, 288)
    before, whole = torch.get_num_threads(), made(x)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert all(torch.equal(made(x[-rows:]), whole[-rows:]) for rows in (1, 2, 3, 5, 16, 33, 69))
    finally:
        torch.set_num_threads(before)


def test_where_there_is_no_such_product_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "on a CPU" in why_not(torch.device("cuda"))
    assert "on a CPU" in why_not(torch.device("cuda"), "int4")
    monkeypatch.setattr("mmserve.models.registry.why_not", lambda device, kind: "no VNNI")
    with pytest.raises(ConfigError, match="dtype 'int8' is not available: no VNNI"):
        load_model(ModelConfig(path="bundled", dtype="int8"))
