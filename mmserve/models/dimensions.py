"""From a checkpoint's ``config.json`` to the dimensions and switches of a ``Decoder``, a reader for each family.

What a configuration asks for and ``Decoder`` does not do is refused by name; nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mmserve.errors import ConfigError
from mmserve.models.decoder import DecoderConfig
from mmserve.models.keys import Keys
from mmserve.models.layouts import LLADA, layout_of
from mmserve.models.moe import MoEConfig
from mmserve.models.rotary import Llama3Scaling, frequency_axes
from mmserve.models.switches import LLAMA, MIXTURE, QWEN2, QWEN3, check_switches, refuse_text_model

#: Switches of LLaDA's own configuration, and the values of them that ``Decoder`` implements.
_LLADA_SWITCHES: Mapping[str, tuple[object, ...]] = {
    "activation_type": ("silu",),
    "block_type": ("llama",),
    "block_group_size": (1,),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "alibi": (False, None),
    "rope": (True,),
    "include_bias": (False, None),  # would also give the head a bias
    "bias_for_layer_norm": (False, None),
    "attention_layer_norm": (False, None),
    "input_emb_norm": (False, None),
    "scale_logits": (False, None),
    "multi_query_attention": (False, None),
    "clip_qkv": (None,),
}
_QWEN3_HEAD = 128  # where its configuration has no ``head_dim``


#: Keys that LLaDA2 has and ``_from_llada2`` reads.
_LLADA2_READ = frozenset({"num_experts", "partial_rotary_factor", "use_bias", "use_qk_norm", "use_qkv_bias"})
_LLADA2_SWITCHES: Mapping[str, tuple[object, ...]] = {
    "norm_head": (False, None),
    "norm_topk_prob": (True, None),
    "score_function": ("sigmoid", None),
    "moe_router_enable_expert_bias": (True, None),
    "use_rmsnorm": (True, None),
}


def decoder_config(keys: Keys) -> DecoderConfig:
    """Dimensions from a ``config.json`` of either layout; raises ``ConfigError`` naming the key and its value."""
    try:
        return _reader(keys)(keys)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{keys.path}: {error}") from error


def _reader(keys: Keys) -> Callable[[Keys], DecoderConfig]:
    kind = keys.values.get("model_type")
    if kind in (*QWEN2, *QWEN3):
        return _from_qwen
    if kind in MIXTURE:
        return _from_llada2
    if layout_of(keys.values) is LLADA:  # its own keys: no other configuration has ``d_model``
        return _from_llada
    if kind in LLAMA:
        return _from_llama
    raise refuse_text_model(keys)


def _from_llada(keys: Keys) -> DecoderConfig:
    keys.check(_LLADA_SWITCHES)
    width, heads = keys.integer("d_model"), keys.integer("n_heads")
    _divides(keys, width, heads)
    return DecoderConfig(
        vocab_size=keys.integer("embedding_size", "vocab_size"),
        hidden_size=width,
        intermediate_size=keys.integer("mlp_hidden_size", default=int(keys.number("mlp_ratio", default=4) * width)),
        num_layers=keys.integer("n_layers"),
        num_heads=heads,
        num_kv_heads=keys.integer("n_kv_heads", default=heads),
        head_dim=width // heads,
        rope_theta=keys.number("rope_theta", default=10_000.0),
        rms_norm_eps=keys.number("rms_norm_eps", default=1e-5),
        max_positions=keys.integer("max_sequence_length", default=4096),
        qkv_bias=keys.flag("include_qkv_bias"),
        tie_embeddings=keys.flag("weight_tying"),
    )


def _from_llama(keys: Keys) -> DecoderConfig:
    """As transformers' ``modeling_llama.py`` and ``modeling_mistral.py``."""
    check_switches(keys)
    return _from_hugging_face(keys)


def _from_hugging_face(keys: Keys) -> DecoderConfig:
    """What the configurations of LLaMA, Qwen and LLaDA2 have in common."""
    theta, scaling, axes = _rotary(keys)
    width, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if keys.values.get("head_dim") is None:
        _divides(keys, width, heads)
    bias = keys.flag("attention_bias")
    return DecoderConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=width,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", default=heads),
        head_dim=keys.integer("head_dim", default=width // heads),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_axes=axes,
        rms_norm_eps=keys.number("rms_norm_eps", default=1e-6),
        max_positions=_sight(keys, keys.integer("max_position_embeddings", default=2048)),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        tie_embeddings=keys.flag("tie_word_embeddings"),
    )


def _sight(keys: Keys, positions: int) -> int:
    """Most positions of a request: within a sliding window (Mistral's) each sees all before it, as in plain attention,
    so a window ends what is served."""
    return min(positions, keys.integer("sliding_window", default=positions))


def _rotary(keys: Keys) -> tuple[float, Llama3Scaling | None, tuple[int, ...]]:
    """Base, scaling, and the axis of position that turns each frequency.

    From ``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling`` of those before; Dimple has
    ``mrope_section`` beside them.
    """
    merged: dict[str, Any] = {"rope_type": "default", "mrope_section": keys.values.get("mrope_section")}
    for name in ("rope_parameters", "rope_scaling"):
        values = keys.values.get(name) or {}
        if not isinstance(values, Mapping):
            raise ConfigError(f"{keys.path}: {name} must be an object, not {values!r}")
        merged |= {"rope_type": values["type"]} if "type" in values else {}
        merged |= values
    rope = Keys(merged, keys.path)
    axes = _axes(rope, interleaved=rope.flag("mrope_interleaved") or keys.values.get("model_type") == "qwen3_vl")
    # "dynamic" changes nothing within max_position_embeddings, and no request is longer.
    kinds = ("default", "mrope", None) if axes else ("default", "dynamic", "llama3", None)
    rope.check({"rope_type": kinds, "partial_rotary_factor": (1, None)})
    theta = keys.number("rope_theta", default=rope.number("rope_theta", default=10_000.0))
    if rope.values["rope_type"] != "llama3":
        return theta, None, axes
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_positions=rope.integer("original_max_position_embeddings"),
    )
    return theta, scaling, axes


def _axes(rope: Keys, *, interleaved: bool) -> tuple[int, ...]:
    """M-RoPE's axes (``mrope_section``: frequencies of time, rows and columns); () where positions have one."""
    sections = rope.values.get("mrope_section")
    if sections is None:
        return ()
    whole = isinstance(sections, list) and all(type(count) is int and count > 0 for count in sections)
    if not whole or len(sections) != 3:
        raise ConfigError(f"{rope.path}: mrope_section must be three positive numbers, not {sections!r}")
    return frequency_axes(sections, interleaved=interleaved)


def _from_qwen(keys: Keys) -> DecoderConfig:
    """As transformers' ``modeling_qwen2.py`` and ``modeling_qwen3.py``; ``sliding_window`` alone means nothing."""
    check_switches(keys)
    values = {name: value for name, value in keys.values.items() if name != "sliding_window"}
    if keys.values["model_type"] in QWEN2:
        config = _from_hugging_face(Keys(values, keys.path))
        return replace(config, qkv_bias=True, out_bias=False, mlp_bias=False)
    if values.get("head_dim") is None:
        values["head_dim"] = _QWEN3_HEAD
    return replace(_from_hugging_face(Keys(values, keys.path)), mlp_bias=False, qk_norm=True)


def _from_llada2(keys: Keys) -> DecoderConfig:
    """As ``configuration_llada2_moe.py`` of inclusionAI/LLaDA2.0-mini, with its defaults."""
    check_switches(keys, read=_LLADA2_READ)
    keys.check(_LLADA2_SWITCHES)
    given = keys.values
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 16_384}
    values = {name: given[name] for name in given if name not in ("sliding_window", "partial_rotary_factor")}
    config = _from_hugging_face(Keys({**defaults, **values}, keys.path))
    first = given.get("first_k_dense_replace") or 0
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ConfigError(f"{keys.path}: first_k_dense_replace must be a number of layers, not {first!r}")
    size = keys.integer("moe_intermediate_size")
    return replace(
        config,
        rotary_width=int(config.head_dim * keys.number("partial_rotary_factor", default=0.5)),
        qkv_bias=keys.flag("use_qkv_bias"),
        out_bias=keys.flag("use_bias") or given.get("use_bias") is None,
        mlp_bias=False,
        qk_norm=keys.flag("use_qk_norm") or given.get("use_qk_norm") is None,
        moe=MoEConfig(
            experts=keys.integer("num_experts"),
            top_k=keys.integer("num_experts_per_tok", default=2),
            expert_size=size,
            shared_size=size * keys.integer("num_shared_experts") if given.get("num_shared_experts") else 0,
            groups=keys.integer("n_group", default=8),
            kept_groups=keys.integer("topk_group", default=4),
            scale=keys.number("routed_scaling_factor", default=2.5),
            first_layer=first,
        ),
    )


def _divides(keys: Keys, width: int, heads: int) -> None:
    if width % heads:
        raise ConfigError(f"{keys.path}: a width of {width} does not divide into {heads} heads")
