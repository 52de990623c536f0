"""The rows of one stream: what each is, its K/V before rotation, and its visual token where somebody asks for it.

Shapes in names: N layers, C capacity, n rows, G key/value heads, K head size, D width of a visual token, A axes of a
position, 0 of them where it is one number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.encode.watching import VISUAL
from mmserve.models.base import LoadedModel
from mmserve.video.memory import Kind
from mmserve.video.positions import going_on, laid_out


@dataclass(frozen=True)
class Unit:
    """What becomes rows together: a frame, or as many as the model sees as one (``VisionEncoder.frames_per_grid``)."""

    ids: np.ndarray  # int64 [n], ``VISUAL`` for each visual token
    coordinates: np.ndarray  # int64 [A, n]: time, row and column of each visual token
    begin: float  # seconds of the first of its frames …
    seconds: float  # … and of the last
    frames: int = 1

    def rows(self, number: int) -> Table:
        """Its rows as frame ``number`` of a stream, not placed yet."""
        n, visual = len(self.ids), self.ids == VISUAL
        kind = np.where(visual, Kind.VISUAL, Kind.LABEL).astype(np.int8)
        places = laid_out(visual, self.coordinates)[..., :-1]
        of_each = np.full(n, number), np.full(n, self.begin), np.full(n, self.seconds), np.full(n, self.frames)
        return Table(kind, *of_each, self.ids, places, self.coordinates)


@dataclass(frozen=True)
class Table:
    """What each row is; arrays ``[n]`` that are replaced, never changed."""

    kind: np.ndarray  # int8, of ``Kind``
    frame: np.ndarray  # int64: number of the unit of frames; of a carrier the one it represents; -1 of sinks
    begin: np.ndarray  # float64: seconds of its first frame; nan of sinks
    seconds: np.ndarray  # float64: of its last frame; nan of sinks
    frames: np.ndarray  # int64: how many it has; 0 of sinks
    ids: np.ndarray  # int64, ``VISUAL`` for each visual token
    places: np.ndarray  # int64, for the rotary embedding; [A, n] where positions have axes
    coordinates: np.ndarray  # int64 [A, n]: time, row and column of each visual token

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, index: np.ndarray) -> Table:
        """Some of the rows, in the order of ``index`` (int64)."""
        return Table(*(array[..., index] for array in self.arrays))

    def then(self, other: Table) -> Table:
        """The rows of both."""
        return Table(*(np.concatenate(pair, axis=-1) for pair in zip(self.arrays, other.arrays, strict=True)))

    def after(self, before: Table) -> Table:
        """The same rows at the places that they have after ``before``."""
        return self.at(going_on(before.places, before.shape, self.shape)[..., :-1])

    def at(self, places: np.ndarray) -> Table:
        """The same rows at other ``places``."""
        return replace(self, places=places)

    def numbered(self) -> Table:
        """The same rows at places that are counted from 0."""
        return self.at(laid_out(*self.shape)[..., :-1])

    @property
    def shape(self) -> tuple[np.ndarray, np.ndarray]:
        """Which rows are visual tokens, and where each of those is: what places depend on."""
        return self.ids == VISUAL, self.coordinates

    @property
    def following(self) -> int:
        """The place of text that follows."""
        text = np.zeros(1, dtype=bool), np.zeros((len(self.coordinates), 1), dtype=np.int64)
        return int(going_on(self.places, self.shape, text)[..., 0].max())

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Its fields, in their order."""
        of_each = self.kind, self.frame, self.begin, self.seconds, self.frames
        return *of_each, self.ids, self.places, self.coordinates

    @property
    def visual(self) -> np.ndarray:
        """Rows (int64) where visual tokens are."""
        return np.flatnonzero(self.ids == VISUAL)

    @property
    def first(self) -> int:
        """Sinks and carriers in front of the frames."""
        return int(np.count_nonzero(self.kind <= Kind.CARRIER))


def sinks(header: np.ndarray, axes: int) -> Table:
    """The chat's header (int64 ids), with which a stream begins; ``axes`` of a position, 1 = it is one number."""
    n = len(header)
    coordinates = np.zeros((axes if axes > 1 else 0, n), dtype=np.int64)
    places = laid_out(np.zeros(n, dtype=bool), coordinates)[..., :-1]
    unknown = np.full(n, np.nan)
    of_each = np.full(n, Kind.SINK, np.int8), np.full(n, -1), unknown, unknown, np.zeros(n, dtype=np.int64)
    return Table(*of_each, header, places, coordinates)


@dataclass
class Buffers:
    """Tensors of a stream's rows with room for ``C`` of them. Rows that are there never change: what is evicted leaves
    by a copy into other buffers. So a view of the first n rows is a branch of the stream that nothing disturbs.

    ``keys``, ``values``: ``[N, C, G, K]``, keys before rotation; ``turned``: the same keys at their places, for the
    passes over new rows. They are None where every question computes K/V again. ``features [C, D]``: visual tokens,
    None where nobody asks for them.
    """

    keys: Tensor | None
    values: Tensor | None
    turned: Tensor | None
    features: Tensor | None

    @classmethod
    def of(cls, model: LoadedModel, capacity: int, *, kv: bool, features: bool) -> Buffers:
        """Empty ones."""
        c = model.decoder.config
        shape = (c.num_layers, capacity, c.num_kv_heads, c.head_dim)
        keys, values, turned = (
            torch.empty(shape, dtype=model.dtype, device=model.device) if kv else None for _ in range(3)
        )
        tokens = torch.zeros(capacity, model.width, dtype=model.dtype, device=model.device) if features else None
        return cls(keys, values, turned, tokens)

    def copy_rows(self, source: Buffers, index: np.ndarray, at: int) -> None:
        """Take over rows ``index`` (int64) of ``source``, one after another from row ``at``; not their rotation."""
        for name, axis in (("keys", 1), ("values", 1), ("features", 0)):
            mine, theirs = getattr(self, name), getattr(source, name)
            if mine is not None:
                rows = torch.from_numpy(index).to(mine.device)
                mine.narrow(axis, at, len(index)).copy_(theirs.index_select(axis, rows))

    def turn(self, model: LoadedModel, places: np.ndarray) -> None:
        """Rotate the keys of the first rows to their ``places`` (int64 ``[n]`` or ``[A, n]``)."""
        if self.keys is None or self.turned is None:
            return
        rows = places.shape[-1]
        cos, sin = model.decoder.rotary(torch.from_numpy(places).to(model.device))
        self.turned[:, :rows] = rotate(self.keys[:, :rows], cos, sin)


def row_bytes(model: LoadedModel, *, kv: bool, features: bool) -> int:
    """Bytes of a row in ``Buffers``."""
    c = model.decoder.config
    of_kv = 3 * c.num_layers * c.num_kv_heads * c.head_dim if kv else 0
    return (of_kv + (model.width if features else 0)) * model.dtype.itemsize
