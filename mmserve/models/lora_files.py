"""Adapters in peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mmserve.errors import ConfigError
from mmserve.models.checkpoint import ADAPTER, GENERATION, Weights, read_json
from mmserve.models.decoder import Decoder
from mmserve.models.keys import Keys
from mmserve.models.lora import HEAD, SITES, Adapter, Site, gives_same_bits_wide
from mmserve.models.tensor_parts import Rows

WEIGHTS = "adapter_model.safetensors"
#: Parts of an adapter's tensor names: ``PREFIX``, the layer, ``LORA_A`` or ``LORA_B``.
PREFIX, LORA_A, LORA_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
#: Names of the text model and of the output layer: alone, and in a vision-language model, new and old.
_NAMED = (
    ("model", "lm_head"),
    ("model.language_model", "lm_head"),
    ("language_model.model", "language_model.lm_head"),
)
#: Settings of peft that change the computation, and the supported values.
_SWITCHES: Mapping[str, tuple[object, ...]] = {
    "alora_invocation_tokens": (None, []),  # has no effect before these tokens
    "alpha_pattern": ({}, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    # Others, such as PiSSA, also change the model's weights unless converted when saved, which sets true.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "peft_type": ("LORA",),
    "trainable_token_indices": (None,),
    "use_dora": (False, None),
    "use_qalora": (False, None),
}


def adapter_bytes(folder: Path) -> int:
    """Size of an adapter's stored weights; raises ``ConfigError`` if there are none."""
    try:
        return (folder / WEIGHTS).stat().st_size
    except OSError as error:
        raise ConfigError(f"{folder} has no {WEIGHTS}: {error.strerror}") from error


def read_adapter(name: str, folder: Path, decoder: Decoder, dtype: torch.dtype, device: torch.device) -> Adapter:
    """The adapter in ``folder`` for ``decoder``, whose parameters remember their tensor names.

    Raises ``ConfigError`` naming the setting, tensor or file that is wrong, and every tensor that belongs neither to
    attention or dense feed-forward layers of the decoder, nor to the output layer.
    """
    config = read_json(folder / ADAPTER)
    keys = Keys(config, folder / ADAPTER)
    keys.check(_SWITCHES)
    alpha = keys.number("lora_alpha", default=float(keys.integer("r", default=8)))
    weights = Weights(folder, WEIGHTS)
    modules = _modules(decoder)
    layers: list[dict[str, Site]] = []
    rank = 0
    of_layer = {site: tuple(f"layers.{{}}.{part}" for part in parts) for site, parts in SITES.items()}
    for index in range(decoder.config.num_layers + 1):
        sites: dict[str, Site] = {}
        of_this = of_layer if index < decoder.config.num_layers else {HEAD: (HEAD,)}
        for site, names in of_this.items():
            parts = [name.format(index) for name in names]
            found = [_pair(weights, modules.get(part)) for part in parts]
            shapes = [modules[part][1] for part in parts if part in modules]
            if not any(found):
                continue
            ranks = [0 if pair is None else len(pair[0]) for pair in found]
            rank = max(rank, *ranks)
            joint = _joint(found, shapes, ranks, alpha, rslora=keys.flag("use_rslora"))
            sites[site] = Site(joint.a_IR.to(device, dtype), joint.b_RO.to(device, dtype))
        layers.append(sites)
    weights.check_all_read()
    if not rank:
        raise ConfigError(f"{weights.source} has no tensors of LoRA")
    wide = gives_same_bits_wide(layers)
    return Adapter(name, f"{name}:{_digest(folder)}", rank, tuple(layers), wide, _block_length(folder))


def _block_length(folder: Path) -> int:
    """``block_length`` of the adapter's ``generation_config.json``; 0 if it has none."""
    path = folder / GENERATION
    values = read_json(path) if path.exists() else {}
    return Keys(values, path).integer("block_length") if "block_length" in values else 0


def _modules(decoder: Decoder) -> dict[str, tuple[str | Rows, torch.Size]]:
    """The tensor in the checkpoint, and the shape, of each linear layer of the decoder's layers and of the output
    layer."""
    known = {HEAD, *(each for parts in SITES.values() for each in parts)}
    found: dict[str, tuple[str | Rows, torch.Size]] = {}
    for name, (part, shape) in decoder.origins.items():
        module, _, leaf = name.rpartition(".")
        ours = leaf == "weight" and module.rpartition(".")[2] in known and ".moe." not in module
        if ours and isinstance(part, str | Rows):
            found[module] = (part, shape)
    return found


def _pair(weights: Weights, module: tuple[str | Rows, torch.Size] | None) -> tuple[Tensor, Tensor] | None:
    """A ``[r, in]`` and B ``[out, r]`` of a layer, fp32; None if the adapter has none."""
    if module is None:
        return None
    part, (out, into) = module
    tensor = part if isinstance(part, str) else part.name
    stem = next((s for s in _stems(tensor) if s + LORA_A in weights), None)
    if stem is None:
        return None
    rank = weights.shape(stem + LORA_A)[0]
    cpu = torch.device("cpu")
    total = out if isinstance(part, str) else part.total
    a = weights.tensor(stem + LORA_A, torch.Size([rank, into]), torch.float32, cpu)
    b = weights.tensor(stem + LORA_B, torch.Size([total, rank]), torch.float32, cpu)
    return a, b if isinstance(part, str) else b[part.start : part.start + out]


def _stems(tensor: str) -> Iterator[str]:
    """Possible prefixes of a layer's names in an adapter: as in the checkpoint and, for a vision-language model, as in
    other versions of transformers, whose names peft saves."""
    module = tensor.removesuffix(".weight")
    yield PREFIX + module
    for own in (text for text, _head in _NAMED if module.startswith(f"{text}.layers.")):
        yield from (PREFIX + text + module.removeprefix(own) for text, _head in _NAMED)
    if module in (head for _text, head in _NAMED):
        yield from (PREFIX + head for _text, head in _NAMED)


def _joint(
    pairs: list[tuple[Tensor, Tensor] | None],
    shapes: list[torch.Size],
    ranks: list[int],
    alpha: float,
    *,
    rslora: bool,
) -> Site:
    """The layers of one site as a single pair: A concatenated, B block-diagonal."""
    into, outs = shapes[0][1], [shape[0] for shape in shapes]
    a_IR = torch.zeros(into, sum(ranks))
    b_RO = torch.zeros(sum(ranks), sum(outs))
    row = column = 0
    for pair, rank, out in zip(pairs, ranks, outs, strict=True):
        if pair is not None:
            scale = alpha / (math.sqrt(rank) if rslora else rank)
            a_IR[:, row : row + rank] = pair[0].T
            b_RO[row : row + rank, column : column + out] = pair[1].T * scale
        row, column = row + rank, column + out
    return Site(a_IR, b_RO)


def _digest(folder: Path) -> str:
    made = hashlib.sha256()
    for file in (ADAPTER, WEIGHTS, *([GENERATION] if (folder / GENERATION).exists() else [])):
        with (folder / file).open("rb") as opened:
            made.update(hashlib.file_digest(opened, "sha256").digest())
    return made.hexdigest()[:16]
