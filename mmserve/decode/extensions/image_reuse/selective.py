"""Selective recompute: positions of images with reused K/V that decode passes run again (see ``kv/reuse/kv_share.py``).

Shapes in names: R rows of a pass, A predicting rows among them, L positions with K/V, H query heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from mmserve_kernels.cached_attention import Ragged
from mmserve_kernels.dispatch import pick
from torch import Tensor

from mmserve.kv.pool import pages_for
from mmserve.kv.reuse.base import largest
from mmserve.kv.store import KVStore


@dataclass
class SelectiveRecompute:
    """The positions of one request that are still to be recomputed, with the attention that they receive; plain
    data."""

    each_step: int  # positions that a pass recomputes in addition to those it decodes
    layer: int  # layer (from 0) whose attention and values select positions
    positions: np.ndarray  # int64 [n], ascending: not recomputed in this prompt yet
    moved: np.ndarray  # float32 [n], deviation of their values from this prompt's
    attended: np.ndarray  # float32 [n]; until the first decode pass, the attention of all prompt positions to them

    def rows(self) -> np.ndarray:
        """Positions (int64, ascending) to run in the next pass of decode."""
        return self.positions[largest(self.moved * self.attended, self.each_step)]

    def absorb(self, seen: PredictingRows) -> None:
        """Apply the result of a completed pass: the positions that it ran are no longer candidates for recompute."""
        if seen.attention_L is None:
            raise ValueError("a pass is absorbed before it was run")
        left = ~np.isin(self.positions, seen.rows)
        self.positions, self.moved = self.positions[left], self.moved[left]
        self.attended = seen.attention_L.cpu().numpy()[self.positions]


@dataclass
class PredictingRows:
    """The attention of the predicting rows of one request in one pass. It is applied to the request's state only when
    the pass has succeeded."""

    rows: np.ndarray  # int64, all rows of the pass
    predicting_A: Tensor  # int64, indices of the rows that predict tokens
    layer: int
    attention: Callable[[Tensor], Tensor]  # from rotated queries [A, H, K] to weights, fp32 [L]
    attention_L: Tensor | None = None

    def observe(self, layer: int, q_RHK: Tensor, rotated_RHK: Tensor) -> None:
        """Record the attention of the request's rows in ``layer``; ``q_RHK`` is before rotation. Their keys are in the
        store."""
        if layer == self.layer:
            self.attention_L = self.attention(rotated_RHK[self.predicting_A])


class RowWatcher:
    """Creates ``PredictingRows`` for the requests of one store; holds no state of any request."""

    def __init__(self, store: KVStore, dtype: torch.dtype) -> None:
        self._store = store
        op = pick("attention_scores", store.device, dtype, store.keys[0].shape[-1])
        self._scores = op.run
        store.kernels[op.op] = op.path

    def watch(
        self, state: SelectiveRecompute, rows: np.ndarray, wanted: np.ndarray, seen: np.ndarray, pages: np.ndarray
    ) -> PredictingRows | None:
        """The observation of a pass over ``rows`` (int64, ascending): the ``wanted`` rows predict tokens, and each
        attends to the first ``seen`` positions. None if no positions are left to recompute."""
        if not len(state.positions):
            return None
        visible = int(seen.max())
        table = torch.from_numpy(pages[: pages_for(visible, self._store.page_size)]).to(self._store.device)
        predicting_A = torch.from_numpy(np.searchsorted(rows, wanted)).to(self._store.device)
        ragged = Ragged((len(wanted),), (visible,), (table,), table[:0], torch.from_numpy(seen).to(table.device))

        def attention(queries_AHK: Tensor) -> Tensor:
            summed_LH: Tensor = self._scores(queries_AHK, self._store.keys[state.layer], ragged)
            return summed_LH.sum(1)

        return PredictingRows(rows, predicting_A, state.layer, attention)
