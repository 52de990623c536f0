"""Tiny random checkpoints of transformers' text models, as transformers itself writes them, which is as they are
published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from helpers import tokenizer
from llama_checkpoints import HIDDEN, ROWS, edit
from transformers import AutoConfig, AutoModelForCausalLM

from mmserve.reference.tokenizer import BOS, EOS

#: Positions of each oracle: longer than any window below.
LENGTH = 43
_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": ROWS,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
    "bos_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
_YARN = {"rope_type": "yarn", "rope_theta": 5_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_WAVES = [1.0, 1.5, 2.0, 3.5]
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": _WAVES, "long_factor": [2 * w for w in _WAVES]}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 11, "tie_word_embeddings": True}
#: Name of a case: ``model_type`` and what differs from ``_SIZES``.
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama yarn": ("llama", {"rope_parameters": _YARN}),
    "qwen3 yarn": ("qwen3", {"head_dim": 16, "rope_parameters": {**_YARN, "beta_fast": 16.0, "truncate": False}}),
    "yarn of two scales": ("llama", {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.3}}),
    "mistral window": ("mistral", {"sliding_window": 9}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 8,
            "rope_parameters": {**_YARN, "original_max_position_embeddings": 80, "llama_4_scaling_beta": 0.1},
        },
    ),
    "qwen2 windows": ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "mixtral window": ("mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True}),
    "qwen3_moe dense": (
        "qwen3_moe",
        {**_EXPERTS, "head_dim": 8, "num_experts": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "qwen3_moe flat": ("qwen3_moe", {**_EXPERTS, "head_dim": 8, "num_experts": 8, "norm_topk_prob": True}),
    "qwen3_moe dense flat": ("qwen3_moe", {**_EXPERTS, "head_dim": 8, "num_experts": 5, "decoder_sparse_step": 2}),
    "phi3": ("phi3", {"sliding_window": 13, "pad_token_id": 0}),
    "phi3 long": (
        "phi3",
        {"pad_token_id": 0, "rope_parameters": _LONG, "original_max_position_embeddings": 80},
    ),
    "phi4 mini": (
        "phi3",
        {"pad_token_id": 0, "head_dim": 8, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma2 uncapped": ("gemma2", {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3_text": (
        "gemma3_text",
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
}


def oracle(case: str) -> Any:
    """transformers' model of a case: its next token depends on what came before, and no norm is 1."""
    kind, options = CASES[case]
    torch.manual_seed(23)
    eos = tokenizer().convert_tokens_to_ids(EOS)
    bos = tokenizer().convert_tokens_to_ids(BOS)
    config = AutoConfig.for_model(kind, **{**_SIZES, "bos_token_id": bos, "eos_token_id": eos, **options})
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, weight in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, -0.5, 0.5) if "gemma" in kind else torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith(".bias"):
            torch.nn.init.normal_(weight)
        elif name.endswith("gate.weight"):  # steeper ones make 2e-4 of float32's rounding
            torch.nn.init.normal_(weight, std=0.25)
    return made


def save(model: Any, folder: Path, **changes: Any) -> Path:
    """The checkpoint of ``model``, with ``changes`` of its configuration (``...`` removes a key)."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer().save_pretrained(folder)
    edit(folder / "config.json", **changes)
    return folder
