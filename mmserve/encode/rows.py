"""The pieces of a prompt, text and media, as rows; with the resulting positions, spans and grids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mmserve.core.encoded import Span


@dataclass(frozen=True)
class Rows:
    """A piece of a prompt: ids, the place of each row before pruning, and which rows are visual.

    If positions have several axes, places are ``[axes, rows]``, and counted in positions instead of rows.
    """

    ids: np.ndarray  # int64 [rows]
    places: np.ndarray  # int64 [rows]
    span: int  # distance from its start to that of the next piece
    pruned: int  # number of rows removed
    visual: np.ndarray  # bool [rows]
    grid: np.ndarray  # int64 [rows]: index of the grid (image or frame) of each patch; -1 = none
    features: Tensor | None  # [visual rows, D]; None for text
    companion_features: Tensor | None = None  # the companion's features, if the request's policy requires them
    clip: bool = False


def text_rows(ids: np.ndarray) -> Rows:
    """The rows of text ``ids`` (int64 ``[rows]``)."""
    count = len(ids)
    return Rows(ids, np.arange(count), count, 0, np.zeros(count, dtype=bool), np.full(count, -1), None)


def places_of(pieces: list[Rows], starts: list[int]) -> np.ndarray | None:
    """The position of each row, and of the answer's start, for ``Canvas.create``; None = the row's index.

    ``starts``: the start of each piece, and of the answer.
    """
    if not any(piece.pruned or piece.places.ndim > 1 for piece in pieces):
        return None
    parts = [start + piece.places for start, piece in zip(starts, pieces, strict=False)]
    axes = np.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return np.concatenate([np.broadcast_to(p, (*axes, p.shape[-1])) for p in (*parts, np.array(starts[-1:]))], axis=-1)


def spans_of(pieces: list[Rows], starts: list[int]) -> tuple[Span, ...]:
    """The location of each image and clip. ``starts``: the places at which the pieces begin."""
    rows = np.cumsum([0, *(len(piece.ids) for piece in pieces)]).tolist()
    return tuple(
        Span(row, row + len(piece.ids), place, piece.clip)
        for row, place, piece in zip(rows, starts, pieces, strict=False)
        if piece.features is not None
    )


def grids_of(pieces: list[Rows]) -> tuple[tuple[np.ndarray, ...], ...]:
    """For each image and clip, the rows of the prompt that are the patches of each of its grids."""
    starts = np.cumsum([0, *(len(piece.ids) for piece in pieces)])
    return tuple(
        tuple(start + np.flatnonzero(piece.grid == i) for i in range(int(piece.grid.max()) + 1))
        for start, piece in zip(starts, pieces, strict=False)
        if piece.features is not None
    )
