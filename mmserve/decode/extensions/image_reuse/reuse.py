"""Reused K/V: images' K/V are put into a request's pages, and a rule selects the positions to run again (``kv/reuse``).

The reused K/V are a function of the image (``image_kv.py``): the first request with an image computes them, so that no
answer depends on the contents of the cache.
Shapes in names: N layers, L positions, D hidden, G key/value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from mmserve_kernels.dispatch import pick
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.encoded import DeepStack, Encoded, Past
from mmserve.core.generators import Returning
from mmserve.core.request import Request
from mmserve.decode.extensions.base import Extension, Opening, RequestExtension
from mmserve.decode.extensions.image_reuse.checks import reusable, reused
from mmserve.decode.extensions.image_reuse.image_kv import ImageKV
from mmserve.decode.extensions.image_reuse.selective import PredictingRows, RowWatcher, SelectiveRecompute
from mmserve.decode.forward import Pass
from mmserve.encode.embedding import deep_rows
from mmserve.kv.reuse import Reuse, reuse_of
from mmserve.kv.store import KVStore
from mmserve.models.alone import kv_alone
from mmserve.models.attended import column_sums
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.decoder import DecoderLayer
from mmserve.tiers.memory import TensorCache


@dataclass
class ReusedKV:
    """The positions of a request with reused K/V, as plain data."""

    positions: np.ndarray  # bool [canvas]: positions whose reused K/V are kept; no policy runs them
    selective: SelectiveRecompute | None = None  # if some of them are recomputed during decode

    def absorb(self, rows: PredictingRows) -> None:
        """Apply the result of a pass: the positions that it ran are no longer reused."""
        if self.selective is None:
            raise ValueError("nothing was to be recorded of this pass")
        self.selective.absorb(rows)
        self.positions[rows.rows] = False


#: Incremental work that writes K/V into a request's pages: yields positions times layers of each increment, and returns
#: the result.
KVWork = Generator[int, None, ReusedKV]


def run_to_completion(work: KVWork) -> ReusedKV:
    """Run ``work`` to completion and return its result."""
    running = Returning(work)
    for _positions in running:
        pass
    return running.returned


@dataclass(eq=False)
class ReusedImages(RequestExtension):
    """The reused K/V of one request."""

    watcher: RowWatcher
    prefix: bool  # whether the prompt does not attend to later positions
    work: KVWork | None = None  # until the K/V are in the request's pages
    kv: ReusedKV | None = None  # from then on
    _reused: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.kv is not None:
            self._reused = int(self.kv.positions.sum())

    @property
    def reused(self) -> int:
        return self._reused

    @property
    def rewrites_prompt(self) -> bool:
        return True

    @property
    def runs_ahead(self) -> bool:
        """False with selective recompute: the number of positions that it runs depends on the number of passes."""
        return self.kv is None or self.kv.selective is None

    def ready(self, most: int) -> bool:
        """Continue ``work``. If any work was left and ``most`` is set, the first pass is due only at the next
        call."""
        ran = 0
        while self.work is not None and (ran < most or not most):
            try:
                ran += next(self.work)
            except StopIteration as ended:
                self.work, self.kv = None, ended.value
                self._reused = int(ended.value.positions.sum())
        return self.work is None and not (most and ran)

    def rows(self, rows: np.ndarray, *, first: bool) -> np.ndarray:
        """``rows`` without reused positions, except for those that are selected for recompute."""
        if self.kv is None:
            return rows
        rows = rows[~self.kv.positions[rows]]
        return rows if first or self.kv.selective is None else np.union1d(rows, self.kv.selective.rows())

    def watch(self, p: Pass, *, first: bool) -> Pass:
        if first or self.kv is None or self.kv.selective is None:
            return p
        limits = np.full(len(p.wanted), p.visible)
        if self.prefix:
            limits[p.wanted < p.canvas.prompt_length] = p.canvas.prompt_length
        return replace(p, observation=self.watcher.watch(self.kv.selective, p.rows, p.wanted, limits, p.pages))

    def after_forward(self, p: Pass, seconds: float) -> None:
        if self.kv is not None and isinstance(p.observation, PredictingRows):
            self.kv.absorb(p.observation)

    def snapshot(self) -> ReusedKV | None:
        return self.kv


@dataclass(frozen=True)
class _Measured:
    """Measurements of reused positions in the first layers: float32 ``[n]`` each."""

    deviation: np.ndarray  # the deviation by which the rule selects positions
    moved: np.ndarray  # deviation of the last layer's values, if the rule uses it
    attended: np.ndarray  # attention that they receive there


class ImageKVReuse(Extension):
    """Reuses image K/V in one model's store, for requests with ``image_reuse`` and for questions about video
    streams."""

    def __init__(self, model: LoadedModel, store: KVStore, cache: TensorCache) -> None:
        self._model, self._store, self.images = model, store, ImageKV(model, cache)
        self._watcher = RowWatcher(store, model.dtype)
        self._causal = model.spec.causal
        self._scores = pick("attention_scores", model.device, model.dtype, model.decoder.config.head_dim).run

    def keys(self, encoded: Encoded, cache: str = "") -> tuple[bytes, ...]:
        return self.images.keys(encoded, cache)

    def attach(self, o: Opening) -> ReusedImages | None:
        prefix = self._model.spec.attention is Attention.PREFIX
        if o.encoded.past is not None:
            return ReusedImages(self._watcher, prefix, kv=self.place(o.encoded.past, o.canvas, o.pages))
        policy = reuse_of(o.request)
        if policy is None:
            return None
        work = self.make(policy, o.encoded, o.canvas, o.embeddings, o.deep, o.pages)
        return ReusedImages(self._watcher, prefix, work=work)

    def restore(self, request: Request, canvas: Canvas, snapshot: object) -> ReusedImages | None:
        if not isinstance(snapshot, ReusedKV):
            return None
        return ReusedImages(self._watcher, self._model.spec.attention is Attention.PREFIX, kv=snapshot)

    def make(
        self,
        policy: Reuse,
        encoded: Encoded,
        canvas: Canvas,
        embeddings: Tensor,
        deep: DeepStack | None,
        pages: np.ndarray,
    ) -> KVWork:
        """Write the K/V of the prompt's images into ``pages``. Returns which positions of the canvas prefill need not
        run.

        One increment of that work is one layer of an image alone, or of the part of the prompt that is measured.
        ``encoded`` has the ``keys`` of its spans; ``embeddings [canvas, D]`` and ``deep`` are the request's.
        """
        kept = np.zeros(canvas.size, dtype=bool)
        sizes = reusable(encoded)
        if not reused(policy, encoded):
            return ReusedKV(kept)
        rows = np.concatenate([span.start + np.arange(n) for span, n in zip(encoded.spans, sizes, strict=True)])
        reused_NLGK = yield from self.images.found(encoded, sizes)
        measured = None
        if policy.layers and (policy.count(sizes) or policy.each_step):
            end = self._measured_length(policy, rows, canvas)
            measured = yield from self._measure(policy, reused_NLGK, rows, canvas, embeddings[:end], deep)
        self._write(reused_NLGK, rows, canvas, pages)
        kept[rows] = True
        again = policy.choose(sizes, np.zeros(0) if measured is None else measured.deviation)
        kept[rows[again]] = False
        if measured is None or not policy.each_step:
            return ReusedKV(kept)
        layer = min(policy.layers, len(self._model.decoder.layers)) - 1
        left = (np.delete(of_each, again) for of_each in (rows, measured.moved, measured.attended))
        return ReusedKV(kept, SelectiveRecompute(policy.each_step, layer, *left))

    def place(self, past: Past, canvas: Canvas, pages: np.ndarray) -> ReusedKV:
        """Write the K/V of ``past`` into a request's ``pages``; its positions are not run by any pass."""
        self._write([past.keys, past.values], past.rows, canvas, pages)
        kept = np.zeros(canvas.size, dtype=bool)
        kept[past.rows] = True
        return ReusedKV(kept)

    def _measured_length(self, policy: Reuse, rows: np.ndarray, canvas: Canvas) -> int:
        """Length of the canvas prefix on which the K/V of ``rows``, or the policy's weights, depend."""
        if self._model.spec.attention is Attention.FULL:
            return canvas.size
        if policy.by_attention or self._model.spec.attention is Attention.PREFIX:
            return canvas.prompt_length
        return int(rows[-1]) + 1

    def _measure(
        self,
        policy: Reuse,
        reused_NLGK: list[Tensor],
        rows: np.ndarray,
        canvas: Canvas,
        x_LD: Tensor,
        deep: DeepStack | None,
    ) -> Generator[int, None, _Measured]:
        """The deviation of the K/V of ``rows``, at the last of the policy's layers, from their values in this prompt.

        ``x_LD``: embeddings of the canvas prefix that is measured. The K/V of all layers up to there are computed for
        that: they replace the reused ones.
        """
        decoder, device = self._model.decoder, self._model.device
        layers = min(policy.layers, len(decoder.layers))
        before = np.arange(len(x_LD))
        positions, at = self._positions(canvas, before), torch.from_numpy(rows).to(device)
        squared, moved, attended = (torch.zeros(len(rows), device=device) for _ in range(3))

        def observe(layer: DecoderLayer, before_LD: Tensor) -> None:
            cos, sin = decoder.rotary(positions)
            q_LHK, k_LGK = (rotate(x, cos, sin) for x in layer.queries_and_keys(before_LD, slice(None)))
            limits = torch.arange(1, len(before_LD) + 1, device=device) if self._causal else None
            attended.copy_(column_sums(self._scores, q_LHK, k_LGK, limits)[at].sum(1))

        added, watch = deep_rows([(before, deep)]), observe if policy.by_attention else None
        fresh = kv_alone(decoder, x_LD, positions, causal=self._causal, layers=layers, deep=added, observe=watch)
        for layer, of_layer in enumerate(fresh):
            for reused_LGK, found in zip(reused_NLGK, of_layer, strict=True):
                own = found[at]
                if layer == layers - 1:
                    moved = (own.float() - reused_LGK[layer].float()).flatten(1)  # of keys, finally of values
                    squared += moved.square().sum(1)
                reused_LGK[layer] = own
            yield len(before)
        moved = moved.abs().sum(1)
        deviation = moved * attended if policy.by_attention else squared
        return _Measured(*(x.cpu().numpy() for x in (deviation, moved, attended)))

    def _write(self, reused_NLGK: list[Tensor], rows: np.ndarray, canvas: Canvas, pages: np.ndarray) -> None:
        size = self._store.page_size
        slots = torch.from_numpy(pages[rows // size] * size + rows % size).to(self._model.device)
        cos, sin = self._model.decoder.rotary(self._positions(canvas, rows))
        keys_NLGK, values_NLGK = reused_NLGK
        for layer, (keys, values) in enumerate(zip(self._store.keys, self._store.values, strict=True)):
            keys.flatten(0, 1)[slots] = rotate(keys_NLGK[layer], cos, sin)
            values.flatten(0, 1)[slots] = values_NLGK[layer]

    def _positions(self, canvas: Canvas, rows: np.ndarray) -> Tensor:
        """Rotary positions of ``rows``, on each of the model's position axes."""
        places, axes = canvas.rotary_positions(rows), self._model.position_axes
        if axes > 1:
            places = np.broadcast_to(places, (axes, places.shape[-1])).copy()
        return torch.from_numpy(places).to(self._model.device)
