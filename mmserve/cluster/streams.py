"""Video streams of sessions on a cluster: each has a worker that keeps its frames and K/V, and receives its questions,
which then continue like any request."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from mmserve.cluster.asking import WorkerEnded
from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.messages import Appended, Order, Parcel, StreamSaved
from mmserve.cluster.requests import Sink
from mmserve.cluster.stream import PATIENCE, ClusterStream, RemoteFrame
from mmserve.cluster.workers import PayloadStore, Worker
from mmserve.config import VideoConfig
from mmserve.core.info import ModelInfo
from mmserve.core.request import Request, RequestId, Vision
from mmserve.core.session import Asked, Memory
from mmserve.core.tenant import Tenant
from mmserve.errors import FailedPrecondition, MMServeError, Unavailable
from mmserve.video.base import EncodedFrame
from mmserve.video.bounds import check_bytes, check_count
from mmserve.video.standing import StandingQuestion, TypedAnswer

#: Streams of exited workers that are opened concurrently.
_AT_ONCE = 4
#: Seconds between two attempts to find a worker.
_POLL = 0.05


class Requests(Protocol):
    """The interface for the requests of a model that streams need."""

    @property
    def info(self) -> ModelInfo:
        """The model."""

    def session_adapter(self, asked: str) -> str:
        """See ``Streams.adapter_for``."""

    def submit_there(
        self, request: Request, sink: Sink, worker: str, ask: Callable[[Order], Asked], again: Callable[[], bool]
    ) -> Asked:
        """Admit a question about a stream that ``worker`` keeps: ``ask`` sends it the order, and returns the frames
        asked about. Once its prompt is encoded, it continues like any request; if it is lost before, ``again`` is
        called, which returns whether ``orders_again`` will be called. Raises as ``Engine.submit``, and the errors of
        ``ask``."""

    def orders_again(self, request: RequestId, worker: str) -> list[Order]:
        """The orders for ``worker`` for a question that was lost; empty if it has ended meanwhile."""

    def waits_for_stream(self, request: RequestId) -> bool:
        """Whether a question would have to be asked again if its worker were lost."""

    def give_up(self, request: RequestId) -> None:
        """End a question that was lost with its stream."""

    def cancel(self, request_id: RequestId, error: MMServeError | None = None) -> None:
        """End a question with ``error``."""


class ClusterStreams:
    """``Streams`` of a model, each on the one of ``workers()`` with the fewest streams; the limits of ``[video]`` apply
    to all workers together. ``closing`` is called once, at the end. Also implements ``FrameQuestions``."""

    def __init__(
        self,
        requests: Requests,
        settings: ClusterSettings,
        config: VideoConfig,
        workers: Callable[[], Sequence[Worker]],
        payloads: PayloadStore,
        closing: Callable[[], None],
    ) -> None:
        self.model, self.requests = requests.info.name, requests
        self._settings, self._config, self._workers = settings, config, workers
        self._payloads, self._closing = payloads, closing
        self._lock = threading.Lock()
        self._streams: dict[str, ClusterStream] = {}  # by their names on their workers
        self._open: dict[ClusterStream, int] = {}  # reserved bytes of each
        self._stopped = False
        self._openers = ThreadPoolExecutor(_AT_ONCE, "mmserve-streams")

    def open(self, memory: Memory, tenant: Tenant, vision: Vision | None = None, extra_bytes: int = 0) -> ClusterStream:
        """See ``Streams.open``; raises ``Unavailable`` if there is no worker."""
        given = memory, tenant, vision, extra_bytes
        stream = ClusterStream(self, given, self._settings.save_frames, self._settings.max_losses)
        with self._lock:
            check_count(self._config, len(self._open))
            self._open[stream] = 0
        try:
            held = stream.begin()
            with self._lock:
                if stream not in self._open and stream.ended is not None:  # meanwhile, with its worker or the server
                    raise stream.ended
                check_bytes(self._config, sum(self._open.values()), held)
                self._open[stream] = held
        except BaseException:
            stream.close()
            raise
        return stream

    def adapter_for(self, asked: str) -> str:
        """See ``Streams.adapter_for``."""
        return self.requests.session_adapter(asked)

    @property
    def stopped(self) -> bool:
        """See ``Streams.stopped``."""
        return self._stopped

    def stop(self) -> None:
        """See ``Streams.stop``."""
        with self._lock:
            first, self._stopped = not self._stopped, True
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()
        if first:
            self._openers.shutdown()
            self._closing()

    # --- reports of workers ---

    def reported(self, item: Appended | StreamSaved) -> None:
        """The result of a frame, or a checkpoint of a stream; called with the coordinator's lock."""
        with self._lock:
            stream = self._streams.get(item.key)
        if isinstance(item, Appended):
            if stream is not None:
                stream.on_item(item)
        elif stream is not None:
            stream.saved(item)
        else:
            self.drop(item.parcel)

    def worker_exited(self, worker: str) -> None:
        """A worker has exited: others continue its streams."""
        for stream in self._all():
            stream.worker_exited(worker)

    def tick(self) -> None:
        """Move streams from workers that no longer encode to those that do."""
        encoding = {worker.name for worker in self._workers() if "encode" in worker.roles}
        for stream in self._all() if encoding else ():
            if stream.worker not in encoding:
                stream.move()

    # --- for streams ---

    def choose(self, tried: Collection[str], patience: float) -> Worker | None:
        """A worker not in ``tried`` that encodes, with the fewest streams; None if there is none within ``patience``
        seconds."""
        end = time.monotonic() + patience
        while True:
            workers = [worker for worker in self._workers() if worker.name not in tried]
            found = [worker for worker in workers if "encode" in worker.roles] or workers
            if found:
                counts = Counter(stream.worker for stream in self._all())
                return min(found, key=lambda worker: counts[worker.name])
            if self._stopped or time.monotonic() >= end:
                return None
            time.sleep(_POLL)

    def renamed(self, stream: ClusterStream, name: str, former: str) -> bool:
        """Register the stream's new name on its worker. Returns whether streams may still be opened."""
        with self._lock:
            self._streams.pop(former, None)
            if not self._stopped:
                self._streams[name] = stream
            return not self._stopped

    def discard(self, stream: ClusterStream, name: str) -> None:
        """Remove a closed stream."""
        with self._lock:
            self._streams.pop(name, None)
            self._open.pop(stream, None)

    def sent(self, parcel: Parcel, worker: str) -> Parcel:
        """A checkpoint, converted for a worker."""
        return None if parcel is None else self._payloads.sent(parcel, worker)

    def drop(self, parcel: Parcel) -> None:
        """Drop a checkpoint that is no longer needed."""
        if parcel is not None:
            self._payloads.drop(parcel)

    def run_in_background(self, work: Callable[[], None]) -> None:
        """Run ``work`` on another thread."""
        self._openers.submit(work)

    def no_worker(self) -> Unavailable:
        """The error if there is no worker."""
        return Unavailable(
            f"no worker of {self.model!r} is available while they are being replaced; try again in a few seconds"
        )

    # --- standing questions ---

    def check(self, question: StandingQuestion, path: str = "question") -> None:
        """See ``FrameQuestions.check``; on any worker."""
        tried: set[str] = set()
        while (worker := self.choose(tried, PATIENCE)) is not None:
            try:
                worker.ask(self.model, "stream.check", (question, path))
            except WorkerEnded:
                tried.add(worker.name)
            else:
                return
        raise self.no_worker()

    def judge(self, frame: EncodedFrame, questions: Sequence[StandingQuestion]) -> list[TypedAnswer]:
        """See ``FrameQuestions.judge``; on the worker that keeps the frame."""
        if not isinstance(frame, RemoteFrame):
            raise FailedPrecondition("the frame is of no stream of this cluster")
        judged: list[TypedAnswer] = frame.stream.question(
            "stream.judge", frame.number, list(questions), frame=frame.number
        )
        return judged

    def _all(self) -> list[ClusterStream]:
        with self._lock:
            return list(self._streams.values())


def lost_question() -> Unavailable:
    """The error of a question whose stream, or prompt, was lost."""
    return Unavailable("the worker that had the question has ended before its prompt was encoded: ask again")
