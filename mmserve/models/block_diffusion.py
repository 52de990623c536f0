"""Block diffusion: SDAR (arXiv 2510.06303; JetAstra/SDAR), made from Qwen3, and LLaDA2.0 (arXiv 2512.15745;
inclusionAI/LLaDA2.0-mini), a mixture of experts.

Attention is block-causal; blocks are counted from the start of the sequence, including the prompt, so that the prompt's
last tokens may share a block with the first masks. The logits of a row predict its own position. If an answer's budget
ends within a block, the block is truncated, as in diffusers' ``LLaDA2Pipeline``; SDAR's own ``generate.py`` has masks
there. The edits that LLaDA2.1 was trained for are the commit policy ``edit``.
"""

from __future__ import annotations

from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import Sources, load_text, make_spec, mask_id_of

#: Mask token and default block length by architecture, as in SDAR's generate.py and ``generate`` of
#: modeling_llada2_moe.py.
KINDS = {
    "sdar": ("<|MASK|>", 4),
    "sdar_moe": ("<|MASK|>", 4),
    "sdar_v": ("<|MASK|>", 4),
    "llada2_moe": ("<|mask|>", 32),
}


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load the layout of ``JetLM/SDAR-*`` or ``inclusionAI/LLaDA2.0-*``; raises ``ConfigError`` naming what is wrong.

    ``block_size`` of the configuration, if set, is the block length.
    """
    return load_text(checkpoint, target, blocks)


def blocks(sources: Sources) -> ModelSpec:
    """The spec of a block diffusion model."""
    mask, block_length = KINDS[sources.checkpoint.architecture]
    return make_spec(
        sources,
        attention=Attention.BLOCK_CAUSAL,
        mask_id=mask_id_of(sources, mask),
        block_length=sources.keys.integer("block_size", default=block_length),
    )
