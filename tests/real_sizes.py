"""Checkpoints of random weights with the dimensions of published ones, in bf16 and few layers: matrices, towers and
vocabularies are as large, and the shards have an index, as they are published.

Tensors have the names that transformers writes, and are written a shard at a time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from helpers import tokenizer
from llada_checkpoints import VISION
from llava_checkpoints import TEMPLATES
from qwen_vl_checkpoints import SPECIAL, TEMPLATE, flatten, special_ids
from safetensors.torch import save_file
from tokenizers import AddedToken
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from mmserve.models.checkpoint import INDEX, write_json
from mmserve.models.projectors import mlp_projector

#: So many that what a product with the output layer takes for itself is small beside the weights.
LAYERS = 4
_SHARD_BYTES = 1 << 30
_CLIP_MEAN = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


def write_shards(folder: Path, shapes: Mapping[str, torch.Size]) -> int:
    """Random bf16 tensors of these ``shapes``; their bytes."""
    generator, shard, files, room, total = torch.Generator().manual_seed(0), dict[str, torch.Tensor](), {}, 0, 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, shape in [*shapes.items(), ("", torch.Size())]:
        size = 2 * shape.numel()
        if shard and (not name or room + size > _SHARD_BYTES):
            file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(shard, file)
            shard, room = {}, 0
        if name:
            norm = len(shape) == 1 and name.endswith("weight")
            tensor = torch.empty(shape, dtype=torch.bfloat16)
            shard[name] = tensor.fill_(1.0) if norm else tensor.uniform_(-0.03, 0.03, generator=generator)
            room, total = room + size, total + size
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})
    return total


def _shapes(make: Callable[[], torch.nn.Module]) -> Iterator[tuple[str, torch.Size]]:
    with torch.device("meta"):
        module = make()
    return ((name, parameter.shape) for name, parameter in module.named_parameters())


def llava_15(folder: Path) -> int:
    """llava-hf/llava-1.5-7b-hf, but for its number of layers."""
    tok = copy.deepcopy(tokenizer())
    tok.chat_template = None
    tok.save_pretrained(folder)
    write_json(folder / "chat_template.json", {"chat_template": TEMPLATES["llava"]})
    side = {"height": 336, "width": 336}
    processor = {"crop_size": side, "size": {"shortest_edge": 336}, "resample": 3, "do_center_crop": True}
    write_json(
        folder / "preprocessor_config.json",
        {**processor, **_CLIP_MEAN, "do_resize": True, "image_processor_type": "CLIPImageProcessor"},
    )
    tower = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
    settings = {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": tok.convert_tokens_to_ids("<image>"),
        "model_type": "llava",
        "projector_hidden_act": "gelu",
        "text_config": {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": LAYERS,
            "vocab_size": 32_064,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {**tower, "image_size": 336, "patch_size": 14, "model_type": "clip_vision_model"},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    write_json(folder / "config.json", settings)
    config = LlavaConfig.from_dict(copy.deepcopy(settings))
    shapes = {_within(name): shape for name, shape in _shapes(lambda: LlavaForConditionalGeneration(config))}
    return write_shards(folder, shapes)


def _within(name: str) -> str:
    """The published name of a tensor: the decoder is a model of its own."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    inner = name.removeprefix("model.")
    return inner.replace("language_model.", "language_model.model.", 1) if "language_model" in inner else inner


def llada_v(folder: Path) -> int:
    """GSAI-ML/LLaDA-V, but for its number of layers: SigLIP 2 so400m behind tiles, a vocabulary of 126,464."""
    tok = copy.deepcopy(tokenizer())
    tok.save_pretrained(folder)
    text = {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": LAYERS,
        "vocab_size": 126_464,
    }
    tower = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27}
    siglip = SiglipVisionConfig(**tower, image_size=384, patch_size=14, vision_use_head=False)
    tiles = {"image_aspect_ratio": "anyres_max_4", "image_grid_pinpoints": "(1x1),...,(6x6)"}
    settings = {
        **VISION,
        **tiles,
        **text,
        "architectures": ["LlavaLLaDAModelLM"],
        "model_type": "llava_llada",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "mask_token_id": 3,
        "hidden_act": "silu",
        "max_position_embeddings": 16_384,
        "mm_hidden_size": 1152,
        "mm_patch_merge_type": "spatial_unpad",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    write_json(folder / "config.json", settings)
    write_json(folder / "vision_tower" / "config.json", siglip.to_dict())
    shapes = dict(_shapes(lambda: LlamaForCausalLM(LlamaConfig(**text))))
    below = "model.vision_tower.vision_tower.vision_model."
    shapes |= {below + name: shape for name, shape in _shapes(lambda: SiglipVisionModel(siglip))}
    projector = _shapes(lambda: mlp_projector("mlp2x_gelu", 1152, 4096))
    shapes |= {f"model.mm_projector.{name}": shape for name, shape in projector}
    return write_shards(folder, {**shapes, "model.image_newline": torch.Size([4096])})


def qwen25_vl(folder: Path) -> int:
    """Qwen/Qwen2.5-VL-7B-Instruct, but for its number of layers."""
    tok = copy.deepcopy(tokenizer())
    tok.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL], special_tokens=True)
    tok.chat_template = TEMPLATE
    tok.save_pretrained(folder)
    ids = special_ids()
    text = {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "max_position_embeddings": 128_000,
        "num_attention_heads": 28,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "vocab_size": 152_064,
    }
    names = (("image_token_id", "image_pad"), ("video_token_id", "video_pad"))
    names += (("vision_start_token_id", "vision_start"), ("vision_end_token_id", "vision_end"))
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config={"out_hidden_size": 3584}, **{key: ids[f"<|{name}|>"] for key, name in names}
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(folder)
    flatten(folder / "config.json")
    values = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**values, "eos_token_id": ids["<|im_end|>"], "torch_dtype": "bfloat16"})
    processor = {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "temporal_patch_size": 2}
    kind = {"merge_size": 2, "image_processor_type": "Qwen2VLImageProcessor"}
    write_json(folder / "preprocessor_config.json", {**processor, **_CLIP_MEAN, **kind})
    made = _shapes(lambda: Qwen2_5_VLForConditionalGeneration(config))
    return write_shards(folder, {_flat(name): shape for name, shape in made})


def _flat(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
