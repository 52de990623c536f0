"""Tiny random checkpoints in the layouts of llava-hf's LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision, and their oracles.

``config.json`` and the processors' settings have the keys of the published ones; tensors have the names that
transformers writes, which are the published ones.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers import tokenizer
from PIL import Image
from shuffled_checkpoints import Checkpoint, text_settings
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    PreTrainedTokenizerFast,
)
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from mmserve.models.checkpoint import write_json

SIDE, PATCH = 24, 4
#: Visual tokens of a tile.
TILE = 36
#: Heights and widths, as LLaVA-NeXT has them for tiles of 336 pixels.
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE], [3 * SIDE, SIDE], [SIDE, 3 * SIDE]]
#: The forms of their chats: LLaVA-1.5's and LLaVA-NeXT's leave the start of text to the tokenizer.
TEMPLATES = {
    "llava": (
        "{% for message in messages %}{{ message['role'].upper() + ': ' }}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "llava_next": (
        "{% for message in messages %}{{ '[INST] ' }}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{{ ' [/INST]' }}{% endfor %}"
    ),
    "llava_next_video": (
        "{% for message in messages %}{{ message['role'].upper() + ': ' }}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% elif part['type'] == 'video' %}{{ '<video>\n' }}"
        "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "llava_onevision": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% elif part['type'] == 'video' %}{{ '<video>\n' }}"
        "{% else %}{{ '\n' + part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
_TOWER = {
    "hidden_size": 24,
    "image_size": SIDE,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
}
CLIP: dict[str, Any] = {
    "crop_size": {"height": SIDE, "width": SIDE},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": SIDE},
}


class _OneVision(LlavaOnevisionProcessor):
    """Its check of arguments imports torchvision, which is not needed for images."""

    def check_argument_for_proper_class(self, *_: Any) -> None: ...


class Llava(Checkpoint):
    """A checkpoint on disk and what transformers says; prompts begin as its processors have them begin."""

    @torch.no_grad()
    def inputs(self, text: str, files: Sequence[bytes]) -> dict[str, torch.Tensor]:
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
        # A list of each chat's images, as ``apply_chat_template`` has them.
        return dict(self.processor(text=[text], images=[images] if images else None, return_tensors="pt"))


def llava(folder: Path, text: str = "llama", **changes: Any) -> Llava:
    """LLaVA-1.5: one tile, CLIP."""
    tok = _tokenizer(folder, "llava")
    write_json(folder / "preprocessor_config.json", {**CLIP, "image_processor_type": "CLIPImageProcessor"})
    images = CLIPImageProcessorPil.from_pretrained(folder)
    processor = LlavaProcessor(
        images, tok, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    settings = _config(tok, "llava", text, "clip_vision_model", **changes)
    return Llava(folder, _model(LlavaForConditionalGeneration, LlavaConfig, settings), processor, settings)


def llava_next(folder: Path, text: str = "mistral", **changes: Any) -> Llava:
    """LLaVA-NeXT: tiles, CLIP."""
    tok = _tokenizer(folder, "llava_next")
    pinpoints = {"image_grid_pinpoints": PINPOINTS}
    values = {**CLIP, **pinpoints, "aspect_ratio_setting": "anyres", "do_pad": True}
    values["image_processor_type"] = "LlavaNextImageProcessor"
    write_json(folder / "preprocessor_config.json", values)
    images = LlavaNextImageProcessorPil.from_pretrained(folder)
    processor = LlavaNextProcessor(
        images, tok, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    settings = _config(tok, "llava_next", text, "clip_vision_model", **pinpoints, use_image_newline_parameter=True)
    settings |= changes
    return Llava(folder, _model(LlavaNextForConditionalGeneration, LlavaNextConfig, settings), processor, settings)


def llava_next_video(folder: Path, text: str = "llama", **changes: Any) -> Llava:
    """LLaVA-NeXT with clips: frames of one tile, whose features are pooled before the projector."""
    tok = _tokenizer(folder, "llava_next_video")
    pinpoints = {"image_grid_pinpoints": PINPOINTS}
    values = {**CLIP, **pinpoints, "aspect_ratio_setting": "anyres", "do_pad": True}
    values["image_processor_type"] = "LlavaNextImageProcessor"
    write_json(folder / "preprocessor_config.json", values)
    video = {**CLIP, "do_sample_frames": False, "video_processor_type": "LlavaNextVideoVideoProcessor"}
    write_json(folder / "video_preprocessor_config.json", video)
    images = LlavaNextImageProcessorPil.from_pretrained(folder)
    processor = LlavaNextProcessor(
        images, tok, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    settings = _config(tok, "llava_next_video", text, "clip_vision_model", **pinpoints)
    settings |= {"spatial_pool_mode": "average", "spatial_pool_stride": 2, **changes}
    model = _model(LlavaNextVideoForConditionalGeneration, LlavaNextVideoConfig, settings)
    return Llava(folder, model, processor, settings)


def llava_onevision(folder: Path, text: str = "qwen2", **changes: Any) -> Llava:
    """LLaVA-OneVision: tiles up to 3 x 3 of which as many patches are kept as 2 have, SigLIP, videos."""
    tok = _tokenizer(folder, "llava_onevision")
    pinpoints = {"image_grid_pinpoints": [[y * SIDE, x * SIDE] for y in (1, 2, 3) for x in (1, 2, 3)]}
    half = [0.5, 0.5, 0.5]
    values: dict[str, Any] = {"crop_size": None, "do_center_crop": None, "image_mean": half, "image_std": half}
    values = {**CLIP, **pinpoints, **values, "do_pad": True, "size": {"height": SIDE, "width": SIDE}}
    write_json(folder / "preprocessor_config.json", {**values, "image_processor_type": "LlavaOnevisionImageProcessor"})
    images = LlavaOnevisionImageProcessorPil.from_pretrained(folder)
    ratio = {"vision_aspect_ratio": "anyres_max_2"}
    processor = _OneVision(images, tok, None, num_image_tokens=TILE, vision_feature_select_strategy="full", **ratio)
    settings = _config(tok, "llava_onevision", text, "siglip_vision_model", **pinpoints, **ratio)
    settings |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", **changes}
    model = _model(LlavaOnevisionForConditionalGeneration, LlavaOnevisionConfig, settings)
    return Llava(folder, model, processor, settings)


def sdar_vl(folder: Path, block_size: int = 4, **changes: Any) -> Llava:
    """SDAR-VL, with the keys of JetAstra/SDAR-VL's ``sdar_v_8b/config.json``: LLaVA-OneVision around SDAR.

    The oracle is LLaVA-OneVision with Qwen3, which is SDAR's text model but for its mask.
    """
    text = text_settings("qwen3")
    made = llava_onevision(folder, "qwen3", text_config=text, **changes)
    tok = made.processor.tokenizer
    sdar = {"attention_bias": False, "block_size": block_size, "mask_token_id": tok.mask_token_id, "model_type": "sdar"}
    window = {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False}
    settings = {**made.config, "model_type": "sdar_v", "text_config": {**text, **sdar, **window}}
    write_json(folder / "config.json", settings)
    return Llava(folder, made.oracle, made.processor, settings)


def _tokenizer(folder: Path, kind: str) -> PreTrainedTokenizerFast:
    """With a start of text that it puts in front of a prompt itself, as LLaMA's does and Qwen's does not."""
    tok = copy.deepcopy(tokenizer())
    if kind == "llava_onevision":
        tok.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tok.bos_token, tok.eos_token = None, "<|im_end|>"
    else:
        begin = (tok.bos_token, tok.bos_token_id)
        tok.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tok.chat_template = None
    tok.save_pretrained(folder)
    write_json(folder / "chat_template.json", {"chat_template": TEMPLATES[kind]})
    return tok


def _config(tok: PreTrainedTokenizerFast, kind: str, text: str, tower: str, **changes: Any) -> dict[str, Any]:
    names = {"llava": "Llava", "llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision"}
    names["llava_next_video"] = "LlavaNextVideo"
    return {
        "architectures": [f"{names[kind]}ForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": tok.convert_tokens_to_ids("<image>"),
        **(
            {"video_token_index": tok.convert_tokens_to_ids("<video>")}
            if kind in ("llava_onevision", "llava_next_video")
            else {}
        ),
        "model_type": kind,
        "projector_hidden_act": "gelu",
        "text_config": text_settings(text, **({"sliding_window": None} if text == "mistral" else {})),
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vision_config": {**_TOWER, "model_type": tower},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        **changes,
    }


def _model(kind: Any, config: Any, settings: dict[str, Any]) -> Any:
    """A random model whose next token depends on what came before, a picture's every part among it."""
    torch.manual_seed(11)
    model = kind._from_config(config.from_dict(settings), attn_implementation="eager", dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() < 2:
            torch.nn.init.normal_(parameter, std=0.3)
        elif "language_model" not in name and "lm_head" not in name:
            torch.nn.init.normal_(parameter, std=2.0 / parameter[0].numel() ** 0.5)
    return model
