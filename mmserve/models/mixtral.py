"""Mixtral (arXiv 2401.04088): Mistral's attention, with a mixture of experts, top 2, in each layer.

The layout is that of ``mistralai/Mixtral-8x7B-Instruct-v0.1``.
"""

from __future__ import annotations

from dataclasses import replace

from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.dimensions import WINDOWED, from_hugging_face
from mmserve.models.keys import Keys
from mmserve.models.layouts import HUGGING_FACE
from mmserve.models.llama import load
from mmserve.models.moe import MoEConfig
from mmserve.models.switches import check_switches
from mmserve.models.windows import layer_windows

__all__ = ["LAYOUT", "dimensions", "load"]

LAYOUT = replace(
    HUGGING_FACE,
    name="mixtral",
    architecture="MixtralForCausalLM",
    layer={
        **HUGGING_FACE.layer,
        "moe.router": "block_sparse_moe.gate",
        "moe.experts": "block_sparse_moe.experts",
    },
    parts={"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
)


def dimensions(keys: Keys) -> DecoderConfig:
    """As transformers' ``modeling_mixtral.py``; raises ``ConfigError``."""
    check_switches(keys, read=WINDOWED | {"num_local_experts"})
    moe = MoEConfig(
        experts=keys.integer("num_local_experts", default=8),
        top_k=keys.integer("num_experts_per_tok", default=2),
        expert_size=keys.integer("intermediate_size"),
        softmax=True,
    )
    return layer_windows(keys, replace(from_hugging_face(keys), moe=moe), everywhere=True)
