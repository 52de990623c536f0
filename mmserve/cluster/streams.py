"""Sessions' streams of video on a cluster: each has a worker that keeps its frames and K/V, and takes its questions in;
these then go on as any request does."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from mmserve.cluster.asking import WorkerEnded
from mmserve.cluster.messages import Appended, Order
from mmserve.cluster.requests import Sink
from mmserve.cluster.workers import Worker
from mmserve.core.request import Request, Vision
from mmserve.core.session import Asked, Memory
from mmserve.core.tenant import Tenant
from mmserve.errors import Cancelled, FailedPrecondition, InvalidArgument, Unavailable
from mmserve.video.base import Frame, Scope, Seen, StreamLost, StreamStats
from mmserve.video.standing import Judged, StandingQuestion

NO_ADAPTER = "must name no adapter: sessions of video on a cluster take none"
#: Has the coordinator take in a request that the worker with this name has, and calls the function with its order.
Submit = Callable[[Request, Sink, str, Callable[[Order], Asked]], Asked]


@dataclass(frozen=True)
class SeenThere(Seen):
    """A frame that the worker of its stream keeps; its tensors are empty."""

    stream: ClusterStream
    number: int


class ClusterStream:
    """``Stream`` whose frames the worker ``home`` keeps."""

    def __init__(self, streams: ClusterStreams, home: Worker, name: str) -> None:
        self.home, self.name, self._streams = home, name, streams
        self.worker = home.name  # ``home`` may have another name once its worker is replaced
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[float, Future[Seen]]] = {}
        self._number = 0
        self._lost: StreamLost | None = None

    def append(self, frame: Frame) -> Future[Seen]:
        """As of ``Stream.append``; ``StreamLost`` where the worker has ended."""
        future: Future[Seen] = Future()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._number += 1
            number = self._number
            self._under_way[number] = frame.seconds, future
        image = frame.image.convert("RGB")
        sent = (self.name, number, frame.seconds, image.size, image.tobytes(), frame.detail)
        self.home.post(self._streams.model, "stream.append", sent)
        return future

    def ask(self, request: Request, scope: Scope | None, sink: Sink) -> Asked:
        """As of ``Stream.ask``."""
        if request.adapter:
            raise InvalidArgument.of("adapter", NO_ADAPTER)
        return self._streams.submit(
            request, sink, self.worker, lambda order: self.question("stream.ask", self.name, order, scope)
        )

    def stats(self) -> StreamStats:
        """As of ``Stream.stats``."""
        stats: StreamStats = self.question("stream.stats", self.name)
        return stats

    def close(self) -> None:
        """As of ``Stream.close``."""
        self._streams.forget(self)
        self.home.post(self._streams.model, "stream.close", (self.name,))
        self._fail(Cancelled("the stream was closed"))

    def question(self, question: str, *arguments: Any) -> Any:
        """What the worker answers; raises ``StreamLost`` where it has ended."""
        if self._lost is not None:
            raise self._lost
        try:
            return self.home.ask(self._streams.model, question, arguments)
        except WorkerEnded as error:
            raise lost() from error

    def took(self, item: Appended) -> None:
        """A frame is in, or has failed."""
        with self._lock:
            seconds, future = self._under_way.pop(item.number, (0.0, None))
        if future is None:
            return
        if item.error is not None:
            future.set_exception(item.error)
        else:
            future.set_result(SeenThere(seconds, torch.empty(0), torch.empty(0), self, item.number))

    def left(self) -> None:
        """Its worker has ended."""
        with self._lock:
            self._lost = lost()
        self._fail(self._lost)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            under_way, self._under_way = self._under_way, {}
        for _seconds, future in under_way.values():
            future.set_exception(error)


class ClusterStreams:
    """``Streams`` of ``model``, each on the worker with the fewest of those that ``workers`` returns. The bounds of
    ``[video]`` hold for each worker. ``closing`` is called once, at the end. Also its ``Judge``."""

    def __init__(
        self,
        model: str,
        workers: Callable[[], Sequence[Worker]],
        submit: Submit,
        closing: Callable[[], None],
    ) -> None:
        self.model, self.submit = model, submit
        self._workers, self._closing = workers, closing
        self._lock = threading.Lock()
        self._streams: dict[str, ClusterStream] = {}
        self._stopped = False

    def open(self, memory: Memory, tenant: Tenant, vision: Vision | None = None, beside: int = 0) -> ClusterStream:
        """As of ``Streams.open``; ``Unavailable`` where there is no worker."""
        workers = self._workers()
        encoders = [worker for worker in workers if "encode" in worker.roles] or workers
        if not encoders:
            raise self._nobody()
        with self._lock:
            if self._stopped:
                raise Unavailable("the server is shutting down; open the stream at another one")
            counts = Counter(stream.worker for stream in self._streams.values())
            home = min(encoders, key=lambda worker: counts[worker.name])
            name = uuid.uuid4().hex
            stream = self._streams[name] = ClusterStream(self, home, name)
        try:
            stream.question("stream.open", name, memory, tenant, vision, beside)
            if home.name != stream.worker:  # it was replaced meanwhile
                raise lost()
        except BaseException:
            self.forget(stream)
            raise
        return stream

    def adapter_for(self, asked: str) -> str:
        """As of ``Streams.adapter_for``: none."""
        if asked:
            raise InvalidArgument.of("model", NO_ADAPTER)
        return ""

    @property
    def stopped(self) -> bool:
        """As of ``Streams.stopped``."""
        return self._stopped

    def stop(self) -> None:
        """As of ``Streams.stop``."""
        with self._lock:
            first, self._stopped = not self._stopped, True
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()
        if first:
            self._closing()

    def forget(self, stream: ClusterStream) -> None:
        """It is closed."""
        with self._lock:
            self._streams.pop(stream.name, None)

    def took(self, item: Appended) -> None:
        """What a worker reports of a frame."""
        with self._lock:
            stream = self._streams.get(item.key)
        if stream is not None:
            stream.took(item)

    def left(self, worker: str) -> None:
        """A worker has ended, and its streams with it."""
        with self._lock:
            streams = [stream for stream in self._streams.values() if stream.worker == worker]
        for stream in streams:
            stream.left()

    # --- standing questions ---

    def check(self, question: StandingQuestion, path: str = "question") -> None:
        """As of ``Judge.check``, on any worker."""
        workers = self._workers()
        if not workers:
            raise self._nobody()
        workers[0].ask(self.model, "stream.check", (question, path))

    def judge(self, frame: Seen, questions: Sequence[StandingQuestion]) -> list[Judged]:
        """As of ``Judge.judge``, on the worker that keeps the frame."""
        if not isinstance(frame, SeenThere):
            raise FailedPrecondition("the frame is of no stream of this cluster")
        judged: list[Judged] = frame.stream.question("stream.judge", frame.stream.name, frame.number, list(questions))
        return judged

    def _nobody(self) -> Unavailable:
        return Unavailable(f"no worker of {self.model!r} is there: they are being replaced, try again in a few seconds")


def lost_question() -> Unavailable:
    """Why a question ends whose stream, or prompt, was lost."""
    return Unavailable("the worker that had the question has ended before its prompt was encoded: ask again")


def lost() -> StreamLost:
    """Why a stream whose worker has ended is no more."""
    return StreamLost("the worker that kept the session's frames has ended, and they with it: open another session")
