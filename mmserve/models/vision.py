"""CLIP-style vision towers behind LLaVA's MLP projector."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mmserve.models.base import VisionEncoder


class LlavaVision(VisionEncoder):
    """A tower from transformers, one layer's patch features, and LLaVA's ``mlpNx_gelu`` projector.

    ``tower`` is any transformers vision model that returns ``hidden_states``; ``processor`` a pillow-backed image
    processor; ``select_layer`` counts hidden states as LLaVA does (-2 = the last layer but one); ``has_cls`` tells
    whether the first position is a class token, which LLaVA drops.
    """

    def __init__(
        self, tower: nn.Module, projector: nn.Module, processor: Any, *, select_layer: int, has_cls: bool
    ) -> None:
        super().__init__()
        self.tower, self.projector, self.processor = tower, projector, processor
        self.select_layer, self.has_cls = select_layer, has_cls
        config: Any = tower.config
        self.tokens_per_image = (int(config.image_size) // int(config.patch_size)) ** 2

    def prepare(self, image: Image.Image) -> Tensor:
        pixels = self.processor(image, return_tensors="np")["pixel_values"][0]
        return torch.from_numpy(np.ascontiguousarray(pixels, dtype=np.float32))

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.tower(pixels, output_hidden_states=True).hidden_states[self.select_layer]
        return self.projector(hidden[:, 1:] if self.has_cls else hidden)


def mlp_projector(kind: str, vision_size: int, hidden_size: int) -> nn.Sequential:
    """LLaVA's projector ``linear`` or ``mlpNx_gelu`` from the tower's feature size to the decoder's hidden size."""
    if kind == "linear":
        return nn.Sequential(nn.Linear(vision_size, hidden_size))
    depth = int(kind.removeprefix("mlp").removesuffix("x_gelu"))
    layers: list[nn.Module] = [nn.Linear(vision_size, hidden_size)]
    for _ in range(depth - 1):
        layers += [nn.GELU(), nn.Linear(hidden_size, hidden_size)]
    return nn.Sequential(*layers)
