"""Qwen2 and Qwen3 against transformers' own classes with the same weights; tokenizers; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llama_checkpoints import SHAPES, edit, load, our_logits, save
from qwen_checkpoints import CHATML, IM_END, KINDS, Qwen, ids, qwen, save_tokenizer_as_vocabulary

from mmserve.errors import ConfigError
from mmserve.models.base import Attention
from mmserve.models.chat import prompt_ids
from mmserve.reference.tokenizer import EOS, EOT

#: Keys as transformers 4 wrote them; a window that is not used is named all the same.
OLD_KEYS: dict[str, Any] = {
    "rope_parameters": ...,
    "rope_theta": 50_000.0,
    "rope_scaling": None,
    "layer_types": ...,
    "max_window_layers": 28,
    "sliding_window": 131_072,
    "use_sliding_window": False,
}


def difference(folder: Path, oracle: Qwen) -> float:
    model = load(folder)
    with torch.no_grad():
        return float((our_logits(model, model.decoder.embed(ids())) - oracle(ids()).logits).abs().max())


@pytest.mark.parametrize("keys", [{}, OLD_KEYS], ids=["transformers 5", "transformers 4"])
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str, heads: str, keys: dict[str, Any]) -> None:
    oracle = qwen(kind, *SHAPES[heads])
    assert difference(save(oracle, tmp_path, **keys), oracle) < 1e-4
    spec = load(tmp_path, name="mine").spec
    assert (spec.name, spec.architecture, spec.attention) == ("mine", kind, Attention.CAUSAL)
    assert (spec.causal, spec.logit_shift, spec.block_length(), spec.banned_ids) == (True, 1, 1, ())
    edit(tmp_path / "config.json", rope_parameters=..., rope_theta=10_000.0)
    assert difference(tmp_path, oracle) > 1e-2, "the rotary base does matter"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"head_dim": 16, "hidden_size": 24}),
    ],
    ids=["qwen2 tied", "qwen3 tied", "qwen3 biased", "qwen3 wide heads"],
)
def test_switches(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    oracle = qwen(kind, **options)
    assert difference(save(oracle, tmp_path), oracle) < 1e-4
    decoder = load(tmp_path).decoder
    assert (decoder.head.weight is decoder.embed.weight) == options.get("tie_word_embeddings", False)


def test_qwen3_heads_are_128_wide_where_nothing_is_said(tmp_path: Path) -> None:
    oracle = qwen("qwen3", head_dim=128)
    assert difference(save(oracle, tmp_path, head_dim=...), oracle) < 1e-4


def test_a_tokenizer_of_vocabulary_and_merges(tmp_path: Path) -> None:
    save(qwen("qwen2"), tmp_path)
    added = save_tokenizer_as_vocabulary(tmp_path)
    model = load(tmp_path)
    assert model.tokenizer.chat_template.endswith(CHATML)
    chat = [{"role": "user", "content": [{"type": "text", "text": "a red circle"}]}]
    prompt = prompt_ids(model.tokenizer, chat)
    assert model.tokenizer.decode(prompt) == "<|im_start|>user\na red circle<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.count(added[IM_END]) == 1
    assert model.spec.end_ids == {*model.tokenizer.convert_tokens_to_ids([EOS, EOT]), added[IM_END]}
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(ConfigError, match="the tokenizer cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false, not 'yes'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types names 2 layers, and num_hidden_layers is",
        ),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}, "but use_sliding_window is not set"),
        ({"layer_types": ["chunked_attention"] * 3}, r"layer_types \['chunked_attention'\] are not supported"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, "rope_type = 'proportional' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"tokenizer_model_max_length": 0}, "tokenizer_model_max_length must be a positive number, not 0"),
        ({"num_hidden_layers": 4}, r"no tensor model\.layers\.3\.input_layernorm\.weight"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, kind: str, changes: dict[str, Any], message: str) -> None:
    save(qwen(kind), tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_one_family_s_tensors_are_not_taken_for_the_other_s(tmp_path: Path) -> None:
    save(qwen("qwen2"), tmp_path, model_type="qwen3", architectures=..., head_dim=8)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(tmp_path)
    save(qwen("qwen3"), tmp_path, model_type="qwen2", architectures=...)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path)
