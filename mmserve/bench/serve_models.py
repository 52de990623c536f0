"""Small models that accept prompts of 10,000 tokens, derived from the bundled causal one: for times, not for
answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from mmserve.models.checkpoint import read_json, write_checkpoint, write_json
from mmserve.models.names import shipped_folder

#: Maximum positions of the models.
POSITIONS = 12_288
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def next_token(folder: Path) -> Path:
    """Write the bundled causal model with more positions: rotary embeddings need no weights."""
    shutil.copytree(_source(), folder)
    config = folder / "config.json"
    write_json(config, {**read_json(config), "max_position_embeddings": POSITIONS})
    return folder


def deep(folder: Path, layers: int) -> Path:
    """Write the same with ``layers`` layers, which repeat those of the bundled model."""
    next_token(folder)
    config, found = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    known, begin = config["num_hidden_layers"], "model.layers."
    tensors = {name: tensor for name, tensor in found.items() if not name.startswith(begin)}
    for layer in range(layers):
        own = f"{begin}{layer % known}."
        tensors |= {
            f"{begin}{layer}.{name.removeprefix(own)}": t.clone() for name, t in found.items() if name.startswith(own)
        }
    write_checkpoint(folder, {**config, "num_hidden_layers": layers}, tensors)
    return folder


def block_diffusion(folder: Path) -> Path:
    """Write the same decoder as block diffusion in SDAR's layout, with query and key norms of weight 1."""
    source = _source()
    known = read_json(source / "config.json")
    found = load_file(source / "model.safetensors")
    tensors = {name: t for name, t in found.items() if "vision" not in name and "projector" not in name}
    for layer in range(known["num_hidden_layers"]):
        for norm in ("q_norm", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{norm}.weight"] = torch.ones(known["head_dim"])
    config = {name: value for name, value in known.items() if not name.startswith("mm_")}
    config |= {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "max_position_embeddings": POSITIONS}
    write_checkpoint(folder, {n: v for n, v in config.items() if n != "image_aspect_ratio"}, tensors)
    for name in _TOKENIZER:
        shutil.copy(source / name, folder / name)
    return folder


def _source() -> Path:
    return shipped_folder("bundled-causal")
