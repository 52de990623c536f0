"""The engine of one model whose stages run on the workers of a cluster: admits requests, sends them from worker to
worker, and resumes those that lose their worker from their last checkpoint.

Tokens do not depend on where a request runs, so tokens repeated after a loss equal those that the client already
has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from mmserve.cluster.adapters import ClusterAdapters
from mmserve.cluster.asking import ask_any
from mmserve.cluster.caches import ClusterCaches
from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.in_flight import InFlight
from mmserve.cluster.messages import Appended, Chunk, Heartbeat, Item, Lost, Moved, Order, RequestEvent, StreamSaved
from mmserve.cluster.requests import Sink
from mmserve.cluster.streams import ClusterStreams, lost_question
from mmserve.cluster.switching import Switching
from mmserve.cluster.totals import NOTHING, counted, total
from mmserve.cluster.workers import PayloadStore, Worker
from mmserve.config import Config, EngineConfig
from mmserve.core.constraint import CheckedConstraint
from mmserve.core.events import Failed, Finished
from mmserve.core.info import AdapterInfo, ModelInfo
from mmserve.core.request import Request, RequestId
from mmserve.core.session import Asked
from mmserve.core.stats import Stats
from mmserve.encode.decoding import DecodePool
from mmserve.engine.waiting import WaitingQueue
from mmserve.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    MMServeError,
    TransferError,
    Unavailable,
)
from mmserve.video.host import Parts
from mmserve.video.support import SessionSupport, adapter_of

logger = logging.getLogger("mmserve.cluster")

#: Seconds after a request's deadline until the coordinator ends it: normally its worker does so, with an error that
#: names the stage.
_GRACE = 0.5
_NO_SESSIONS = SessionSupport(refusal="this model takes no video sessions")


class Coordinator:
    """``EngineLike`` over a changing set of workers; thread-safe."""

    def __init__(
        self,
        info: ModelInfo,
        engine: EngineConfig,
        settings: ClusterSettings,
        payloads: PayloadStore,
        support: SessionSupport = _NO_SESSIONS,
        adapters: Sequence[AdapterInfo] = (),
    ) -> None:
        self.info, self._settings, self._payloads, self._support = info, settings, payloads, support
        self._queue = WaitingQueue(engine)
        self._lock = threading.RLock()
        self.adapters = ClusterAdapters(info.name, engine.adapter_folder, self._adapters_in_use, adapters)
        self._in_flight = InFlight(info.name, engine.max_running, settings, payloads, self._queue, self.adapters.holds)
        self._dispatch = self._in_flight.dispatch
        self.caches = ClusterCaches(info.name, self._serving, self._dropped)
        self._streams: ClusterStreams | None = None  # of video sessions; created on demand
        self._stats: dict[str, Stats] = {}
        self._ended = NOTHING  # counters of workers that exited
        self._switching = Switching(settings.decide_seconds)
        self.switches = self.losses = 0  # numbers of role switches and lost workers

    # --- as an engine ---

    def start(self) -> None:
        """Admit requests from now on."""
        self._queue.refusal = ""

    def submit(self, request: Request, sink: Sink) -> None:
        """As ``Engine.submit``; a refusal by a worker is sent as ``Failed``."""
        self._queue.check(request)
        with self._lock:
            self._in_flight.begin(self.adapters.resolved(request), sink)

    def session_parts(self, config: Config) -> Parts:
        """As ``video.host.Served``; raises ``Unimplemented`` if the model does not support sessions."""
        self._support.check()
        decoders = DecodePool(config.media)
        decoders.open()
        streams = ClusterStreams(self, self._settings, config.video, self._serving, self._payloads, decoders.close)
        self._streams = streams
        standing = streams if self._support.standing else None
        return Parts(self._support, streams, decoders, standing, self.cancel, here=False)

    def submit_there(
        self, request: Request, sink: Sink, worker: str, ask: Callable[[Order], Asked], again: Callable[[], bool]
    ) -> Asked:
        """See ``streams.Requests.submit_there``."""
        self._queue.check(request)
        with self._lock:
            order = self._in_flight.begin_at(worker, self.adapters.resolved(request), sink, again)
        try:
            asked = ask(order)
        except BaseException:
            with self._lock:
                self._in_flight.withdraw(request.id)
            raise
        with self._lock:
            self._in_flight.accepted(request.id, worker)
        return asked

    def session_adapter(self, asked: str) -> str:
        """See ``streams.Requests.session_adapter``."""
        known = {each.name for each in self.adapters.listed()}
        return adapter_of(asked, known, kept=self._support.keeps_kv)

    def orders_again(self, request: RequestId, worker: str) -> list[Order]:
        """See ``streams.Requests.orders_again``."""
        with self._lock:
            return self._in_flight.orders_again(request, worker)

    def waits_for_stream(self, request: RequestId) -> bool:
        """See ``streams.Requests.waits_for_stream``."""
        with self._lock:
            return self._in_flight.waits_for_stream(request)

    def give_up(self, request: RequestId) -> None:
        """See ``streams.Requests.give_up``."""
        with self._lock:
            if self._in_flight.waits_for_stream(request):
                self._in_flight.fail(self._in_flight.groups[request], lost_question())

    def check_constraint(self, request: Request, answer: str | None) -> CheckedConstraint | None:
        """None: constraints are compiled by the workers, which check those of requests."""
        return None

    def prompt_ids(self, request: Request, special_tokens: bool = True, generation_prompt: bool = True) -> list[int]:
        """See ``Engine.prompt_ids``; tokenizers are on the workers."""
        return cast("list[int]", self._ask_any("prompt_ids", request, special_tokens, generation_prompt))

    def token_strs(self, ids: Sequence[int]) -> list[str]:
        """See ``Engine.token_strs``."""
        return cast("list[str]", self._ask_any("token_strs", list(ids)))

    def detokenized(self, ids: Sequence[int]) -> str:
        """See ``Engine.detokenized``."""
        return str(self._ask_any("detokenized", list(ids)))

    def cancel(self, request_id: RequestId, error: MMServeError | None = None) -> None:
        """See ``Engine.cancel``."""
        with self._lock:
            group = self._in_flight.groups.get(request_id)
            if group is not None:
                self._in_flight.fail(group, error or Cancelled("the request was cancelled"))

    def drain(self, timeout: float) -> bool:
        """See ``Engine.drain``."""
        with self._queue.lock:
            self._queue.refusal = "the server is shutting down; send the request to another one"
            self._queue.draining = timeout > 0  # questions of open sessions are still admitted
        in_time = self._queue.idle.wait(timeout)
        if not in_time:
            with self._queue.lock:
                self._queue.draining = False
            with self._lock:
                for group in list(self._in_flight.groups.values()):
                    self._in_flight.fail(group, Unavailable("the server shut down before the request finished"))
        return in_time

    def stop(self) -> None:
        """End all remaining requests; the fleet stops the workers."""
        self.drain(0.0)

    def stats(self) -> Stats:
        """Total counters of all workers and of the queue here."""
        with self._lock:
            sums = total([*self._stats.values(), self._ended])
            waiting = {f"waiting_{role}": count for role, count in self._dispatch.waiting().items()}
        return replace(
            sums,
            live=self._queue.admitted,
            queued=self._queue.queued,
            shed=self._queue.shed,
            stages={**sums.stages, **waiting},
            expected_wait=self._queue.expected_wait(),
        )

    def stats_of_workers(self) -> Mapping[str, Stats]:
        """The latest statistics of each worker, by its name."""
        with self._lock:
            return dict(self._stats)

    # --- reports of the fleet ---

    def load_adapters(self, worker: Worker) -> None:
        """Prepare a worker before it joins (adapters); blocks."""
        self.adapters.load_adapters(worker)

    def worker_ready(self, worker: Worker) -> None:
        """A worker is ready, after ``load_adapters``; or has a role again."""
        with self._lock:
            self._dispatch.workers[worker.name] = worker
            self._in_flight.send()

    def worker_exited(self, name: str) -> None:
        """A worker exited, or was given up: its requests continue on other workers."""
        with self._lock:
            self._dispatch.workers.pop(name, None)
            self._dispatch.index.worker_exited(name)
            self.adapters.worker_exited(name)
            if (last := self._stats.pop(name, None)) is not None:
                self._ended = total([self._ended, counted(last)])
            self.losses += 1
            self._in_flight.worker_exited(name)
            if self._streams is not None:
                self._streams.worker_exited(name)
            self._in_flight.send()

    def take(self, worker: str, items: Sequence[Item]) -> None:
        """Process a worker's reports about this model's requests, in order; may wait for the worker's memory."""
        found = [self._keep(item) for item in items]  # without the lock: may take seconds if the worker is stopped
        with self._lock:
            for item in found:
                if isinstance(item, Heartbeat):
                    if worker in self._dispatch.workers:
                        self._stats[worker] = item.stats[self.info.name]
                elif not isinstance(item, Appended | StreamSaved):
                    self._in_flight.reported(worker, item)
                elif self._streams is not None:
                    self._streams.reported(item)
            if any(_makes_room(item) for item in found):
                self._in_flight.send()

    def tick(self, now: float) -> None:
        """To be called several times a second; ``now``: monotonic clock (seconds)."""
        self._queue.measure(now)
        self.adapters.tick()
        if self._streams is not None:
            self._streams.tick()
        with self._lock:
            for group in list(self._in_flight.groups.values()):
                deadline = group.request.deadline
                if deadline is not None and deadline + _GRACE <= now:
                    self._in_flight.fail(group, DeadlineExceeded("the deadline passed before the request finished"))

    def switch(self, now: float) -> None:
        """Switch a worker's role if that is due; to be called about once a second."""
        with self._lock:
            demand, workers = self._dispatch.demand()
            change = self._switching.due_change(now, demand, workers)
            if change is None:
                return
            logger.info(
                "worker %s goes from %s to %s (to do: %s)",
                change.name,
                change.taken_from,
                change.given_to,
                ", ".join(f"{role} {each.requests} × {each.seconds:.2f} s" for role, each in demand.items()),
            )
            self.switches += 1
            self._dispatch.workers[change.name].serve([change.given_to])
            self._in_flight.send()

    # --- not locked ---

    def _keep(self, item: Item) -> Item | Lost:
        """``item`` with its state copied or mapped here, or ``Lost`` if that fails."""
        if isinstance(item, StreamSaved):
            return self._kept_stream(item)
        if not isinstance(item, Moved | Chunk):
            return item
        why: MMServeError
        try:
            return replace(item, parcel=self._payloads.persist(item.parcel))
        except TransferError as error:  # its worker has just exited
            why = error
        except Exception as error:  # noqa: BLE001 - a bug with one state leaves the other requests alone
            why = Internal.logged(error, f"a state of request {item.key}", logger)
        self._payloads.drop(item.parcel)  # lets the worker, if it is alive, reuse that memory
        return Lost(item.model, item.key, item.sample, why, isinstance(item, Chunk) or item.stays)

    def _kept_stream(self, item: StreamSaved) -> StreamSaved:
        try:
            return replace(item, parcel=None if item.parcel is None else self._payloads.own(item.parcel))
        except Exception as error:  # noqa: BLE001 - the state before it is still there
            logger.warning("the state of a stream after frame %d is lost: %r", item.number, error)
            self._payloads.drop(item.parcel)
            return replace(item, parcel=None)

    def _serving(self) -> list[Worker]:
        with self._lock:
            return list(self._dispatch.workers.values())

    def _ask_any(self, question: str, *arguments: object) -> object:
        return ask_any(self._serving(), self.info.name, question, *arguments)

    def _adapters_in_use(self) -> set[str]:
        with self._lock:
            return {group.request.adapter for group in self._in_flight.groups.values()} - {""}

    def _dropped(self, pages: Sequence[bytes]) -> None:
        with self._lock:
            self._dispatch.index.dropped(pages)


def _makes_room(item: Item | Lost) -> bool:
    """Whether the item can change which worker a request needs, so that waiting requests should be sent; not for text
    and steps, which are frequent."""
    return not isinstance(item, RequestEvent) or isinstance(item.event, Failed | Finished)
