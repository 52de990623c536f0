"""Tiny random checkpoints in the real layouts of LLaDA and LLaDA-V, and the transformers models they come from."""

from __future__ import annotations

import re
import socket
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from mmserve.config import ModelConfig
from mmserve.models.base import LoadedModel
from mmserve.models.checkpoint import read_json, write_checkpoint, write_json
from mmserve.models.decoder import dense_attention
from mmserve.models.registry import load_model
from mmserve.reference.tokenizer import train_tokenizer

VOCAB, SIDE, PATCH = 640, 24, 6


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(lines=400)


def llama(heads: int, kv_heads: int, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(heads * 10 + kv_heads)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        rope_theta=50_000.0,
        initializer_range=0.2,
        attn_implementation="eager",
        **options,
    )
    model = LlamaForCausalLM(config).eval()
    for norm in (p for name, p in model.named_parameters() if "norm" in name):
        torch.nn.init.uniform_(norm, 0.5, 1.5)
    return model


@torch.no_grad()
def open_logits(model: LlamaForCausalLM, embeddings: Tensor) -> Tensor:
    """Llama's logits of ``embeddings [B, T, D]`` when every position sees every other."""
    length = embeddings.shape[1]
    return model(inputs_embeds=embeddings, attention_mask=torch.zeros(len(embeddings), 1, length, length)).logits


@torch.no_grad()
def our_logits(model: LoadedModel, embeddings: Tensor) -> Tensor:
    positions = torch.arange(embeddings.shape[1]).expand(embeddings.shape[:2])
    return model.decoder.logits(model.decoder(embeddings, positions, dense_attention()))


def ids(length: int = 17, rows: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


def own_name(name: str) -> str:
    """LLaDA's own name of a Llama tensor, spelled out apart from the table under test."""
    whole = {
        "model.embed_tokens.weight": "model.transformer.wte.weight",
        "model.norm.weight": "model.transformer.ln_f.weight",
        "lm_head.weight": "model.transformer.ff_out.weight",
    }
    if name in whole:
        return whole[name]
    name = name.replace("model.layers.", "model.transformer.blocks.").replace("self_attn.", "").replace("mlp.", "")
    renamed = {"o_proj": "attn_out", "gate_proj": "ff_proj", "down_proj": "ff_out"}
    renamed |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm"}
    return re.sub(r"\.(\w+)\.(weight|bias)$", lambda m: f".{renamed.get(m[1], m[1])}.{m[2]}", name)


def own_config(model: LlamaForCausalLM, **changes: Any) -> dict[str, Any]:
    """``config.json`` with the keys that LLaDA-8B's has."""
    c = model.config
    return {
        "activation_type": "silu",
        "alibi": False,
        "architectures": ["LLaDAModelLM"],
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": c.hidden_size,
        "embedding_size": c.vocab_size,
        "eos_token_id": 1,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "mask_token_id": 3,
        "max_sequence_length": 4096,
        "mlp_hidden_size": c.intermediate_size,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": c.num_attention_heads,
        "n_kv_heads": c.num_key_value_heads,
        "n_layers": c.num_hidden_layers,
        "pad_token_id": 1,
        "rms_norm_eps": c.rms_norm_eps,
        "rope": True,
        "rope_theta": 50_000.0,
        "scale_logits": False,
        "vocab_size": c.vocab_size,
        "weight_tying": False,
        **changes,
    }


def hf_config(model: LlamaForCausalLM, **changes: Any) -> dict[str, Any]:
    """``config.json`` with the keys that LLaDA-V's has: no mask id."""
    c = model.config
    return {
        "architectures": ["LlavaLLaDAModelLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "max_position_embeddings": 16384,
        "model_type": "llava_llada",
        "num_attention_heads": c.num_attention_heads,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_key_value_heads,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": 50_000.0,
        "tie_word_embeddings": False,
        "tokenizer_model_max_length": 8192,
        "vocab_size": c.vocab_size,
        **changes,
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], **options: Any) -> Path:
    write_checkpoint(folder, config, tensors, **options)
    tokenizer().save_pretrained(folder)
    return folder


def edit(path: Path, **changes: Any) -> None:
    values = {**read_json(path), **changes}
    write_json(path, {key: value for key, value in values.items() if value is not ...})


def load(folder: Path | str, **options: Any) -> LoadedModel:
    refuse = AssertionError("loading must not open a connection")
    with patch.object(socket.socket, "connect", side_effect=refuse), patch("socket.getaddrinfo", side_effect=refuse):
        return load_model(ModelConfig(path=str(folder), **{"dtype": "float32", "device": "cpu", **options}))


def tower_of(kind: str) -> Any:
    torch.manual_seed(7)
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    if kind == "clip":
        return CLIPVisionModel(CLIPVisionConfig(**sizes)).eval()
    return SiglipVisionModel(SiglipVisionConfig(**sizes)).eval()


def processor_json(kind: str) -> dict[str, Any]:
    common = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    if kind == "clip":
        size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}, "do_center_crop": True}
        mean = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "resample": 3}
        return {"image_processor_type": "CLIPImageProcessor", **common, **size, **mean}
    size = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    return {"image_processor_type": "SiglipImageProcessor", **common, **size}


VISION = {
    "mm_vision_tower": "vision_tower",
    "mm_hidden_size": 24,
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "patch",
    "mm_patch_merge_type": "flat",
    "image_aspect_ratio": "square",
}


class Sighted:
    """A LLaDA-V checkpoint on disk, and the parts that it was written from."""

    def __init__(self, folder: Path, kind: str, *, old_names: bool = True, **changes: Any) -> None:
        self.folder, self.oracle, self.tower = folder, llama(4, 2), tower_of(kind)
        torch.manual_seed(11)
        self.projector = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))
        self.newline = torch.randn(32)
        self.tensors = dict(self.oracle.state_dict())
        self.tensors |= {f"model.mm_projector.{name}": t for name, t in self.projector.state_dict().items()}
        below = "model.vision_tower.vision_tower." + ("vision_model." if old_names else "")
        self.tensors |= {below + name: t for name, t in self.tower.state_dict().items()}
        self.tensors["model.image_newline"] = self.newline
        write(folder, hf_config(self.oracle, **VISION | changes), self.tensors, shard_bytes=50_000)
        write_json(folder / "vision_tower" / "config.json", self.tower.config.to_dict())
        write_json(folder / "vision_tower" / "preprocessor_config.json", processor_json(kind))

    def rewrite(self, *, without: str = "\0", **changed: Tensor) -> None:
        tensors = {name: t for name, t in (self.tensors | changed).items() if without not in name}
        write_checkpoint(self.folder, read_json(self.folder / "config.json"), tensors, shard_bytes=50_000)

    @torch.no_grad()
    def visual_tokens(self, pixels: Tensor, layer: int = -2, first: int = 0) -> Tensor:
        return self.projector(self.tower(pixels, output_hidden_states=True).hidden_states[layer][:, first:])


def image(width: int = 31, height: int = 45) -> Image.Image:
    return Image.fromarray(np.random.default_rng(5).integers(0, 256, (height, width, 3), dtype=np.uint8))
