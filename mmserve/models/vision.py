"""CLIP-style vision towers behind LLaVA's MLP projector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from mmserve.models.base import VisionEncoder


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """How a clip becomes visual tokens, as LLaVA-NeXT's ``llava_arch.py`` has it but for ``frames`` and ``time``.

    ``frames`` are sampled; the grid of each one's projected patches is pooled over squares of ``stride`` by ``mode``
    (``average``, ``max`` or ``bilinear``). ``newline`` says what the checkpoint's separator, where it has one, ends:
    every row of a frame (``grid``), every frame (``frame``), the clip (``one_token``) or nothing (``no_token``).
    ``time`` is a format string of ``seconds`` (whole ones) for the text in front of each frame; empty = none.
    """

    frames: int
    stride: int = 2
    mode: str = "bilinear"
    newline: str = "one_token"
    time: str = ""


class NewlineProjector(nn.Module):
    """A projector that ends every image in LLaVA's ``image_newline``: ``[B, N, C]`` to ``[B, N + 1, D]``."""

    def __init__(self, projector: nn.Module, newline: Tensor) -> None:
        super().__init__()
        self.projector = projector
        self.newline = nn.Parameter(newline, requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        tokens = self.projector(features)
        return torch.cat([tokens, self.newline.to(tokens.dtype).expand(len(tokens), 1, -1)], dim=1)


class LlavaVision(VisionEncoder):
    """A tower from transformers, one layer's patch features, and LLaVA's ``mlpNx_gelu`` projector.

    ``tower`` is any transformers vision model that returns ``hidden_states``; ``processor`` a pillow-backed image
    processor; ``select_layer`` counts hidden states as LLaVA does (-2 = the last layer but one); ``has_cls`` tells
    whether the first position is a class token, which LLaVA drops. ``video`` is None where it takes images only.
    """

    def __init__(
        self,
        tower: nn.Module,
        projector: nn.Module,
        processor: Any,
        *,
        select_layer: int,
        has_cls: bool,
        video: VideoSettings | None = None,
    ) -> None:
        super().__init__()
        self.tower, self.projector, self.processor = tower, projector, processor
        self.select_layer, self.has_cls = select_layer, has_cls
        self.video = video
        self.frames_per_video = video.frames if video is not None else 0
        config: Any = tower.config
        self.tokens_per_image = (int(config.image_size) // int(config.patch_size)) ** 2

    def prepare(self, image: Image.Image) -> Tensor:
        pixels = self.processor(image, return_tensors="np")["pixel_values"][0]
        return torch.from_numpy(np.ascontiguousarray(pixels, dtype=np.float32))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.projector(self._features(pixels))

    def video_tokens(self, pixels: Tensor) -> list[Tensor]:
        if self.video is None:
            return super().video_tokens(pixels)
        project = self.projector
        newline: Tensor | None = None
        if isinstance(project, NewlineProjector):
            newline, project = project.newline, project.projector
        tokens = project(self._features(pixels))
        grid_FHWD = pool_grid(tokens, self.video.stride, self.video.mode)
        return _separate(grid_FHWD, None if newline is None else newline.to(tokens.dtype), self.video.newline)

    def frame_text(self, seconds: float) -> str:
        return self.video.time.format(seconds=int(seconds)) if self.video is not None else ""

    def _features(self, pixels: Tensor) -> Tensor:
        hidden = self.tower(pixels, output_hidden_states=True).hidden_states[self.select_layer]
        return hidden[:, 1:] if self.has_cls else hidden


def pooled_side(side: int, stride: int, mode: str) -> int:
    """Rows, and columns, that ``pool_grid`` leaves of ``side``."""
    return -(-side // stride) if mode == "bilinear" else side // stride


def pool_grid(tokens: Tensor, stride: int, mode: str) -> Tensor:
    """Pool ``tokens [F, side * side, D]`` over their grid, as LLaVA-NeXT's ``get_2dPool``: ``[F, rows, columns, D]``.

    ``average`` and ``max`` over squares of ``stride``, leaving out what is over at the right and bottom;
    ``bilinear`` interpolates at the centres of ``ceil(side / stride)`` equal squares.
    """
    frames, count, width = tokens.shape
    side = int(count**0.5)
    grid_FDHW = tokens.view(frames, side, side, width).permute(0, 3, 1, 2)
    if mode == "average":
        pooled = F.avg_pool2d(grid_FDHW, stride)
    elif mode == "max":
        pooled = F.max_pool2d(grid_FDHW, stride)
    else:
        size = pooled_side(side, stride, mode)
        pooled = F.interpolate(grid_FDHW, size=(size, size), mode="bilinear")
    return pooled.permute(0, 2, 3, 1)


def _separate(grid_FHWD: Tensor, newline: Tensor | None, position: str) -> list[Tensor]:
    """The tokens ``[n, D]`` of each frame, with the separator ``newline [D]`` where ``position`` puts it."""
    frames, rows, _columns, width = grid_FHWD.shape
    if newline is None or position == "no_token":
        return list(grid_FHWD.flatten(1, 2))
    if position == "grid":
        return list(torch.cat([grid_FHWD, newline.expand(frames, rows, 1, width)], dim=2).flatten(1, 2))
    tokens = list(grid_FHWD.flatten(1, 2))
    ends = range(frames) if position == "frame" else [frames - 1]
    for i in ends:
        tokens[i] = torch.cat([tokens[i], newline[None]])
    return tokens


def mlp_projector(kind: str, vision_size: int, hidden_size: int) -> nn.Sequential:
    """LLaVA's projector ``linear`` or ``mlpNx_gelu`` from the tower's feature size to the decoder's hidden size."""
    if kind == "linear":
        return nn.Sequential(nn.Linear(vision_size, hidden_size))
    depth = int(kind.removeprefix("mlp").removesuffix("x_gelu"))
    layers: list[nn.Module] = [nn.Linear(vision_size, hidden_size)]
    for _ in range(depth - 1):
        layers += [nn.GELU(), nn.Linear(hidden_size, hidden_size)]
    return nn.Sequential(*layers)
