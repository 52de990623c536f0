"""SmolVLM (arXiv 2504.05299) and Idefics3 (arXiv 2408.12637): ``smolvlm`` and ``idefics3`` in transformers' layout.

A SigLIP tower with position embeddings for images of any size, pixel shuffle, one linear layer, and LLaMA's decoder.
Layouts are those of HuggingFaceTB/SmolVLM2-2.2B-Instruct, HuggingFaceTB/SmolVLM-Instruct (``idefics3`` as well) and
HuggingFaceM4/Idefics3-8B-Llama3.
"""

from __future__ import annotations

from transformers import (
    Idefics3Config,
    Idefics3VisionTransformer,
    SmolVLMConfig,
    SmolVLMVisionTransformer,
)
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE, DEFAULT_MEDIA_OUTTRO

from mmserve.models.base import LoadedModel
from mmserve.models.chat import VIDEO
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.nested import layout_below, load_nested, nested_tokenizer, read_config
from mmserve.models.smolvlm_vision import CLIP_BEGIN, load_smol_vision

_KINDS = {"idefics3": (Idefics3Config, Idefics3VisionTransformer), "smolvlm": (SmolVLMConfig, SmolVLMVisionTransformer)}
#: Chats with a video use transformers' own template, whatever the checkpoint's is, as in its processor. The text around
#: a video is part of it, so that both are tokenised together.
_VIDEO_CHAT = DEFAULT_CHAT_TEMPLATE.replace(VIDEO, f"{CLIP_BEGIN}{VIDEO}{DEFAULT_MEDIA_OUTTRO}")
_EITHER = (
    "{% set seen = namespace(video=false) %}{% for message in messages %}{% for part in message['content'] %}"
    "{% if part is mapping and part['type'] == 'video' %}{% set seen.video = true %}{% endif %}"
    "{% endfor %}{% endfor %}{% if seen.video %}"
)


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load either of these layouts; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    kind, tower = _KINDS[checkpoint.architecture]
    config = read_config(kind, checkpoint)
    vision = load_smol_vision(checkpoint, target, config, tower)
    videos = bool(vision.frames_per_video)

    def either(own: str) -> str:
        return f"{_EITHER}{_VIDEO_CHAT}{{% else %}}{own}{{% endif %}}" if videos else own

    tokenizer = nested_tokenizer(checkpoint, config, videos=videos, change=either)
    layout = layout_below("model.text_model", "lm_head")
    return load_nested(checkpoint, target, config, tokenizer, layout, lambda _width: vision)
