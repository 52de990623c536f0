"""The vision tower of Qwen2-VL (arXiv 2409.12191), and the common parts of those of Qwen2.5-VL and Qwen3-VL.

Images keep their size and aspect ratio: a tower takes rows of patches with a grid, and its merger combines four patches
to one visual token. Shapes in names: N patches, U visual tokens, C width of the tower, D width of a visual token, H
heads.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from mmserve.core.request import PixelRange
from mmserve.models.picture import Picture, Prepared, Text, Tile, VisionEncoder, joined
from mmserve.models.qwen_pixels import QwenPixels
from mmserve.models.scores import mean_attention
from mmserve.prune.base import Evidence, GridView


class QwenVision(VisionEncoder):
    """The checkpoint's processor, followed by a tower of transformers (``blocks``, ``merger``).

    Visual tokens have time, row and column positions in the decoder: ``coordinates`` of its pictures. ``frames``:
    number of frames sampled from a video.
    """

    tokens_per_image = 0

    def __init__(self, tower: nn.Module, pixels: QwenPixels, *, frames: int) -> None:
        super().__init__()
        self.tower, self.pixels, self.frames_per_video = tower, pixels, frames
        self.frames_per_grid = pixels.frames_a_patch
        self.config: Any = tower.config

    @property
    def evidence(self) -> frozenset[Evidence]:
        return frozenset({Evidence.COLUMN_MEANS, Evidence.KEYS})

    def settings(self) -> Mapping[str, Any]:
        return {"processor": self.pixels.settings(), "tower": self.config.to_dict()}

    @property
    def pixel_limits(self) -> tuple[PixelRange, PixelRange]:
        return self.pixels.limits

    def within(self, images: PixelRange, videos: PixelRange) -> VisionEncoder:
        made = copy.copy(self)
        made.pixels = self.pixels.within(images, videos)
        return made

    def prepare(self, image: Image.Image) -> Prepared:
        return self.pixels.image(image)

    def prepare_clip(
        self, frames: Sequence[Image.Image], seconds: Sequence[float], *, length: float | None = None
    ) -> Prepared:
        return self.pixels.clip(frames, seconds)

    def pieces(self, one: Prepared, *, clip: bool) -> tuple[Text | int, ...]:
        count = int(one["grid"].prod()) // self.config.spatial_merge_size**2
        tiles = self._tiles(one["grid"][0], torch.empty(count, 0), {})
        return self._picture(tiles, one.get("seconds") if clip else None).pieces

    def encode(self, batch: Sequence[Prepared], wanted: frozenset[Evidence], *, clip: bool) -> list[Picture]:
        grids = torch.cat([one["grid"] for one in batch])
        with self._watched(wanted) as seen:
            made = self.tower(torch.cat([one["pixels"] for one in batch]), grids.to(self._device))
        tokens_UD = self._tokens(made)
        evidence = {kind: self._in_order(values, grids) for kind, values in seen.items()}
        counts = (grids.prod(1) // self.config.spatial_merge_size**2).tolist()
        starts = torch.tensor([0, *counts]).cumsum(0).tolist()
        pictures = []
        for one, start, count in zip(batch, starts, counts, strict=False):
            own = slice(start, start + count)
            tiles = self._tiles(
                one["grid"][0], tokens_UD[own], {kind: values[own] for kind, values in evidence.items()}
            )
            pictures.append(self._picture(tiles, one.get("seconds") if clip else None))
        return pictures

    def _tiles(self, grid: Tensor, tokens_UD: Tensor, seen: Mapping[Evidence, Tensor]) -> list[Tile]:
        """A tile for each temporal patch."""
        frames, rows, columns = (grid // torch.tensor([1, *[self.config.spatial_merge_size] * 2])).tolist()
        size = rows * columns
        return [
            Tile(
                tokens_UD[i * size : (i + 1) * size],
                torch.arange(size),
                GridView(rows, columns, {kind: values[i * size : (i + 1) * size] for kind, values in seen.items()}),
            )
            for i in range(frames)
        ]

    def _picture(self, tiles: list[Tile], seconds: Tensor | None) -> Picture:
        """``seconds`` (float64 ``[tiles, 2]``): start and end of each of a clip's temporal patches; None for an
        image."""
        parts: list[Tile | Text] = list(tiles)
        return joined(parts, coordinates(tiles, self._times(seconds)) if seconds is not None else coordinates(tiles))

    def _times(self, seconds_F2: Tensor) -> Tensor:
        """The time positions of a clip's temporal patches, int64 ``[F]``: consecutive."""
        return torch.arange(len(seconds_F2))

    def stream_time(self, number: int, seconds: float) -> int:
        return number

    def _tokens(self, made: Any) -> Tensor:
        """The visual tokens ``[U, D]`` in the tower's result."""
        tokens: Tensor = made.pooler_output
        return tokens

    @property
    def _scored(self) -> int:
        """The block whose attention scores patches: the one before the features."""
        return int(self.config.depth) - 1

    def _in_order(self, values: Tensor, _grids: Tensor) -> Tensor:
        """Values of visual tokens, ``[U, …]``, reordered from the order of the tower's blocks."""
        return values

    @property
    def _device(self) -> torch.device:
        return next(self.tower.parameters()).device

    @contextmanager
    def _watched(self, wanted: frozenset[Evidence]) -> Iterator[dict[Evidence, Tensor]]:
        """Yields a dict that the next run of this thread fills with the ``wanted`` evidence, one value per visual
        token."""
        seen: dict[Evidence, Tensor] = {}
        me = threading.get_ident()

        def watch(block: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            if threading.get_ident() != me:
                return
            merged = self.config.spatial_merge_size**2
            for kind, values in _evidence(block, arguments[0], wanted, **options):
                seen[kind] = values.unflatten(0, (-1, merged)).mean(1)

        blocks: Any = self.tower.get_submodule("blocks")
        hook = blocks[self._scored].register_forward_pre_hook(watch, with_kwargs=True) if wanted else None
        try:
            yield seen
        finally:
            if hook is not None:
                hook.remove()


def coordinates(tiles: Sequence[Tile], times: Tensor | None = None) -> Tensor:
    """Time, row and column of each visual token of consecutive ``tiles``, int64 ``[3, n]``.

    ``times``: int64 ``[tiles]``; None = all 0.
    """
    found = []
    for tile, time in zip(tiles, [0] * len(tiles) if times is None else times.tolist(), strict=True):
        place = torch.arange(tile.view.size)
        found.append(torch.stack([torch.full_like(place, time), place // tile.view.columns, place % tile.view.columns]))
    return torch.cat(found, dim=1)


def _evidence(
    block: Any, x_NC: Tensor, wanted: frozenset[Evidence], *, cu_seqlens: Tensor, position_embeddings: Any, **_rest: Any
) -> Iterator[tuple[Evidence, Tensor]]:
    """The evidence of ``block`` for its input patches: fp32 ``[N]`` or ``[N, C]``."""
    attention = block.attn
    query_NHK, key_NHK, _ = attention.qkv(block.norm1(x_NC)).unflatten(-1, (3, attention.num_heads, -1)).unbind(1)
    if Evidence.KEYS in wanted:
        yield Evidence.KEYS, key_NHK.float().mean(1)
    if Evidence.COLUMN_MEANS in wanted:
        query_NHK, key_NHK = apply_rotary_pos_emb_vision(query_NHK, key_NHK, *position_embeddings)
        lengths = cu_seqlens.diff().tolist()  # of each frame, within which attention is full
        yield Evidence.COLUMN_MEANS, mean_attention(query_NHK, key_NHK, lengths, lengths)
