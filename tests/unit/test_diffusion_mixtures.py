"""Diffusion models with Qwen3-MoE's experts: LLaDA-MoE with full attention, and SDAR's in blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llama_checkpoints import edit, load
from qwen_checkpoints import MASK_ID, block_mask, ids, store_logits
from text_checkpoints import oracle, save

from mmserve.errors import ConfigError
from mmserve.models.base import Attention
from mmserve.models.checkpoint import read_json, write_json


def llada_moe(folder: Path, made: Any, **changes: Any) -> Path:
    """The keys of ``inclusionAI/LLaDA-MoE-7B-A1B-Instruct``'s ``config.json``, and its tensors' names."""
    c = made.config
    save(made, folder)
    config = {
        "architectures": ["LLaDAMoEModelLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "modeling_lladamoe.LLaDAMoEModelLM"},
        "clip_qkv": None,
        "dense_intermediate_size": c.intermediate_size,
        "eos_token_id": c.eos_token_id,
        "expert_intermediate_size": c.moe_intermediate_size,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "mask_token_id": MASK_ID,
        "max_position_embeddings": 8192,
        "model_type": "llada",
        "moe_layer_freq": [int((layer + 1) % c.decoder_sparse_step == 0) for layer in range(c.num_hidden_layers)],
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": c.norm_topk_prob,
        "num_attention_heads": c.num_attention_heads,
        "num_experts": c.num_experts,
        "num_experts_per_tok": c.num_experts_per_tok,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_key_value_heads,
        "pad_token_id": c.eos_token_id,
        "partial_rotary_factor": 1,
        "qk_layernorm": True,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": c.rope_parameters["rope_theta"],
        "routed_scaling_factor": 1,
        "router_num_group": None,
        "router_topk_group": None,
        "shared_expert_intermediate_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": c.vocab_size,
        **changes,
    }
    write_json(folder / "config.json", {key: value for key, value in config.items() if value is not ...})
    return folder


@pytest.mark.parametrize("case", ["qwen3_moe flat", "qwen3_moe dense flat"])
@torch.no_grad()
def test_llada_moe_is_qwen3_moe_with_full_attention(tmp_path: Path, case: str) -> None:
    made = oracle(case)
    model = load(llada_moe(tmp_path, made), name="mine")
    rows = ids(21)
    expected = made(input_ids=rows, attention_mask=torch.zeros(2, 1, 21, 21)).logits
    assert (store_logits(model, rows, ()) - expected).abs().max() < 1e-4
    spec = model.spec
    assert (spec.name, spec.architecture, spec.attention) == ("mine", "llada_moe", Attention.FULL)
    assert (spec.logit_shift, spec.mask_id, spec.banned_ids, spec.max_tokens) == (0, MASK_ID, (MASK_ID,), 8192)


@pytest.mark.parametrize(
    ("options", "most"),
    [({"positions": 100}, 100), ({"positions": 16_384, "rope_scaling": "yarn"}, 16_384)],
)
def test_llada_moe_has_the_positions_that_are_configured(tmp_path: Path, options: dict[str, Any], most: int) -> None:
    model = load(llada_moe(tmp_path, oracle("qwen3_moe flat")), **options)
    assert model.spec.max_tokens == most
    assert (model.decoder.config.rope_scaling is None) is ("rope_scaling" not in options)


@torch.no_grad()
def test_sdar_with_experts_is_qwen3_moe_in_blocks(tmp_path: Path) -> None:
    made = oracle("qwen3_moe")
    changes = {"model_type": "sdar_moe", "architectures": ["SDARMoeForCausalLM"], "mask_token_id": MASK_ID}
    save(made, tmp_path, **changes, layer_types=..., block_size=4)
    model = load(tmp_path)
    expected = made(input_ids=ids(18), attention_mask=block_mask(18, 4).expand(2, -1, -1, -1)).logits
    assert (store_logits(model, ids(18), (4, 12)) - expected).abs().max() < 1e-4
    assert (model.spec.attention, model.spec.attention_block) == (Attention.BLOCK_CAUSAL, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_layernorm": False}, "qk_layernorm = False is not supported"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function = 'sigmoid' is not supported"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64 is not supported"),
        ({"moe_layer_freq": [1]}, r"moe_layer_freq must be 4 times 0 or 1, not \[1\]"),
        ({"mask_token_id": ...}, r"has no mask_token_id and the tokenizer no <\|mask\|>"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    llada_moe(tmp_path, oracle("qwen3_moe flat"), **changes)
    if "mask_token_id" in changes:
        edit(tmp_path / "tokenizer_config.json", mask_token=...)
        assert "mask_token_id" not in read_json(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
