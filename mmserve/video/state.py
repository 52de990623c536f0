"""What is kept of one stream, and how it changes: rows come, rows are evicted, questions see a branch.

One thread changes it; any thread may take a branch or look at the counters.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmserve.core.session import Memory
from mmserve.encode.watching import VISUAL
from mmserve.errors import FailedPrecondition, InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.video.append import New, append
from mmserve.video.archive import Archive, evenly, inside
from mmserve.video.base import Scope, StreamStats
from mmserve.video.layout import Branch, Shown, embedded_rows
from mmserve.video.memory import Kind, Rows, policy_of
from mmserve.video.positions import after_eviction, is_full, next_place
from mmserve.video.rows import Buffers, Table, frame_rows, row_bytes, sinks

#: Rows and positions that are left for a question and its answer, at most.
RESERVE = 128


@dataclass(frozen=True)
class Streaming:
    """A model as its streams use it."""

    model: LoadedModel
    floor: int  # see ``row_floor``
    appends: bool  # K/V are kept, and not only visual tokens
    most: int  # rows of a prompt and its answer
    header: np.ndarray  # int64: ids of the sinks

    @property
    def reserve(self) -> int:
        """Rows and positions that are left for a question and its answer."""
        return min(RESERVE, self.most // 4)


class StreamState:
    """The rows of one stream within the bounds of ``memory``."""

    def __init__(self, model: Streaming, memory: Memory) -> None:
        self._model, self._memory, self._policy = model, memory, policy_of(memory)
        self._features = keeps_features(model, memory)
        self._lock = threading.Lock()
        self._seen = self._frames = self._evicted = 0
        self._before: Tensor | None = None  # visual tokens of the newest frame
        nothing = np.zeros(0, dtype=np.int64)
        self._archive = Archive(memory.host_bytes) if memory.policy == "recall" else None
        self._table = Table(nothing.astype(np.int8), nothing, nothing.astype(np.float64), nothing, nothing)
        self._buffers = self._empty()

    # --- any thread ---

    @torch.inference_mode()
    def branch(self, scope: Scope | None) -> Branch:
        """What a question about ``scope`` sees (None = all that is kept); ``FailedPrecondition`` where that is none."""
        with self._lock:
            table, buffers = self._table, self._buffers
        own = table.kind >= Kind.LABEL
        if not own.any():
            raise FailedPrecondition("the stream has no frame yet: ask once the first one is there")
        index = np.arange(len(table))
        if scope is not None and self._archive is not None:
            return self._recalled(scope)
        if scope is not None:
            within = own & inside(table.seconds, scope)
            if not within.any():
                raise FailedPrecondition(nothing_of(scope, table.seconds[own]))
            index = np.flatnonzero(within | (table.kind == Kind.SINK))
            table = table.take(index).at(np.arange(len(index)))
        keys, values = (None if kv is None else _rows(kv, index, 1) for kv in (buffers.keys, buffers.values))
        tokens = None
        if keys is None and buffers.features is not None:
            tokens = _rows(buffers.features, index[table.visual], 0)
        return Branch(table, keys, values, tokens, self._model.header)

    def stats(self) -> StreamStats:
        """Counters now."""
        with self._lock:
            b = self._buffers
            kv = sum(t.nbytes for t in (b.keys, b.values, b.turned) if t is not None)
            features = 0 if b.features is None else b.features.nbytes
            features += 0 if self._archive is None else self._archive.bytes
            return StreamStats(self._frames, len(self._table), self._evicted, kv, features)

    def _recalled(self, scope: Scope) -> Branch:
        """The frames of ``scope`` as a clip of their own, thinned out evenly where they are more than the budget."""
        assert self._archive is not None
        header = self._model.header
        with self._lock:
            found, seconds = self._archive.found(scope), self._archive.seconds
        if not found:
            raise FailedPrecondition(nothing_of(scope, seconds))
        room = self._memory.budget - len(header)
        chosen = evenly(found, room // max(len(one.ids) for one in found))
        table = sinks(header)
        for i, one in enumerate(chosen):
            table = table.then(one.table(i, next_place(table.places)))
        tokens = torch.cat([one.tokens_kD for one in chosen]).to(self._model.model.device, self._model.model.dtype)
        return Branch(table, None, None, tokens, header)

    # --- the streams' thread ---

    def chosen(self, shown: Shown) -> Shown:
        """The rows of the next frame that the policy takes."""
        tokens, before = shown.seen.tokens_RD, self._before
        if shown.detail and len(shown.tokens_kD) == len(tokens):  # else a pruner has chosen
            known = before is not None and before.shape == tokens.shape
            old = _array(before) if before is not None and known else None
            shown = shown.with_tokens(self._policy.taken(old, _array(tokens), self._seen))
        self._before = tokens
        self._seen += 1
        return replace(shown, number=self._seen - 1)

    def has_room(self, shown: Shown, beside: int) -> bool:
        """Whether ``shown`` fits after ``beside`` rows that are about to be written, with nothing evicted for it."""
        coming = beside + len(shown.ids)
        return len(self._table) + coming <= self._memory.budget and not self._is_full(coming)

    @torch.inference_mode()
    def make_room(self, shown: Shown) -> None:
        """Evict what the rows of ``shown`` leave no room for.

        ``InvalidArgument`` where they have none even then.
        """
        coming, budget, header = len(shown.ids), self._memory.budget, len(self._model.header)
        if header + coming > budget:
            why = f"must be at least {header + coming}: the chat's header is {header} rows, and a frame {coming}"
            raise InvalidArgument.of("memory.budget", why)
        if not len(self._table):
            self._begin()
        if len(self._table) + coming > budget:
            self._evict(budget - coming)
        if self._is_full(coming):
            self._count_anew()

    @torch.inference_mode()
    def coming(self, shown: Shown, beside: Table | None) -> tuple[Table, New | None]:
        """The rows that ``shown`` becomes after those that are kept and ``beside``, and the pass that they need."""
        before = self._table if beside is None else self._table.then(beside)
        table = frame_rows(shown.ids, shown.number, shown.seconds, next_place(before.places))
        return table, self._written(self._buffers, len(before), table, shown.tokens_kD)

    def commit(self, table: Table, shown: Shown) -> None:
        """The rows of one more frame, ``shown``, are there: questions see them from now on."""
        with self._lock:
            if self._archive is not None:
                self._archive.add(shown)
            self._table = self._table.then(table)
            self._frames += 1

    def _begin(self) -> None:
        """The chat's header."""
        table = sinks(self._model.header)
        self._run(self._written(self._buffers, 0, table, None))
        with self._lock:
            self._table = table

    def _evict(self, most: int) -> None:
        """Leave at most ``most`` rows, chosen by the policy."""
        table, old = self._table, self._buffers
        left = self._policy.left(self._rows(), most)
        front = left.keep[: table.take(left.keep).first]  # sinks and carriers
        rest = left.keep[len(front) :]
        pooled, tokens = self._pooled(left.pooled)
        kept = table.take(front).then(pooled).then(table.take(rest))
        kept = kept.at(after_eviction(self._memory.positions, kept.places, kept.first))
        fresh = self._empty()
        fresh.copy_rows(old, front, 0)
        if tokens is not None:
            fresh.turn(self._model.model, kept.places[: len(front)])
            carriers = kept.take(np.arange(len(front), kept.first))
            self._run(self._written(fresh, len(front), carriers, tokens))
        fresh.copy_rows(old, rest, kept.first)
        fresh.turn(self._model.model, kept.places)
        with self._lock:
            self._table, self._buffers = kept, fresh
            self._evicted += len(table) - len(left.keep)

    def _count_anew(self) -> None:
        """Positions begin at 0 again; under ``reanchor`` the rows are run again there."""
        table, buffers = self._table.at(np.arange(len(self._table))), self._buffers
        if self._memory.positions == "reanchor":
            old, buffers = buffers, self._empty()
            assert old.features is not None
            visual = torch.from_numpy(table.visual).to(old.features.device)
            self._run(self._written(buffers, 0, table, old.features[visual]))
        else:
            buffers.turn(self._model.model, table.places)
        with self._lock:
            self._table, self._buffers = table, buffers

    def _pooled(self, frames: np.ndarray) -> tuple[Table, Tensor | None]:
        """A carrier for each of ``frames``, and the tokens ``[k, D]`` of these rows: means of the frames' tokens."""
        table, features = self._table, self._buffers.features
        if not len(frames):
            return table.take(frames), None
        assert features is not None
        own = [np.flatnonzero((table.frame == f) & (table.kind == Kind.VISUAL)) for f in frames]
        tokens = torch.stack([_rows(features, rows, 0).mean(0) for rows in own])
        first = np.array([rows[0] for rows in own])
        seconds, places = table.seconds[first], table.places[first]
        kinds, ids = np.full(len(own), Kind.CARRIER, np.int8), np.full(len(own), VISUAL)
        return Table(kinds, frames, seconds, ids, places), tokens

    def _rows(self) -> Rows:
        """The policy's input."""
        table, buffers, needs = self._table, self._buffers, self._policy.needs
        norms = features = None
        if "norms" in needs and buffers.keys is not None:
            norms = _array(buffers.keys[:, : len(table)].float().norm(dim=-1).mean((0, 2)))
        if "features" in needs and buffers.features is not None:
            features = _array(buffers.features[: len(table)])
        return Rows(table.kind, table.frame, norms, features)

    def _written(self, buffers: Buffers, start: int, table: Table, tokens_kD: Tensor | None) -> New | None:
        """Put visual tokens of ``table``'s rows into ``buffers``; the pass that writes their K/V, if there is one."""
        if buffers.features is not None and tokens_kD is not None:
            rows = torch.from_numpy(start + table.visual).to(buffers.features.device)
            buffers.features[rows] = tokens_kD.to(buffers.features.dtype)
        if buffers.keys is None:
            return None
        return New(buffers, start, embedded_rows(self._model.model, table.ids, tokens_kD), table.places)

    def _run(self, new: New | None) -> None:
        if new is not None:
            append(self._model.model, [new], self._model.floor)

    def _empty(self) -> Buffers:
        return Buffers.of(self._model.model, self._memory.budget, kv=self._model.appends, features=self._features)

    def _is_full(self, coming: int) -> bool:
        return is_full(self._table.places, coming + self._model.reserve, self._model.model.spec.max_tokens)


def keeps_features(model: Streaming, memory: Memory) -> bool:
    """Whether the visual tokens of kept rows stay beside their K/V."""
    return not model.appends or memory.positions == "reanchor" or "features" in policy_of(memory).needs


def state_bytes(model: Streaming, memory: Memory) -> int:
    """Bytes that a stream takes at most."""
    rows = memory.budget * row_bytes(model.model, kv=model.appends, features=keeps_features(model, memory))
    return rows + (memory.host_bytes if memory.policy == "recall" else 0)


def nothing_of(scope: Scope, seconds: np.ndarray) -> str:
    """Why a question about ``scope`` finds no frame, where those of ``seconds`` are kept."""
    begin = "its start" if scope.begin is None else f"{scope.begin:g} s"
    end = "now" if scope.end is None else f"{scope.end:g} s"
    held = f"frames of {seconds.min():g} s to {seconds.max():g} s" if len(seconds) else "none: host_bytes is too small"
    return f"no frame is kept of the stream from {begin} to {end}; kept are {held}"


def _rows(x: Tensor, index: np.ndarray, axis: int) -> Tensor:
    """Rows ``index`` (int64, ascending) of ``x``: a view where they are side by side."""
    if len(index) and index[-1] - index[0] == len(index) - 1:
        return x.narrow(axis, int(index[0]), len(index))
    return x.index_select(axis, torch.from_numpy(index).to(x.device))


def _array(x: Tensor) -> np.ndarray:
    return x.float().cpu().numpy()
