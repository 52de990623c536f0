"""The engine of one model whose stages are on the workers of a cluster: takes requests in, sends each on from worker to
worker, and lets those that lose their worker go on from their last saved state.

Tokens do not depend on where a request runs, so what comes again after a loss is what the client has already.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mmserve.cluster.adapters import ClusterAdapters, missing
from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.dispatch import Dispatch
from mmserve.cluster.kept import ClusterKept
from mmserve.cluster.messages import Beat, Happened, Item, Lost, Moved, Refused, without_media
from mmserve.cluster.requests import Group, Part, Sink
from mmserve.cluster.switching import Switching
from mmserve.cluster.totals import NOTHING, counted, total
from mmserve.cluster.workers import Depot, Worker
from mmserve.config import EngineConfig
from mmserve.core.constraint import CheckedConstraint
from mmserve.core.events import Admitted, Delta, Draft, Event, Failed, Finished, Snapshot
from mmserve.core.handover import ROLES, Handover
from mmserve.core.info import ModelInfo
from mmserve.core.progress import Progress, Reached, StageEntered, StepTaken
from mmserve.core.request import Request, RequestId, Stage
from mmserve.core.samples import samples
from mmserve.core.stats import Stats
from mmserve.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    MMServeError,
    TransferError,
    Unavailable,
    Unimplemented,
)
from mmserve.observe.logs import about
from mmserve.waiting import WaitingQueue

logger = logging.getLogger("mmserve.cluster")

#: Seconds after a request's deadline until it is ended here: its worker ends it by itself, with an error
#: that names the stage.
_GRACE = 0.5


class Coordinator:
    """``EngineLike``, over workers that come and go. Every method may be called from any thread."""

    def __init__(self, info: ModelInfo, engine: EngineConfig, settings: ClusterSettings, depot: Depot) -> None:
        self.info, self._engine, self._settings, self._depot = info, engine, settings, depot
        self._queue = WaitingQueue(engine)
        self._lock = threading.RLock()
        self._groups: dict[RequestId, Group] = {}
        self.adapters = ClusterAdapters(info.name, engine.adapter_folder, self._adapters_in_use)
        self._dispatch = Dispatch(info.name, engine.max_running, depot, self._parts, self.adapters.holds)
        self.kept = ClusterKept(info.name, self._serving, self._dropped)
        self._stats: dict[str, Stats] = {}
        self._ended = NOTHING  # what workers that ended had counted
        self._switching = Switching(settings.decide_seconds)
        self.switches = self.losses = 0  # roles changed, workers lost

    # --- as an engine ---

    def start(self) -> None:
        """Take requests from now on."""
        self._queue.refusal = ""

    def submit(self, request: Request, sink: Sink) -> None:
        """As of ``Engine.submit``; what a worker refuses comes as ``Failed``."""
        self._queue.check(request)
        with self._lock:
            request = self.adapters.resolved(request)
            group = Group(request, sink, time.monotonic())
            group.parts[None] = part = Part(group, None, Handover(request, Stage.QUEUED, None))
            with self._queue.lock:
                ahead = self._queue.take(request, group.due, of_session=False)
            self._groups[request.id] = group
            sink(Admitted(ahead))
            if not self._share_out(part):
                self._dispatch.wait(part)
            self._send()

    def check_constraint(self, request: Request, answer: str | None) -> CheckedConstraint:
        """``Unimplemented``: what compiles constraints is with the workers."""
        raise Unimplemented("constraints are checked where the stages are: send the request itself")

    def cancel(self, request_id: RequestId, error: MMServeError | None = None) -> None:
        """As of ``Engine.cancel``."""
        with self._lock:
            group = self._groups.get(request_id)
            if group is not None:
                self._fail(group, error or Cancelled("the request was cancelled"))

    def drain(self, timeout: float) -> bool:
        """As of ``Engine.drain``."""
        with self._queue.lock:
            self._queue.refusal = "the server is shutting down; send the request to another one"
        in_time = self._queue.idle.wait(timeout)
        if not in_time:
            with self._lock:
                for group in list(self._groups.values()):
                    self._fail(group, Unavailable("the server shut down before the request finished"))
        return in_time

    def stop(self) -> None:
        """End what is left; the workers are their fleet's to end."""
        self.drain(0.0)

    def stats(self) -> Stats:
        """Counters of all workers together, with what waits here."""
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
        """What each worker has reported last, by its name."""
        with self._lock:
            return dict(self._stats)

    # --- what the fleet reports ---

    def equip(self, worker: Worker) -> None:
        """Give a worker that will join what it needs beside its models; waits for it."""
        self.adapters.equip(worker)

    def joined(self, worker: Worker) -> None:
        """A worker is ready, after ``equip``; or has a role again."""
        with self._lock:
            self._dispatch.workers[worker.name] = worker
            self._send()

    def left(self, name: str) -> None:
        """A worker has ended, or is given up: what it had goes on elsewhere."""
        with self._lock:
            self._dispatch.workers.pop(name, None)
            self._dispatch.index.left(name)
            self.adapters.left(name)
            if (last := self._stats.pop(name, None)) is not None:
                self._ended = total([self._ended, counted(last)])
            self.losses += 1
            for part in [part for part in self._parts() if part.worker == name]:
                self._lost(part)
            self._send()

    def take(self, worker: str, items: Sequence[Item]) -> None:
        """What a worker reports of this model's requests, in order; waits for its memory."""
        found = [self._keep(item) for item in items]  # without the lock: a worker that is stopped may take seconds
        with self._lock:
            for item in found:
                if isinstance(item, Beat):
                    if worker in self._dispatch.workers:
                        self._stats[worker] = item.stats[self.info.name]
                    continue
                group = self._groups.get(item.key)
                part = None if group is None else group.part_of(item.sample)
                if group is None or part is None or part.worker != worker:
                    self._forget(item)
                    continue
                try:
                    self._took(group, part, item)
                except Exception as error:  # noqa: BLE001 - a bug with one request ends that request only
                    self._fail(group, Internal.logged(error, f"request {group.id}", logger, about(group.request)))
            self._send()

    def tick(self, now: float) -> None:
        """To be called a few times a second; ``now`` is on the monotonic clock (seconds)."""
        self._queue.measure(now)
        self.adapters.tick()
        with self._lock:
            for group in list(self._groups.values()):
                deadline = group.request.deadline
                if deadline is not None and deadline + _GRACE <= now:
                    self._fail(group, DeadlineExceeded("the deadline passed before the request finished"))

    def switch(self, now: float) -> None:
        """Change a worker's role where that is due; to be called about once a second."""
        with self._lock:
            demand, workers = self._dispatch.demand()
            change = self._switching.look(now, demand, workers)
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
            self._send()

    # --- not locked ---

    def _keep(self, item: Item) -> Item | Lost:
        """``item`` with the memory of its state held here, or that its state is lost."""
        if not isinstance(item, Moved):
            return item
        why: MMServeError
        try:
            return replace(item, parcel=self._depot.keep(item.parcel))
        except TransferError as error:  # its worker has just ended
            why = error
        except Exception as error:  # noqa: BLE001 - a bug with one state leaves the other requests alone
            why = Internal.logged(error, f"a state of request {item.key}", logger)
        return Lost(item.model, item.key, item.sample, why, item.stays)

    def _serving(self) -> list[Worker]:
        with self._lock:
            return list(self._dispatch.workers.values())

    def _adapters_in_use(self) -> set[str]:
        with self._lock:
            return {group.request.adapter for group in self._groups.values()} - {""}

    def _dropped(self, pages: Sequence[bytes]) -> None:
        with self._lock:
            self._dispatch.index.dropped(pages)

    # --- locked ---

    def _parts(self) -> Iterator[Part]:
        """All that have not ended."""
        for group in list(self._groups.values()):
            yield from list(group.parts.values())

    def _send(self) -> None:
        """Send on what waits, as far as workers have room."""
        sent, stuck = self._dispatch.send()
        for part in sent:
            self._leave_queue(part.group)
        for part in stuck:
            if part.group.id in self._groups:  # not where another part of it ended it
                self._fail(part.group, missing(part.group.request.adapter, part.stage))

    def _share_out(self, whole: Part) -> bool:
        """Whether several encode workers that have nothing to do share the media of a request, which waits for them."""
        found = self._dispatch.shards(whole, self._settings.shard_pixels)
        for shard in found:
            whole.group.parts[shard.sample] = shard
            self._dispatch.wait(shard)
        return bool(found)

    def _shard_ended(self, group: Group, shard: Part, item: Item | Lost) -> None:
        """A shard is encoded, or cannot be: then the worker of the whole request encodes it, and reports the error."""
        whole = group.parts[None]
        if isinstance(item, Lost):
            logger.warning("a shard of request %s is lost: %s", group.id, item.error)
            self._lost(shard)
            return
        if isinstance(item, Moved):
            whole.seen.append(item.parcel)
        del group.parts[shard.sample]
        if not any(part.shard for part in group.parts.values()):
            self._dispatch.wait(whole)

    def _forget_seen(self, part: Part) -> None:
        for parcel in part.seen:
            self._depot.drop(parcel)
        part.seen = []

    def _took(self, group: Group, part: Part, item: Item | Lost) -> None:
        if part.shard:
            self._shard_ended(group, part, item)
        elif isinstance(item, Lost):  # what was saved before counts
            logger.warning("a state of request %s is lost: %s", group.id, item.error)
            if not item.stays:
                self._lost(part)
        elif isinstance(item, Moved):
            self._moved(group, part, item)
        elif isinstance(item, Refused):
            logger.warning("request %s begins anew, refused by worker %s: %s", group.id, part.worker, item.error)
            self._depot.drop(part.parcel)
            self._forget_seen(part)
            part.point, part.parcel = Handover(self._own(part), Stage.QUEUED, None), None
            self._lost(part)
        elif isinstance(item, Happened):
            self._happened(group, part, item.event)

    def _moved(self, group: Group, part: Part, item: Moved) -> None:
        one = item.handover.request.sampling.n == 1
        if one and part.sample is None and group.request.sampling.n > 1:
            group.split(part)
            part = group.parts[item.sample]
        self._depot.drop(part.parcel)
        self._forget_seen(part)
        own = self._own(part)
        request = own if item.handover.stage is Stage.QUEUED else without_media(own)
        part.point, part.parcel = replace(item.handover, request=request), item.parcel
        if not item.stays:
            self._timed(part.stage, item.handover.run)
            self._dispatch.wait(part)

    @staticmethod
    def _own(part: Part) -> Request:
        """The request of ``part``, as it was sent."""
        request = part.group.request
        return request if part.sample is None else samples(request)[part.sample]

    def _happened(self, group: Group, part: Part, event: Event | Progress) -> None:
        sample = getattr(event, "sample", 0) if part.sample is None else part.sample
        match event:
            case Failed(error):
                self._fail(group, error)
            case Delta(text):
                if sample not in group.done and (new := part.new_text(sample, text)):
                    group.sink(Delta(new, sample))
            case Finished():
                if sample not in group.done:
                    self._finished(group, part, replace(event, sample=sample))
            case Snapshot() | Draft() | StageEntered() | StepTaken() | Reached() if sample not in group.done:
                group.sink(replace(event, sample=sample))

    def _finished(self, group: Group, part: Part, event: Finished) -> None:
        group.done.add(event.sample)
        for role, ms in zip(ROLES, (event.times.encode, event.times.prefill, event.times.decode), strict=True):
            self._dispatch.took(role, ms / 1000)
        total = group.request.sampling.n
        if part.sample is not None or len(group.done) == total:
            self._depot.drop(part.parcel)
            self._forget_seen(part)
            group.parts = {sample: each for sample, each in group.parts.items() if each is not part}
        self._queue.served(group.work // total, event.times.total / 1000)
        if len(group.done) == total:
            self._end(group)
        group.sink(event)

    def _fail(self, group: Group, error: MMServeError) -> None:
        for part in group.parts.values():
            worker = self._dispatch.workers.get(part.worker or "")
            if worker is not None:
                worker.cancel(self.info.name, [part.id], Cancelled("the request was cancelled"))
            else:
                self._dispatch.withdraw(part)
            self._depot.drop(part.parcel)
            self._forget_seen(part)
        group.parts = {}
        self._end(group)
        group.sink(Failed(error))

    def _end(self, group: Group) -> None:
        del self._groups[group.id]
        self._leave_queue(group)
        self._queue.end(group.request.sampling.n)

    def _leave_queue(self, group: Group) -> None:
        if not group.begun:
            group.begun = True
            self._queue.leave(group.request.tenant, group.request.sampling.n, group.work, group.due)

    def _lost(self, part: Part) -> None:
        """Its worker ended, or never had it: it goes on from where it was saved."""
        part.losses += 1
        if part.losses > self._settings.max_losses:
            why = f"{part.losses} workers ended while they had the request; it may be the cause: send it again, or not"
            self._fail(part.group, Unavailable(why))
            return
        self._dispatch.wait(part)

    def _timed(self, role: str, run: Mapping[str, float]) -> None:
        """Note what a stage took of a request that left it."""
        if role == "encode":
            self._dispatch.took(role, run.get("load", 0.0) + run.get("tokenize", 0.0) + run.get("encode", 0.0))
        elif role == "prefill":
            self._dispatch.took(role, run.get("prefill", 0.0))

    def _forget(self, item: Item | Lost) -> None:
        """A state of a request that has ended, or is elsewhere."""
        if isinstance(item, Moved):
            self._depot.drop(item.parcel)
