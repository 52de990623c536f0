"""Streams of video whose frames and K/V a worker keeps, for sessions of the front."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from PIL import Image

from mmserve.cluster.messages import Appended, Item, Order
from mmserve.config import VideoConfig
from mmserve.core.request import Vision
from mmserve.core.session import Asked, Memory
from mmserve.core.tenant import Tenant
from mmserve.engine import Engine
from mmserve.errors import Cancelled, FailedPrecondition, MMServeError
from mmserve.request_state import Sink
from mmserve.video.base import Frame, Scope, Seen, StreamStats
from mmserve.video.facts import standing_of
from mmserve.video.reported import reported
from mmserve.video.standing import Judged, StandingQuestion
from mmserve.video.streams import EngineStream, EngineStreams


class StreamHome:
    """Those of one ``engine``; streams have the names that the front gives them.

    ``report``: puts an item into what the front is sent. ``sink_of``: what takes the events of an order's request.
    Methods are for one thread at a time, and wait for no frame.
    """

    def __init__(
        self,
        engine: Engine,
        config: VideoConfig,
        report: Callable[[Item], None],
        sink_of: Callable[[Order], Sink],
    ) -> None:
        self._model, self._report, self._sink_of = engine.info.name, report, sink_of
        self._streams = EngineStreams(engine, config)
        self._standing = standing_of(engine.stages.model)
        self._most_seen = config.frames_under_way + 1 if self._standing is not None else 0
        self._open: dict[str, EngineStream] = {}
        self._seen: dict[str, OrderedDict[int, Seen]] = {}  # the latest frames of each, for standing questions

    def open(self, name: str, memory: Memory, tenant: Tenant, vision: Vision | None, beside: int) -> None:
        """As of ``Streams.open``."""
        self._open[name] = self._streams.open(memory, tenant, vision, beside)
        self._seen[name] = OrderedDict()

    def append(self, name: str, number: int, frame: Frame) -> None:
        """As of ``Stream.append``; what becomes of the frame is reported as ``Appended`` with ``number``."""
        try:
            future = self._stream(name).append(frame)
        except MMServeError as error:
            self._report(Appended(self._model, name, number, error))
            return
        future.add_done_callback(lambda done: self._appended(name, number, done))

    def ask(self, name: str, order: Order, scope: Scope | None) -> Asked:
        """As of ``Stream.ask``, for the request of ``order``, whose events go to the front as those of any order."""
        return self._stream(name).ask(order.request(), scope, self._sink_of(order))

    def stats(self, name: str) -> StreamStats:
        """As of ``Stream.stats``."""
        return self._stream(name).stats()

    def close(self, name: str) -> None:
        """As of ``Stream.close``."""
        stream = self._open.pop(name, None)
        self._seen.pop(name, None)
        if stream is not None:
            stream.close()

    def check(self, question: StandingQuestion, path: str) -> None:
        """As of ``Standing.check``."""
        assert self._standing is not None, "facts have it"
        self._standing.check(question, path)

    def judge(self, name: str, number: int, questions: Sequence[StandingQuestion]) -> list[Judged]:
        """As of ``Standing.judge``, about one of the latest frames."""
        assert self._standing is not None, "facts have it"
        seen = self._seen.get(name, OrderedDict()).get(number)
        if seen is None:
            raise FailedPrecondition("the frame is not kept any more")
        return self._standing.judge(seen, questions)

    def stop(self) -> None:
        """Close all streams."""
        self._streams.stop()

    def _stream(self, name: str) -> EngineStream:
        stream = self._open.get(name)
        if stream is None:
            raise FailedPrecondition("the stream is closed")
        return stream

    def _appended(self, name: str, number: int, done: Future[Seen]) -> None:
        """On the streams' thread, or on that of ``close``."""
        error = Cancelled("the stream was closed") if done.cancelled() else done.exception()
        latest = self._seen.get(name)
        if error is None and latest is not None and self._most_seen:
            latest[number] = done.result()
            while len(latest) > self._most_seen:
                latest.popitem(last=False)
        self._report(Appended(self._model, name, number, None if error is None else reported(error)))


def frame_of(seconds: float, size: tuple[int, int], pixels: bytes, detail: bool) -> Frame:
    """A frame from its RGB bytes, of ``size`` (width, height)."""
    return Frame(seconds, Image.frombytes("RGB", size, pixels), detail)
