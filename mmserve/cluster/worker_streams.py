"""Video streams whose frames and K/V a worker keeps, for sessions of the front end."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from PIL import Image

from mmserve.cluster.messages import Appended, Item, Order, Parcel, StreamSaved
from mmserve.config import VideoConfig
from mmserve.core.request import Vision
from mmserve.core.session import Asked, Memory
from mmserve.core.stream_state import EncodedFrameState, StreamPayload
from mmserve.core.tenant import Tenant
from mmserve.engine.engine import Engine
from mmserve.engine.request_state import Sink
from mmserve.errors import Cancelled, FailedPrecondition, MMServeError
from mmserve.video.base import EncodedFrame, Frame, Scope, StreamStats
from mmserve.video.reported import reported
from mmserve.video.standing import StandingQuestion, TypedAnswer
from mmserve.video.streams import EngineStream, EngineStreams
from mmserve.video.support import standing_of

logger = logging.getLogger("mmserve.cluster")


@dataclass
class _OpenStream:
    """An open stream: the number of its newest frame, and the latest frames, for standing questions."""

    stream: EngineStream
    number: int = 0
    seen: OrderedDict[int, EncodedFrame] = field(default_factory=OrderedDict)


class WorkerStreams:
    """The streams of one ``engine``, by names that the front end assigns.

    ``report``: sends an item to the front end. ``sink_of``: returns the sink of an order's request. ``write``,
    ``read``: convert between payloads and parcels. Methods must not be called concurrently, and do not wait for
    frames.
    """

    def __init__(
        self,
        engine: Engine,
        config: VideoConfig,
        report: Callable[[Item], None],
        sink_of: Callable[[Order], Sink],
        write: Callable[[Any], Parcel],
        read: Callable[[Parcel], Any],
    ) -> None:
        self._model, self._report, self._sink_of = engine.info.name, report, sink_of
        self._write, self._read = write, read
        self._streams = EngineStreams(engine, config)
        self._standing = standing_of(engine.stages.model)
        self._most_seen = config.frames_under_way + 1 if self._standing is not None else 0
        self._open: dict[str, _OpenStream] = {}
        # On a separate thread, so that frames of other streams do not wait while a state is written.
        self._saving = ThreadPoolExecutor(1, "mmserve-saving", lambda: torch.set_num_threads(1))

    def open(
        self, name: str, memory: Memory, tenant: Tenant, vision: Vision | None, extra_bytes: int, parcel: Parcel = None
    ) -> int:
        """See ``Streams.open``; with a state in ``parcel``, the stream continues from it. Returns the bytes reserved
        for it."""
        saved: StreamPayload | None = None if parcel is None else self._read(parcel)
        kept = _OpenStream(self._streams.open(memory, tenant, vision, extra_bytes, saved))
        if saved is not None:
            kept.number = saved.number
            kept.seen.update((one.number, EncodedFrame(one.seconds, one.tokens, one.whole)) for one in saved.seen)
        self._open[name] = kept
        return kept.stream.held

    def append(self, name: str, number: int, frame: Frame) -> None:
        """See ``Stream.append``; the result is reported as ``Appended`` with ``number``."""
        try:
            kept = self._kept(name)
            future = kept.stream.append(frame)
        except MMServeError as error:
            self._report(Appended(self._model, name, number, error))
            return
        kept.number = number
        future.add_done_callback(partial(self._appended, name, kept, number))

    def save(self, name: str) -> None:
        """Report the stream's state after its current frames as ``StreamSaved``; no effect if it is closed."""
        kept = self._open.get(name)
        if kept is None:
            return
        number = kept.number

        def taken(done: Future[StreamPayload]) -> None:  # on the streams' thread, before the next frame
            seen = tuple(EncodedFrameState(i, one.seconds, one.tokens_RD, one.whole_RD) for i, one in kept.seen.items())
            self._saving.submit(self._saved, name, number, seen, done)

        try:
            kept.stream.save().add_done_callback(taken)
        except MMServeError:  # it is being closed
            return

    def ask(self, name: str, order: Order, scope: Scope | None) -> Asked:
        """See ``Stream.ask``; for the request of ``order``, whose events are sent to the front end like those of any
        order."""
        return self._kept(name).stream.ask(order.request(), scope, self._sink_of(order))

    def stats(self, name: str) -> StreamStats:
        """See ``Stream.stats``."""
        return self._kept(name).stream.stats()

    def close(self, name: str) -> None:
        """See ``Stream.close``."""
        kept = self._open.pop(name, None)
        if kept is not None:
            kept.stream.close()

    def check(self, question: StandingQuestion, path: str) -> None:
        """See ``Standing.check``."""
        assert self._standing is not None, "the model supports standing questions"
        self._standing.check(question, path)

    def judge(self, name: str, number: int, questions: Sequence[StandingQuestion]) -> list[TypedAnswer]:
        """See ``Standing.judge``; about one of the latest frames."""
        assert self._standing is not None, "the model supports standing questions"
        seen = self._kept(name).seen.get(number)
        if seen is None:
            raise FailedPrecondition("the frame is not kept any more")
        return self._standing.judge(seen, questions)

    def stop(self) -> None:
        """Close all streams."""
        self._streams.stop()
        self._saving.shutdown()

    def _kept(self, name: str) -> _OpenStream:
        kept = self._open.get(name)
        if kept is None:
            raise FailedPrecondition("the stream is closed")
        return kept

    def _appended(self, name: str, kept: _OpenStream, number: int, done: Future[EncodedFrame]) -> None:
        """Called on the streams' thread, or on that of ``close``."""
        error = Cancelled("the stream was closed") if done.cancelled() else done.exception()
        if error is None and self._most_seen:
            kept.seen[number] = done.result()
            while len(kept.seen) > self._most_seen:
                kept.seen.popitem(last=False)
        self._report(Appended(self._model, name, number, None if error is None else reported(error)))

    def _saved(self, name: str, number: int, seen: tuple[EncodedFrameState, ...], done: Future[StreamPayload]) -> None:
        parcel: Parcel = None
        try:
            parcel = self._write(replace(done.result(), seen=seen, number=number))
        except Cancelled:  # it was closed
            return
        except Exception as error:  # noqa: BLE001 - the front has an older state
            logger.error("the state of a stream could not be saved: %r", error)
        self._report(StreamSaved(self._model, name, number, parcel))


def frame_of(seconds: float, size: tuple[int, int], pixels: bytes, detail: bool) -> Frame:
    """A frame from its RGB bytes; ``size``: width and height."""
    return Frame(seconds, Image.frombytes("RGB", size, pixels), detail)
