"""Random adapters in the files that peft saves, and the same added to the weights they are for."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmserve.models.checkpoint import write_json

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def adapter_tensors(model: Any, seed: int, *, rank: int = 4, targets: Sequence[str] = ALL) -> dict[str, Tensor]:
    """``lora_A`` and ``lora_B`` of each linear layer of transformers' ``model`` whose name ends in one of ``targets``,
    by peft's names; wide enough to change most tokens."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear):
            stem = f"base_model.model.{name}"
            found[f"{stem}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=generator) * 0.3
            found[f"{stem}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=generator) * 0.3
    assert found
    return found


def save_adapter(folder: Path, tensors: dict[str, Tensor], *, rank: int = 4, **changes: Any) -> Path:
    """The keys of peft's ``adapter_config.json``, and its file of tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = sorted({re.sub(r".*\.([^.]+)\.lora_A\.weight", r"\1", name) for name in tensors if "lora_A" in name})
    config = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "base",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": 6,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **changes,
    }
    write_json(folder / "adapter_config.json", {key: value for key, value in config.items() if value is not ...})
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def merged(model: Any, tensors: dict[str, Tensor], *, alpha: float = 6, rslora: bool = False) -> Any:
    """A copy of ``model`` with ``W + scale * B A`` for each pair."""
    made = copy.deepcopy(model)
    made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.clone())  # no longer the embeddings', if it was
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            scale = alpha / (len(a) ** 0.5 if rslora else len(a))
            weight = made.get_submodule(stem.removeprefix("base_model.model.")).weight
            weight += scale * tensors[f"{stem}.lora_B.weight"] @ a
    return made
