"""LLaVA-1.5 (arXiv 2310.03744), LLaVA-NeXT, its video model and LLaVA-OneVision (arXiv 2408.03326) in transformers.

``llava``, ``llava_next``, ``llava_next_video`` and ``llava_onevision``, in the layouts of llava-hf/llava-1.5-7b-hf,
llava-hf/llava-v1.6-mistral-7b-hf, llava-hf/LLaVA-NeXT-Video-7B-hf and llava-hf/llava-onevision-qwen2-7b-ov-hf: a CLIP
or SigLIP tower, a two-layer projector, and the decoder of LLaMA, Mistral, Qwen2 or Qwen3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import LlavaConfig, LlavaNextConfig, LlavaNextVideoConfig, LlavaOnevisionConfig

from mmserve.models.base import LoadedModel, ModelSpec
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import Sources, next_token
from mmserve.models.llava_vision import CLIPS, load_llava_vision
from mmserve.models.mistral3 import load as load_pixtral
from mmserve.models.nested import found_layout, image_token, load_nested, nested_tokenizer, read_config

_CONFIGS = {
    "llava": LlavaConfig,
    "llava_next": LlavaNextConfig,
    "llava_next_video": LlavaNextVideoConfig,
    "llava_onevision": LlavaOnevisionConfig,
}


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load any of these layouts; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    config = read_config(_CONFIGS[checkpoint.architecture], checkpoint)
    if config.vision_config.model_type == "pixtral":
        return load_pixtral(checkpoint, target)
    return load_as(checkpoint, target, config, next_token)


def load_as(checkpoint: Checkpoint, target: Target, config: Any, spec: Callable[[Sources], ModelSpec]) -> LoadedModel:
    """Load ``config`` (of transformers) as the model that ``spec`` describes. Raises as ``load``."""
    videos = config.model_type in CLIPS
    tokenizer = nested_tokenizer(checkpoint, config, videos=videos, video="video_token_id")
    video = image_token(tokenizer, config, checkpoint, "video_token_id") if videos else ""
    layout, prefix = found_layout(checkpoint)
    see = partial(load_llava_vision, checkpoint, target, config, prefix)
    return load_nested(checkpoint, target, config, tokenizer, layout, see, spec, video)
