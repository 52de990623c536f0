"""Tiny random checkpoints in the published layouts of Mistral Small 3.1 and Pixtral, and transformers' own classes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from qwen_vl_checkpoints import installed
from shuffled_checkpoints import Checkpoint, _model, _tokenizer, text_settings
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessorPil,
)

from mmserve.models.checkpoint import write_json

PATCH = 4
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '[INST]' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '[IMG]' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '[/INST]' }}"
    "{% endfor %}"
)
_TOWER = {
    "head_dim": 8,
    "hidden_act": "gelu",
    "hidden_size": 24,
    "image_size": 48,
    "intermediate_size": 40,
    "model_type": "pixtral",
    "num_attention_heads": 3,
    "num_channels": 3,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
    "rope_theta": 100.0,
}
_IMAGES: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "PixtralImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": {"height": PATCH, "width": PATCH},
    "processor_class": "PixtralProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 48},
}


@dataclass
class Processor:
    """``PixtralProcessor``, whose file imports torchvision: its code for the text of a picture is run as it is."""

    images: Any
    tokenizer: Any
    patch_size: int
    spatial_merge_size: int
    image_token: str = "[IMG]"
    image_break_token: str = "[IMG_BREAK]"
    image_end_token: str = "[IMG_END]"

    def __call__(self, text: str, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        made: dict[str, Any] = {}
        if images:
            square = self.patch_size * self.spatial_merge_size
            made = dict(self.images(list(images), patch_size=square, return_tensors="pt"))
        replace = installed("pixtral/processing_pixtral.py", "replace_image_token")
        pieces = text.split(self.image_token)
        texts = [*(replace(self, made, index) for index in range(len(images))), ""]
        assert len(pieces) == len(texts)
        whole = "".join(piece + more for piece, more in zip(pieces, texts, strict=True))
        ids = torch.tensor([self.tokenizer.encode(whole, add_special_tokens=False)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **made}


class Pixtral(Checkpoint):
    """A checkpoint on disk, and what transformers says."""

    @torch.no_grad()
    def inputs(self, text: str, files: Sequence[bytes]) -> dict[str, torch.Tensor]:
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
        made: dict[str, torch.Tensor] = self.processor(text, images)
        return made


def mistral3(folder: Path, text: str = "mistral", **changes: Any) -> Pixtral:
    """A Pixtral tower whose patches are merged two by two."""
    return _saved(folder, "mistral3", text, 2, **{"spatial_merge_size": 2, "vision_feature_layer": -1, **changes})


def pixtral(folder: Path, **changes: Any) -> Pixtral:
    """LLaVA with a Pixtral tower."""
    full = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_seq_length": 1}
    return _saved(folder, "llava", "mistral", 1, **full, **changes)


def _saved(folder: Path, kind: str, text: str, merge: int, **changes: Any) -> Pixtral:
    tok = _tokenizer(["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    tok.chat_template = None
    tok.save_pretrained(folder)
    write_json(folder / "chat_template.json", {"chat_template": TEMPLATE})
    write_json(folder / "preprocessor_config.json", _IMAGES)
    own = {
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
        "image_token": "[IMG]",
        "patch_size": PATCH,
        "processor_class": "PixtralProcessor",
        "spatial_merge_size": merge,
    }
    write_json(folder / "processor_config.json", own)
    config, model = {
        "llava": (LlavaConfig, LlavaForConditionalGeneration),
        "mistral3": (Mistral3Config, Mistral3ForConditionalGeneration),
    }[kind]
    options: dict[str, Any] = {"sliding_window": None}
    if text == "ministral3":
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 5e4}
        options |= {"rope_theta": ..., "rope_parameters": {**yarn, "llama_4_scaling_beta": 0.1}, "head_dim": 8}
        options["max_position_embeddings"] = 1024
    values = {key: value for key, value in text_settings(text, **options).items() if value is not ...}
    settings: dict[str, Any] = {
        "architectures": [model.__name__],
        "image_token_index": tok.convert_tokens_to_ids("[IMG]"),
        "model_type": kind,
        "multimodal_projector_bias": kind == "llava",
        "projector_hidden_act": "gelu",
        "text_config": values,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": _TOWER,
        **changes,
    }
    images = PixtralImageProcessorPil.from_pretrained(folder)
    processor = Processor(images, tok, PATCH, merge)
    return Pixtral(folder, _model(model, config, settings), processor, settings)
