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
from mmserve.models.chat import VIDEO, adapt_chat_template, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.family import Sources, next_token
from mmserve.models.llava_vision import CLIPS, load_llava_vision
from mmserve.models.mistral3 import load as load_pixtral
from mmserve.models.nested import image_token, layout_below, load_nested, read_config, use_processor_template

_CONFIGS = {
    "llava": LlavaConfig,
    "llava_next": LlavaNextConfig,
    "llava_next_video": LlavaNextVideoConfig,
    "llava_onevision": LlavaOnevisionConfig,
}
#: Where the decoder's tensors lie: as published, and as transformers names them within.
_PUBLISHED = layout_below("language_model.model", "language_model.lm_head")
_WITHIN = layout_below("model.language_model", "lm_head")


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load any of these layouts; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    config = read_config(_CONFIGS[checkpoint.architecture], checkpoint)
    if config.vision_config.model_type == "pixtral":
        return load_pixtral(checkpoint, target)
    return load_as(checkpoint, target, config, next_token)


def load_as(checkpoint: Checkpoint, target: Target, config: Any, spec: Callable[[Sources], ModelSpec]) -> LoadedModel:
    """Load ``config`` (of transformers), the model being what ``spec`` says. Raises as ``load``."""
    tokenizer = load_tokenizer(checkpoint.folder)
    use_processor_template(tokenizer, checkpoint.folder)
    image, videos = image_token(tokenizer, config, checkpoint), config.model_type in CLIPS
    video = image_token(tokenizer, config, checkpoint, "video_token_id") if videos else VIDEO
    adapt_chat_template(
        tokenizer, checkpoint.folder, images=True, videos=videos, vicuna=False, image=image, video=video
    )
    layout = _WITHIN if _WITHIN.tensor("embed.weight") in checkpoint.weights else _PUBLISHED
    prefix = "model." if layout is _WITHIN else ""
    see = partial(load_llava_vision, checkpoint, target, config, prefix)
    return load_nested(checkpoint, target, config, tokenizer, layout, see, spec, video)
