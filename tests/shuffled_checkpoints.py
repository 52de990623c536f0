"""Tiny random checkpoints in the published layouts of SmolVLM, Idefics3 and InternVL, and transformers' own classes.

``config.json``, processor settings, tokens and chat templates have the keys and forms of HuggingFaceTB/SmolVLM2-*,
HuggingFaceM4/Idefics3-8B-Llama3 and OpenGVLab/InternVL3-*-hf; tensors have the names that transformers writes.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from helpers import tokenizer
from PIL import Image
from qwen_checkpoints import CHATML
from transformers import (
    GotOcr2ImageProcessorPil,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.utils import PushToHubMixin

from mmserve.models.checkpoint import read_json, write_checkpoint, write_json

WIDTH, SIDE, PATCH = 32, 24, 4
#: Rows of the embeddings: more than the tokenizers have tokens.
ROWS = 768
#: Visual tokens of a tile: 6 x 6 patches, squares of 2 x 2.
TILE = 9

SMOL_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
INTERN_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif content['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{'<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
_IMAGES = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
}
SMOL_PROCESSOR: dict[str, Any] = {
    **_IMAGES,
    "do_image_splitting": True,
    "do_pad": True,
    "image_processor_type": "SmolVLMImageProcessor",
    "max_image_size": {"longest_edge": SIDE},
    "processor_class": "SmolVLMProcessor",
    "resample": 1,
    "size": {"longest_edge": 2 * SIDE},
    "video_sampling": {"fps": 1, "max_frames": 4, "video_size": {"longest_edge": SIDE}},
}
INTERN_PROCESSOR: dict[str, Any] = {
    **_IMAGES,
    "crop_size": None,
    "crop_to_patches": False,
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "max_patches": 6,
    "min_patches": 1,
    "processor_class": "InternVLProcessor",
    "resample": 3,
    "size": {"height": SIDE, "width": SIDE},
}


class _Smol(processing_smolvlm.SmolVLMProcessor):
    """transformers' processor; its check of arguments imports torchvision, which is not needed for images."""

    def check_argument_for_proper_class(self, *_: Any) -> None: ...


class _Intern(InternVLProcessor):
    def check_argument_for_proper_class(self, *_: Any) -> None: ...


def text_settings(kind: str, **options: Any) -> dict[str, Any]:
    """``text_config``: only what differs from the class's defaults."""
    return {
        "model_type": kind,
        "hidden_size": WIDTH,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": ROWS,
        "initializer_range": 0.2,
        "rope_theta": 50_000.0,
        **({"head_dim": 12} if kind == "qwen3" else {}),
        **options,
    }


_TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}


class Checkpoint:
    """A checkpoint on disk, and what transformers says of the same request: its processor and its model."""

    def __init__(self, folder: Path, oracle: Any, processor: Any, config: dict[str, Any]) -> None:
        self.folder, self.oracle, self.processor, self.config = folder, oracle, processor, config
        oracle.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", {"eos_token_id": processor.tokenizer.eos_token_id})

    @torch.no_grad()
    def inputs(self, text: str, files: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """What the processor makes of a prompt and its images, as the model takes it."""
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
        made = self.processor(text=text, images=images or None, return_tensors="pt")
        return {key: value for key, value in made.items() if key not in ("rows", "cols")}

    @torch.no_grad()
    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """``[T, V]`` of a prompt."""
        return self.oracle(**inputs).logits[0]

    @torch.no_grad()
    def greedy(self, inputs: dict[str, torch.Tensor], count: int, banned: Sequence[int]) -> list[int]:
        """What ``generate`` says, past any end of text."""
        made = self.oracle.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(banned),
        )
        return [int(token) for token in made[0, inputs["input_ids"].shape[1] :]]


def smolvlm(folder: Path, kind: str = "smolvlm", **changes: Any) -> Checkpoint:
    """``kind``: ``smolvlm`` or ``idefics3``; ``changes`` of ``config.json``."""
    tok = _tokenizer(
        ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>"]
        + [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    )
    tok.eos_token = "<end_of_utterance>"
    tok.chat_template = None
    tok.save_pretrained(folder)
    settings: dict[str, Any] = {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": tok.convert_tokens_to_ids("<image>"),
        "model_type": kind,
        "scale_factor": 2,
        "text_config": text_settings("llama"),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vision_config": {
            **_TOWER,
            "image_size": SIDE,
            "patch_size": PATCH,
            "model_type": kind,
            "use_base_siglip": False,
        },
        **changes,
    }
    processor = dict(SMOL_PROCESSOR)
    make: Any = _Smol
    classes: tuple[Any, Any, Any] = SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil
    if kind == "idefics3":
        settings["architectures"] = ["Idefics3ForConditionalGeneration"]
        processor |= {"image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor"}
        del processor["video_sampling"]
        classes = Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil
    write_json(folder / "preprocessor_config.json", processor)
    write_json(
        folder / "processor_config.json", {"image_seq_len": TILE, "processor_class": processor["processor_class"]}
    )
    write_json(folder / "chat_template.json", {"chat_template": SMOL_TEMPLATE})
    images = classes[2].from_pretrained(folder)
    if kind == "idefics3":
        made = Idefics3Processor(images, copy.deepcopy(tok), image_seq_len=TILE)
    else:
        processing_smolvlm.num2words = str  # is asked for even where no video is
        made = make(images, tok, None, image_seq_len=TILE)
    return Checkpoint(folder, _model(classes[1], classes[0], settings), made, settings)


def internvl(
    folder: Path,
    text: str = "qwen2",
    *,
    tower: Mapping[str, Any] = MappingProxyType({}),
    text_options: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Checkpoint:
    """``text``: the decoder's ``model_type``; ``changes`` of ``config.json`` and of what it says of both parts."""
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tok = _tokenizer([*names.values(), "<|im_start|>", "<|im_end|>"])
    tok.eos_token = "<|im_end|>"
    tok.chat_template = INTERN_TEMPLATE
    tok.save_pretrained(folder)
    values = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", {**values, "extra_special_tokens": names})
    tok = PreTrainedTokenizerFast.from_pretrained(folder)
    settings: dict[str, Any] = {
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "image_seq_length": TILE,
        "image_token_id": tok.convert_tokens_to_ids("<IMG_CONTEXT>"),
        "model_type": "internvl",
        "projector_hidden_act": "gelu",
        "text_config": text_settings(text, **text_options),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            **_TOWER,
            "architectures": ["InternVisionModel"],
            "attention_bias": True,
            "image_size": [SIDE, SIDE],
            "layer_norm_eps": 1e-06,
            "model_type": "internvl_vision",
            "norm_type": "layer_norm",
            "patch_size": [PATCH, PATCH],
            "use_absolute_position_embeddings": True,
            "use_mask_token": False,
            "use_mean_pooling": True,
            "use_qk_norm": False,
            **tower,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        **changes,
    }
    write_json(folder / "preprocessor_config.json", INTERN_PROCESSOR)
    write_json(folder / "processor_config.json", {"image_seq_length": TILE, "processor_class": "InternVLProcessor"})
    images = GotOcr2ImageProcessorPil.from_pretrained(folder)
    made = _Intern(images, tok, None, image_seq_length=TILE)
    model = _model(InternVLForConditionalGeneration, InternVLConfig, settings)
    return Checkpoint(folder, model, made, settings)


class _Saved(PushToHubMixin):
    """A video processor with its settings as transformers 5.23 writes them; its class needs torchvision."""

    _auto_class = None

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)

    def to_dict(self) -> dict[str, Any]:
        return self.settings


def saved_by_transformers_5(made: Checkpoint, **video: Any) -> None:
    """Replace the processors' files by what ``save_pretrained`` of transformers 5 writes: ``processor_config.json``
    with the settings of the image processor, and ``video`` of the video processor."""
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.json"):
        (made.folder / name).unlink(missing_ok=True)
    settings = read_json(made.folder / "tokenizer_config.json")
    made.processor.video_processor = _Saved({**_FRAMES, **video})
    template = SMOL_TEMPLATE if "smolvlm" in made.config["model_type"] else INTERN_TEMPLATE
    made.processor.chat_template = template
    made.processor.save_pretrained(made.folder)
    write_json(made.folder / "tokenizer_config.json", settings)
    written = read_json(made.folder / "processor_config.json")
    assert written["video_processor"].items() >= video.items() and "size" in written["image_processor"]


#: What every video processor of transformers 5.23 writes; what differs of each is added.
_FRAMES: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "do_sample_frames": False,
    "rescale_factor": 0.00392156862745098,
    "return_metadata": False,
}

#: Names of transformers' tensors in the authors' own layout.
_ORIGINAL = {
    r"^model\.language_model": "language_model.model",
    r"^lm_head": "language_model.lm_head",
    r"^model\.multi_modal_projector\.layer_norm": "mlp1.0",
    r"^model\.multi_modal_projector\.linear_1": "mlp1.1",
    r"^model\.multi_modal_projector\.linear_2": "mlp1.3",
    r"^model\.vision_tower": "vision_model",
    r"cls_token$": "class_embedding",
    r"position_embeddings$": "position_embedding",
    r"patch_embeddings\.projection": "patch_embedding",
    r"encoder\.layer\.": "encoder.layers.",
    r"layernorm_before": "norm1",
    r"layernorm_after": "norm2",
    r"lambda_": "ls",
    r"attention\.projection_layer": "attn.proj",
    r"attention\.([qk])_norm": r"attn.\1_norm",
}


def internvl_chat(folder: Path, **changes: Any) -> Checkpoint:
    """The same network as ``internvl`` makes, as OpenGVLab/InternVL3-8B has it; ``changes`` of ``config.json``."""
    made = internvl(folder, tower={"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False})
    for name in ("model.safetensors", "preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()
    made.processor.image_processor.image_mean = (0.485, 0.456, 0.406)
    made.processor.image_processor.image_std = (0.229, 0.224, 0.225)
    (folder / "chat_template.jinja").write_text(CHATML)
    tower = {key: value for key, value in made.config["vision_config"].items() if key in _TOWER or key == "norm_type"}
    config = {
        "architectures": ["InternVLChatModel"],
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": SIDE,
        "llm_config": made.config["text_config"],
        "max_dynamic_patch": 6,
        "min_dynamic_patch": 1,
        "model_type": "internvl_chat",
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "torch_dtype": "bfloat16",
        "use_thumbnail": True,
        "vision_config": {
            **tower,
            "image_size": SIDE,
            "model_type": "intern_vit_6b",
            "patch_size": PATCH,
            "qk_normalization": True,
            "qkv_bias": False,
            "use_flash_attn": True,
        },
        **changes,
    }
    write_checkpoint(folder, config, _original(made.oracle.state_dict()))
    return made


def _original(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if re.search(r"vision.*attention\.[kv]_proj", name):
            continue
        if "vision" in name and "attention.q_proj" in name:
            tensor = torch.cat([tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
            name = name.replace("attention.q_proj", "attn.qkv")
        for pattern, new in _ORIGINAL.items():
            name = re.sub(pattern, new, name)
        found[name] = tensor
    return found


def _tokenizer(specials: list[str]) -> PreTrainedTokenizerFast:
    tok = copy.deepcopy(tokenizer())
    tok.add_special_tokens({"additional_special_tokens": specials})
    return tok


def _model(kind: Any, config: Any, settings: dict[str, Any]) -> Any:
    """A random model whose next token depends on what came before, a picture's every part among it."""
    torch.manual_seed(11)
    model = kind._from_config(config.from_dict(settings), attn_implementation="eager", dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "lambda" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() < 2:
            torch.nn.init.normal_(parameter, std=0.3)
        elif "text_model" not in name and "language_model" not in name and "lm_head" not in name:
            torch.nn.init.normal_(parameter, std=2.0 / parameter[0].numel() ** 0.5)
    return model
