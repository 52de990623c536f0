"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with many small experts in its layers, as ``Qwen/Qwen3-30B-A3B``."""

from __future__ import annotations

from dataclasses import replace

from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.dimensions import WINDOWED, from_hugging_face, softmax_experts
from mmserve.models.keys import Keys
from mmserve.models.layouts import HUGGING_FACE
from mmserve.models.llama import load
from mmserve.models.switches import check_switches
from mmserve.models.windows import layer_windows

__all__ = ["EXPERTS", "LAYOUT", "STACKED", "dimensions", "load"]

#: Names of a layer's experts.
EXPERTS = {"moe.router": "mlp.gate", "moe.experts": "mlp.experts"}
LAYOUT = replace(
    HUGGING_FACE, name="qwen3_moe", architecture="Qwen3MoeForCausalLM", layer={**HUGGING_FACE.layer, **EXPERTS}
)
#: ``Qwen/Qwen3-VL-30B-A3B-Instruct`` has all experts of a layer in two tensors.
STACKED = {
    "gate_proj": "mlp.experts.gate_up_proj",
    "up_proj": "mlp.experts.gate_up_proj",
    "down_proj": "mlp.experts.down_proj",
}


def dimensions(keys: Keys) -> DecoderConfig:
    """As transformers' ``modeling_qwen3_moe.py``; raises ``ConfigError``."""
    check_switches(keys, read=WINDOWED | {"num_experts", "num_local_experts"})
    config = replace(from_hugging_face(keys), mlp_bias=False, qk_norm=True, moe=softmax_experts(keys))
    return layer_windows(keys, config, switch="use_sliding_window")
