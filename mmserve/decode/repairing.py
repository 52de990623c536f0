"""Positions of images whose K/V were taken from elsewhere, run in passes that decode (see ``kv/reuse/kv_share.py``).

Shapes in names: R rows of a pass, L positions held, H query heads, G key/value heads, K head size.
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
class Repairing:
    """What is left to repair of one request, the newest token's attention to it included."""

    each_step: int  # positions run beside a token
    layer: int  # whose attention and values decide, counted from 0
    positions: np.ndarray  # int64 [n], ascending: not run in this prompt yet
    moved: np.ndarray  # float32 [n], how far their values are from this prompt's
    attended: np.ndarray  # float32 [n], until the first token was run what all of the prompt gives them

    def rows(self) -> np.ndarray:
        """Positions (int64, ascending) to run beside the next token."""
        return self.positions[largest(self.moved * self.attended, self.each_step)]

    def absorb(self, seen: NewestRow) -> None:
        """Take over what a pass showed, now that it is done; what it ran is repaired."""
        if seen.attention_L is None:
            raise ValueError("a pass is absorbed before it was run")
        left = ~np.isin(self.positions, seen.rows)
        self.positions, self.moved = self.positions[left], self.moved[left]
        self.attended = seen.attention_L.cpu().numpy()[self.positions]


@dataclass
class NewestRow:
    """What the last row of one pass of one request attends to. It is kept apart until the pass is done."""

    rows: np.ndarray  # int64, all that the pass runs
    layer: int
    attention: Callable[[Tensor], Tensor]  # of a rotated row [1, H, K], whose keys are in the store: fp32 [L]
    attention_L: Tensor | None = None

    def see(self, layer: int, q_RHK: Tensor, rotated_RHK: Tensor) -> None:
        """The request's own rows in ``layer``, before and after rotation; their keys are in the store."""
        if layer == self.layer:
            self.attention_L = self.attention(rotated_RHK[-1:])


class Repairer:
    """Watches passes for the requests of one store; holds no state of any."""

    def __init__(self, store: KVStore, dtype: torch.dtype) -> None:
        self._store = store
        op = pick("attention_scores", store.device, dtype, store.keys[0].shape[-1])
        self._scores = op.run
        store.kernels[op.op] = op.path

    def watch(self, state: Repairing, rows: np.ndarray, visible: int, pages: np.ndarray) -> NewestRow | None:
        """What to note of a pass over ``rows`` (int64, the newest last), after which ``visible`` positions are there;
        None where nothing is left to repair."""
        if not len(state.positions):
            return None
        table = torch.from_numpy(pages[: pages_for(visible, self._store.page_size)]).to(self._store.device)
        ragged = Ragged((1,), (visible,), (table,), table[:0])

        def attention(row_1HK: Tensor) -> Tensor:
            summed_LH: Tensor = self._scores(row_1HK, self._store.keys[state.layer], ragged)
            return summed_LH.sum(1)

        return NewestRow(rows, state.layer, attention)
