"""Block diffusion: SDAR (arXiv 2510.06303; JetAstra/SDAR), made from Qwen3, and LLaDA2.0 (arXiv 2512.15745;
inclusionAI/LLaDA2.0-mini), a mixture of experts.

A position sees everything up to the end of its own block; blocks are counted from the start of the row, prompt
included, so the prompt's last tokens may share a block with the first masks. The logits of a row predict its own
position. Where an answer's budget ends within a block there is nothing right of it, as in diffusers'
``LLaDA2Pipeline``; SDAR's own ``generate.py`` shows the model masks there. The edits that LLaDA2.1 was trained for are
the commit policy ``edit``.
"""

from __future__ import annotations

from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import Sources, load_text, make_spec, mask_id_of

#: Architecture to its mask token, and to the positions of a block where no configuration has them: those of SDAR's
#: generate.py, and of ``generate`` in modeling_llada2_moe.py.
KINDS = {
    "sdar": ("<|MASK|>", 4),
    "sdar_moe": ("<|MASK|>", 4),
    "sdar_v": ("<|MASK|>", 4),
    "llada2_moe": ("<|mask|>", 32),
}


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load the layout of ``JetLM/SDAR-*`` or ``inclusionAI/LLaDA2.0-*``; raises ``ConfigError`` naming what is wrong.

    ``block_size`` of the configuration, where it is set, is the number of positions of a block.
    """
    return load_text(checkpoint, target, blocks)


def blocks(sources: Sources) -> ModelSpec:
    """The spec of a model that decodes in blocks."""
    mask, block_length = KINDS[sources.checkpoint.architecture]
    return make_spec(
        sources,
        attention=Attention.BLOCK_CAUSAL,
        mask_id=mask_id_of(sources, mask),
        block_length=sources.keys.integer("block_size", default=block_length),
    )
