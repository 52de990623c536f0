"""Pixel shuffle: the features of a square of patches are concatenated to one visual token.

As in the connectors of Idefics3 (arXiv 2408.12637) and InternVL (arXiv 2404.16821). Pruners get the resulting grid, and
the tower's evidence averaged over the same squares. Shapes in names: B tiles, N the tower's positions, C its width, D
the decoder's; S squares of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmserve.models.evidence import OF_PATCHES, AttentionModules, Watched
from mmserve.models.picture import Picture, Prepared, Text, Tile, VisionEncoder, blank, joined
from mmserve.models.vision import describe_processor
from mmserve.prune.base import Evidence, GridView, Part

#: Tiles that go through a tower together: all tiles of a long clip would take too much memory.
AT_ONCE = 8


def with_parts(tiles: Sequence[Tile], rows: int, columns: int) -> list[Tile]:
    """Labels tiles that cover an image row by row with the part that each shows; later tiles are unchanged."""
    found = list(tiles)
    for i in range(rows * columns):
        row, column = divmod(i, columns)
        part = Part(row / rows, (row + 1) / rows, column / columns, (column + 1) / columns)
        found[i] = replace(found[i], view=replace(found[i].view, part=part))
    return found


def squares(x_BNC: Tensor, factor: int) -> Tensor:
    """``[B, S, factor * factor, C]``: the patches of each square, row by row, of a square grid ``[B, N, C]``."""
    side = int(x_BNC.shape[1] ** 0.5)
    grid = x_BNC.unflatten(1, (side // factor, factor, side // factor, factor))
    return grid.transpose(2, 3).flatten(3, 4).flatten(1, 2)


class ShuffledTower(nn.Module):
    """A tower from transformers, pixel shuffle over squares with a side of ``factor`` patches, and a projector.

    ``layers``: the tower's layers for evidence; ``select_layer``: negative index of its hidden states, -1 is its final
    output; ``first``: index of the first patch, 1 after a class token, which is dropped. ``projector`` maps ``[B, S,
    factor * factor * C]`` to ``[B, S, D]``.
    """

    def __init__(
        self,
        tower: nn.Module,
        projector: nn.Module,
        layers: Sequence[AttentionModules],
        *,
        factor: int,
        select_layer: int = -1,
        first: int = 0,
    ) -> None:
        super().__init__()
        self.tower, self.projector = tower, projector
        self._layers = tuple(layers)
        self.factor, self.select_layer, self.first = factor, select_layer, first

    def blanks(self, count: int) -> list[Tile]:
        """``count`` tiles before the tower runs."""
        config: Any = self.tower.config
        size, patch = (v if isinstance(v, int) else v[0] for v in (config.image_size, config.patch_size))
        side = size // patch // self.factor
        return [blank(side, side) for _ in range(count)]

    def forward(self, pixels: Tensor, wanted: frozenset[Evidence]) -> list[Tile]:
        """Each tile of ``pixels [B, 3, side, side]`` with the ``wanted`` evidence."""
        return [tile for some in pixels.split(AT_ONCE) for tile in self._tiles(some, wanted)]

    def _tiles(self, pixels: Tensor, wanted: frozenset[Evidence]) -> list[Tile]:
        watched = Watched(self._layers, self.select_layer, wanted)
        with watched.running():
            out = self.tower(pixels, output_hidden_states=bool(wanted) or self.select_layer != -1)
        last = out.last_hidden_state if self.select_layer == -1 else out.hidden_states[self.select_layer]
        tokens = self.projector(squares(last[:, self.first :], self.factor).flatten(2))
        seen: dict[Evidence, Tensor] = {}
        if wanted:
            found = watched.evidence(out.hidden_states, first=self.first)
            seen = {kind: self._pooled(values) for kind, values in found.items()}
        side = int(tokens.shape[1] ** 0.5)
        patches = torch.arange(side * side)
        return [
            Tile(own, patches, GridView(side, side, {kind: values[i] for kind, values in seen.items()}))
            for i, own in enumerate(tokens)
        ]

    def _pooled(self, values: Tensor) -> Tensor:
        """Evidence ``[B, patches]`` or ``[B, patches, C]``, averaged over squares."""
        wide = values if values.dim() == 3 else values[..., None]
        pooled = squares(wide, self.factor).mean(2)
        return pooled if values.dim() == 3 else pooled[..., 0]


class ShuffledVision(VisionEncoder):
    """An image processor, followed by ``tower``; ``frames`` makes one tile of each frame of a clip, None = no
    videos."""

    frames_at_once = AT_ONCE
    tokens_per_image = 0
    #: Texts before and after an image's tiles.
    frame: tuple[str, ...] = ()
    evidence = OF_PATCHES

    def __init__(self, tower: ShuffledTower, processor: Any, frames: Any | None = None) -> None:
        super().__init__()
        self.tower, self._processor, self._frames = tower, processor, frames

    def row(self, tiles: Sequence[Tile], one: Prepared, *, clip: bool) -> Sequence[Tile | Text]:
        """The row of the image or clip ``one`` with these tiles."""
        raise NotImplementedError

    def settings(self) -> Mapping[str, Any]:
        tower: Any = self.tower.tower
        return {
            "processor": [describe_processor(p) for p in (self._processor, self._frames) if p is not None],
            "tower": tower.config.to_dict(),
            "factor": self.tower.factor,
            "select_layer": self.tower.select_layer,
            "text": self.frame,
        }

    def pieces(self, one: Prepared, *, clip: bool) -> tuple[Text | int, ...]:
        return joined(self.row(self.tower.blanks(len(one["pixels"])), one, clip=clip)).pieces

    def encode_frames(self, some: Prepared, wanted: frozenset[Evidence]) -> list[Tile]:
        return self.tower(some["pixels"], wanted)

    def encode(self, batch: Sequence[Prepared], wanted: frozenset[Evidence], *, clip: bool) -> list[Picture]:
        tiles = iter(self.tower(torch.cat([one["pixels"] for one in batch]), wanted))
        return [joined(self.row([next(tiles) for _ in one["pixels"]], one, clip=clip)) for one in batch]
