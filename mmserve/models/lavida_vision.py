"""LaViDa's way of seeing (arXiv 2505.16839; jacklishufan/LaViDa): LLaVA-NeXT's tiles of any resolution, each pooled.

An image is shrunk to one tile and, fitted into the resolution that wastes least, cut into more. Each tile's projected
patches are pooled over squares of two; those of the cut tiles are then put together, freed of the margins that fitting
added, and each row of them ends in the checkpoint's separator. Shapes in names: N tiles, D hidden, H and W of a grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from mmserve.models.evidence import OF_PATCHES, gather
from mmserve.models.picture import Picture, Prepared, Tile, VisionEncoder, joined
from mmserve.models.towers import VisionParts
from mmserve.models.vision import describe_processor, pool_grid, pooled_side
from mmserve.prune.base import Evidence, Look

#: Patches along a side of a square that is pooled: ``get_2dPool`` is called with its default.
STRIDE = 2


class LavidaVision(VisionEncoder):
    """``parts`` with a tower without class token; ``resolutions``: widths and heights in pixels that an image may be
    fitted into, each a whole number of tiles, or None where it is one tile; ``mode``: of pooling, see ``pool_grid``."""

    def __init__(self, parts: VisionParts, resolutions: tuple[tuple[int, int], ...] | None, mode: str) -> None:
        super().__init__()
        self.tower, self.projector, self.processor = parts.tower, parts.projector, parts.processor
        self.select_layer, self.side, self.resolutions, self.mode = parts.select_layer, parts.side, resolutions, mode
        self.newline: Tensor | None
        self.register_buffer("newline", parts.newline)
        self.pooled = pooled_side(parts.patches, STRIDE, mode)
        self.tokens_per_image = 0 if resolutions else self.pooled**2 + (parts.newline is not None)

    @property
    def evidence(self) -> frozenset[Evidence]:
        return OF_PATCHES

    def settings(self) -> Mapping[str, Any]:
        tower: Any = self.tower
        return {
            "processor": {**describe_processor(self.processor), "resolutions": self.resolutions, "side": self.side},
            "tower": tower.config.to_dict(),
            "select_layer": self.select_layer,
            "mode": self.mode,
        }

    def prepare(self, image: Image.Image) -> Prepared:
        """``pixels [N, 3, side, side]``, the whole image first, and its ``size``: int64 ``[2]``, width and height."""
        tiles = [image]
        if self.resolutions is not None:
            width, height = self._resolution(image.width, image.height)
            fitted = fit(image, width, height)
            boxes = [(x, y) for y in range(0, height, self.side) for x in range(0, width, self.side)]
            tiles = [image.resize((self.side, self.side))]
            tiles += [fitted.crop((x, y, x + self.side, y + self.side)) for x, y in boxes]
        pixels = np.concatenate([self.processor(tile, return_tensors="np")["pixel_values"] for tile in tiles])
        return {"pixels": torch.from_numpy(pixels.astype(np.float32)), "size": torch.tensor(image.size)}

    def _resolution(self, width: int, height: int) -> tuple[int, int]:
        """The one of ``resolutions`` that an image is fitted into."""
        best = select_best_resolution((height, width), [(h, w) for w, h in self.resolutions or ()])
        return int(best[1]), int(best[0])

    def see(self, batch: Sequence[Prepared], wanted: frozenset[Evidence], *, clip: bool) -> list[Picture]:
        hidden = self.tower(torch.cat([one["pixels"] for one in batch]), output_hidden_states=True).hidden_states
        evidence = gather(self.tower, hidden, self.select_layer, wanted, first=0)
        grids_NHWD = pool_grid(self.projector(hidden[self.select_layer]), STRIDE, self.mode)
        seen = {kind: self._pooled(values) for kind, values in evidence.items()}
        counts = [len(one["pixels"]) for one in batch]
        pictures, start = [], 0
        for one, count in zip(batch, counts, strict=True):
            own = slice(start, start + count)
            pictures.append(self._picture(grids_NHWD[own], {k: v[own] for k, v in seen.items()}, one["size"].tolist()))
            start += count
        return pictures

    def _pooled(self, values: Tensor) -> Tensor:
        """Evidence of patches, ``[N, patches]`` or ``[N, patches, C]``, pooled as tokens are: ``[N, H, W, …]``."""
        pooled = pool_grid(values if values.dim() == 3 else values[..., None], STRIDE, self.mode)
        return pooled if values.dim() == 3 else pooled[..., 0]

    def _picture(self, grids_NHWD: Tensor, seen: Mapping[Evidence, Tensor], size: Sequence[int]) -> Picture:
        base = {kind: values[0] for kind, values in seen.items()}
        if len(grids_NHWD) == 1:
            return joined([_tile(grids_NHWD[0], base, self.newline, every_row=False)])
        columns, rows = (length // self.side for length in self._resolution(size[0], size[1]))
        merged = _merged(grids_NHWD[1:], rows, columns, size)
        parts = [_tile(grids_NHWD[0], base, None, every_row=False)]
        if merged.shape[0] and merged.shape[1]:
            of_merged = {kind: _merged(values[1:], rows, columns, size) for kind, values in seen.items()}
            parts.append(_tile(merged, of_merged, self.newline, every_row=True))
        return joined(parts)


def fit(image: Image.Image, width: int, height: int) -> Image.Image:
    """``image`` in the middle of a black one of ``width`` x ``height``, as large as fits."""
    across, down = width / image.width, height / image.height
    if across < down:
        size = width, min(math.ceil(image.height * across), height)
    else:
        size = min(math.ceil(image.width * down), width), height
    fitted = Image.new("RGB", (width, height))
    fitted.paste(image.resize(size), ((width - size[0]) // 2, (height - size[1]) // 2))
    return fitted


def _merged(tiles: Tensor, rows: int, columns: int, size: Sequence[int]) -> Tensor:
    """``tiles [rows * columns, H, W, …]`` side by side, without the margins round an image of ``size``."""
    rest = tiles.shape[3:]
    whole = (
        tiles.unflatten(0, (rows, columns))
        .transpose(1, 2)
        .reshape(rows * tiles.shape[1], columns * tiles.shape[2], *rest)
    )
    return unpadded(whole, size)


def unpadded(grid: Tensor, size: Sequence[int]) -> Tensor:
    """``grid [H, W, …]`` without the margins that fitting an image of ``size`` (width, height) put there."""
    width, height = size
    rows, columns = grid.shape[:2]
    if width / height > columns / rows:
        margin = (rows - int(height * (columns / width))) // 2
        return grid[margin : rows - margin]
    margin = (columns - int(width * (rows / height))) // 2
    return grid[:, margin : columns - margin]


def _tile(grid_HWD: Tensor, seen: Mapping[Evidence, Tensor], newline: Tensor | None, *, every_row: bool) -> Tile:
    """A grid's tokens, the separator behind each row of it, or behind all of it."""
    rows, columns, width = grid_HWD.shape
    look = Look(rows, columns, {kind: values.flatten(0, 1) for kind, values in seen.items()})
    patches = torch.arange(rows * columns)
    if newline is None:
        return Tile(grid_HWD.flatten(0, 1), patches, look)
    newline = newline.to(grid_HWD.dtype)
    if not every_row:
        return Tile(torch.cat([grid_HWD.flatten(0, 1), newline[None]]), patches, look)
    tokens = torch.cat([grid_HWD, newline.expand(rows, 1, width)], dim=1).flatten(0, 1)
    return Tile(tokens, patches + patches // columns, look)
