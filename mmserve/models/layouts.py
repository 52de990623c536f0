"""Tensor names of the layouts of LLaMA-family checkpoints, for reading and writing; writing of configurations.

One table serves both directions: it maps a parameter of ``Decoder`` to its tensor's name. LLaDA's own names are those
of ``GSAI-ML/LLaDA-8B-Instruct``; the Hugging Face names are those of LLaMA, Qwen2 and Qwen3, ``GSAI-ML/LLaDA-V`` and
``liuhaotian/llava-v1.5-7b``; the latter two also have a projector, and may have a vision tower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from mmserve.errors import ConfigError
from mmserve.models.decoder import Decoder
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.switches import TEXT
from mmserve.models.tensor_parts import ExpertSlice, Part, Rows

TOWER, PROJECTOR, NEWLINE = "model.vision_tower.vision_tower.", "model.mm_projector.", "model.image_newline"


@dataclass(frozen=True)
class Layout:
    """Names of a layout's tensors: ``outer`` for modules outside of layers, ``layer`` for those of layer N."""

    name: str  # ``model_type``
    architecture: str  # the class in ``architectures``
    outer: Mapping[str, str]
    layers: str  # the prefix of the layer's number
    layer: Mapping[str, str]
    #: Tensors of a layer that contain one part of all experts, by the part's name; parts in the same tensor are
    #: adjacent.
    stacked: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)  # names within an expert, if different

    def tensor(self, parameter: str) -> str:
        """The tensor name of a ``Decoder`` parameter, such as ``layers.3.q_proj.weight``."""
        module, _, leaf = parameter.rpartition(".")
        if module in self.outer:
            return f"{self.outer[module]}.{leaf}"
        _layers, number, inner = module.split(".", 2)
        within = ""
        while inner not in self.layer:  # a submodule that keeps its name
            if not inner:
                raise ConfigError(f"the layout has no place for {parameter}: is model_type the right one?")
            inner, _, part = inner.rpartition(".")
            within = f".{self.parts.get(part, part)}{within}"
        return f"{self.layers}.{number}.{self.layer[inner]}{within}.{leaf}"

    def names(self, decoder: Decoder) -> dict[str, Part]:
        """The tensor name of every parameter of ``decoder``, or its part of a tensor if parameters share one."""
        parameters = dict(decoder.named_parameters(remove_duplicate=False))
        slices: dict[str, Part] = {
            name: self._expert_slice(name, len(p), decoder)
            for name, p in parameters.items()
            if self._lies_stacked(name)
        }
        names = {name: self.tensor(name) for name in parameters if name not in slices}
        totals: Counter[str] = Counter()
        for name, tensor in names.items():
            totals[tensor] += len(parameters[name])
        starts: Counter[str] = Counter()
        found: dict[str, Part] = {}
        for name, tensor in names.items():
            rows, total = len(parameters[name]), totals[tensor]
            found[name] = tensor if rows == total else Rows(tensor, starts[tensor], total)
            starts[tensor] += rows
        return found | slices

    def _lies_stacked(self, parameter: str) -> bool:
        return ".moe.experts." in parameter and parameter.split(".")[-2] in self.stacked

    def _expert_slice(self, parameter: str, rows: int, decoder: Decoder) -> ExpertSlice:
        """The slab of ``layers.N.moe.experts.E.PART.weight``."""
        moe = decoder.config.moe
        assert moe is not None
        _layers, layer, _moe, _experts, expert, part, _leaf = parameter.split(".")
        name = self.stacked[part]
        beside = [each for each, tensor in self.stacked.items() if tensor == name]
        return ExpertSlice(
            f"{self.layers}.{layer}.{name}", int(expert), moe.experts, beside.index(part) * rows, len(beside) * rows
        )


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
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "gate_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "down_proj": "mlp.down_proj",
    },
)
#: The same names for autoregressive models.
LLAVA_LLAMA = replace(HUGGING_FACE, name="llava_llama", architecture="LlavaLlamaForCausalLM")
LLAMA = replace(HUGGING_FACE, name="llama", architecture="LlamaForCausalLM")

#: ``inclusionAI/LLaDA2.0-mini``: queries, keys and values are in one tensor, in this order.
LLADA2 = replace(
    HUGGING_FACE,
    name="llada2_moe",
    architecture="LLaDA2MoeModelLM",
    outer={**HUGGING_FACE.outer, "embed": "model.word_embeddings"},
    layer={
        **HUGGING_FACE.layer,
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention.query_key_value"),
        "q_norm": "attention.query_layernorm",
        "k_norm": "attention.key_layernorm",
        "o_proj": "attention.dense",
        "moe.router": "mlp.gate",
        "moe.experts": "mlp.experts",
        "moe.shared": "mlp.shared_experts",
    },
)


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout of a configuration: LLaDA's own has ``d_model``, the others ``hidden_size``."""
    if config.get("model_type") in TEXT:
        found: Layout = import_module(TEXT[config["model_type"]]).LAYOUT
        return found
    if config.get("model_type") == LLADA2.name:
        return LLADA2
    return LLADA if "d_model" in config else HUGGING_FACE


#: Fields of a decoder's configuration in both layouts that can be written: LLaDA's names, and the others'.
_WRITTEN = {
    "hidden_size": ("d_model", "hidden_size"),
    "intermediate_size": ("mlp_hidden_size", "intermediate_size"),
    "num_layers": ("n_layers", "num_hidden_layers"),
    "num_heads": ("n_heads", "num_attention_heads"),
    "num_kv_heads": ("n_kv_heads", "num_key_value_heads"),
    "vocab_size": ("vocab_size", "vocab_size"),
    "max_positions": ("max_sequence_length", "max_position_embeddings"),
    "rope_theta": ("rope_theta", "rope_theta"),
    "rms_norm_eps": ("rms_norm_eps", "rms_norm_eps"),
    "tie_embeddings": ("weight_tying", "tie_word_embeddings"),
}


def config_json(layout: Layout, config: DecoderConfig) -> dict[str, Any]:
    """The ``config.json`` of a decoder in ``layout``, without ids and vision; ``decoder_config`` reads it back."""
    c, own = config, layout is LLADA
    held = {name: getattr(c, name) for name in (*_WRITTEN, "head_dim", "qkv_bias", *(() if own else ("mlp_bias",)))}
    if c != DecoderConfig(**held, out_bias=c.qkv_bias and not own):
        raise ConfigError(f"the {layout.name} layout has no place for these biases, norms, scales and rotations: {c}")
    values = {"architectures": [layout.architecture], "model_type": layout.name}
    values |= {names[0 if own else 1]: getattr(c, name) for name, names in _WRITTEN.items()}
    if not own:
        biases = {"attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias}
        return {**values, "head_dim": c.head_dim, **biases, "hidden_act": "silu"}
    kinds = {"activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms", "rope": True, "alibi": False}
    return {**values, "embedding_size": c.vocab_size, "include_bias": False, "include_qkv_bias": c.qkv_bias, **kinds}


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
