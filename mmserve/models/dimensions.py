"""Reads a ``DecoderConfig`` from a checkpoint's ``config.json``, with one reader for each family.

Options that ``Decoder`` does not implement are refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module

from mmserve.errors import ConfigError
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.keys import Keys
from mmserve.models.layouts import LLADA, layout_of
from mmserve.models.moe import MoEConfig
from mmserve.models.rope_keys import read_rope
from mmserve.models.switches import LLAMA, MIXTURE, QWEN2, QWEN3, TEXT, check_switches, refuse_text_model
from mmserve.models.windows import layer_windows

#: Switches of LLaDA's own configuration, and the values that ``Decoder`` implements.
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
_QWEN3_HEAD = 128  # default of ``head_dim``


#: Keys of layers with sliding windows, which ``layer_windows`` reads.
WINDOWED = frozenset({"use_sliding_window", "layer_types"})
#: Keys that LLaDA2 has and ``_from_llada2`` reads.
_LLADA2_READ = frozenset(
    {"num_experts", "partial_rotary_factor", "rotary_dim", "use_bias", "use_qk_norm", "use_qkv_bias"}
)
_LLADA2_SWITCHES: Mapping[str, tuple[object, ...]] = {
    "norm_head": (False, None),
    "norm_topk_prob": (True, None),
    "score_function": ("sigmoid", None),
    "moe_router_enable_expert_bias": (True, None),
    "use_rmsnorm": (True, None),
}


#: Defaults of classes of transformers by ``model_type``, where they differ from those of ``from_hugging_face``.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "ministral3": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "qwen2": {"max_position_embeddings": 32_768},
    "qwen3": {"max_position_embeddings": 32_768},
    "qwen3_moe": {"max_position_embeddings": 32_768, "num_key_value_heads": 4},
}


def decoder_config(keys: Keys) -> DecoderConfig:
    """The decoder's configuration from a ``config.json`` of either layout; raises ``ConfigError`` naming key and
    value."""
    kind = keys.values.get("model_type")
    if isinstance(kind, str) and kind in _DEFAULTS:
        keys = Keys({**_DEFAULTS[kind], **keys.values}, keys.path)
    try:
        return _reader(keys)(keys)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{keys.path}: {error}") from error


def _reader(keys: Keys) -> Callable[[Keys], DecoderConfig]:
    kind = keys.values.get("model_type")
    if isinstance(kind, str) and kind in TEXT:
        found: Callable[[Keys], DecoderConfig] = import_module(TEXT[kind]).dimensions
        return found
    if kind in (*QWEN2, *QWEN3):
        return _from_qwen
    if kind in MIXTURE:
        return _from_llada2
    if layout_of(keys.values) is LLADA:  # no other configuration has ``d_model``
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
    if keys.values.get("model_type") != "mistral":
        check_switches(keys)
        return from_hugging_face(keys)
    check_switches(keys, read=WINDOWED)
    return layer_windows(keys, from_hugging_face(keys), everywhere=True)


def from_hugging_face(keys: Keys, *, partial: bool = False) -> DecoderConfig:
    """The part that configurations of LLaMA, Qwen and their relatives have in common.

    ``partial``: the architecture may rotate only a share of each head. Raises ``ConfigError``.
    """
    rope = read_rope(keys, partial=partial)
    width, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if keys.values.get("head_dim") is None:
        _divides(keys, width, heads)
    bias, head = keys.flag("attention_bias"), keys.integer("head_dim", default=width // heads)
    positions = keys.integer("max_position_embeddings", default=2048)
    return DecoderConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=width,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", default=heads),
        head_dim=head,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_width=0 if rope.share == 1.0 else int(head * rope.share),
        rope_axes=rope.axes,
        rms_norm_eps=keys.number("rms_norm_eps", default=1e-6),
        max_positions=rope.positions or positions,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        tie_embeddings=keys.flag("tie_word_embeddings"),
    )


def _from_qwen(keys: Keys) -> DecoderConfig:
    """As transformers' ``modeling_qwen2.py`` and ``modeling_qwen3.py``."""
    kind = keys.values["model_type"]
    experts = kind == "qwen3_vl_moe"
    read = WINDOWED if kind in ("qwen2", "qwen3") else frozenset()
    check_switches(keys, read=read | {"num_experts", "num_local_experts"} if experts else read)
    if kind in QWEN2:
        config = replace(from_hugging_face(keys), qkv_bias=True, out_bias=False, mlp_bias=False)
    else:
        values = {**keys.values, "head_dim": keys.values.get("head_dim") or _QWEN3_HEAD}
        moe = softmax_experts(keys) if experts else None
        config = replace(from_hugging_face(Keys(values, keys.path)), mlp_bias=False, qk_norm=True, moe=moe)
    return layer_windows(keys, config, switch="use_sliding_window") if kind in ("qwen2", "qwen3") else config


def softmax_experts(keys: Keys) -> MoEConfig:
    """Qwen3-MoE's experts: in every ``decoder_sparse_step``-th layer except for ``mlp_only_layers``."""
    layers, step = keys.integer("num_hidden_layers"), keys.integer("decoder_sparse_step", default=1)
    named = keys.values.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise ConfigError(f"{keys.path}: mlp_only_layers must be a list of layers, not {named!r}")
    return MoEConfig(
        experts=keys.integer("num_experts", "num_local_experts", default=128),
        top_k=keys.integer("num_experts_per_tok", default=8),
        expert_size=keys.integer("moe_intermediate_size", default=768),
        dense_layers=frozenset({*named, *(layer for layer in range(layers) if (layer + 1) % step)}),
        softmax=True,
        # Qwen3-VL's class always has weights that sum to 1.
        normed=keys.values.get("model_type") == "qwen3_vl_moe" or keys.flag("norm_topk_prob"),
    )


def _from_llada2(keys: Keys) -> DecoderConfig:
    """As ``configuration_llada2_moe.py`` of inclusionAI/LLaDA2.0-mini, with its defaults."""
    check_switches(keys, read=_LLADA2_READ)
    keys.check(_LLADA2_SWITCHES)
    given = keys.values
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 16_384}
    values = {name: given[name] for name in given if name not in ("sliding_window", "partial_rotary_factor")}
    config = from_hugging_face(Keys({**defaults, **values}, keys.path))
    first = given.get("first_k_dense_replace") or 0
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ConfigError(f"{keys.path}: first_k_dense_replace must be a number of layers, not {first!r}")
    size, rotated = keys.integer("moe_intermediate_size"), keys.number("partial_rotary_factor", default=0.5)
    rotary_width = int(config.head_dim * rotated)
    keys.check({"rotary_dim": (rotary_width, None)})  # the same in other units
    return replace(
        config,
        rotary_width=rotary_width,
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
