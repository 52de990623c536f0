"""LLaMA (arXiv 2302.13971), Qwen2 (arXiv 2407.10671), Qwen3 (arXiv 2505.09388) and LLaVA-1.5 (arXiv 2310.03744).

One decoder with causal attention, token by token. ``llama``, ``qwen2`` and ``qwen3`` are text only, in transformers'
layout; ``llava_llama`` is the layout of ``liuhaotian/llava-v1.5-7b``: LLaMA's tensors, ``model.mm_projector`` and, if
it was fine-tuned, the vision tower. All need safetensors and a tokenizer.
"""

from __future__ import annotations

from mmserve.models.base import LoadedModel
from mmserve.models.chat import adapt_chat_template, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import load_family, next_token, takes_images, takes_videos


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load any of these layouts; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    tokenizer = load_tokenizer(checkpoint.folder)
    adapt_chat_template(
        tokenizer,
        checkpoint.folder,
        images=takes_images(checkpoint),
        videos=takes_videos(checkpoint),
        vicuna=checkpoint.architecture == "llava_llama",
    )
    return load_family(checkpoint, target, tokenizer, next_token)
