"""Forward passes of one model over one K/V store, with guidance, sparse attention and CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from mmserve.decode.forward import Pass, Watch, forward, row_floor, value_changes
from mmserve.decode.graphs import Graphs
from mmserve.decode.guidance import combined, with_unconditional
from mmserve.decode.logits import RowLogits
from mmserve.decode.state import Guidance
from mmserve.kv.sparse import Sparse
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel
from mmserve.models.lora import Stacks

Stage = Literal["prefill", "decode"]


class Runner:
    """Runs the passes of a batch; holds no state of any request.

    ``sparse`` selects what passes attend to; None = everything. ``graphs``: CUDA graphs of decode passes; None = no
    graphs.
    """

    def __init__(
        self,
        model: LoadedModel,
        store: KVStore,
        *,
        sparse: Sparse | None = None,
        graphs: Graphs | None = None,
        stacks: Stacks | None = None,
    ) -> None:
        self.graphs = graphs
        #: Passes run a multiple of this many rows (see ``row_floor``).
        self.floor = row_floor(model)
        self.yield_callbacks: dict[str, Callable[[], None]] = {}
        self._model, self._store, self._sparse, self._stacks = model, store, sparse, stacks
        model.decoder.set_row_floor(self.floor)

    def record_loaded(self, pages: np.ndarray, positions: int) -> None:
        """Record that the first ``positions`` of ``pages`` (int64) hold keys that were not written by a pass."""
        if self._sparse is not None:
            self._sparse.record_loaded(pages, positions)

    def set_yield_callbacks(self, prefill: Callable[[], None], decode: Callable[[], None]) -> None:
        """Set callbacks that prefill and decode passes call in each layer, to let other passes use the thread."""
        self.yield_callbacks = {"prefill": prefill, "decode": decode}

    def run(
        self,
        stage: Stage,
        batch: list[tuple[Pass, Guidance | None]],
        written: Callable[[int], None] | None = None,
    ) -> tuple[list[RowLogits], float]:
        """One forward pass of the ragged batch: each request's logits, and the pass's CPU time (seconds). ``written``:
        see ``forward``."""
        begun, yielded, yield_callback = time.thread_time(), 0.0, self.yield_callbacks.get(stage)

        def between() -> None:
            nonlocal yielded
            if yield_callback is not None:
                since = time.thread_time()
                yield_callback()
                yielded += time.thread_time() - since

        sparse, first = self._sparse, stage == "prefill"
        selection = None if sparse is None else sparse.prefill if first else sparse.decode
        logits = forward(
            self._model,
            self._store,
            with_unconditional(batch),
            self.floor,
            sparse=sparse,
            selection=selection,
            graphs=None if first else self.graphs,
            between=between,
            stacks=self._stacks,
            written=written,
        )
        return combined(batch, logits), time.thread_time() - begun - yielded

    def changes(self, batch: list[Watch]) -> list[np.ndarray]:
        """The changes of watched positions (``value_changes``)."""
        return value_changes(self._model, self._store, batch, self.floor, sparse=self._sparse, stacks=self._stacks)
