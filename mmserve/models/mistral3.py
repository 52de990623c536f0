"""Mistral Small 3.1 and Ministral 3 with images, and Pixtral (arXiv 2410.07073), as transformers writes them.

``mistral3`` in the layout of mistralai/Mistral-Small-3.1-24B-Instruct-2503, and ``llava`` with a Pixtral tower in that
of mistral-community/pixtral-12b: the decoder of Mistral or of Ministral 3.
"""

from __future__ import annotations

from functools import partial

from transformers import LlavaConfig, Mistral3Config

from mmserve.models.base import LoadedModel
from mmserve.models.chat import adapt_chat_template, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.nested import image_token, layout_below, load_nested, read_config, use_processor_template
from mmserve.models.pixtral_vision import load_pixtral_vision

_CONFIGS = {"llava": LlavaConfig, "mistral3": Mistral3Config}
#: Where the decoder's tensors lie: as published, and as transformers names them within.
_PUBLISHED = layout_below("language_model.model", "language_model.lm_head")
_WITHIN = layout_below("model.language_model", "lm_head")


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load either of these layouts; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    config = read_config(_CONFIGS[checkpoint.architecture], checkpoint)
    tokenizer = load_tokenizer(checkpoint.folder)
    use_processor_template(tokenizer, checkpoint.folder)
    image = image_token(tokenizer, config, checkpoint)
    adapt_chat_template(tokenizer, checkpoint.folder, images=True, videos=False, vicuna=False, image=image)
    within = _WITHIN.tensor("embed.weight") in checkpoint.weights
    see = partial(load_pixtral_vision, checkpoint, target, config, "model." if within else "")
    return load_nested(checkpoint, target, config, tokenizer, _WITHIN if within else _PUBLISHED, see)
