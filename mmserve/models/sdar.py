"""SDAR (arXiv 2510.06303; JetAstra/SDAR): block diffusion, made from Qwen3.

Tensors and configuration are Qwen3's. A position sees everything up to the end of its own block; blocks are counted
from the start of the row, prompt included, so the prompt's last tokens may share a block with the first masks. The
logits of a row predict its own position. Where an answer's budget ends within a block there is nothing right of it,
as in diffusers' ``LLaDA2Pipeline``; SDAR's own ``generate.py`` shows the model masks there.
"""

from __future__ import annotations

from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.chat import adapt_chat_template, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import Sources, listed_ids, load_family, make_spec, mask_id_of

MASK = "<|MASK|>"
BLOCK_LENGTH = 4  # that of generate.py, for checkpoints whose configuration does not say another


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load ``JetLM/SDAR-*`` as published; raises ``ConfigError`` naming the key, tensor or file that is wrong.

    ``block_size`` of the configuration is the number of positions of a block.
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
