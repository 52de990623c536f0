"""Selective recompute: positions of images with reused K/V, run in passes of decode (see ``kv/reuse/kv_share.py``).

Shapes in names: R rows of a pass, A of them that ask, L positions held, H query heads, K head size.
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
    """The positions of one request that are left to run, and the attention that they get: plain data."""

    each_step: int  # positions run beside what a pass decodes
    layer: int  # whose attention and values decide, counted from 0
    positions: np.ndarray  # int64 [n], ascending: not run in this prompt yet
    moved: np.ndarray  # float32 [n], how far their values are from this prompt's
    attended: np.ndarray  # float32 [n], until the first pass of decode what all of the prompt gives them

    def rows(self) -> np.ndarray:
        """Positions (int64, ascending) to run in the next pass of decode."""
        return self.positions[largest(self.moved * self.attended, self.each_step)]

    def absorb(self, seen: AskingRows) -> None:
        """Take over what a pass showed, now that it is done; what it ran is the prompt's own."""
        if seen.attention_L is None:
            raise ValueError("a pass is absorbed before it was run")
        left = ~np.isin(self.positions, seen.rows)
        self.positions, self.moved = self.positions[left], self.moved[left]
        self.attended = seen.attention_L.cpu().numpy()[self.positions]


@dataclass
class AskingRows:
    """The attention of those rows of one pass of one request that predict the next tokens. It is kept
    separate until the pass is done."""

    rows: np.ndarray  # int64, all that the pass runs
    asking_A: Tensor  # int64, which of them predict
    layer: int
    attention: Callable[[Tensor], Tensor]  # of rotated rows [A, H, K], whose keys are in the store: fp32 [L]
    attention_L: Tensor | None = None

    def see(self, layer: int, q_RHK: Tensor, rotated_RHK: Tensor) -> None:
        """The request's own rows in ``layer``, before and after rotation; their keys are in the store."""
        if layer == self.layer:
            self.attention_L = self.attention(rotated_RHK[self.asking_A])


class RowWatcher:
    """Watches passes for the requests of one store; holds no state of any."""

    def __init__(self, store: KVStore, dtype: torch.dtype) -> None:
        self._store = store
        op = pick("attention_scores", store.device, dtype, store.keys[0].shape[-1])
        self._scores = op.run
        store.kernels[op.op] = op.path

    def watch(
        self, state: SelectiveRecompute, rows: np.ndarray, wanted: np.ndarray, seen: np.ndarray, pages: np.ndarray
    ) -> AskingRows | None:
        """The asking rows of a pass over ``rows`` (int64, ascending): the ``wanted`` ones predict the next tokens, and
        attend to the first ``seen`` positions each. None where nothing is left to run again."""
        if not len(state.positions):
            return None
        visible = int(seen.max())
        table = torch.from_numpy(pages[: pages_for(visible, self._store.page_size)]).to(self._store.device)
        asking_A = torch.from_numpy(np.searchsorted(rows, wanted)).to(self._store.device)
        ragged = Ragged((len(wanted),), (visible,), (table,), table[:0], torch.from_numpy(seen).to(table.device))

        def attention(asking_AHK: Tensor) -> Tensor:
            summed_LH: Tensor = self._scores(asking_AHK, self._store.keys[state.layer], ragged)
            return summed_LH.sum(1)

        return AskingRows(rows, asking_A, state.layer, attention)
