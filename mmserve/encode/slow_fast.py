"""The frames of a clip given by a request's sampling, and frames of the fast path (SlowFast): one visual token each.

Slow-fast: few frames in detail, many compact (SlowFast-LLaVA, arXiv 2407.15841).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmserve.core.own_frames import OwnFrames
from mmserve.core.request import VideoSampling
from mmserve.encode.sampling import (
    SCENE_FRAMES,
    SCENE_RATE,
    SCENE_SIMILARITY,
    FixedRate,
    ProcessorFrames,
    Sampler,
    Scene,
    packed,
)
from mmserve.models.picture import Grid, Picture, Text

#: Key of a prepared clip, bool ``[frames]``: which frames are in detail; absent = all.
DETAILS = "details"


@dataclass(frozen=True)
class Chosen:
    """A selection of frames in the fields of ``MediaFile``."""

    frames: int = 0
    rate: float = 0.0
    sampler: dict[str, Any] | None = None


def chosen_frames(sampling: VideoSampling | None, frames: int, rate: float, own: OwnFrames | None = None) -> Chosen:
    """The selection by ``sampling``; without a rule, the frames of the model's ``own`` processor, or else ``frames``
    and ``rate``."""
    if sampling is None or (sampling.frames is None and sampling.fps is None and not sampling.scenes):
        return Chosen(frames, rate, None if own is None else packed(ProcessorFrames(**vars(own))))
    if sampling.frames is not None:
        return Chosen(sampling.frames)
    sampler: Sampler
    if sampling.scenes:
        similarity = SCENE_SIMILARITY if sampling.scene_similarity is None else sampling.scene_similarity
        sampler = Scene(sampling.fps or SCENE_RATE, sampling.scene_frames or SCENE_FRAMES, similarity)
    else:
        assert sampling.fps is not None
        sampler = FixedRate(sampling.fps)
    return Chosen(sampler=packed(sampler))


def details_of(sampling: VideoSampling | None, details: Sequence[bool]) -> tuple[bool, ...]:
    """Which frames are in detail, from the sampler's ``details`` of the file."""
    every = None if sampling is None else sampling.detail_every
    return tuple(details) if every is None else tuple(i % every == 0 for i in range(len(details)))


def detailed_grids(details: Tensor, frames_per_grid: int) -> list[bool]:
    """For each grid of a clip whether it contains a frame in detail. ``details``: bool ``[frames]``."""
    return [bool(some.any()) for some in details.split(frames_per_grid)]


def compacted(picture: Picture, detailed: Sequence[bool]) -> Picture:
    """``picture`` of a clip with the patches of each grid that is not detailed replaced by one token, their mean.

    Separators and text stay. The token takes the place of the grid's middle patch, and is exempt from pruning.
    """
    tokens, keep = picture.tokens.clone(), torch.ones(len(picture.tokens), dtype=torch.bool)
    for grid, whole in zip(picture.grids, detailed, strict=True):
        if not whole:
            middle = grid.patches[len(grid.patches) // 2]
            tokens[middle] = picture.tokens[grid.patches].mean(0)
            keep[grid.patches] = False
            keep[middle] = True
    place = keep.cumsum(0) - 1
    grids = tuple(
        Grid(place[grid.patches], grid.view) for grid, whole in zip(picture.grids, detailed, strict=True) if whole
    )
    pieces: list[Text | int] = []
    start = 0
    for piece in picture.pieces:
        if isinstance(piece, int):
            pieces.append(int(keep[start : start + piece].sum()))
            start += piece
        else:
            pieces.append(piece)
    coordinates = None if picture.coordinates is None else picture.coordinates[:, keep]
    return Picture(tokens[keep.to(tokens.device)], grids, tuple(pieces), coordinates)


def fewest_pieces(pieces: Sequence[Text | int], detailed: Sequence[bool]) -> tuple[Text | int, ...]:
    """A lower bound of the result of ``compacted`` for ``pieces``, before the tower has run."""
    counts = [piece for piece in pieces if isinstance(piece, int)]
    if len(counts) == len(detailed):
        left = iter([count if whole else min(count, 1) for count, whole in zip(counts, detailed, strict=True)])
        return tuple(next(left) if isinstance(piece, int) else piece for piece in pieces)
    texts = tuple(piece for piece in pieces if not isinstance(piece, int))
    compact = len(detailed) - sum(detailed)
    return (*texts, sum(counts) * sum(detailed) // len(detailed) + compact)
