"""Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786), text: ``google/gemma-2-*-it``, ``google/gemma-3-1b-it``.

Layers with a sliding window alternate with global layers; each layer has norms before and after its parts. Gemma 2 caps
scores and logits; Gemma 3 has norms of queries and keys, and another rotary base in layers with a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmserve.errors import ConfigError
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.dimensions import from_hugging_face
from mmserve.models.keys import Keys
from mmserve.models.layouts import HUGGING_FACE
from mmserve.models.llama import load
from mmserve.models.switches import check_switches
from mmserve.models.windows import FULL, SLIDING, layer_windows

__all__ = ["LAYOUT", "dimensions", "load"]

LAYOUT = replace(
    HUGGING_FACE,
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    layer={
        **HUGGING_FACE.layer,
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
)
_READ = frozenset(
    {
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_act",
        "hidden_activation",
        "layer_types",
        "query_pre_attn_scalar",
        "sliding_window_pattern",
    }
)
#: Defaults of transformers' configuration classes, for Gemma 2 and Gemma 3.
_GEMMA2 = {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_BOTH = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}


def dimensions(keys: Keys) -> DecoderConfig:
    """As transformers' ``modeling_gemma2.py`` and ``modeling_gemma3.py``; raises ``ConfigError``."""
    third = keys.values.get("model_type") == "gemma3_text"
    keys = Keys({**_BOTH, **(_GEMMA3 if third else _GEMMA2), **keys.values}, keys.path)
    check_switches(keys, read=_READ)
    keys.check({"hidden_activation": ("gelu_pytorch_tanh", None), "hidden_act": ("gelu_pytorch_tanh", None)})
    local, keys = _local_base(keys) if third else (0.0, keys)
    config = replace(from_hugging_face(keys), qk_norm=third, mlp_bias=False, local_theta=local)
    config = replace(
        config,
        activation="gelu_tanh",
        score_cap=_cap(keys, "attn_logit_softcapping"),
        logit_cap=_cap(keys, "final_logit_softcapping"),
        query_scale=(config.head_dim / keys.number("query_pre_attn_scalar")) ** 0.5,
        embed_scale=config.hidden_size**0.5,
        output_norms=True,
        unit_offset=True,
    )
    pattern = keys.integer("sliding_window_pattern", default=6) if third else 2
    return layer_windows(keys, config, pattern=pattern)


def _cap(keys: Keys, name: str) -> float:
    return keys.number(name) if keys.values.get(name) is not None else 0.0


def _local_base(keys: Keys) -> tuple[float, Keys]:
    """The rotary base of layers with a window, and the keys for the other layers.

    transformers 5 writes ``rope_parameters`` for each kind of layer; earlier versions wrote ``rope_local_base_freq``
    for layers with a window.
    """
    values: dict[str, Any] = dict(keys.values)
    by_kind = values.get("rope_parameters")
    if not isinstance(by_kind, dict) or FULL not in by_kind:
        return keys.number("rope_local_base_freq"), keys
    for kind in (FULL, SLIDING):
        if not isinstance(by_kind.get(kind) or {}, dict):
            raise ConfigError(f"{keys.path}: rope_parameters.{kind} must be an object, not {by_kind[kind]!r}")
    everywhere, local = by_kind[FULL] or {}, Keys(by_kind.get(SLIDING) or {}, keys.path)
    if local.values.get("rope_type", "default") != "default":
        raise ConfigError(f"{keys.path}: rope_parameters.{SLIDING} is scaled, which is not supported")
    values["rope_parameters"] = everywhere
    values["rope_theta"] = everywhere.get("rope_theta", keys.number("rope_theta"))
    return local.number("rope_theta", default=keys.number("rope_local_base_freq")), Keys(values, keys.path)
