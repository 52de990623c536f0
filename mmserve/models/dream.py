"""Dream (arXiv 2508.15487; HKUNLP/Dream): masked diffusion with full attention, derived from Qwen2.5.

Tensors and configuration are Qwen2's. As in the original next-token model, the logits of a row predict the position to
its right.
"""

from __future__ import annotations

from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import Sources, load_text, make_spec, mask_id_of

MASK = "<|mask|>"


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load ``Dream-org/Dream-v0-*`` as published; raises ``ConfigError`` naming the key, tensor or file that is wrong.

    Models with the same name but blocks or M-RoPE are refused.
    """
    return load_text(checkpoint, target, _spec)


def _spec(sources: Sources) -> ModelSpec:
    sources.keys.check({"use_mrope": (False, None), "block_size": (None,)})
    return make_spec(sources, attention=Attention.FULL, mask_id=mask_id_of(sources, MASK), logit_shift=1)
