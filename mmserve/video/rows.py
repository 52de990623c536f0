"""The rows of one stream: what each is, its K/V before rotation, and its visual token where somebody asks for it.

Shapes in names: N layers, C capacity, n rows, G key/value heads, K head size, D width of a visual token.
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


@dataclass(frozen=True)
class Table:
    """What each row is; arrays ``[n]`` that are replaced, never changed."""

    kind: np.ndarray  # int8, of ``Kind``
    frame: np.ndarray  # int64: number of the frame; of a carrier the one it represents; -1 of sinks
    seconds: np.ndarray  # float64: of that frame; nan of sinks
    ids: np.ndarray  # int64, ``VISUAL`` for each visual token
    places: np.ndarray  # int64, for the rotary embedding

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, index: np.ndarray) -> Table:
        """Some of the rows, in the order of ``index`` (int64)."""
        return Table(*(array[index] for array in self._arrays))

    def then(self, other: Table) -> Table:
        """The rows of both."""
        return Table(*(np.concatenate(pair) for pair in zip(self._arrays, other._arrays, strict=True)))

    def at(self, places: np.ndarray) -> Table:
        """The same rows at other ``places``."""
        return replace(self, places=places)

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.kind, self.frame, self.seconds, self.ids, self.places

    @property
    def visual(self) -> np.ndarray:
        """Rows (int64) where visual tokens stand."""
        return np.flatnonzero(self.ids == VISUAL)

    @property
    def first(self) -> int:
        """Sinks and carriers in front of the frames."""
        return int(np.count_nonzero(self.kind <= Kind.CARRIER))


def sinks(header: np.ndarray) -> Table:
    """The chat's header (int64 ids), with which a stream begins."""
    n = len(header)
    return Table(np.full(n, Kind.SINK, np.int8), np.full(n, -1), np.full(n, np.nan), header, np.arange(n))


def frame_rows(ids: np.ndarray, number: int, seconds: float, place: int) -> Table:
    """The rows of a frame (int64 ids, ``VISUAL`` for each visual token), side by side from ``place``."""
    kind = np.where(ids == VISUAL, Kind.VISUAL, Kind.LABEL).astype(np.int8)
    n = len(ids)
    return Table(kind, np.full(n, number), np.full(n, seconds), ids, place + np.arange(n))


@dataclass
class Buffers:
    """Tensors of a stream's rows with room for ``C`` of them. Rows that are there never change: what is evicted leaves
    by a copy into other buffers. So a view of the first n rows is a branch of the stream that nothing disturbs.

    ``keys``, ``values``: ``[N, C, G, K]``, keys before rotation; ``turned``: the same keys at their places, for the
    passes over new rows. They are None where every question computes K/V anew. ``features [C, D]``: visual tokens,
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
        """Rotate the keys of the first rows to their ``places`` (int64 ``[n]``)."""
        if self.keys is None or self.turned is None:
            return
        cos, sin = model.decoder.rotary(torch.from_numpy(places).to(model.device))
        self.turned[:, : len(places)] = rotate(self.keys[:, : len(places)], cos, sin)


def row_bytes(model: LoadedModel, *, kv: bool, features: bool) -> int:
    """Bytes of a row in ``Buffers``."""
    c = model.decoder.config
    of_kv = 3 * c.num_layers * c.num_kv_heads * c.head_dim if kv else 0
    return (of_kv + (model.width if features else 0)) * model.dtype.itemsize
