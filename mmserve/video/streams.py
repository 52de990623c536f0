"""Video streams of an engine: one thread processes the frames of all streams (``intake.py``), which take turns;
questions are submitted to the engine."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

import torch

from mmserve.config import VideoConfig
from mmserve.core.request import Request, Vision
from mmserve.core.session import Asked, Memory
from mmserve.core.stream_state import StreamPayload
from mmserve.core.tenant import Tenant
from mmserve.decode.commit import ACCOMPANIED
from mmserve.decode.recompute import KEEPS_PROMPT
from mmserve.engine.engine import Engine
from mmserve.engine.request_state import Sink
from mmserve.errors import FailedPrecondition, InvalidArgument, Unavailable, Unimplemented
from mmserve.prune import pruner_for
from mmserve.prune.base import judged_by_decoder
from mmserve.video.base import EncodedFrame, Frame, Scope, StreamStats
from mmserve.video.bounds import check_bytes, check_count
from mmserve.video.intake import Saving, Waiting, closed, failed, process_frames
from mmserve.video.layout import header_of, question, streaming_model
from mmserve.video.memory import policy_of
from mmserve.video.positions import RULES
from mmserve.video.state import Streaming, StreamState, state_bytes
from mmserve.video.support import adapter_of, keeps_kv

#: Maximum frames of all streams in one batch: larger batches would make waiting frames wait too long.
AT_ONCE = 8


class EngineStream:
    """One stream of an ``EngineStreams``; see ``mmserve.video.base.Stream``."""

    def __init__(self, streams: EngineStreams, memory: Memory, vision: Vision, held: int, tenant: Tenant) -> None:
        self.held = held  # reserved bytes
        self.waiting: deque[Waiting | Saving] = deque()  # guarded by the streams' lock
        self.vision, self.tenant = vision, tenant
        self.pruner = pruner_for(vision, seed=0)
        self.state: StreamState | None = StreamState(streams.model, memory)  # None = closed
        self._streams, self._last = streams, -float("inf")  # seconds of the newest frame

    def append(self, frame: Frame) -> Future[EncodedFrame]:
        if not frame.seconds > self._last:
            why = f"must be after {self._last:g} s, that of the frame before, not {frame.seconds:g} s"
            raise InvalidArgument.of("frame.seconds", why)
        waiting = Waiting(frame)
        self._streams.enqueue(self, waiting)
        self._last = frame.seconds
        return waiting.future

    def save(self) -> Future[StreamPayload]:
        """A state for ``EngineStreams.open``, from which a stream continues after the current frames."""
        saving = Saving(self._last)
        self._streams.enqueue(self, saving)
        return saving.future

    def restore(self, saved: StreamPayload) -> None:
        """Continue the saved stream; call before other methods."""
        if self.state is not None:
            self.state.restore(saved)
        self._last = saved.last

    def ask(self, request: Request, scope: Scope | None, sink: Sink) -> Asked:
        state = self.state
        if state is None:
            raise FailedPrecondition("the stream is closed")
        return self._streams.ask(request, state, scope, sink)

    def stats(self) -> StreamStats:
        state = self.state
        return StreamStats(0, 0, 0, 0, 0) if state is None else state.stats()

    def close(self) -> None:
        """See ``Stream.close``; may be called twice."""
        self._streams.discard(self)


class EngineStreams:
    """All streams of one engine; see ``mmserve.video.base.Streams``. The engine belongs to the caller, and must outlive
    it."""

    def __init__(self, engine: Engine, config: VideoConfig | None = None) -> None:
        self._engine, self._config = engine, config or VideoConfig()
        self._made: Streaming | None = None
        self._lock = threading.Condition()
        self._streams: list[EngineStream] = []
        self._turns: deque[EngineStream] = deque()  # streams with waiting frames, in the order of their turns
        self._refusal = ""
        self._thread: threading.Thread | None = None

    @property
    def model(self) -> Streaming:
        """The model for streams; raises ``Unimplemented`` if it does not support them."""
        if self._made is None:
            stages = self._engine.stages
            model = streaming_model(stages.model)
            appends = keeps_kv(model, stages.capabilities)
            floor = stages.decoder.parts.runner.floor
            self._made = Streaming(model, floor, appends, stages.capabilities.max_tokens, header_of(model))
        return self._made

    # --- any thread ---

    def open(
        self,
        memory: Memory,
        tenant: Tenant,
        vision: Vision | None = None,
        extra_bytes: int = 0,
        saved: StreamPayload | None = None,
    ) -> EngineStream:
        """See ``Streams.open``; ``saved``: from ``EngineStream.save``, with the same model, memory and vision."""
        vision = vision or Vision()
        self._check(memory, vision)
        held = state_bytes(self.model, memory) + extra_bytes
        most = self._config.session_bytes
        if held > most:
            why = f"would take {held} bytes with all that a session keeps; [video] session_bytes allows {most}"
            raise InvalidArgument.of("memory.budget", why)
        with self._lock:
            if self._refusal:
                raise Unavailable(self._refusal)
            check_count(self._config, len(self._streams))
            check_bytes(self._config, self._bytes(), held)
            stream = EngineStream(self, memory, vision, held, tenant)
            self._streams.append(stream)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="mmserve-streams", daemon=True)
                self._thread.start()
        if saved is not None:
            try:
                stream.restore(saved)
            except BaseException:
                self.discard(stream)
                raise
        return stream

    @property
    def stopped(self) -> bool:
        """Whether all streams are closed, and none can be opened."""
        return bool(self._refusal)

    def stop(self) -> None:
        """See ``Streams.stop``; may be called twice."""
        with self._lock:
            self._refusal = "the server is shutting down; open the stream at another one"
            streams = list(self._streams)
        for stream in streams:
            self.discard(stream)
        with self._lock:
            thread, self._thread = self._thread, None
            self._lock.notify_all()
        if thread is not None:
            thread.join()

    def enqueue(self, stream: EngineStream, waiting: Waiting | Saving) -> None:
        """Queue a frame, or a request for the state, of a stream."""
        with self._lock:
            if stream.state is None:
                raise FailedPrecondition("the stream is closed")
            stream.waiting.append(waiting)
            if len(stream.waiting) == 1:
                self._turns.append(stream)
                self._lock.notify_all()

    def discard(self, stream: EngineStream) -> None:
        """Close a stream: its frames in progress fail, and its reserved bytes are released."""
        with self._lock:
            if stream.state is None:
                return
            stream.state = None  # current users release it soon
            self._streams.remove(stream)
            dropped = list(stream.waiting)
            stream.waiting.clear()
            if stream in self._turns:
                self._turns.remove(stream)
        for waiting in dropped:
            failed(waiting, closed())

    def ask(self, request: Request, state: StreamState, scope: Scope | None, sink: Sink) -> Asked:
        """Submit a question about a stream to the engine."""
        request = self._engine.stages.resolved(request)
        self._engine.stages.capabilities.check(request)
        if request.kv_reduction is not None:
            raise InvalidArgument.of("kv_reduction", "must not be set with a question about a stream")
        if request.adapter:
            adapter_of(request.adapter, (), kept=self.model.appends)
        if request.diffusion.commit.name in ACCOMPANIED:
            raise InvalidArgument.of("diffusion.commit", "must not be a policy with a companion model in a session")
        if self.model.appends and request.diffusion.recompute.name not in KEEPS_PROMPT:
            only = " or ".join(map(repr, sorted({*KEEPS_PROMPT} & {*self._engine.info.recompute_policies})))
            raise InvalidArgument.of("diffusion.recompute", f"must be {only}: a stream's rows are not run again")
        branch = state.branch(scope)
        encoded, run = question(self.model.model, request, branch, most=self.model.most)
        self._engine.submit(request, sink, encoded, of_session=True)
        return Asked(*branch.times, run)

    def adapter_for(self, asked: str) -> str:
        return adapter_of(asked, {each.name for each in self._engine.adapters.listed()}, kept=self.model.appends)

    # --- the streams' thread ---

    def _check(self, memory: Memory, vision: Vision) -> None:
        """Raises ``InvalidArgument`` for settings invalid for any stream, ``Unimplemented`` for those that this model
        does not support."""
        model, pruner = self.model, pruner_for(vision, seed=0)
        policy = policy_of(memory)
        if memory.positions not in RULES:
            why = f"there is no rule {memory.positions!r}; known are {list(RULES)}"
            raise InvalidArgument.of("memory.positions", why)
        least, most = len(model.header) + 1, model.most - model.reserve
        if not least <= memory.budget <= most:
            why = f"must be in [{least}, {most}], not {memory.budget}: the rest is for questions and answers"
            raise InvalidArgument.of("memory.budget", why)
        for key in ("carriers", "host_bytes"):
            if getattr(memory, key) < 0:
                raise InvalidArgument.of(f"memory.{key}", "must not be negative")
        if memory.policy == "recall" and not memory.host_bytes:
            raise InvalidArgument.of("memory.host_bytes", "must be above 0 with 'recall', which keeps old frames there")
        name = model.model.spec.name
        if "norms" in policy.needs and not model.appends:
            raise Unimplemented(f"model {name!r} keeps no K/V of a stream, which memory policy {memory.policy!r} needs")
        if model.model.position_axes > 1 and memory.policy == "carrier":
            why = "has rows and columns as positions, and a carrier has neither"
            raise Unimplemented(f"model {name!r} {why}: choose another memory policy than 'carrier'")
        if vision.pruner not in ("none", *self._engine.info.pruners) or judged_by_decoder(pruner):
            raise Unimplemented(f"model {name!r} cannot prune the frames of a stream by {vision.pruner!r}")

    def _bytes(self) -> int:
        return sum(stream.held for stream in self._streams)

    def _loop(self) -> None:
        torch.set_num_threads(self._engine.config.torch_threads)
        while (batch := self._next()) is not None:
            try:
                for stream, each in batch:
                    if isinstance(each, Saving):
                        _save(stream, each)
                process_frames(self.model, [(stream, each) for stream, each in batch if isinstance(each, Waiting)])
            except BaseException as error:  # noqa: BLE001 - a bug here must leave no frame waiting
                for _stream, waiting in batch:
                    failed(waiting, error)

    def _next(self) -> list[tuple[EngineStream, Waiting | Saving]] | None:
        """The next frames, taken from streams in turn up to the maximum; waits for the first. None = stop.

        A request for a stream's state precedes all of its frames in the result.
        """
        with self._lock:
            while not self._turns:
                if self._refusal:
                    return None
                self._lock.wait()
            batch: list[tuple[EngineStream, Waiting | Saving]] = []
            while self._turns and len(batch) < AT_ONCE:
                stream = self._turns[0]
                if isinstance(stream.waiting[0], Saving) and any(stream is other for other, _each in batch):
                    break
                self._turns.popleft()
                batch.append((stream, stream.waiting.popleft()))
                if stream.waiting:
                    self._turns.append(stream)
            return batch


def _save(stream: EngineStream, saving: Saving) -> None:
    """Runs on the streams' thread, between frames of ``stream``."""
    state = stream.state
    try:
        if state is None:
            raise closed()
        saved = state.saved(saving.last)
    except BaseException as error:  # noqa: BLE001 - of one stream: the others go on
        failed(saving, error)
        return
    if saving.future.set_running_or_notify_cancel():
        saving.future.set_result(saved)
