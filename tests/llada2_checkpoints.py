"""Tiny random checkpoints in LLaDA2.0's layout, and the transformers model that they come from: GLM-4.5's decoder.

``Glm4MoeForCausalLM`` has the same parts under other names: norms of queries and keys, half-rotated heads, a sigmoid
router with groups and a bias for the choice, a shared expert, dense first layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers import tokenizer
from llama_checkpoints import HIDDEN, ROWS
from qwen_checkpoints import MASK_ID
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from mmserve.models.checkpoint import write_checkpoint
from mmserve.reference.tokenizer import EOS


@torch.no_grad()
def glm(**options: Any) -> Glm4MoeForCausalLM:
    """A random model; the router's bias is wide enough to change its choice."""
    torch.manual_seed(5)
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": ROWS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 60_000.0, "partial_rotary_factor": 0.5},
        "initializer_range": 0.3,
        "use_qk_norm": True,
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "attn_implementation": "eager",
    }
    made = Glm4MoeForCausalLM(Glm4MoeConfig(**{**values, **options})).eval()
    for name, weight in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith("gate.weight"):
            torch.nn.init.normal_(weight)
    for name, buffer in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    return made


def save(oracle: Glm4MoeForCausalLM, folder: Path, **changes: Any) -> Path:
    """A checkpoint with the keys of ``inclusionAI/LLaDA2.0-mini``'s ``config.json``; ``...`` removes a key."""
    c = oracle.config
    config = {
        "architectures": ["LLaDA2MoeModelLM"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM"},
        "dtype": "bfloat16",
        "embedding_dropout": 0.0,
        "eos_token_id": tokenizer().convert_tokens_to_ids(EOS),
        "first_k_dense_replace": c.first_k_dense_replace,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "mask_token_id": MASK_ID,
        "max_position_embeddings": 32_768,
        "max_window_layers": 28,
        "model_type": "llada2_moe",
        "moe_intermediate_size": c.moe_intermediate_size,
        "moe_router_enable_expert_bias": True,
        "n_group": c.n_group,
        "norm_head": False,
        "norm_topk_prob": True,
        "num_attention_heads": c.num_attention_heads,
        "num_experts": c.n_routed_experts,
        "num_experts_per_tok": c.num_experts_per_tok,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_key_value_heads,
        "num_shared_experts": c.n_shared_experts,
        "output_dropout": 0.0,
        "output_router_logits": False,
        "pad_token_id": tokenizer().convert_tokens_to_ids(EOS),
        "partial_rotary_factor": c.rope_parameters["partial_rotary_factor"],
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": c.rope_parameters["rope_theta"],
        "routed_scaling_factor": c.routed_scaling_factor,
        "score_function": "sigmoid",
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "topk_group": c.topk_group,
        "use_bias": False,
        "use_cache": True,
        "use_qk_norm": c.use_qk_norm,
        "use_qkv_bias": c.attention_bias,
        "use_rmsnorm": True,
        "use_sliding_window": False,
        "vocab_size": c.vocab_size,
        **changes,
    }
    write_checkpoint(folder, {k: v for k, v in config.items() if v is not ...}, tensors(oracle), shard_bytes=60_000)
    tokenizer().save_pretrained(folder)
    return folder


def tensors(oracle: Glm4MoeForCausalLM) -> dict[str, Tensor]:
    """LLaDA2.0's tensors of the model, spelled out apart from the table under test."""
    theirs = dict(oracle.state_dict())
    ours = {
        "model.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "model.norm.weight": theirs["model.norm.weight"],
        "lm_head.weight": theirs["lm_head.weight"],
    }
    for layer in range(oracle.config.num_hidden_layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            ours[at + name] = theirs[at + name]
        for kind in ("weight", "bias"):
            parts = [theirs.get(f"{at}self_attn.{part}_proj.{kind}") for part in "qkv"]
            if all(part is not None for part in parts):
                ours[f"{at}attention.query_key_value.{kind}"] = torch.cat(parts)
        for name, other in (("query_layernorm", "q_norm"), ("key_layernorm", "k_norm"), ("dense", "o_proj")):
            if f"{at}self_attn.{other}.weight" in theirs:
                ours[f"{at}attention.{name}.weight"] = theirs[f"{at}self_attn.{other}.weight"]
        dense = [
            name for name in theirs if name.startswith(f"{at}mlp.") and "experts" not in name and "gate." not in name
        ]
        ours |= {name: theirs[name] for name in dense}
        if f"{at}mlp.gate.weight" not in theirs:
            continue
        ours[f"{at}mlp.gate.weight"] = theirs[f"{at}mlp.gate.weight"]
        ours[f"{at}mlp.gate.expert_bias"] = theirs[f"{at}mlp.gate.e_score_correction_bias"]
        ours |= {name: theirs[name] for name in theirs if name.startswith(f"{at}mlp.shared_experts.")}
        for expert, both in enumerate(theirs[f"{at}mlp.experts.gate_up_proj"]):
            gate, up = both.chunk(2)
            ours[f"{at}mlp.experts.{expert}.gate_proj.weight"] = gate
            ours[f"{at}mlp.experts.{expert}.up_proj.weight"] = up
            ours[f"{at}mlp.experts.{expert}.down_proj.weight"] = theirs[f"{at}mlp.experts.down_proj"][expert]
    return ours
