"""Tensor names and configuration keys of the layouts that LLaMA-family checkpoints come in, read and written.

One table serves both directions: a parameter of ``Decoder`` to its tensor's name when loading, and the same when
exporting. LLaDA's own names are those of ``GSAI-ML/LLaDA-8B-Instruct``; the Hugging Face style names are those of
LLaMA, of ``GSAI-ML/LLaDA-V`` and of ``liuhaotian/llava-v1.5-7b``; the latter two also carry a projector, and may
carry a vision tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmserve.errors import ConfigError
from mmserve.models.decoder import Decoder, DecoderConfig

TOWER, PROJECTOR, NEWLINE = "model.vision_tower.vision_tower.", "model.mm_projector.", "model.image_newline"


@dataclass(frozen=True)
class Layout:
    """Names of a layout's tensors: ``outer`` for the decoder's own modules, ``layer`` for those of layer N."""

    name: str  # ``model_type``
    architecture: str  # the class in ``architectures``
    outer: Mapping[str, str]
    layers: str  # what stands before the layer's number
    layer: Mapping[str, str]

    def tensor(self, parameter: str) -> str:
        """The tensor's name of a ``Decoder`` parameter, such as ``layers.3.q_proj.weight``."""
        module, _, leaf = parameter.rpartition(".")
        if module in self.outer:
            return f"{self.outer[module]}.{leaf}"
        _layers, number, inner = module.split(".", 2)
        return f"{self.layers}.{number}.{self.layer[inner]}.{leaf}"

    def names(self, decoder: Decoder) -> dict[str, str]:
        """Every parameter of ``decoder`` with its tensor's name."""
        return {name: self.tensor(name) for name, _ in decoder.named_parameters(remove_duplicate=False)}


LLADA = Layout(
    name="llada",
    architecture="LLaDAModelLM",
    outer={"embed": "model.transformer.wte", "norm": "model.transformer.ln_f", "head": "model.transformer.ff_out"},
    layers="model.transformer.blocks",
    layer={
        "attn_norm": "attn_norm",
        "q_proj": "q_proj",
        "k_proj": "k_proj",
        "v_proj": "v_proj",
        "o_proj": "attn_out",
        "mlp_norm": "ff_norm",
        "gate_proj": "ff_proj",
        "up_proj": "up_proj",
        "down_proj": "ff_out",
    },
)
HUGGING_FACE = Layout(
    name="llava_llada",
    architecture="LlavaLLaDAModelLM",
    outer={"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    layers="model.layers",
    layer={
        "attn_norm": "input_layernorm",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "o_proj": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "down_proj": "mlp.down_proj",
    },
)
#: The same names for models that decode left to right.
LLAVA_LLAMA = replace(HUGGING_FACE, name="llava_llama", architecture="LlavaLlamaForCausalLM")
LLAMA = replace(HUGGING_FACE, name="llama", architecture="LlamaForCausalLM")

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
}
_HF_SWITCHES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
}


class Keys:
    """A ``config.json`` whose values are checked as they are read; ``path`` is named in every ``ConfigError``."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of ``names`` that is set, a positive integer; ``default`` where none is."""
        return int(self._number(names, (int,), default))

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of ``names`` that is set, a positive number; ``default`` where none is."""
        return float(self._number(names, (int, float), default))

    def flag(self, name: str) -> bool:
        """A switch, off where it is not set."""
        value = self.values.get(name)
        if value not in (True, False, None):
            raise ConfigError(f"{self.path}: {name} must be true or false, not {value!r}")
        return bool(value)

    def choice(self, name: str, accepted: tuple[str, ...], default: str) -> str:
        """One of the ``accepted`` strings."""
        value = self.values.get(name, default)
        if value not in accepted:
            raise ConfigError(f"{self.path}: {name} = {value!r} is not supported; it can be {_listed(accepted)}")
        return str(value)

    def check(self, switches: Mapping[str, tuple[object, ...]]) -> None:
        """Raise ``ConfigError`` for a switch that is set to something else than is implemented."""
        for name, accepted in switches.items():
            if name in self.values and self.values[name] not in accepted:
                raise ConfigError(
                    f"{self.path}: {name} = {self.values[name]!r} is not supported; it can be {_listed(accepted)}"
                )

    def _number(self, names: tuple[str, ...], kinds: tuple[type, ...], default: float | None) -> Any:
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            if default is None:
                raise ConfigError(f"{self.path} has no {' or '.join(names)}")
            return default
        value: Any = self.values[name]
        if type(value) not in kinds or value <= 0:
            raise ConfigError(f"{self.path}: {name} must be a positive number, not {value!r}")
        return value


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout that a configuration is written in: LLaDA's own says ``d_model``, the others ``hidden_size``."""
    return LLADA if "d_model" in config else HUGGING_FACE


def decoder_config(keys: Keys) -> DecoderConfig:
    """Dimensions from a ``config.json`` of either layout; raises ``ConfigError`` naming the key and its value."""
    read = _from_llada if layout_of(keys.values) is LLADA else _from_hugging_face
    try:
        return read(keys)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{keys.path}: {error}") from error


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


def _from_hugging_face(keys: Keys) -> DecoderConfig:
    keys.check(_HF_SWITCHES)
    rope = keys.values.get("rope_parameters") or {}
    Keys(rope, keys.path).check({"rope_type": ("default", None), "partial_rotary_factor": (1, None)})
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
        rope_theta=keys.number("rope_theta", default=Keys(rope, keys.path).number("rope_theta", default=10_000.0)),
        rms_norm_eps=keys.number("rms_norm_eps", default=1e-6),
        max_positions=keys.integer("max_position_embeddings", default=2048),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        tie_embeddings=keys.flag("tie_word_embeddings"),
    )


def config_json(layout: Layout, config: DecoderConfig) -> dict[str, Any]:
    """The ``config.json`` of a decoder in ``layout``, without ids and vision; the inverse of ``decoder_config``."""
    c = config
    if (
        c.qk_norm
        or (layout is LLADA and (c.out_bias or c.mlp_bias))
        or c.out_bias != (c.qkv_bias and layout is not LLADA)
    ):
        raise ConfigError(f"the {layout.name} layout has no place for these biases and norms: {c}")
    if layout is LLADA:
        return {
            "architectures": [layout.architecture],
            "model_type": layout.name,
            "d_model": c.hidden_size,
            "n_heads": c.num_heads,
            "n_kv_heads": c.num_kv_heads,
            "n_layers": c.num_layers,
            "mlp_hidden_size": c.intermediate_size,
            "vocab_size": c.vocab_size,
            "embedding_size": c.vocab_size,
            "max_sequence_length": c.max_positions,
            "rope_theta": c.rope_theta,
            "rms_norm_eps": c.rms_norm_eps,
            "weight_tying": c.tie_embeddings,
            "include_bias": False,
            "include_qkv_bias": c.qkv_bias,
            "activation_type": "silu",
            "block_type": "llama",
            "layer_norm_type": "rms",
            "rope": True,
            "alibi": False,
        }
    return {
        "architectures": [layout.architecture],
        "model_type": layout.name,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_positions,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": c.qkv_bias,
        "mlp_bias": c.mlp_bias,
        "hidden_act": "silu",
    }


def decoder_tensors(layout: Layout, decoder: Decoder) -> dict[str, torch.Tensor]:
    """The decoder's weights by their names in ``layout``; tied embeddings are written once."""
    return {layout.tensor(name): parameter for name, parameter in decoder.named_parameters()}


def vision_tensors(tower: nn.Module, projector: nn.Module, newline: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Weights of tower, projector and the row separator ``newline [D]`` by LLaVA's names."""
    tensors: dict[str, torch.Tensor] = {tower_tensor(name): parameter for name, parameter in tower.named_parameters()}
    alone = len(list(projector.children())) == 1
    tensors |= {projector_tensor(name, alone=alone): parameter for name, parameter in projector.named_parameters()}
    return tensors if newline is None else tensors | {NEWLINE: newline}


def tower_tensor(parameter: str) -> str:
    """LLaVA's name of a tower's parameter: as transformers named it up to 4, below ``vision_model``."""
    return f"{TOWER}vision_model.{parameter.removeprefix('vision_model.')}"


def projector_tensor(parameter: str, *, alone: bool) -> str:
    """LLaVA's name of a projector's parameter; its ``linear`` projector is a bare layer without a number."""
    return PROJECTOR + (parameter.removeprefix("0.") if alone else parameter)


def _divides(keys: Keys, width: int, heads: int) -> None:
    if width % heads:
        raise ConfigError(f"{keys.path}: a width of {width} does not divide into {heads} heads")


def _listed(values: tuple[object, ...]) -> str:
    return " or ".join(repr(value) for value in values)
