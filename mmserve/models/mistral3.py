"""Mistral Small 3.1 and Ministral 3 with images, and Pixtral (arXiv 2410.07073), in transformers' layout.

``mistral3``: mistralai/Mistral-Small-3.1-24B-Instruct-2503; ``llava`` with a Pixtral tower:
mistral-community/pixtral-12b; with the decoder of Mistral or Ministral 3.
"""

from __future__ import annotations

from functools import partial

from transformers import LlavaConfig, Mistral3Config

from mmserve.models.base import LoadedModel
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.nested import found_layout, load_nested, nested_tokenizer, read_config
from mmserve.models.pixtral_vision import load_pixtral_vision

_CONFIGS = {"llava": LlavaConfig, "mistral3": Mistral3Config}


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load either of these layouts; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    config = read_config(_CONFIGS[checkpoint.architecture], checkpoint)
    tokenizer = nested_tokenizer(checkpoint, config)
    layout, prefix = found_layout(checkpoint)
    see = partial(load_pixtral_vision, checkpoint, target, config, prefix)
    return load_nested(checkpoint, target, config, tokenizer, layout, see)
