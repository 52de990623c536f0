"""InternVL (arXiv 2404.16821, 2504.10479) as transformers writes it: ``internvl``, OpenGVLab/InternVL3-8B-hf.

An InternViT tower, pixel shuffle, a two-layer projector, and the decoder of Qwen2, Qwen3 or LLaMA.
"""

from __future__ import annotations

from transformers import InternVLConfig

from mmserve.models.base import LoadedModel
from mmserve.models.chat import VIDEO, adapt_chat_template, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.internvl_vision import CLIP_BEGIN, load_intern_vision, video_frames
from mmserve.models.nested import image_token, layout_below, load_nested, read_config, use_processor_template

#: Where the decoder's tensors lie: as published, and as transformers names them within.
_LAYOUTS = (
    layout_below("language_model.model", "language_model.lm_head"),
    layout_below("model.language_model", "lm_head"),
)


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load this layout; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    folder = checkpoint.folder
    config = read_config(InternVLConfig, checkpoint)
    tokenizer = load_tokenizer(folder)
    use_processor_template(tokenizer, folder)
    image, videos = image_token(tokenizer, config, checkpoint), bool(video_frames(folder))
    adapt_chat_template(tokenizer, folder, images=True, videos=videos, vicuna=False, image=image)
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = tokenizer.chat_template.replace(VIDEO, f"{CLIP_BEGIN}{VIDEO}")
    published, within = _LAYOUTS
    layout = within if within.tensor("embed.weight") in checkpoint.weights else published
    vision = load_intern_vision(checkpoint, target, config, "model." if layout is within else "")
    return load_nested(checkpoint, target, config, tokenizer, layout, lambda _width: vision)
