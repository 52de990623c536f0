"""LLaDA-MoE (arXiv 2509.24389): masked diffusion with full attention and a mixture of experts.

The layout is that of ``inclusionAI/LLaDA-MoE-7B-A1B-Instruct``, whose ``model_type`` is LLaDA's; its decoder is
Qwen3-MoE's, whose norms of queries and keys are a head's and whose router is a softmax.
"""

from __future__ import annotations

from dataclasses import replace

from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.dimensions import from_hugging_face
from mmserve.models.family import Sources, load_text, make_spec, mask_id_of
from mmserve.models.keys import Keys
from mmserve.models.layouts import HUGGING_FACE
from mmserve.models.moe import MoEConfig
from mmserve.models.qwen_moe import EXPERTS
from mmserve.models.switches import check_switches

KIND, MASK = "llada_moe", "<|mask|>"
LAYOUT = replace(HUGGING_FACE, name=KIND, architecture="LLaDAMoEModelLM", layer={**HUGGING_FACE.layer, **EXPERTS})
_SWITCHES = {
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_score_function": ("softmax", None),
    "qk_layernorm": (True,),
    "routed_scaling_factor": (1, None),
    "router_num_group": (None, 1),
    "router_topk_group": (None, 1),
    "shared_expert_intermediate_size": (None, 0),
}


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load the layout; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    return load_text(checkpoint.with_config({**checkpoint.config, "model_type": KIND}), target, _spec)


def _spec(sources: Sources) -> ModelSpec:
    return make_spec(sources, attention=Attention.FULL, mask_id=mask_id_of(sources, MASK))


def dimensions(keys: Keys) -> DecoderConfig:
    """As ``modeling_lladamoe.py`` of the checkpoint; raises ``ConfigError``."""
    check_switches(keys, read=frozenset({"num_experts", "qk_layernorm"}))
    keys.check(_SWITCHES)
    layers = keys.integer("num_hidden_layers")
    listed = keys.values.get("moe_layer_freq") or [1] * layers
    if not isinstance(listed, list) or len(listed) != layers or set(listed) - {0, 1}:
        raise ConfigError(f"{keys.path}: moe_layer_freq must be {layers} times 0 or 1, not {listed!r}")
    dense = frozenset(layer for layer, experts in enumerate(listed) if not experts)
    sizes = {"intermediate_size": keys.integer("dense_intermediate_size", "expert_intermediate_size")}
    moe = MoEConfig(
        experts=keys.integer("num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        expert_size=keys.integer("expert_intermediate_size"),
        dense_layers=dense,
        softmax=True,
        normed=keys.flag("norm_topk_prob"),
    )
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    config = from_hugging_face(Keys({**defaults, **keys.values, **sizes}, keys.path))
    return replace(config, mlp_bias=False, qk_norm=True, moe=moe)
