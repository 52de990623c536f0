"""LLaDA (arXiv 2502.09992) and LLaDA-V (arXiv 2505.16933): masked diffusion decoders with full attention.

Both layouts load onto one ``Decoder``; LLaDA-V's may add a vision tower and a projector.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.chat import ensure_chat_template, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import (
    END_OF_TURN,
    Sources,
    listed_ids,
    load_family,
    make_spec,
    mask_id_of,
    takes_images,
    takes_videos,
    token_id,
)

MASK = "<|mdm_mask|>"
#: Tokens that LLaDA-V's ``generate`` (modeling_llada.py) suppresses at masks besides the end of text.
_NEVER_IN_ANSWERS = ("<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>")


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load either layout; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    tokenizer = load_tokenizer(checkpoint.folder)
    ensure_chat_template(tokenizer, images=takes_images(checkpoint), videos=takes_videos(checkpoint))
    return load_family(checkpoint, target, tokenizer, _spec)


def _spec(sources: Sources) -> ModelSpec:
    banned = banned_ids(sources.checkpoint, sources.tokenizer)
    return make_spec(sources, attention=Attention.FULL, mask_id=mask_id_of(sources, MASK), banned=banned)


def banned_ids(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Token ids that the checkpoint suppresses in answers, besides the mask.

    ``suppress_tokens`` in ``generation_config.json`` is used if set. Otherwise LLaDA-V's rule applies to its layout:
    its ``generate`` sets 126080, 126081, 126346 and 126347 (start of text, end of text, start and end of a header) to
    minus infinity at masks and stops at ``<|eot_id|>``, so the end of text is banned as long as the end of a turn
    remains. LLaDA's own ``generate`` suppresses nothing by default: it was trained to pad the canvas after the answer
    with the end of text.
    """
    suppressed = checkpoint.generation.get("suppress_tokens")
    if suppressed is not None:
        return set(listed_ids(suppressed))
    if checkpoint.architecture != "llava_llada":
        return set()
    ids = {i for i in (token_id(tokenizer, name) for name in _NEVER_IN_ANSWERS) if i is not None}
    if token_id(tokenizer, END_OF_TURN) is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return ids
