"""Sparse attention: passes that read only a part of their request's K/V, and the selection of that part.

Prefill selects blocks of ``sparse_block`` positions, decode selects pages. A selection is made for each layer, head and
block of rows from the request's own queries and keys, so a request's tokens do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from mmserve_kernels.cached_attention import Ragged
from mmserve_kernels.dispatch import pick
from mmserve_kernels.sparse_attention import BlockIndex, Rows, block_index, estimates
from torch import Tensor

from mmserve.config import EngineConfig
from mmserve.errors import ConfigError
from mmserve.kv.store import KVStore, Read, written_pages
from mmserve.models.base import LoadedModel
from mmserve.models.decoder_config import UNEVEN

#: In TidalDecode the first layers are dense; layer 2 (from 0) selects for later ones, and so does layer 13 of 32.
_DENSE_LAYERS, _SECOND_SELECTION = 2, 11 / 30
#: Share of a head's channels that DoubleSparse uses for scores.
_CHANNELS = 4


@dataclass(frozen=True, eq=False)
class View:
    """A builder's input: one request in one layer."""

    layer: int
    q_RHK: Tensor
    keys: Callable[[], Tensor]  # [L, G, K]
    bounds: Callable[[], tuple[Tensor, Tensor]]  # [C, G, K] each: minimum and maximum of the keys in each page
    rows: Rows
    before_ABC: Tensor | None = None  # the same builder's estimate in the previous layer, from the third layer on


Builder = Callable[[View], Tensor]
#: Builders by their name in the configuration; to add one: an estimate, and a line here. Differences from the method of
#: the same name are in an estimate's docstring. ``random``, and ``oracle``, which takes more time than it saves, are
#: for comparison.
PREFILL: dict[str, Builder] = {
    "vertical_slash": lambda view: estimates.by_lines(view.q_RHK, view.keys(), view.rows),
    "query_aware": lambda view: estimates.by_means(view.q_RHK, view.keys(), view.rows),
    "segments": lambda view: estimates.by_segments(view.q_RHK, view.keys(), view.rows, view.before_ABC),
    "sink_window": lambda view: estimates.by_distance(view.rows),
    "random": lambda view: estimates.at_random(view.rows, view.layer),
    "oracle": lambda view: estimates.by_attention(view.q_RHK, view.keys(), view.rows),
}
DECODE: dict[str, Builder] = {
    "quest": lambda view: estimates.by_bounds(view.q_RHK, *view.bounds(), view.rows),
    "double_sparse": lambda view: estimates.by_channels(
        view.q_RHK, view.keys(), view.rows, channels=max(1, view.q_RHK.shape[-1] // _CHANNELS)
    ),
    "tidal": lambda view: estimates.by_attention(view.q_RHK, view.keys(), view.rows),
    "sink_window": lambda view: estimates.by_distance(view.rows),
    "random": lambda view: estimates.at_random(view.rows, view.layer),
    "oracle": lambda view: estimates.by_attention(view.q_RHK, view.keys(), view.rows),
}
#: Blocks that every builder takes at any density: the sink and the rows' own.
LEAST = {"sink_window": 2}


@dataclass(frozen=True)
class Selection:
    """The selection of a stage's passes: ``builder`` by name, ``density`` and ``mass`` as in ``estimates.densest``, and
    the numbers of rows and positions in a block."""

    builder: str
    density: float
    mass: float
    row_block: int
    kv_block: int

    def mask(self, estimate_ABC: Tensor, rows: Rows) -> Tensor:
        """The selected blocks, from the builder's estimate ``[A, B, C]``."""
        least = LEAST.get(self.builder, 1)
        return estimates.densest(estimate_ABC, rows, density=self.density, mass=self.mass, least=least)


class Sparse:
    """The sparse attention of one model over one store; ``prefill`` and ``decode`` are None if the stage is dense."""

    def __init__(self, model: LoadedModel, store: KVStore, engine: EngineConfig) -> None:
        """Raises ``ConfigError`` if the setting conflicts with a guarantee of the engine."""
        c = model.decoder.config
        if engine.sparse_prefill and engine.prefix_cache and model.spec.attention_block is not None:
            raise ConfigError(
                "[engine] sparse_prefill chooses among the rows that are run, and a prefix cache leaves some out: "
                f"set prefix_cache = false, or sparse_prefill = '', to serve {model.spec.name!r}"
            )
        if not c.plain_attention:
            raise ConfigError(f"[engine] sparse_* is not implemented for model {model.spec.name!r}: {UNEVEN}")
        self._store, self._layers = store, c.num_layers
        self._op = pick("sparse_attention", store.device, model.dtype, c.head_dim)
        store.kernels[self._op.op] = self._op.path
        self._heads = c.num_heads
        numbers = engine.sparse_density, engine.sparse_mass
        block, page = engine.sparse_block, store.page_size
        self.prefill = Selection(engine.sparse_prefill, *numbers, block, block) if engine.sparse_prefill else None
        # One row per block if tokens come one by one: drafted rows must not change the result of others.
        rows = 1 if model.spec.causal else block
        self.decode = Selection(engine.sparse_decode, *numbers, rows, page) if engine.sparse_decode else None
        self._bounds = _Bounds(store) if engine.sparse_decode == "quest" else None

    def read(self, selection: Selection | None, rows: list[np.ndarray], ragged: Ragged) -> Read | None:
        """The attention of a pass over ``rows`` (positions of each request); None = dense attention.

        Must be called for every pass: it updates the summaries of pages.
        """
        if selection is None and self._bounds is None:
            return None
        dense = frozenset() if selection is None else self.dense_layers(selection)
        selecting = selecting_layers(self._layers)
        written = None if self._bounds is None else self._bounds.written(ragged)
        positions = [torch.from_numpy(r).to(self._store.device) for r in rows]
        kept: list[BlockIndex] = []  # of the last layer that selected
        before: list[Tensor | None] = [None] * len(rows)  # estimates of each request in that layer

        def read(layer: int, q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor) -> Tensor:
            if self._bounds is not None and written is not None:
                self._bounds.update(layer, k_PSGK, *written)
            if selection is not None and (selection.builder != "tidal" or layer in selecting):
                kept[:] = [self._index(selection, layer, q_THK, k_PSGK, ragged, positions, before)]
            if selection is None or layer in dense:
                return self._store.dense(q_THK, k_PSGK, v_PSGK, ragged)
            made: Tensor = self._op.run(q_THK, k_PSGK, v_PSGK, ragged, kept[0])
            return made

        return read

    def dense_layers(self, selection: Selection) -> frozenset[int]:
        """Layers that are always dense: TidalDecode's first ones, and those that select for others."""
        if selection.builder != "tidal":
            return frozenset()
        return frozenset({*range(_DENSE_LAYERS), *selecting_layers(self._layers)} & {*range(self._layers)})

    def record_loaded(self, pages: np.ndarray, positions: int) -> None:
        """Record that the first ``positions`` of ``pages`` (int64) hold keys that were not written by a pass."""
        if self._bounds is None:
            return
        size = self._store.page_size
        at = torch.from_numpy(pages).to(self._store.device)
        filled = (positions - torch.arange(len(at), device=at.device) * size).clamp(0, size)
        for layer, keys in enumerate(self._store.keys):
            self._bounds.update(layer, keys, at, filled)

    def _index(
        self,
        s: Selection,
        layer: int,
        q_THK: Tensor,
        k_PSGK: Tensor,
        ragged: Ragged,
        positions: list[Tensor],
        before: list[Tensor | None],
    ) -> BlockIndex:
        """The blocks that each request's rows read in ``layer``; estimates are stored in ``before`` for the next
        layer."""
        build = (DECODE if s is self.decode else PREFILL)[s.builder]
        groups = k_PSGK.shape[2]
        masks, start = [], 0
        for i, (at, length, table) in enumerate(zip(positions, ragged.kv_lengths, ragged.page_tables, strict=True)):
            here = slice(start, start + len(at))
            start += len(at)
            limit = None if ragged.kv_limit is None else ragged.kv_limit[here]
            rows = Rows(at, length, limit, s.row_block, s.kv_block)
            view = View(
                layer,
                q_THK[here],
                partial(_gathered, k_PSGK, table, length),
                partial(self._pages, layer, table, length),
                rows,
                before[i] if layer > 1 else None,
            )
            estimate = before[i] = build(view)
            mask = s.mask(estimate, rows)
            masks.append(mask.expand(groups, -1, -1) if len(mask) == 1 else mask)
        return block_index(masks, s.row_block, s.kv_block)

    def _pages(self, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        assert self._bounds is not None, "only `quest` uses them, and creates them"
        pages = table[: -(-length // self._store.page_size)]
        return self._bounds.low[layer][pages], self._bounds.high[layer][pages]


def selecting_layers(layers: int) -> tuple[int, int]:
    """The layers (from 0) at which TidalDecode selects, for a model of ``layers`` layers: 2 and 13 of 32."""
    return _DENSE_LAYERS, _DENSE_LAYERS + round((layers - _DENSE_LAYERS) * _SECOND_SELECTION)


def _gathered(k_PSGK: Tensor, table: Tensor, length: int) -> Tensor:
    return k_PSGK[table].flatten(0, 1)[:length]


class _Bounds:
    """Minimum and maximum of the keys in each page, ``[P, G, K]`` for each layer; valid for pages that were written."""

    def __init__(self, store: KVStore) -> None:
        self._page = store.page_size
        self.low = [torch.zeros_like(k[:, 0]) for k in store.keys]
        self.high = [torch.zeros_like(k[:, 0]) for k in store.keys]

    def written(self, ragged: Ragged) -> tuple[Tensor, Tensor]:
        """See ``written_pages``."""
        return written_pages(ragged, len(self.low[0]), self._page)

    def update(self, layer: int, k_PSGK: Tensor, pages: Tensor, filled: Tensor) -> None:
        """Recompute the bounds of ``pages``."""
        keys = k_PSGK[pages]
        there = (torch.arange(self._page, device=pages.device) < filled[:, None])[..., None, None]
        self.low[layer][pages] = keys.masked_fill(~there, torch.inf).amin(1)
        self.high[layer][pages] = keys.masked_fill(~there, -torch.inf).amax(1)
