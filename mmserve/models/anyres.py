"""LLaVA-NeXT's ``anyres``: a downscaled image, and tiles of the image whose patches are reassembled to a grid.

As ``prepare_inputs_labels_for_multimodal`` in LLaVA-NeXT's llava_arch.py, and ``pack_image_features`` of transformers'
LlavaNext and LlavaOnevision: padding is removed, a grid with too many patches is downscaled, and each row ends in a
separator. Shapes in names: T tiles, the whole image first; P patches of a tile; H, W rows and columns of the
reassembled grid; D hidden, C channels of evidence.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from mmserve.errors import ConfigError
from mmserve.models.keys import Keys
from mmserve.models.picture import Grid, Picture
from mmserve.prune.base import Evidence, GridView, Part

#: Patches are downscaled if their grid exceeds the limit by this factor along a side.
_SLACK = 1.1
#: Maximum tiles along a side of a range such as ``(1x1),...,(6x6)``.
_MOST_TILES = 100


@dataclass(frozen=True, kw_only=True)
class Anyres:
    """Tiling of images, and reassembly of their patches.

    ``pinpoints``: allowed heights and widths in pixels, multiples of ``tile``. ``max_tiles``: grids with more patches
    than this many tiles are downscaled, None = never. ``rounded``: whether the unpadded size is rounded before it is
    truncated to an integer, as in transformers, or only truncated, as in LLaVA-NeXT.
    """

    pinpoints: tuple[tuple[int, int], ...]
    tile: int
    max_tiles: int | None = None
    rounded: bool = False

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the tiles of an image of ``height`` × ``width`` pixels."""
        best = max(self.pinpoints, key=lambda pinpoint: _fit(pinpoint, height, width))
        return best[0] // self.tile, best[1] // self.tile

    def count(self, side: int, height: int, width: int) -> int:
        """Number of visual tokens of an image of ``height`` × ``width`` pixels, whose tiles have ``side`` ×
        ``side``."""
        rows, columns = self._lay(height, width, side).size
        return side * side + rows * (columns + 1)

    def picture(
        self, tokens_TPD: Tensor, seen: Mapping[Evidence, Tensor], newline_D: Tensor, height: int, width: int
    ) -> Picture:
        """The ``Picture`` of an image of ``height`` × ``width`` pixels, from its tiles' tokens ``[T, P, D]`` and their
        evidence ``seen``, ``[T, P]`` or ``[T, P, C]``."""
        _count, patches, hidden = tokens_TPD.shape
        side = math.isqrt(patches)
        laid = self._lay(height, width, side)
        grid_HWD = laid.out(tokens_TPD[1:])
        rows, columns, _hidden = grid_HWD.shape
        lines = torch.cat([grid_HWD, newline_D.to(grid_HWD.dtype).expand(rows, 1, hidden)], dim=1)
        tokens = torch.cat([tokens_TPD[0], lines.flatten(0, 1)])
        whole = GridView(side, side, {kind: values[0] for kind, values in seen.items()})
        grids = [Grid(torch.arange(patches), whole)]
        places = patches + torch.arange(rows * (columns + 1)).view(rows, columns + 1)
        spread = {kind: laid.out(values[1:]) for kind, values in seen.items()}
        for down in _bands(laid.top, laid.kept[0], rows, side):
            for across in _bands(laid.left, laid.kept[1], columns, side):
                shown = {kind: values[down, across].flatten(0, 1) for kind, values in spread.items()}
                part = Part(down.start / rows, down.stop / rows, across.start / columns, across.stop / columns)
                view = GridView(down.stop - down.start, across.stop - across.start, shown, part)
                grids.append(Grid(places[down, across].flatten(), view))
        return Picture(tokens, tuple(grids), (len(tokens),))

    def _lay(self, height: int, width: int, side: int) -> _Laid:
        rows, columns = self.shape(height, width)
        full_rows, full_columns = rows * side, columns * side
        top = left = 0
        if width / height > full_columns / full_rows:
            top = (full_rows - self._whole(height * (full_columns / width))) // 2
        else:
            left = (full_columns - self._whole(width * (full_rows / height))) // 2
        kept = full_rows - 2 * top, full_columns - 2 * left
        size = kept
        if self.max_tiles is not None:
            ratio = math.sqrt(kept[0] * kept[1] / (self.max_tiles * side**2))
            if ratio > _SLACK:
                size = int(kept[0] // ratio), int(kept[1] // ratio)
        return _Laid(rows, columns, side, top, left, kept, size)

    def _whole(self, patches: float) -> int:
        return int(round(patches, 7)) if self.rounded else int(patches)


@dataclass(frozen=True)
class _Laid:
    """A grid of tiles, after removing ``top`` rows above and below and ``left`` columns at both sides, resized to
    ``size``."""

    rows: int  # of tiles
    columns: int
    side: int  # patches
    top: int
    left: int
    kept: tuple[int, int]
    size: tuple[int, int]

    def out(self, values: Tensor) -> Tensor:
        """The reassembled grid ``[H, W]`` or ``[H, W, C]`` of values of the tiles' patches, ``[T - 1, P]`` or ``[T - 1,
        P, C]``."""
        side, (rows, columns) = self.side, self.kept
        wide = values if values.dim() == 3 else values[..., None]
        tiles = wide.view(self.rows, self.columns, side, side, -1).transpose(1, 2)
        grid_HWC = tiles.reshape(self.rows * side, self.columns * side, -1)
        grid_HWC = grid_HWC[self.top : self.top + rows, self.left : self.left + columns]
        if self.size != self.kept:
            grid_HWC = F.interpolate(grid_HWC.permute(2, 0, 1)[None], self.size, mode="bilinear")[0].permute(1, 2, 0)
        return grid_HWC if values.dim() == 3 else grid_HWC[..., 0]


def _fit(pinpoint: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """The fit of an image: the effective pixels, then the (negative) wasted pixels (``select_best_resolution``)."""
    scale = min(pinpoint[1] / width, pinpoint[0] / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return kept, kept - pinpoint[0] * pinpoint[1]


def _bands(cut: int, kept: int, size: int, side: int) -> list[slice]:
    """The slices of ``size`` rows, or columns, in each tile: ``kept`` patches after the first ``cut`` were kept."""
    found, start = [], 0
    for _tile, members in groupby(int((cut + (i + 0.5) * kept / size) // side) for i in range(size)):
        stop = start + len(list(members))
        found.append(slice(start, stop))
        start = stop
    return found


class LlavaTiles:
    """``process_anyres_image`` of LLaVA-NeXT's mm_utils.py, using a processor for tiles: ``[1, T, 3, tile, tile]``."""

    def __init__(self, processor: Any, anyres: Anyres) -> None:
        self.processor, self.anyres = processor, anyres

    def __call__(self, image: Image.Image, **options: Any) -> dict[str, np.ndarray]:
        tile = self.anyres.tile
        rows, columns = self.anyres.shape(image.height, image.width)
        width, height = columns * tile, rows * tile
        across, down = width / image.width, height / image.height
        if across < down:
            size = width, min(math.ceil(image.height * across), height)
        else:
            size = min(math.ceil(image.width * down), width), height
        padded = Image.new("RGB", (width, height))
        padded.paste(image.resize(size), ((width - size[0]) // 2, (height - size[1]) // 2))
        corners = [(x, y) for y in range(0, height, tile) for x in range(0, width, tile)]
        tiles = [image.resize((tile, tile)), *(padded.crop((x, y, x + tile, y + tile)) for x, y in corners)]
        return {"pixel_values": np.stack([self.processor(t, **options)["pixel_values"][0] for t in tiles])[None]}


def anyres_of(keys: Keys, tile: int) -> Anyres | None:
    """The tiling from LLaVA's keys, for tiles of this size; None = an image is a single tile. Raises
    ``ConfigError``."""
    ratio = keys.values.get("image_aspect_ratio") or "square"
    if ratio in ("square", "pad"):
        return None
    limit = re.fullmatch(r"anyres(?:_max_([1-9]\d*))?", str(ratio))
    if limit is None:
        raise ConfigError(
            f"{keys.path}: image_aspect_ratio = {ratio!r} is not supported; "
            "it can be 'square', 'pad', 'anyres' or 'anyres_max_N'"
        )
    if keys.values.get("mm_patch_merge_type") != "spatial_unpad":
        raise ConfigError(f"{keys.path}: image_aspect_ratio = {ratio!r} needs mm_patch_merge_type = 'spatial_unpad'")
    return Anyres(
        pinpoints=tuple((height, width) for width, height in _pinpoints(keys, tile)),
        tile=tile,
        max_tiles=int(limit[1]) if limit[1] else None,
    )


def check_pinpoints(pinpoints: object, tile: int, keys: Keys) -> list[tuple[int, int]]:
    """Returns pairs of positive multiples of ``tile``; raises ``ConfigError`` for others."""
    found: list[tuple[int, int]] = []
    for pair in pinpoints if isinstance(pinpoints, Sequence) else ():
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(n, int) for n in pair):
            break
        if min(pair) < tile or pair[0] % tile or pair[1] % tile:
            break
        found.append((pair[0], pair[1]))
    else:
        if found:
            return found
    raise ConfigError(f"{keys.path}: image_grid_pinpoints must be a list of pairs of multiples of {tile} pixels")


def _pinpoints(keys: Keys, tile: int) -> list[tuple[int, int]]:
    """Widths and heights in pixels, from a list, its text, or a range of tiles such as ``(1x1),...,(6x6)``."""
    value = keys.values.get("image_grid_pinpoints")
    if isinstance(value, str) and (ends := re.findall(r"\((\d+)x(\d+)\)", value)):
        (x, y), (to_x, to_y) = (tuple(map(int, end)) for end in (ends[0], ends[-1]))
        if max(to_x, to_y) > _MOST_TILES:
            raise ConfigError(f"{keys.path}: image_grid_pinpoints = {value!r} has more than {_MOST_TILES} tiles a side")
        value = [[i * tile, j * tile] for i in range(x, to_x + 1) for j in range(y, to_y + 1)]
    elif isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
    return check_pinpoints(value, tile, keys)
