"""Fast-dLLM v2 (arXiv 2509.26328; NVlabs/Fast-dLLM, v2): block diffusion, made from Qwen2.5.

Tensors and configuration are Qwen2's. A position sees everything up to the end of its own block, as in SDAR, but the
logits of a row predict the position to its right, as in the next-token model that it was trained from: a block's first
token is predicted by the last row of the block before it, once that is final, and by itself. The rest of a block is
filled a sub-block at a time, while all of the block is seen; the authors' cache of the other sub-blocks' K/V is the
recompute policy ``dual``. They take the most probable first token whatever the temperature; here it is drawn as all
others are.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import Sources, load_text, make_spec, mask_id_of

MASK = "|<MASK>|"
#: Positions of a sub-block, as of ``generate`` in the authors' modeling.py: no configuration has them.
SUB_BLOCK = 8


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load ``Efficient-Large-Model/Fast_dLLM_v2_*`` as published; raises ``ConfigError`` naming what is wrong.

    ``bd_size`` of the configuration is the number of positions of a block.
    """
    return load_text(checkpoint, target, shifted_blocks)


def shifted_blocks(sources: Sources) -> ModelSpec:
    """The spec of a model that decodes in blocks, whose rows predict what is right of them."""
    block = sources.keys.integer("bd_size", default=32)
    made = make_spec(
        sources,
        attention=Attention.BLOCK_CAUSAL,
        mask_id=mask_id_of(sources, MASK),
        logit_shift=1,
        block_length=block,
    )
    return replace(made, sub_block=gcd(block, SUB_BLOCK))
