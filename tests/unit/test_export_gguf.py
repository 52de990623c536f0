"""GGUF files: read again by the format's own package, and run by llama.cpp where it is installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import llada_checkpoints
import numpy as np
import pytest
import torch
from llama_checkpoints import llama, save
from qwen_checkpoints import qwen, save_dream

from mmserve import cli
from mmserve.bench.llama_cpp import LlamaCpp, library
from mmserve.bench.passes import missing, pass_rows
from mmserve.config import ModelConfig
from mmserve.errors import ConfigError
from mmserve.export.gguf import FORMS, form_of, write_gguf
from mmserve.export.gguf_tokenizer import pre_tokenizer
from mmserve.models.base import LoadedModel
from mmserve.models.decoder import dense_attention
from mmserve.models.registry import load_model

IDS = [7, 300, 21, 5, 99, 400, 8, 8, 17, 230, 64]


def loaded(kind: str, folder: Path, *, tied: bool = False) -> LoadedModel:
    """A tiny model of random weights in the layout ``kind``."""
    if kind == "llada":
        oracle = llada_checkpoints.llama(4, 4)
        tensors = {llada_checkpoints.own_name(name): tensor for name, tensor in oracle.state_dict().items()}
        llada_checkpoints.write(folder, llada_checkpoints.own_config(oracle), tensors)
    elif kind == "Dream":
        save_dream(qwen("qwen2"), folder)
    elif kind == "llama":
        save(llama(4, 2, tie_word_embeddings=tied), folder)
    elif kind == "mistral":  # as from version 0.2 on: without a window
        save(llama(4, 2), folder, model_type=kind, architectures=["MistralForCausalLM"], sliding_window=None)
    else:
        save(qwen(kind), folder)
    model = load_model(ModelConfig(path=str(folder), dtype="float32", device="cpu"))
    assert isinstance(model, LoadedModel)
    return model


KINDS = ("llada", "llama", "mistral", "qwen2", "qwen3")


def ours(model: LoadedModel, ids: list[int]) -> np.ndarray:
    row = torch.tensor([ids])
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()[None, None]
    seen = dense_attention(mask if model.spec.causal else None)
    with torch.no_grad():
        states = model.decoder(model.decoder.embed(row), torch.arange(len(ids))[None], seen)
        return model.decoder.logits(states)[0].numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_holds_the_model_and_its_tokenizer(kind: str, tmp_path: Path) -> None:
    model = loaded(kind, tmp_path / "model")
    write_gguf(model, tmp_path / "model.gguf")
    read, config = gguf.GGUFReader(tmp_path / "model.gguf"), model.decoder.config
    values = {name: field.contents() for name, field in read.fields.items()}
    name = FORMS[kind].name
    assert values["general.architecture"] == name
    assert values[f"{name}.block_count"] == config.num_layers
    assert values[f"{name}.attention.head_count_kv"] == config.num_kv_heads
    assert values[f"{name}.rope.freq_base"] == pytest.approx(config.rope_theta)
    assert values.get(f"{name}.attention.causal", True) is model.spec.causal
    tokens = values["tokenizer.ggml.tokens"]
    assert len(tokens) == config.vocab_size
    own = model.tokenizer.get_vocab()
    assert all(tokens[number] == token for token, number in own.items() if number < len(tokens))
    assert values["tokenizer.ggml.pre"] in ("smollm", "qwen2")
    assert values.get("tokenizer.ggml.mask_token_id") == (None if model.spec.causal else model.spec.mask_id)
    tensors = {tensor.name: tensor.data for tensor in read.tensors}
    layer = model.decoder.layers[1]
    assert np.array_equal(tensors["blk.1.ffn_down.weight"], layer.down_proj.weight.numpy())
    turned, half = tensors["blk.1.attn_q.weight"], config.head_dim // 2
    plain = layer.q_proj.weight.numpy()
    if FORMS[kind].pairs:  # first and second half of a head take turns
        assert np.array_equal(turned[0 : config.head_dim : 2], plain[:half])
        assert np.array_equal(turned[1 : config.head_dim : 2], plain[half : config.head_dim])
    else:
        assert np.array_equal(turned, plain)


@pytest.mark.skipif(library() is None, reason="xllamacpp is not installed")
def test_llama_cpp_computes_the_same(tmp_path: Path) -> None:
    model = loaded("llada", tmp_path / "model")
    write_gguf(model, tmp_path / "model.gguf")
    other = LlamaCpp(tmp_path / "model.gguf", 32, causal=model.spec.causal, threads=1)
    try:
        expected = ours(model, IDS)
        assert np.abs(other.logits(IDS) - expected).max() < 5e-3
    finally:
        other.close()


def test_a_missing_package_is_named_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert cli.main(["export", "gguf", "--model", str(tmp_path / "none"), "--out", str(tmp_path / "x.gguf")]) == 1
    assert capsys.readouterr().err == "mmserve export: GGUF files need the package gguf: pip install 'mmserve[gguf]'\n"


def test_the_command_line_writes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded("llama", tmp_path / "model", tied=True)
    sizes = []
    for kind in ("f32", "q8_0"):
        out = tmp_path / f"{kind}.gguf"
        command = ["export", "gguf", "--model", str(tmp_path / "model"), "--out", str(out), "--type", kind]
        assert cli.main(command) == 0
        assert capsys.readouterr().out == f"{out}: {out.stat().st_size} bytes\n"
        sizes.append(out.stat().st_size)
    assert sizes[1] < 0.6 * sizes[0]
    names = [tensor.name for tensor in gguf.GGUFReader(tmp_path / "q8_0.gguf").tensors]
    assert "token_embd.weight" in names and "output.weight" not in names


def test_what_llama_cpp_does_not_know_is_refused(tmp_path: Path) -> None:
    model = load_model(ModelConfig(path="bundled", device="cpu"))
    assert isinstance(model, LoadedModel)
    other = replace(model, spec=replace(model.spec, architecture="sdar"))
    with pytest.raises(ConfigError, match="'sdar' is not written as GGUF; written are Dream, llada"):
        form_of(other)
    rope: dict[str, Any] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    save(llama(rope_parameters=rope), tmp_path)
    with pytest.raises(ConfigError, match="its rope_scaling is not the usual one"):
        form_of(load_model(ModelConfig(path=str(tmp_path), device="cpu")))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="only byte-level BPE tokenizers"):
        pre_tokenizer({"pre_tokenizer": None, "model": {"type": "BPE", "byte_fallback": True}})


def test_what_splits_texts_before_bytes_is_named_or_refused() -> None:
    """SmolLM takes digits one by one; GPT-2's pattern keeps them together."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}

    def named(*steps: dict[str, Any]) -> str:
        return pre_tokenizer(
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps]}, "model": {"type": "BPE"}}
        )

    assert (named(level), named(digits, level)) == ("gpt-2", "smollm")
    for other in ({**digits, "individual_digits": False}, {"type": "Punctuation", "behavior": "Isolated"}):
        with pytest.raises(ConfigError, match=r"llama\.cpp has no name for the tokenizer's pre-tokenizer"):
            named(other, level)


@pytest.mark.skipif(library() is None, reason="xllamacpp is not installed")
def test_passes_are_measured_beside_llama_cpp(tmp_path: Path) -> None:
    model = loaded("llada", tmp_path)
    rows = list(pass_rows(model, 1, lambda _: None, positions=(16, 32), threads=(1,)))
    engines = [row["engine"] for row in rows if row["positions"] == 32]
    assert engines[0] == "mmserve f32" and {"llama.cpp f32", "llama.cpp q8_0"} < set(engines)
    assert all(row["near"] and row["passes_per_second"] > 0 and row["times_llama.cpp f32"] for row in rows[:1])


def test_why_a_model_is_not_run_in_llama_cpp_is_said(tmp_path: Path) -> None:
    model = load_model(ModelConfig(path="bundled-causal", device="cpu"))
    assert isinstance(model, LoadedModel)
    why = missing(model)
    assert why == "xllamacpp is not installed: pip install xllamacpp" or "with a K/V cache" in why
