"""InternVL (arXiv 2404.16821, 2504.10479) in transformers' layout: ``internvl``, OpenGVLab/InternVL3-8B-hf.

An InternViT tower, pixel shuffle, a two-layer projector, and the decoder of Qwen2, Qwen3 or LLaMA.
"""

from __future__ import annotations

from transformers import InternVLConfig

from mmserve.models.base import LoadedModel
from mmserve.models.chat import VIDEO, change_templates
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.internvl_vision import CLIP_BEGIN, load_intern_vision, video_frames
from mmserve.models.nested import found_layout, load_nested, nested_tokenizer, read_config


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load this layout; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    config, videos = read_config(InternVLConfig, checkpoint), bool(video_frames(checkpoint.folder))
    tokenizer = nested_tokenizer(checkpoint, config, videos=videos)
    change_templates(tokenizer, lambda template: template.replace(VIDEO, f"{CLIP_BEGIN}{VIDEO}"))
    layout, prefix = found_layout(checkpoint)
    vision = load_intern_vision(checkpoint, target, config, prefix)
    return load_nested(checkpoint, target, config, tokenizer, layout, lambda _width: vision)
