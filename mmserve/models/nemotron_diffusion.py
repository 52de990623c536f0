"""Nemotron-Labs-Diffusion (arXiv 2607.05722): ``nvidia/Nemotron-Labs-Diffusion-*``.

The weights are those of Ministral 3 with other names. It decodes token by token like Ministral 3, can draft blocks of
masks for itself (``decode/extensions/self_draft.py``; the commit policy ``draft_model``), and can fill blocks of masks
(``own_blocks.py`` there; ``threshold``). The authors' adapter for drafts is not implemented.
"""

from __future__ import annotations

from dataclasses import replace

from mmserve.models.base import LoadedModel, ModelSpec
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import Sources, check_tokens, load_text, next_token
from mmserve.models.ministral import dimensions
from mmserve.models.nested import layout_below

__all__ = ["LAYOUT", "dimensions", "load"]

LAYOUT = replace(
    layout_below("encoder", "diffusion_head"),
    name="nemotron_labs_diffusion",
    architecture="NemotronLabsDiffusionModel",
)


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load the layout; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    return load_text(checkpoint, target, _spec)


def _spec(sources: Sources) -> ModelSpec:
    """Drafted masks predict their own positions; a ``dlm_type`` of "dream" would shift them."""
    sources.keys.check({"dlm_type": ("llada", None)})
    mask = sources.keys.values.get("mask_token_id")
    if mask is None:
        return next_token(sources)
    block = sources.keys.integer("block_size", default=32)
    check_tokens(sources, "mask_token_id", [mask])
    return replace(next_token(sources), draft_mask=mask, draft_block=block)
