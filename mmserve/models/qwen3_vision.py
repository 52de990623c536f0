"""The vision tower of Qwen3-VL (arXiv 2511.21631): features for several decoder layers, and timestamps as text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmserve.models.picture import Picture, Text, Tile, joined
from mmserve.models.qwen_vision import QwenVision, coordinates

START, END = "<|vision_start|>", "<|vision_end|>"


class Qwen3Vision(QwenVision):
    """A visual token is an embedding, followed by the features that the decoder's first layers add."""

    def _tokens(self, made: Any) -> Tensor:
        return torch.cat([made.pooler_output, *made.deepstack_features], dim=-1)

    def stream_time(self, number: int, seconds: float) -> int:
        return 0  # timestamps are text

    def _picture(self, tiles: list[Tile], seconds: Tensor | None) -> Picture:
        """In a clip each grid of patches is enclosed in its own begin and end tokens, after a label with its mean
        time."""
        if seconds is None:
            return super()._picture(tiles, seconds)
        parts: list[Tile | Text] = []
        for tile, middle in zip(tiles, seconds.mean(1).tolist(), strict=True):
            parts += [f"<{middle:.1f} seconds>{START}", tile, END]
        return joined(parts, coordinates(tiles))
