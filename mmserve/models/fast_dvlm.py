"""Fast-dVLM (arXiv 2604.06832; NVlabs/Fast-dLLM, fast_dvlm): ``Efficient-Large-Model/Fast_dVLM_3B``.

Qwen2.5-VL in tensors, tower and chats. By default it decodes as a next-token model, with causal K/V; within a block of
masks, attention is bidirectional, and as in Fast-dLLM v2 the logits of a row predict the position to its right. It can
draft such blocks for itself (``decode/extensions/self_draft.py``; the commit policy ``draft_model``), or fill them by
confidence, one sub-block at a time (``own_blocks.py`` there; ``threshold``).
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from mmserve.models.base import LoadedModel, ModelSpec
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import Sources, check_tokens, mask_id_of, next_token
from mmserve.models.fast_dllm import MASK, SUB_BLOCK
from mmserve.models.qwen_vl import KINDS, load_as


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load the layout; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    return load_as(checkpoint, target, KINDS["qwen2_5_vl"], _spec)


def _spec(sources: Sources) -> ModelSpec:
    sources.keys.check({"use_block_causal_mask": (False, None)})
    mask, block = mask_id_of(sources, MASK), sources.keys.integer("bd_size", default=32)
    check_tokens(sources, "mask_token_id", [mask])
    return replace(
        next_token(sources),
        draft_mask=mask,
        draft_block=block,
        draft_shift=1,
        sub_block=gcd(block, SUB_BLOCK),
    )
