"""Fast-dLLM v2 (arXiv 2509.26328; NVlabs/Fast-dLLM, v2): block diffusion, derived from Qwen2.5.

Tensors and configuration are Qwen2's. Attention is block-causal, as in SDAR, but the logits of a row predict the
position to its right, as in the original next-token model: a block's first token is predicted, alone, by the last row
of the previous block, once that is final. The rest of a block is filled one sub-block at a time, with attention over
the whole block; the authors' cache of the other sub-blocks' K/V is the recompute policy ``dual``. They take the most
probable first token at any temperature; here it is sampled like all others.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import Sources, load_text, make_spec, mask_id_of

MASK = "|<MASK>|"
#: Length of a sub-block, as in ``generate`` of the authors' modeling.py: not in any configuration.
SUB_BLOCK = 8


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load ``Efficient-Large-Model/Fast_dLLM_v2_*`` as published; raises ``ConfigError`` naming what is wrong.

    ``bd_size`` of the configuration is the block length.
    """
    return load_text(checkpoint, target, shifted_blocks)


def shifted_blocks(sources: Sources) -> ModelSpec:
    """The spec of a block diffusion model whose rows predict the position to their right."""
    block = sources.keys.integer("bd_size", default=32)
    made = make_spec(
        sources,
        attention=Attention.BLOCK_CAUSAL,
        mask_id=mask_id_of(sources, MASK),
        logit_shift=1,
        block_length=block,
    )
    return replace(made, sub_block=gcd(block, SUB_BLOCK))
