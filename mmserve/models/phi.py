"""Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905): LLaMA with joint projections, as in ``microsoft/Phi-3-*``.

Long-context models are limited to ``original_max_position_embeddings`` (``rope_keys``).
"""

from __future__ import annotations

from dataclasses import replace

from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.dimensions import WINDOWED, from_hugging_face
from mmserve.models.keys import Keys
from mmserve.models.layouts import HUGGING_FACE
from mmserve.models.llama import load
from mmserve.models.switches import check_switches
from mmserve.models.windows import layer_windows

__all__ = ["LAYOUT", "dimensions", "load"]

_QKV, _GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
LAYOUT = replace(
    HUGGING_FACE,
    name="phi3",
    architecture="Phi3ForCausalLM",
    layer={
        **HUGGING_FACE.layer,
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), _QKV),
        **dict.fromkeys(("gate_proj", "up_proj"), _GATE_UP),
    },
)


def dimensions(keys: Keys) -> DecoderConfig:
    """As transformers' ``modeling_phi3.py``, in which "yarn" is an older name of "longrope"; raises ``ConfigError``."""
    check_switches(keys, read=WINDOWED | {"partial_rotary_factor"})
    values = dict(keys.values)
    scaling = values.get("rope_scaling")
    if isinstance(scaling, dict) and "yarn" in (scaling.get("type"), scaling.get("rope_type")):
        values["rope_scaling"] = {**scaling, "type": "longrope", "rope_type": "longrope"}
    config = replace(from_hugging_face(Keys(values, keys.path), partial=True), qkv_bias=False, out_bias=False)
    return layer_windows(keys, replace(config, mlp_bias=False), everywhere=True)
