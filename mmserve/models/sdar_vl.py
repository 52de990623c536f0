"""SDAR-VL (arXiv 2512.14068; JetAstra/SDAR-VL): SDAR with LLaVA-OneVision's vision.

``JetLM/SDAR-VL-*`` has LLaVA-OneVision's tensors, tower, tiles and clips with SDAR's decoder. The authors' code
supports images only in a prompt's whole blocks; here images may be anywhere.
"""

from __future__ import annotations

from transformers import LlavaOnevisionConfig

from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel
from mmserve.models.block_diffusion import blocks
from mmserve.models.checkpoint import CONFIG, Checkpoint, Target
from mmserve.models.keys import Keys
from mmserve.models.llava import load_as
from mmserve.models.nested import read_config


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load the layout; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    path, text = checkpoint.folder / CONFIG, checkpoint.config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != "sdar":
        raise ConfigError(f"{path}: text_config of 'sdar_v' must be of model_type 'sdar'")
    Keys(text, path).check({"use_sliding_window": (False, None)})
    # transformers has no SDAR: its text model is read as Qwen3, from which it is derived.
    config = read_config(
        LlavaOnevisionConfig, checkpoint, model_type="llava_onevision", text_config={**text, "model_type": "qwen3"}
    )
    return load_as(checkpoint, target, config, blocks)
