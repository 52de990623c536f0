"""The rows of one stream: their metadata, K/V before rotation and, if needed, visual tokens.

Shapes in names: N layers, C capacity, n rows, G key/value heads, K head size, D width of a visual token, A position
axes (0 if positions are single numbers).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.encode.clip_encoder import VISUAL
from mmserve.models.base import LoadedModel
from mmserve.video.memory import Kind
from mmserve.video.positions import continued, laid_out


@dataclass(frozen=True)
class Unit:
    """Frames that become rows together: one, or as many as form a grid of the model
    (``VisionEncoder.frames_per_grid``)."""

    ids: np.ndarray  # int64 [n], ``VISUAL`` for each visual token
    coordinates: np.ndarray  # int64 [A, n]: time, row and column of each visual token
    begin: float  # seconds of its first frame …
    seconds: float  # … and of its last
    frames: int = 1

    def rows(self, number: int) -> Table:
        """Its rows as frame ``number`` of a stream, without final positions."""
        n, visual = len(self.ids), self.ids == VISUAL
        kind = np.where(visual, Kind.VISUAL, Kind.LABEL).astype(np.int8)
        places = laid_out(visual, self.coordinates)[..., :-1]
        of_each = np.full(n, number), np.full(n, self.begin), np.full(n, self.seconds), np.full(n, self.frames)
        return Table(kind, *of_each, self.ids, places, self.coordinates)


@dataclass(frozen=True)
class Table:
    """Metadata of each row; arrays ``[n]`` that are replaced, never modified."""

    kind: np.ndarray  # int8, of ``Kind``
    frame: np.ndarray  # int64: number of the unit; for a carrier that of the evicted one; -1 for sinks
    begin: np.ndarray  # float64: seconds of its first frame; nan for sinks
    seconds: np.ndarray  # float64: seconds of its last frame; nan for sinks
    frames: np.ndarray  # int64: number of its frames; 0 for sinks
    ids: np.ndarray  # int64, ``VISUAL`` for each visual token
    places: np.ndarray  # int64: rotary positions; [A, n] with several axes
    coordinates: np.ndarray  # int64 [A, n]: time, row and column of each visual token

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, index: np.ndarray) -> Table:
        """The rows ``index`` (int64), in that order."""
        return Table(*(array[..., index] for array in self.arrays))

    def then(self, other: Table) -> Table:
        """The rows of both, concatenated."""
        return Table(*(np.concatenate(pair, axis=-1) for pair in zip(self.arrays, other.arrays, strict=True)))

    def after(self, before: Table) -> Table:
        """The same rows at the positions after ``before``."""
        return self.at(continued(before.places, before.shape, self.shape)[..., :-1])

    def at(self, places: np.ndarray) -> Table:
        """The same rows at positions ``places``."""
        return replace(self, places=places)

    def numbered(self) -> Table:
        """The same rows at positions numbered from 0."""
        return self.at(laid_out(*self.shape)[..., :-1])

    @property
    def shape(self) -> tuple[np.ndarray, np.ndarray]:
        """A mask of the visual tokens, and their coordinates: the arguments of ``laid_out``."""
        return self.ids == VISUAL, self.coordinates

    @property
    def following(self) -> int:
        """The position of text after the rows."""
        text = np.zeros(1, dtype=bool), np.zeros((len(self.coordinates), 1), dtype=np.int64)
        return int(continued(self.places, self.shape, text)[..., 0].max())

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Its fields, in order."""
        of_each = self.kind, self.frame, self.begin, self.seconds, self.frames
        return *of_each, self.ids, self.places, self.coordinates

    @property
    def visual(self) -> np.ndarray:
        """Indices (int64) of the visual tokens."""
        return np.flatnonzero(self.ids == VISUAL)

    @property
    def first(self) -> int:
        """Number of sinks and carriers before the frames."""
        return int(np.count_nonzero(self.kind <= Kind.CARRIER))


def sinks(header: np.ndarray, axes: int) -> Table:
    """The chat's header (int64 ids), with which a stream begins; ``axes``: number of position axes, 1 = single
    numbers."""
    n = len(header)
    coordinates = np.zeros((axes if axes > 1 else 0, n), dtype=np.int64)
    places = laid_out(np.zeros(n, dtype=bool), coordinates)[..., :-1]
    unknown = np.full(n, np.nan)
    of_each = np.full(n, Kind.SINK, np.int8), np.full(n, -1), unknown, unknown, np.zeros(n, dtype=np.int64)
    return Table(*of_each, header, places, coordinates)


@dataclass
class Buffers:
    """Tensors of a stream's rows with a capacity of ``C``. Written rows never change: eviction copies the kept ones to
    other buffers. So a view of the first n rows is an immutable branch of the stream.

    ``keys``, ``values``: ``[N, C, G, K]``, keys before rotation; ``rotated``: the rotated keys, for passes over new
    rows. They are None if every question computes K/V again. ``features [C, D]``: visual tokens, None if not needed.
    """

    keys: Tensor | None
    values: Tensor | None
    rotated: Tensor | None
    features: Tensor | None

    @classmethod
    def of(cls, model: LoadedModel, capacity: int, *, kv: bool, features: bool) -> Buffers:
        """Empty buffers."""
        c = model.decoder.config
        shape = (c.num_layers, capacity, c.num_kv_heads, c.head_dim)
        keys, values, rotated = (
            torch.empty(shape, dtype=model.dtype, device=model.device) if kv else None for _ in range(3)
        )
        tokens = torch.zeros(capacity, model.width, dtype=model.dtype, device=model.device) if features else None
        return cls(keys, values, rotated, tokens)

    def copy_rows(self, source: Buffers, index: np.ndarray, at: int) -> None:
        """Copy rows ``index`` (int64) of ``source`` to consecutive rows from ``at``, without rotated keys."""
        for name, axis in (("keys", 1), ("values", 1), ("features", 0)):
            target, values = getattr(self, name), getattr(source, name)
            if target is not None:
                rows = torch.from_numpy(index).to(target.device)
                target.narrow(axis, at, len(index)).copy_(values.index_select(axis, rows))

    def rotate_keys(self, model: LoadedModel, places: np.ndarray) -> None:
        """Rotate the keys of the first rows to their positions ``places`` (int64 ``[n]`` or ``[A, n]``)."""
        if self.keys is None or self.rotated is None:
            return
        rows = places.shape[-1]
        cos, sin = model.decoder.rotary(torch.from_numpy(places).to(model.device))
        self.rotated[:, :rows] = rotate(self.keys[:, :rows], cos, sin)


def row_bytes(model: LoadedModel, *, kv: bool, features: bool) -> int:
    """Bytes of one row in ``Buffers``."""
    c = model.decoder.config
    of_kv = 3 * c.num_layers * c.num_kv_heads * c.head_dim if kv else 0
    return (of_kv + (model.width if features else 0)) * model.dtype.itemsize
