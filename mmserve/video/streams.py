"""Streams of video over an engine: one thread takes in the frames of all, questions go to the engine.

Frames go through the tower one by one, so that none depends on what came with it; their rows go through the decoder
together, those of several streams and several of one. Streams take turns.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from mmserve.config import VideoConfig
from mmserve.core.request import Request, Vision
from mmserve.core.tenant import Tenant
from mmserve.decode.commit import ACCOMPANIED
from mmserve.decode.extensions.image_reuse.checks import no_reuse
from mmserve.encode.prompt_look import judged_by_decoder
from mmserve.engine import Engine
from mmserve.errors import (
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MMServeError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from mmserve.prune import pruner_for
from mmserve.request_state import Sink
from mmserve.video.append import New, append
from mmserve.video.base import Asked, Frame, Memory, Scope, Seen, StreamStats
from mmserve.video.layout import Shown, header_of, question, see, streaming_model
from mmserve.video.memory import policy_of
from mmserve.video.positions import RULES
from mmserve.video.rows import Table
from mmserve.video.state import Streaming, StreamState, state_bytes

logger = logging.getLogger("mmserve.video")

#: Frames of all streams that are taken in at once: with more, those that wait for their turn wait too long.
AT_ONCE = 8


@dataclass
class _Waiting:
    """A frame that was handed in."""

    frame: Frame
    future: Future[Seen] = field(default_factory=Future)


@dataclass
class _Coming:
    """A frame that has been through the tower, and the rows that it becomes."""

    state: StreamState
    stream: EngineStream
    waiting: _Waiting
    shown: Shown
    table: Table | None = None
    new: New | None = None


class EngineStream:
    """One stream of an ``EngineStreams``; see ``mmserve.video.base.Stream``."""

    def __init__(self, streams: EngineStreams, memory: Memory, vision: Vision, held: int, tenant: Tenant) -> None:
        self.held = held  # bytes that are set aside for it
        self.waiting: deque[_Waiting] = deque()  # guarded by the streams' lock
        self.vision, self.tenant = vision, tenant
        self.pruner = pruner_for(vision, seed=0)
        self.state: StreamState | None = StreamState(streams.model, memory)  # None = closed
        self._streams, self._last = streams, -float("inf")

    def append(self, frame: Frame) -> Future[Seen]:
        """See ``Stream.append``."""
        if not frame.seconds > self._last:
            why = f"must be after {self._last:g} s, that of the frame before, not {frame.seconds:g} s"
            raise InvalidArgument.of("frame.seconds", why)
        waiting = _Waiting(frame)
        self._streams.hand_in(self, waiting)
        self._last = frame.seconds
        return waiting.future

    def ask(self, request: Request, scope: Scope | None, sink: Sink) -> Asked:
        """See ``Stream.ask``."""
        state = self.state
        if state is None:
            raise FailedPrecondition("the stream is closed")
        return self._streams.ask(request, state, scope, sink)

    def stats(self) -> StreamStats:
        """See ``Stream.stats``."""
        state = self.state
        return StreamStats(0, 0, 0, 0, 0) if state is None else state.stats()

    def close(self) -> None:
        """See ``Stream.close``; a second time nothing happens."""
        self._streams.forget(self)


class EngineStreams:
    """All streams of one engine; see ``mmserve.video.base.Streams``. The engine is the caller's, and outlives this."""

    def __init__(self, engine: Engine, config: VideoConfig | None = None) -> None:
        self._engine, self._config = engine, config or VideoConfig()
        self._made: Streaming | None = None
        self._lock = threading.Condition()
        self._streams: list[EngineStream] = []
        self._turns: deque[EngineStream] = deque()  # those with frames that wait, in the order of their turns
        self._refusal = ""
        self._thread: threading.Thread | None = None

    @property
    def model(self) -> Streaming:
        """The model as streams use it; ``Unimplemented`` where it keeps none."""
        if self._made is None:
            stages = self._engine.stages
            model = streaming_model(stages.model)
            appends = model.spec.causal and not no_reuse(model, reads_pages=stages.capabilities.reads_pages)
            floor = stages.decoder.parts.runner.floor
            self._made = Streaming(model, floor, appends, stages.capabilities.max_tokens, header_of(model))
        return self._made

    # --- any thread ---

    def open(self, memory: Memory, tenant: Tenant, vision: Vision | None = None) -> EngineStream:
        """See ``Streams.open``."""
        vision = vision or Vision()
        self._check(memory, vision)
        held = state_bytes(self.model, memory)
        most = self._config.session_bytes
        if held > most:
            why = f"would take {held} bytes with its features; [video] session_bytes allows {most}"
            raise InvalidArgument.of("memory.budget", why)
        with self._lock:
            if self._refusal:
                raise Unavailable(self._refusal)
            if len(self._streams) >= self._config.max_sessions:
                raise ResourceExhausted(
                    f"{len(self._streams)} streams are open, as many as [video] max_sessions allows; try again later"
                )
            if self._bytes() + held > self._config.total_bytes:
                raise ResourceExhausted(
                    f"open streams have {self._bytes()} bytes set aside, and this one needs {held}; [video] "
                    f"total_bytes allows {self._config.total_bytes}; try again later, or keep less"
                )
            stream = EngineStream(self, memory, vision, held, tenant)
            self._streams.append(stream)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="mmserve-streams", daemon=True)
                self._thread.start()
        return stream

    @property
    def stopped(self) -> bool:
        """Whether all streams are closed, and none can be opened."""
        return bool(self._refusal)

    def held_bytes(self) -> int:
        """Bytes that are set aside for the streams that are open."""
        with self._lock:
            return self._bytes()

    def stop(self) -> None:
        """See ``Streams.stop``; a second time nothing happens."""
        with self._lock:
            self._refusal = "the server is shutting down; open the stream at another one"
            streams = list(self._streams)
        for stream in streams:
            self.forget(stream)
        with self._lock:
            thread, self._thread = self._thread, None
            self._lock.notify_all()
        if thread is not None:
            thread.join()

    def hand_in(self, stream: EngineStream, waiting: _Waiting) -> None:
        """Append a frame to those of its stream that wait."""
        with self._lock:
            if stream.state is None:
                raise FailedPrecondition("the stream is closed")
            stream.waiting.append(waiting)
            if len(stream.waiting) == 1:
                self._turns.append(stream)
                self._lock.notify_all()

    def forget(self, stream: EngineStream) -> None:
        """Close a stream: its frames under way fail, what was set aside for it is free."""
        with self._lock:
            if stream.state is None:
                return
            stream.state = None  # users of it release it soon
            self._streams.remove(stream)
            dropped = list(stream.waiting)
            stream.waiting.clear()
            if stream in self._turns:
                self._turns.remove(stream)
        for waiting in dropped:
            _fail(waiting, _closed())

    def ask(self, request: Request, state: StreamState, scope: Scope | None, sink: Sink) -> Asked:
        """Submit a question about a stream to the engine."""
        self._engine.stages.check(request)
        if request.kv_reduction is not None:
            raise InvalidArgument.of("kv_reduction", "must not be set with a question about a stream")
        if request.diffusion.commit.name in ACCOMPANIED:
            raise InvalidArgument.of("diffusion.commit", "must not be a policy that asks a companion here")
        if self.model.appends and request.diffusion.recompute.name != "last":
            raise InvalidArgument.of("diffusion.recompute", "must be 'last': a stream's rows are not run again")
        branch = state.branch(scope)
        encoded, run = question(self.model.model, request, branch, most=self.model.most)
        self._engine.submit(request, sink, encoded, of_session=True)
        return Asked(*branch.times, run)

    # --- the streams' thread ---

    def _check(self, memory: Memory, vision: Vision) -> None:
        """``InvalidArgument`` for what no stream can be, ``Unimplemented`` for what this model cannot."""
        model, pruner = self.model, pruner_for(vision, seed=0)
        policy = policy_of(memory)
        if memory.positions not in RULES:
            why = f"there is no rule {memory.positions!r}; known are {list(RULES)}"
            raise InvalidArgument.of("memory.positions", why)
        least, most = len(model.header) + 1, model.most - model.reserve
        if not least <= memory.budget <= most:
            why = f"must be in [{least}, {most}], not {memory.budget}: questions and answers need room beside it"
            raise InvalidArgument.of("memory.budget", why)
        for key in ("carriers", "host_bytes"):
            if getattr(memory, key) < 0:
                raise InvalidArgument.of(f"memory.{key}", "must not be negative")
        if memory.policy == "recall" and not memory.host_bytes:
            raise InvalidArgument.of("memory.host_bytes", "must be above 0 with 'recall', which keeps old frames there")
        name = model.model.spec.name
        if "norms" in policy.needs and not model.appends:
            raise Unimplemented(
                f"model {name!r} keeps no K/V of a stream, which memory policy {memory.policy!r} judges by"
            )
        if vision.pruner not in ("none", *self._engine.info.pruners) or judged_by_decoder(pruner):
            raise Unimplemented(f"model {name!r} cannot prune the frames of a stream by {vision.pruner!r}")

    def _bytes(self) -> int:
        return sum(stream.held for stream in self._streams)

    def _loop(self) -> None:
        torch.set_num_threads(self._engine.config.torch_threads)
        while (batch := self._next()) is not None:
            try:
                self._take_in(batch)
            except BaseException as error:  # noqa: BLE001 - a bug here must leave no frame waiting
                for _stream, waiting in batch:
                    _fail(waiting, error)

    def _next(self) -> list[tuple[EngineStream, _Waiting]] | None:
        """The next frames, one of each stream by turns until they are enough; waits for the first. None = stop."""
        with self._lock:
            while not self._turns:
                if self._refusal:
                    return None
                self._lock.wait()
            batch: list[tuple[EngineStream, _Waiting]] = []
            while self._turns and len(batch) < AT_ONCE:
                stream = self._turns.popleft()
                batch.append((stream, stream.waiting.popleft()))
                if stream.waiting:
                    self._turns.append(stream)
            return batch

    def _take_in(self, batch: Sequence[tuple[EngineStream, _Waiting]]) -> None:
        model = self.model.model
        coming: list[_Coming] = []
        for stream, waiting in batch:
            state = stream.state
            try:
                if state is None:
                    raise _closed()
                shown = see(model, waiting.frame, stream.pruner, stream.vision.amount)
                coming.append(_Coming(state, stream, waiting, state.chosen(shown)))
            except BaseException as error:  # noqa: BLE001 - of one frame: the others go on
                _fail(waiting, error)
        while coming:
            now, coming = self._together(coming)
            if self._run(now, alone=len(now) == 1):
                continue
            for c in now:  # again, each by itself: only the frame that causes the failure must fail
                self._run(self._together([c])[0], alone=True)

    def _run(self, now: Sequence[_Coming], *, alone: bool) -> bool:
        """Write the rows of frames and let questions see them; False = nothing is written and it can be repeated.

        An ``alone`` frame fails where that is impossible.
        """
        try:
            append(self.model.model, [c.new for c in now if c.new is not None], self.model.floor)
        except BaseException as error:  # noqa: BLE001
            if not alone:
                logger.warning("a pass of %d frames failed, and is repeated for each of them: %r", len(now), error)
                return False
            for c in now:
                _fail(c.waiting, error)
            return True
        failed: dict[int, BaseException] = {}  # later rows of such a stream do not follow those that it has
        for c in now:
            try:
                if (before := failed.get(id(c.state))) is not None:
                    raise before
                assert c.table is not None
                c.state.commit(c.table, c.shown)
            except BaseException as error:  # noqa: BLE001 - of one stream: the others go on
                failed[id(c.state)] = error
                _fail(c.waiting, error)
                continue
            if c.stream.state is None:
                _fail(c.waiting, _closed())
            else:
                _done(c.waiting, c.shown.seen)
        return True

    def _together(self, coming: list[_Coming]) -> tuple[list[_Coming], list[_Coming]]:
        """The frames of the next pass, and the others: of a stream, the first, and those that fit after it."""
        now: list[_Coming] = []
        later: list[_Coming] = []
        beside: dict[int, Table] = {}
        full: set[int] = set()
        for c in coming:
            own, state = id(c.state), c.state
            before = beside.get(own)
            if own in full or (before is not None and not state.has_room(c.shown, len(before))):
                full.add(own)
                later.append(c)
                continue
            try:
                if before is None:
                    state.make_room(c.shown)
                c.table, c.new = state.coming(c.shown, before)
            except BaseException as error:  # noqa: BLE001 - of one stream: the others go on
                _fail(c.waiting, error)
                continue
            beside[own] = c.table if before is None else before.then(c.table)
            now.append(c)
        return now, later


def _closed() -> Cancelled:
    return Cancelled("the stream was closed")


def _done(waiting: _Waiting, seen: Seen) -> None:
    if waiting.future.set_running_or_notify_cancel():
        waiting.future.set_result(seen)


def _fail(waiting: _Waiting, error: BaseException) -> None:
    """A bug becomes ``Internal`` with an id that the log has too."""
    if waiting.future.done() or not waiting.future.set_running_or_notify_cancel():
        return
    typed = error if isinstance(error, MMServeError) else Internal.logged(error, "a stream's frame", logger)
    waiting.future.set_exception(typed)
