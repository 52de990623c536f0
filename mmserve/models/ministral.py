"""Ministral 3 (``mistralai/Ministral-3-*``): Mistral with YaRN, and queries that are scaled by their position.

The scale (Llama 4's attention scaling) differs from 1 beyond ``original_max_position_embeddings``, so contexts are
limited to that length.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmserve.errors import ConfigError
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.dimensions import WINDOWED, from_hugging_face
from mmserve.models.keys import Keys
from mmserve.models.layouts import HUGGING_FACE
from mmserve.models.llama import load
from mmserve.models.switches import check_switches
from mmserve.models.windows import layer_windows

__all__ = ["LAYOUT", "dimensions", "load"]

LAYOUT = replace(HUGGING_FACE, name="ministral3", architecture="Ministral3ForCausalLM")


def dimensions(keys: Keys) -> DecoderConfig:
    """As transformers' ``modeling_ministral3.py``; raises ``ConfigError``."""
    check_switches(keys, read=WINDOWED)
    config = replace(from_hugging_face(keys), mlp_bias=False)
    rope: Any = keys.values.get("rope_parameters") or keys.values.get("rope_scaling")
    if not isinstance(rope, dict):
        raise ConfigError(f"{keys.path} has no rope_parameters")
    if rope.get("llama_4_scaling_beta"):
        unscaled = Keys(rope, keys.path).integer("original_max_position_embeddings")
        config = replace(config, max_positions=min(config.max_positions, unscaled))
    return layer_windows(keys, config, everywhere=True)
