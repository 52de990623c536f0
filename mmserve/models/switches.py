"""Text models that ``Decoder`` implements, and configuration keys that it does not implement.

Two checkpoints may have the same tensor names but compute different functions, so a text model is supported only if its
``model_type`` is listed here, and only with values of ``SWITCHES`` that have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmserve.errors import ConfigError
from mmserve.models.keys import Keys

#: Text models with the queries, keys and values of LLaMA (without norms and, by default, biases), of Qwen2 (with
#: biases) and of Qwen3 (with norms), by ``model_type``.
LLAMA = ("llama", "mistral", "llava_llama", "llava_llada", "llada", "mmada")
QWEN2 = (
    "qwen2",
    "qwen2_vl",
    "qwen2_5_vl",
    "Dream",
    "Fast_dLLM_Qwen",
    "fast_dvlm",
    "diffusionvl_qwenvl",
    "llava_dream",
    "dimple",
)
QWEN3 = ("qwen3", "qwen3_vl", "qwen3_vl_moe", "sdar")
MIXTURE = ("llada2_moe",)
#: Modules of text models that have their own, by ``model_type``, with ``dimensions(keys)``, ``LAYOUT`` and ``load``.
TEXT: Mapping[str, str] = {
    "gemma2": "mmserve.models.gemma",
    "gemma3_text": "mmserve.models.gemma",
    "llada_moe": "mmserve.models.llada_moe",
    "ministral3": "mmserve.models.ministral",
    "mixtral": "mmserve.models.mixtral",
    "nemotron_labs_diffusion": "mmserve.models.nemotron_diffusion",
    "phi3": "mmserve.models.phi",
    "qwen3_moe": "mmserve.models.qwen_moe",
    "sdar_moe": "mmserve.models.sdar_moe",
}
#: Values that ``text_config`` of a vision-language model may have.
NESTED = ("llama", "ministral3", "mistral", "qwen2", "qwen3")
#: The class that generates text, for each ``model_type`` with other classes in transformers (classifiers, embeddings).
CLASSES = {
    "Fast_dLLM_Qwen": ("Fast_dLLM_QwenForCausalLM",),
    "diffusionvl_qwenvl": ("DiffusionVL_Qwen2_5_VL_ForConditionalGeneration", "DiffusionVLQwenVLForCausalLM"),
    "fast_dvlm": ("Fast_dVLMForConditionalGeneration",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForConditionalGeneration",),
    "gemma3_text": ("Gemma3ForCausalLM",),
    "idefics3": ("Idefics3ForConditionalGeneration",),
    "internvl": ("InternVLForConditionalGeneration",),
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
    "llava": ("LlavaForConditionalGeneration",),
    "llava_next": ("LlavaNextForConditionalGeneration",),
    "llava_next_video": ("LlavaNextVideoForConditionalGeneration",),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration",),
    "ministral3": ("Ministral3ForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "mistral3": ("Mistral3ForConditionalGeneration",),
    "mixtral": ("MixtralForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration",),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration",),
    "sdar_v": ("LlavaOnevisionForConditionalGeneration",),
    "smolvlm": ("SmolVLMForConditionalGeneration",),
}

_OFF, _ONE = (False, None), (1, None)
#: Keys of text models in transformers (and of MiniCPM) that change the decoder's computation, with the values that have
#: no effect. Keys that ``dimensions.py`` reads are not included.
SWITCHES: Mapping[str, tuple[object, ...]] = {
    "activation_function": ("silu", None),
    "hidden_act": ("silu",),
    "hidden_activation": ("silu", None),
    # scores and logits
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": _ONE,
    "logits_scaling": _ONE,
    "query_pre_attn_scalar": (None,),
    # scales of embeddings and of the residual stream
    "dim_model_base": (None,),
    "embedding_multiplier": _ONE,
    "mup_enabled": _OFF,
    "residual_multiplier": _ONE,
    "scale_depth": (None,),
    "scale_emb": _ONE,
    # norms, biases and the order of a layer's parts
    "attention_out_bias": _OFF,
    "attn_output_gate": _OFF,
    "lm_head_bias": _OFF,
    "parallel_attn": _OFF,
    "qk_layer_norms": _OFF,
    "qk_layernorm": _OFF,
    "qkv_bias": _OFF,
    "use_bias": _OFF,
    "use_parallel_residual": _OFF,
    "use_qk_norm": _OFF,
    "use_qkv_bias": _OFF,
    # positions
    "alibi": _OFF,
    "no_rope_layer_interval": (None, 0),
    "no_rope_layers": (None, []),
    "partial_rotary_factor": _ONE,
    "rope_interleave": _OFF,
    "rope_interleaved": _OFF,
    "rotary_dim": (None,),
    "rotary_pct": _ONE,
    "use_mrope": _OFF,
    # attention masks
    "add_cross_attention": _OFF,
    "attention_chunk_size": (None,),
    "cross_attention_layers": (None, []),
    "is_encoder_decoder": _OFF,
    "kv_lora_rank": (None,),
    "lambda_std_dev": (None,),
    "sliding_window_pattern": (None,),
    "use_bidirectional_attention": _OFF,
    "use_sliding_window": _OFF,
    # experts
    "moe_num_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}


def check_switches(keys: Keys, *, read: frozenset[str] = frozenset()) -> None:
    """Raises ``ConfigError`` for a key of ``SWITCHES`` that changes the computation, and for unsupported kinds of
    layers.

    ``read``: keys that this architecture implements.
    """
    keys.check({name: accepted for name, accepted in SWITCHES.items() if name not in read})
    kinds = set(keys.words("layer_types") or ()) - {"full_attention"}
    if kinds and "layer_types" not in read:
        raise ConfigError(f"{keys.path}: layer_types {sorted(kinds)} are not supported")


def refuse_text_model(keys: Keys) -> ConfigError:
    """The error for a text model that is not implemented."""
    return ConfigError(
        f"{keys.path}: the text model {keys.values.get('model_type')!r} is not implemented, whatever its tensors are "
        f"called; implemented are {', '.join(NESTED)}"
    )


def check_class(architecture: str, config: Mapping[str, Any], where: object) -> None:
    """Raises ``ConfigError`` if ``architectures`` names a class that does not generate text."""
    accepted, named = CLASSES.get(architecture), config.get("architectures")
    if accepted and isinstance(named, list) and named and not set(accepted) & set(map(str, named)):
        raise ConfigError(
            f"{where}: architectures = {named} is not served for model_type {architecture!r}; it can be {accepted[0]}"
        )
