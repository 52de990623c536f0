"""A tiny random checkpoint in the layout of google/gemma-3-4b-it, and transformers' own class and processor.

``config.json``, processor settings, tokens and chat template have the published keys and form.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from helpers import tokenizer
from shuffled_checkpoints import ROWS, WIDTH, Checkpoint
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    PreTrainedTokenizerFast,
)
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from mmserve.models.checkpoint import write_json

SIDE, PATCH, TOKENS = 32, 4, 16
#: In the order of google/gemma-3-4b-it's: an image is where a part of a message has one.
TEMPLATE = (
    "{{ bos_token }}{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{%- set role = 'model' -%}{%- else -%}{%- set role = message['role'] -%}"
    "{%- endif -%}{{ '<start_of_turn>' + role + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- else -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": TOKENS,
    "image_std": [0.5, 0.5, 0.5],
    "pan_and_scan_max_num_crops": None,
    "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None,
    "processor_class": "Gemma3Processor",
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"height": SIDE, "width": SIDE},
}


class _Processor(Gemma3Processor):
    """Its check of arguments imports torchvision, which is not needed for images."""

    def check_argument_for_proper_class(self, *_: Any) -> None: ...


class Gemma3(Checkpoint):
    """A checkpoint on disk, with tensors of the published names, and transformers' own answers."""


def gemma3(folder: Path, window: int = 40, **text: Any) -> Gemma3:
    """Layers by turns with a ``window`` and without; ``text``: keys of ``text_config``."""
    tok = _tokenizer(folder)
    write_json(folder / "preprocessor_config.json", PROCESSOR)
    processor = _Processor(Gemma3ImageProcessorPil.from_pretrained(folder), tok, image_seq_length=TOKENS)
    ids = {name: tok.convert_tokens_to_ids(getattr(tok, f"{name}_token")) for name in ("boi", "eoi", "image")}
    settings = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        **{f"{name}_token_index": value for name, value in ids.items()},
        "eos_token_id": [tok.eos_token_id],
        "initializer_range": 0.02,
        "mm_tokens_per_image": TOKENS,
        "model_type": "gemma3",
        "text_config": {
            "head_dim": 12,
            "hidden_size": WIDTH,
            "intermediate_size": 56,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "max_position_embeddings": 1024,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "query_pre_attn_scalar": 16,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": window,
            "vocab_size": ROWS,
            **text,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 24,
            "image_size": SIDE,
            "intermediate_size": 40,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
    }
    return Gemma3(folder, _model(settings), processor, settings)


def _tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tok = copy.deepcopy(tokenizer())
    tokens = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    turns = ["<start_of_turn>", "<end_of_turn>"]
    tok.add_special_tokens({"additional_special_tokens": [*turns, *tokens.values()]})
    tok.chat_template = TEMPLATE
    tok.save_pretrained(folder)
    made = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=tokens)
    made.save_pretrained(folder)
    return made


def _model(settings: dict[str, Any]) -> Gemma3ForConditionalGeneration:
    """A random model whose next token depends on what came before, a picture's every part among it."""
    torch.manual_seed(12)
    config = Gemma3Config.from_dict(settings)
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
        elif parameter.dim() < 2:
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=1.6 / parameter.shape[-1] ** 0.5)
    with torch.no_grad():
        model.get_input_embeddings().weight /= WIDTH**0.5
        model.model.multi_modal_projector.mm_input_projection_weight *= 4
    return model
