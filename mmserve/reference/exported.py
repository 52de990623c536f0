"""Read an exported model's weights back, so that training can go on from it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from mmserve.models.layouts import HUGGING_FACE, LLAVA_LLAMA, decoder_tensors, vision_tensors
from mmserve.reference.model import ReferenceModel


@torch.no_grad()
def read_exported(folder: Path, model: ReferenceModel) -> None:
    """Fill ``model`` with the weights of the checkpoint in ``folder``, one that ``mmserve.reference.export`` wrote.

    Raises ``KeyError`` where a tensor is missing.
    """
    stored = load_file(folder / "model.safetensors")
    layout = LLAVA_LLAMA if model.causal else HUGGING_FACE
    parameters = decoder_tensors(layout, model.decoder) | vision_tensors(model.tower, model.projector, None)
    for name, parameter in parameters.items():
        parameter.copy_(stored[name])
