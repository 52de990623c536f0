"""A low-rank adapter (LoRA, arXiv 2106.09685) of a bundled model's decoder: trained while the weights stay as they are,
and written in peft's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from mmserve.models.checkpoint import ADAPTER, write_json
from mmserve.models.layouts import HUGGING_FACE, LLAVA_LLAMA, Layout
from mmserve.models.lora import HEAD, SITES
from mmserve.models.lora_files import LORA_A, LORA_B, PREFIX, WEIGHTS
from mmserve.reference.model import ReferenceModel


class LowRank(nn.Module):
    """What is added to a layer's weight ``[out, in]``: ``b @ a``; nothing at first, for b is zero."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        out, into = weight.shape
        self.a = nn.Parameter(torch.randn(rank, into, device=weight.device) * into**-0.5)
        self.b = nn.Parameter(torch.zeros(out, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def add_low_rank(model: ReferenceModel, rank: int, *, output: bool = False) -> None:
    """Give each linear layer of the decoder's layers a ``LowRank`` of its own, and the output layer where ``output``;
    nothing else is trained any more."""
    model.requires_grad_(requires_grad=False)
    for _name, linear in _linears(model, output=output):
        register_parametrization(linear, "weight", LowRank(linear.weight, rank))


def write_adapter(model: ReferenceModel, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write what ``add_low_rank`` added, as ``dtype``, in the files that peft saves."""
    layout = LLAVA_LLAMA if model.causal else HUGGING_FACE
    tensors: dict[str, Tensor] = {}
    rank, targets = 0, set[str]()
    for name, linear in _linears(model, output=is_parametrized(model.decoder.head, "weight")):
        added = _added(linear)
        stem = _stem(layout, name)
        tensors[stem + LORA_A] = added.a.detach().to(dtype).contiguous()
        tensors[stem + LORA_B] = added.b.detach().to(dtype).contiguous()
        rank = len(added.a)
        targets.add(stem.rpartition(".")[2])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(
        folder / ADAPTER,
        {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": sorted(targets)},
    )


@torch.no_grad()
def read_adapter(model: ReferenceModel, folder: Path) -> None:
    """Load the files that ``write_adapter`` wrote into what ``add_low_rank`` added to ``model``.

    Raises ``ValueError`` where its rank or layers are others.
    """
    tensors = load_file(folder / WEIGHTS)
    layout = LLAVA_LLAMA if model.causal else HUGGING_FACE
    for name, linear in _linears(model, output=is_parametrized(model.decoder.head, "weight")):
        added, stem = _added(linear), _stem(layout, name)
        for parameter, suffix in ((added.a, LORA_A), (added.b, LORA_B)):
            found = tensors.pop(stem + suffix, None)
            if found is None or found.shape != parameter.shape:
                has = "nothing" if found is None else f"a tensor of shape {tuple(found.shape)}"
                raise ValueError(f"{folder} has {has} for {name}, where {tuple(parameter.shape)} is trained")
            parameter.copy_(found)
    if tensors:
        raise ValueError(f"{folder} has layers that are not trained: {', '.join(sorted(tensors)[:4])}")


@torch.no_grad()
def merge_adapter(model: ReferenceModel, tensors: Mapping[str, Tensor]) -> None:
    """Add the tensors of an adapter that ``write_adapter`` wrote to the weights of ``model``."""
    layout = LLAVA_LLAMA if model.causal else HUGGING_FACE
    for name, linear in _linears(model, output=_stem(layout, HEAD) + LORA_B in tensors):
        stem = _stem(layout, name)
        linear.weight += tensors[stem + LORA_B].float() @ tensors[stem + LORA_A].float()


def _stem(layout: Layout, name: str) -> str:
    """What peft's names of a layer's tensors begin with."""
    return PREFIX + layout.tensor(f"{name}.weight").removesuffix(".weight")


def _linears(model: ReferenceModel, *, output: bool) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of the decoder's layers by name, and then the output layer where ``output``."""
    parts = [part for site in SITES.values() for part in site]
    for index, layer in enumerate(model.decoder.layers):
        for part in parts:
            yield f"layers.{index}.{part}", layer.get_submodule(part)  # type: ignore[misc]
    if output:
        yield HEAD, model.decoder.head


def _added(linear: nn.Linear) -> LowRank:
    added = linear.parametrizations["weight"][0]  # type: ignore[index]
    assert isinstance(added, LowRank)
    return added
