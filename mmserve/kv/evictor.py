"""K/V eviction: records what a policy needs in each pass, and drops K/V from the store.

Shapes in names: R rows of a pass, L positions held, N of them kept, G key/value heads, H query heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from mmserve_kernels.cached_attention import Ragged
from mmserve_kernels.dispatch import pick
from torch import Tensor

from mmserve.kv.pool import pages_for
from mmserve.kv.reduction.base import Held, LayerView, Reduction, Signal
from mmserve.kv.store import KVStore
from mmserve.models.decoder import Decoder


@dataclass
class LayerNotes:
    """Observations of one layer of a request."""

    kept_GN: Tensor  # int64: positions kept by the last eviction, in order; later ones follow
    dropped: int = 0  # number of positions dropped so far
    attention_GL: Tensor | None = None  # fp32
    queries: int = 0  # number of queries observed
    query_sum_HK: Tensor | None = None  # fp64, as the products
    query_products_HKK: Tensor | None = None

    def add_attention(self, sums_GL: Tensor) -> None:
        """Add the attention that one pass gave to each position held; new positions start from zero."""
        old = self.attention_GL
        self.attention_GL = sums_GL if old is None else sums_GL + F.pad(old, (0, sums_GL.shape[1] - old.shape[1]))

    def add_queries(self, q_RHK: Tensor) -> None:
        """Record the queries of one pass, before rotation."""
        q_HRK = q_RHK.double().transpose(0, 1)
        first, second = q_HRK.sum(1), q_HRK.mT @ q_HRK
        if self.query_sum_HK is not None and self.query_products_HKK is not None:
            first, second = first + self.query_sum_HK, second + self.query_products_HKK
        self.queries, self.query_sum_HK, self.query_products_HKK = self.queries + q_HRK.shape[1], first, second

    def positions(self, held: int) -> Tensor:
        """Int64 ``[G, held]``: the position in each slot."""
        kept = self.kept_GN
        since = torch.arange(kept.shape[1] + self.dropped, held + self.dropped, device=kept.device)
        return torch.cat([kept, since.expand(len(kept), -1)], 1)

    def moments(self) -> tuple[Tensor | None, Tensor | None]:
        """Mean ``[H, K]`` and covariance ``[H, K, K]`` of the queries, fp32; None if none were observed."""
        if self.query_sum_HK is None or self.query_products_HKK is None:
            return None, None
        mean_HK = self.query_sum_HK / self.queries
        covariance = self.query_products_HKK / self.queries - mean_HK[:, :, None] * mean_HK[:, None]
        return mean_HK.float(), covariance.float()


@dataclass
class EvictionState:
    """Observations of a request with K/V eviction; plain data."""

    prompt: int
    visual_rows: int  # number of visual rows of the prompt
    visual: Tensor  # bool [prompt + answer]
    layers: list[LayerNotes]
    evicted: int = 0  # positions dropped: later positions are stored that many slots further left
    outputs: int = 0

    def absorb(self, seen: Observation) -> None:
        """Add the observation of a completed pass."""
        for layer, notes in zip(self.layers, seen.layers, strict=True):
            if notes.attention_GL is not None:
                layer.add_attention(notes.attention_GL)
            if notes.q_RHK is not None:
                layer.add_queries(notes.q_RHK)
        self.outputs += seen.outputs


@dataclass
class _LayerObservation:
    attention_GL: Tensor | None = None
    q_RHK: Tensor | None = None


@dataclass
class Observation:
    """The observation of one pass of one request, kept separate until the pass is done: a failed pass has no effect."""

    evictor: Evictor
    signals: frozenset[Signal]
    which: Tensor  # int64: the rows that are observed
    ragged: Ragged  # for those rows only
    outputs: int
    layers: list[_LayerObservation] = field(repr=False)

    def observe(self, layer: int, q_RHK: Tensor, rotated_RHK: Tensor) -> None:
        """Record the request's rows in ``layer``; ``q_RHK`` is before rotation. Their keys are in the store."""
        if not len(self.which):
            return
        if Signal.QUERIES in self.signals:
            self.layers[layer].q_RHK = q_RHK[self.which]
        if Signal.ATTENTION in self.signals:
            self.layers[layer].attention_GL = self.evictor.attention(layer, rotated_RHK[self.which], self.ragged)


class Evictor:
    """Observes and evicts for the requests of one store; holds no state of any request."""

    def __init__(self, decoder: Decoder, store: KVStore, dtype: torch.dtype) -> None:
        self._decoder, self._store = decoder, store
        self._heads = decoder.config.num_kv_heads
        op = pick("attention_scores", store.device, dtype, decoder.config.head_dim)
        self._scores = op.run
        store.kernels[op.op] = op.path

    def begin(self, prompt: int, size: int, visual_rows: np.ndarray) -> EvictionState:
        """The state of a request of ``size`` positions before its first pass; ``visual_rows`` (int64): visual rows
        among the first ``prompt``."""
        visual = np.zeros(size, dtype=bool)
        visual[visual_rows] = True
        none = torch.zeros(self._heads, 0, dtype=torch.int64, device=self._store.device)
        layers = [LayerNotes(none) for _ in self._store.keys]
        return EvictionState(prompt, len(visual_rows), torch.from_numpy(visual).to(none.device), layers)

    def watch(
        self, policy: Reduction, state: EvictionState, rows: np.ndarray, visible: int, pages: np.ndarray
    ) -> Observation:
        """The observation of a pass over ``rows`` (int64 positions), after which ``visible`` positions have K/V."""
        which = np.flatnonzero(rows >= policy.first_query(state.prompt))
        slots = rows[which] - state.evicted
        length = visible - state.evicted
        ragged = Ragged(
            row_counts=(len(which),),
            kv_lengths=(length,),
            page_tables=(self._tensor(pages[: pages_for(length, self._store.page_size)]),),
            slots=self._tensor(slots),
            kv_limit=self._tensor(slots + 1),
        )
        outputs = int((rows >= state.prompt - 1).sum())
        layers = [_LayerObservation() for _ in state.layers]
        return Observation(self, policy.signals, self._tensor(which), ragged, outputs, layers)

    def attention(self, layer: int, rotated_RHK: Tensor, ragged: Ragged) -> Tensor:
        """Attention of the rows to each position held: fp32 ``[G, L]``, summed over rows and the heads of a group."""
        summed_LH: Tensor = self._scores(rotated_RHK, self._store.keys[layer], ragged)
        return summed_LH.unflatten(1, (self._heads, -1)).sum(-1).T

    def evict(self, policy: Reduction, state: EvictionState, pages: np.ndarray, positions: int, place: int) -> int:
        """Drop those of the ``positions`` held that the policy selects now. Returns how many are left.

        ``place``: rotary position of the next token. Proceeds layer by layer, and can be repeated after a failure.
        """
        held = self._held(state, positions)
        count = policy.target(held)
        if count == positions:
            return positions
        table = self._tensor(pages[: pages_for(positions, self._store.page_size)])
        dropped = state.evicted + positions - count
        for index, notes in enumerate(state.layers):
            if notes.dropped < dropped:
                self._evict(policy, state, index, table, positions, count, place)
        state.evicted = dropped
        return count

    def most_pages(self, policy: Reduction, state: EvictionState, positions: int, left: int) -> int:
        """Number of pages that the request needs from now on, if ``left`` more positions may follow."""
        return pages_for(policy.most(self._held(state, positions), left), self._store.page_size)

    def _held(self, state: EvictionState, positions: int) -> Held:
        return Held(positions, state.evicted, state.visual_rows, state.outputs, self._store.page_size)

    def _evict(
        self,
        policy: Reduction,
        state: EvictionState,
        layer: int,
        table: Tensor,
        positions: int,
        count: int,
        place: int,
    ) -> None:
        """Select positions in one layer, and move the kept ones to the front of the request's pages."""
        stores, notes = (self._store.keys[layer], self._store.values[layer]), state.layers[layer]
        keys_LGK, values_LGK = (x.index_select(0, table).flatten(0, 1)[:positions] for x in stores)
        positions_GL = notes.positions(positions)
        mean_HK, covariance_HKK = notes.moments()
        view = LayerView(
            keys_LGK,
            values_LGK,
            state.visual[positions_GL],
            lambda ahead: self._ahead(place, ahead),
            notes.attention_GL,
            mean_HK,
            covariance_HKK,
        )
        keep_GN = policy.select(view, count)
        index_NGK = keep_GN.T[:, :, None].expand(-1, -1, keys_LGK.shape[-1])
        size = self._store.page_size
        slots = (table[:, None] * size + torch.arange(size, device=table.device)).flatten()[:count]
        for stored, held_LGK in zip(stores, (keys_LGK, values_LGK), strict=True):
            stored.flatten(0, 1)[slots] = held_LGK.gather(0, index_NGK)
        notes.kept_GN = positions_GL.gather(1, keep_GN)
        if notes.attention_GL is not None:
            notes.attention_GL = notes.attention_GL.gather(1, keep_GN)
        notes.dropped += positions - count

    def _ahead(self, place: int, ahead: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary angles, averaged over ``ahead`` positions from ``place`` on: ``[1,
        rotated]``."""
        places = torch.arange(place, place + ahead, device=self._store.device)
        axes = self._decoder.config.position_axes
        cos, sin = self._decoder.rotary(places.expand(axes, -1) if axes > 1 else places)
        return cos.mean(0), sin.mean(0)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._store.device)
