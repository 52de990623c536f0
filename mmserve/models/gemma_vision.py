"""Images for DiffusionGemma: Gemma 4's image processor, tower and projection from transformers.

An image keeps its aspect ratio and gets as many patches as fit the processor's budget, so its number of tokens
varies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import Gemma4ImageProcessorPil

from mmserve.errors import ConfigError
from mmserve.models.nested import read_processor
from mmserve.models.picture import Picture, Prepared, Text, Tile, VisionEncoder, blank, joined
from mmserve.models.processors import check_resizes
from mmserve.models.vision import describe_processor
from mmserve.prune.base import Evidence, GridView

#: Files and keys of a checkpoint's image processor settings.
_SETTINGS = ("preprocessor_config.json", "processor_config.json")


class GemmaVision(VisionEncoder):
    """The vision tower of ``encoder``, which is transformers' ``DiffusionGemmaEncoderModel``."""

    tokens_per_image = 0

    def __init__(self, encoder: Any, processor: Any) -> None:
        super().__init__()
        self.tower, self.projection = encoder.vision_tower, encoder.embed_vision
        self._look, self._processor = encoder.get_image_features, processor
        self._begin, self._end = _known(encoder.config.boi_token_id), _known(encoder.config.eoi_token_id)

    def settings(self) -> Mapping[str, Any]:
        tower: Any = self.tower
        frame = (self._begin, self._end)
        return {"processor": describe_processor(self._processor), "tower": tower.config.to_dict(), "frame": frame}

    def prepare(self, image: Image.Image) -> Prepared:
        """``pixels [1, 3, height, width]``, both sides multiples of the patch size."""
        made = self._processor(images=[image], return_tensors="pt")
        patches_nP, places_n2 = made["pixel_values"][0], made["image_position_ids"][0]
        kept = places_n2[:, 0] >= 0  # the others are padding
        columns, rows = (places_n2[kept].amax(0) + 1).tolist()
        side = self._processor.patch_size
        grid = patches_nP[kept].float().reshape(rows, columns, side, side, 3)
        return {"pixels": grid.permute(4, 0, 2, 1, 3).reshape(1, 3, rows * side, columns * side)}

    def forward(self, pixels: Tensor) -> Tensor:
        """Visual tokens ``[B, n, D]`` of ``pixels [B, 3, height, width]``: images of the same shape."""
        side = self._processor.patch_size
        count, rows, columns = len(pixels), pixels.shape[2] // side, pixels.shape[3] // side
        grid = pixels.reshape(count, 3, rows, side, columns, side)
        patches = grid.permute(0, 2, 4, 3, 5, 1).reshape(count, rows * columns, -1)
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places = torch.stack([x, y], -1).reshape(1, -1, 2).expand(count, -1, -1).to(pixels.device)
        features: Tensor = self._look(patches, places).pooler_output
        return features.reshape(count, -1, features.shape[-1])

    def pieces(self, one: Prepared, *, clip: bool) -> tuple[Text | int, ...]:
        side = self._processor.patch_size * self._processor.pooling_kernel_size
        _one, _channels, height, width = one["pixels"].shape
        return joined([self._begin, blank(height // side, width // side), self._end]).pieces

    def encode(self, batch: Sequence[Prepared], wanted: frozenset[Evidence], *, clip: bool) -> list[Picture]:
        pixels = torch.cat([one["pixels"] for one in batch])
        side = self._processor.patch_size * self._processor.pooling_kernel_size
        view = GridView(pixels.shape[2] // side, pixels.shape[3] // side, {})
        tiles = (Tile(tokens, torch.arange(len(tokens)), view) for tokens in self(pixels))
        return [joined([self._begin, tile, self._end]) for tile in tiles]


def _known(token: int | None) -> tuple[int, ...]:
    return () if token is None else (token,)


def load_gemma_vision(folder: Path, encoder: Any) -> GemmaVision | None:
    """The checkpoint's vision encoder; None without settings of an image processor; raises ``ConfigError`` for invalid
    ones."""
    if not any((folder / name).is_file() for name in _SETTINGS):
        return None
    processor = read_processor(Gemma4ImageProcessorPil, folder)
    check_resizes(processor, folder)
    config = encoder.config.vision_config
    for name in ("patch_size", "pooling_kernel_size"):
        if getattr(processor, name) != getattr(config, name):
            raise ConfigError(f"{folder}: the image processor's {name} must be the tower's {getattr(config, name)}")
    return GemmaVision(encoder, processor)
