"""LLaDA2.0 (arXiv 2512.15745; inclusionAI/LLaDA2.0-mini): block diffusion with a mixture of experts.

Attention is block-causal as SDAR's, over blocks of 32 counted from the start of the row; half of each head is
rotated. The edits of committed tokens that LLaDA2.1 adds are not made.
"""

from __future__ import annotations

from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.chat import adapt_chat_template, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import Sources, listed_ids, load_family, make_spec, mask_id_of

MASK = "<|mask|>"
BLOCK_LENGTH = 32  # of ``generate`` in modeling_llada2_moe.py, which no configuration says


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load the layout of ``inclusionAI/LLaDA2.0-mini``; raises ``ConfigError`` naming what is wrong.

    ``block_size`` of the configuration, where it is set, is the number of positions of a block.
    """
    tokenizer = load_tokenizer(checkpoint.folder)
    adapt_chat_template(tokenizer, checkpoint.folder, images=False, videos=False, vicuna=False)
    return load_family(checkpoint, target, tokenizer, _spec)


def _spec(sources: Sources) -> ModelSpec:
    mask_id = mask_id_of(sources, MASK)
    return make_spec(
        sources,
        attention=Attention.BLOCK_CAUSAL,
        mask_id=mask_id,
        banned={mask_id, *listed_ids(sources.checkpoint.generation.get("suppress_tokens"))},
        block_length=sources.keys.integer("block_size", default=BLOCK_LENGTH),
    )
