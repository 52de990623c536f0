"""The state of one stream: appending and evicting rows, and branches for questions.

K/V of a row are final once its block is complete: immediately with causal attention (a block of one). With longer
blocks, the last rows may be pending: they have visual tokens only, and a question runs them in its own prompt. One
thread modifies it; any thread may take a branch or read the counters.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmserve.core.session import Memory
from mmserve.core.stream_state import RowsState, StreamPayload
from mmserve.errors import FailedPrecondition, InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.video.append import New, append
from mmserve.video.archive import Archive, evenly, inside
from mmserve.video.base import Scope, StreamStats
from mmserve.video.layout import Branch, FrameRows, embedded_rows
from mmserve.video.memory import Kind, Rows, policy_of
from mmserve.video.positions import after_eviction, is_full
from mmserve.video.rows import Buffers, Table, row_bytes, sinks
from mmserve.video.units import Units

#: Maximum rows and positions reserved for a question and its answer.
RESERVE = 128


@dataclass(frozen=True)
class Streaming:
    """A model for streams."""

    model: LoadedModel
    floor: int  # see ``row_floor``
    appends: bool  # whether K/V are kept, not only visual tokens
    most: int  # maximum rows of a prompt and its answer
    header: np.ndarray  # int64: ids of the sinks

    @property
    def block(self) -> int:
        """Length of the blocks, counted from a stream's first row, that are run together."""
        return self.model.spec.attention_block or 1

    @property
    def reserve(self) -> int:
        """Number of rows and positions reserved for a question and its answer."""
        return min(RESERVE, self.most // 4)


@dataclass(frozen=True)
class Open:
    """The incomplete unit at the end of a stream, whose rows are replaced when its next frame arrives; its tokens ``[k,
    D]``."""

    number: int
    tokens_kD: Tensor


@dataclass(frozen=True)
class PlannedRows:
    """A stream's rows after appending, how many of them then have K/V, and the pass that writes these."""

    table: Table
    final: int
    open: Open | None
    new: New | None


class StreamState:
    """The rows of one stream within the limits of ``memory``."""

    def __init__(self, model: Streaming, memory: Memory) -> None:
        self._model, self._memory, self._policy = model, memory, policy_of(memory)
        self._features = keeps_features(model, memory)
        self._lock = threading.Lock()
        self._frames = self._evicted = 0
        self._final = 0  # number of leading rows that are not pending
        self._open: Open | None = None
        positions = model.model.spec.max_tokens - model.reserve - memory.budget
        self.units = Units(model.model, self._policy, memory.budget, positions)  # used by the streams' thread
        self._archive = Archive(memory.host_bytes) if memory.policy == "recall" else None
        self._table = sinks(model.header[:0], model.model.position_axes)
        self._buffers = self._empty()

    # --- any thread ---

    @torch.inference_mode()
    def branch(self, scope: Scope | None) -> Branch:
        """The branch for a question about ``scope`` (None = all kept rows); raises ``FailedPrecondition`` if there are
        none."""
        with self._lock:
            table, buffers, final, last = self._table, self._buffers, self._final, self._open
        own = table.kind >= Kind.LABEL
        if not own.any():
            raise FailedPrecondition("the stream has no frame yet: ask after the first frame was appended")
        index = np.arange(len(table))
        if scope is not None and self._archive is not None:
            return self._recalled(scope)
        if scope is not None:
            within = own & inside(table.seconds, scope)
            if not within.any():
                raise FailedPrecondition(no_frames_message(scope, table.seconds[own]))
            index = np.flatnonzero(within | (table.kind == Kind.SINK))
            table = table.take(index).numbered()
        done = index[index < final]
        keys, values = (None if kv is None else _rows(kv, done, 1) for kv in (buffers.keys, buffers.values))
        tokens = None
        if keys is None or len(done) < len(index):
            tokens = self._tokens(table, index, buffers, last)
        return Branch(table, keys, values, tokens, self._model.header)

    def stats(self) -> StreamStats:
        """Current counters."""
        with self._lock:
            b = self._buffers
            kv = sum(t.nbytes for t in (b.keys, b.values, b.rotated) if t is not None)
            features = 0 if b.features is None else b.features.nbytes
            features += 0 if self._archive is None else self._archive.bytes
            return StreamStats(self._frames, len(self._table), self._evicted, kv, features)

    def _recalled(self, scope: Scope) -> Branch:
        """The archived frames of ``scope`` as a separate clip, evenly subsampled if they exceed the budget."""
        assert self._archive is not None
        header = self._model.header
        with self._lock:
            found, seconds = self._archive.found(scope), self._archive.seconds
        if not found:
            raise FailedPrecondition(no_frames_message(scope, seconds))
        room = self._memory.budget - len(header)
        chosen = evenly(found, room // max(len(one.unit.ids) for one in found))
        table = sinks(header, self._model.model.position_axes)
        for i, one in enumerate(chosen):
            table = table.then(one.unit.rows(i).after(table))
        tokens = torch.cat([one.tokens_kD for one in chosen]).to(self._model.model.device, self._model.model.dtype)
        return Branch(table, None, None, tokens, header)

    # --- the streams' thread ---

    def has_room(self, frame: FrameRows, pending: PlannedRows) -> bool:
        """Whether ``frame`` fits after rows that are about to be written, without eviction."""
        table = self._with(frame, pending.table)
        return len(table) <= self._memory.budget and not self._is_full(table)

    @torch.inference_mode()
    def make_room(self, frame: FrameRows) -> None:
        """Evict rows so that those of ``frame`` fit.

        Raises ``InvalidArgument`` if they do not fit even then.
        """
        added, budget, header = len(frame.ids), self._memory.budget, len(self._model.header)
        if header + added > budget:
            why = f"must be at least {header + added}: the chat's header is {header} rows, and a frame {added}"
            raise InvalidArgument.of("memory.budget", why)
        if not len(self._table):
            self._begin()
        over = len(self._with(frame, self._table)) - budget
        if over > 0:
            self._evict(len(self._table) - over)
        if self._is_full(self._with(frame, self._table)):
            self._renumber()

    @torch.inference_mode()
    def plan_append(self, frame: FrameRows, pending: PlannedRows | None) -> PlannedRows:
        """The rows after appending ``frame`` to the kept rows or, if given, to those of ``pending``, which are about to
        be written."""
        known = pending or PlannedRows(self._table, self._final, self._open, None)
        table, start, open_unit = self._with(frame, known.table), known.final, known.open
        new = [] if frame.open else [(frame.number, frame.tokens_kD)]
        if open_unit is not None and open_unit.number != frame.number and (known.table.frame == open_unit.number).any():
            new = [(open_unit.number, open_unit.tokens_kD), *new]  # its next frame failed: it remains as it is
        for number, tokens in new:
            rows = np.flatnonzero(table.frame == number)
            _put(self._buffers, int(rows[0]), table.take(rows), tokens)
        final = max(start, self._whole(len(table) - (len(frame.ids) if frame.open else 0)))
        fresh = torch.cat([tokens for _number, tokens in new]) if new else None
        written = self._written(self._buffers, table, start, final, fresh)
        return PlannedRows(table, final, Open(frame.number, frame.tokens_kD) if frame.open else None, written)

    def commit(self, planned: PlannedRows, frame: FrameRows) -> None:
        """Make the rows of one more frame, ``frame``, visible to questions."""
        with self._lock:
            if self._archive is not None:
                self._archive.add(frame)
            self._table, self._final, self._open = planned.table, planned.final, planned.open
            self._frames += 1

    def saved(self, last: float) -> StreamPayload:
        """The state for ``restore``; ``last``: seconds of the newest frame. Tensors are views of rows that do not
        change any more."""
        b, n, final, open_unit = self._buffers, len(self._table), self._final, self._open
        keys, values = (None if kv is None else kv[:, :final] for kv in (b.keys, b.values))
        rows = RowsState(self._table.arrays, final, keys, values, None if b.features is None else b.features[:n])
        number, tokens = (None, None) if open_unit is None else (open_unit.number, open_unit.tokens_kD)
        archive = None if self._archive is None else self._archive.saved()
        return StreamPayload(rows, self._frames, self._evicted, last, self.units.saved(), number, tokens, archive)

    @torch.inference_mode()
    def restore(self, saved: StreamPayload) -> None:
        """Continue the saved stream, which must have the same model and memory."""
        rows, model, fresh = saved.rows, self._model.model, self._empty()
        table = Table(*rows.table)
        for target, source, axis in (
            (fresh.keys, rows.keys, 1),
            (fresh.values, rows.values, 1),
            (fresh.features, rows.features, 0),
        ):
            if target is not None and source is not None:
                target.narrow(axis, 0, source.shape[axis]).copy_(source)
        fresh.rotate_keys(model, table.places[..., : rows.final])
        self.units.restore(saved.units)
        with self._lock:
            self._table, self._buffers, self._final = table, fresh, rows.final
            self._frames, self._evicted, self._open = saved.frames, saved.evicted, None
            if saved.open is not None and saved.open_tokens is not None:
                self._open = Open(saved.open, saved.open_tokens.to(model.device))
            if self._archive is not None and saved.archive is not None:
                self._archive.restore(saved.archive)

    def _tokens(self, table: Table, index: np.ndarray, buffers: Buffers, last: Open | None) -> Tensor:
        """Visual tokens ``[k, D]`` of the rows of ``table``, with indices ``index`` in ``buffers``; zeros if they are
        not kept because K/V are."""
        model, visual = self._model.model, table.visual
        settled = visual if last is None else visual[table.frame[visual] != last.number]
        if buffers.features is None:
            tokens = torch.zeros(len(settled), model.width, dtype=model.dtype, device=model.device)
        else:
            tokens = _rows(buffers.features, index[settled], 0)
        return tokens if last is None or len(settled) == len(visual) else torch.cat([tokens, last.tokens_kD])

    def _with(self, frame: FrameRows, table: Table) -> Table:
        """``table`` followed by the rows of ``frame``, which replace earlier rows of the same unit."""
        held = np.flatnonzero(table.frame != frame.number)
        table = table if len(held) == len(table) else table.take(held)
        return table.then(frame.unit.rows(frame.number).after(table))

    def _begin(self) -> None:
        """Start with the chat's header."""
        table = sinks(self._model.header, self._model.model.position_axes)
        final = self._whole(len(table))
        self._run(self._written(self._buffers, table, 0, final))
        with self._lock:
            self._table, self._final = table, final

    def _evict(self, most: int) -> None:
        """Evict all but at most ``most`` rows, selected by the policy."""
        table, old, final = self._table, self._buffers, self._final
        retained = self._policy.retain(self._rows(), most)
        front = retained.keep[: table.take(retained.keep).first]  # sinks and carriers
        rest = retained.keep[len(front) :]
        pooled, tokens = self._pooled(retained.pooled)
        kept = table.take(front).then(pooled).then(table.take(rest))
        numbered = kept.numbered().places
        kept = kept.at(after_eviction(self._memory.positions, kept.places, numbered, kept.first))
        fresh = self._empty()
        fresh.copy_rows(old, front, 0)
        done = int(np.count_nonzero(front < final))
        if tokens is not None:
            _put(fresh, len(front), pooled, tokens)
            if done == len(front):  # otherwise rows before the carriers are pending, and so are the carriers
                fresh.rotate_keys(self._model.model, kept.places[..., :done])
                self._run(self._written(fresh, kept, done, kept.first))
                done = kept.first
        fresh.copy_rows(old, rest, kept.first)
        if done == kept.first:
            done += int(np.count_nonzero(rest < final))
        fresh.rotate_keys(self._model.model, kept.places[..., :done])
        with self._lock:
            self._table, self._buffers, self._final = kept, fresh, done
            self._evicted += len(table) - len(retained.keep)

    def _renumber(self) -> None:
        """Restart positions at 0; with ``reanchor``, the rows are run again there."""
        table, buffers, final = self._table.numbered(), self._buffers, self._final
        if self._memory.positions == "reanchor":
            old, buffers = buffers, self._empty()
            assert old.features is not None
            visual = torch.from_numpy(table.visual).to(old.features.device)
            _put(buffers, 0, table, old.features[visual])
            final = self._whole(len(table)) if self._model.block > 1 else final
            self._run(self._written(buffers, table, 0, final))
        else:
            buffers.rotate_keys(self._model.model, table.places[..., :final])
        with self._lock:
            self._table, self._buffers, self._final = table, buffers, final

    def _pooled(self, frames: np.ndarray) -> tuple[Table, Tensor | None]:
        """A carrier for each of ``frames``, and the tokens ``[k, D]`` of these rows: means of the frames' tokens."""
        table, features = self._table, self._buffers.features
        if not len(frames):
            return table.take(frames), None
        assert features is not None
        own = [np.flatnonzero((table.frame == f) & (table.kind == Kind.VISUAL)) for f in frames]
        tokens = torch.stack([_rows(features, rows, 0).mean(0) for rows in own])
        first = np.array([rows[0] for rows in own])
        return replace(table.take(first), kind=np.full(len(own), Kind.CARRIER, np.int8)), tokens

    def _rows(self) -> Rows:
        """The policy's input."""
        table, buffers, needs = self._table, self._buffers, self._policy.needs
        norms = features = None
        if "norms" in needs and buffers.keys is not None:
            norms = np.zeros(len(table), np.float32)  # pending rows have no keys, and are kept
            norms[: self._final] = _array(buffers.keys[:, : self._final].float().norm(dim=-1).mean((0, 2)))
        if "features" in needs and buffers.features is not None:
            features = _array(buffers.features[: len(table)])
        return Rows(table.kind, table.frame, norms, features)

    def _whole(self, rows: int) -> int:
        """The number of leading rows, out of ``rows``, in complete blocks."""
        return rows - rows % self._model.block

    def _written(
        self, buffers: Buffers, table: Table, start: int, stop: int, tokens_kD: Tensor | None = None
    ) -> New | None:
        """The pass that writes K/V of rows ``start`` to ``stop`` of ``table``; None if there are none.

        ``tokens_kD``: their visual tokens, if ``buffers`` do not keep them.
        """
        if buffers.keys is None or start == stop:
            return None
        rows = table.take(np.arange(start, stop))
        if buffers.features is not None:
            tokens_kD = _rows(buffers.features, start + rows.visual, 0)
        x_RD, deep = embedded_rows(self._model.model, rows.ids, tokens_kD)
        return New(buffers, start, x_RD, rows.places, deep)

    def _run(self, new: New | None) -> None:
        if new is not None:
            append(self._model.model, [new], self._model.floor)

    def _empty(self) -> Buffers:
        return Buffers.of(self._model.model, self._memory.budget, kv=self._model.appends, features=self._features)

    def _is_full(self, table: Table) -> bool:
        return is_full(table.places, self._model.reserve, self._model.model.spec.max_tokens)


def keeps_features(model: Streaming, memory: Memory) -> bool:
    """Whether the visual tokens of kept rows are kept in addition to K/V."""
    if not model.appends or model.block > 1:
        return True
    return memory.positions == "reanchor" or "features" in policy_of(memory).needs


def state_bytes(model: Streaming, memory: Memory) -> int:
    """Maximum size of a stream in bytes."""
    rows = memory.budget * row_bytes(model.model, kv=model.appends, features=keeps_features(model, memory))
    return rows + (memory.host_bytes if memory.policy == "recall" else 0)


def no_frames_message(scope: Scope, seconds: np.ndarray) -> str:
    """The error message for a question about ``scope`` without frames, if frames at ``seconds`` are kept."""
    begin = "its start" if scope.begin is None else f"{scope.begin:g} s"
    end = "now" if scope.end is None else f"{scope.end:g} s"
    held = f"frames of {seconds.min():g} s to {seconds.max():g} s" if len(seconds) else "none: host_bytes is too small"
    return f"no frame is kept of the stream from {begin} to {end}; kept are {held}"


def _put(buffers: Buffers, start: int, table: Table, tokens_kD: Tensor) -> None:
    """Store the visual tokens of ``table``'s rows, from row ``start`` on, if ``buffers`` keep them."""
    if buffers.features is not None:
        rows = torch.from_numpy(start + table.visual).to(buffers.features.device)
        buffers.features[rows] = tokens_kD.to(buffers.features.dtype)


def _rows(x: Tensor, index: np.ndarray, axis: int) -> Tensor:
    """Rows ``index`` (int64, ascending) of ``x``; a view if they are consecutive."""
    if len(index) and index[-1] - index[0] == len(index) - 1:
        return x.narrow(axis, int(index[0]), len(index))
    return x.index_select(axis, torch.from_numpy(index).to(x.device))


def _array(x: Tensor) -> np.ndarray:
    return x.float().cpu().numpy()
