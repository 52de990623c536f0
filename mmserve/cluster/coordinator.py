"""The engine of one model whose stages are on the workers of a cluster: takes requests in, sends each on from worker to
worker, and lets those that lose their worker go on from their last saved state.

Tokens do not depend on where a request runs, so what comes again after a loss is what the client has already.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.messages import Beat, Happened, Item, Moved, Order, Parcel, Refused, without_media
from mmserve.cluster.requests import Group, Part, Sink
from mmserve.cluster.routing import Candidate, Seen, choose, cost, media, room, sharded
from mmserve.cluster.switching import Demand, Switching
from mmserve.config import EngineConfig
from mmserve.core.constraint import CheckedConstraint
from mmserve.core.events import Admitted, Delta, Draft, Event, Failed, Finished, Snapshot
from mmserve.core.handover import ROLES, Handover
from mmserve.core.info import ModelInfo
from mmserve.core.plan import Served
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
from mmserve.schedule.fair import charged, fair_order
from mmserve.waiting import WaitingQueue

logger = logging.getLogger("mmserve.cluster")

#: Seconds after a request's deadline until it is ended here: its worker ends it by itself, and knows where it was.
_GRACE = 0.5
#: How much of a mean is new with each value.
_NEW = 0.2


class Worker(Protocol):
    """A worker as the coordinator sees it; no call waits for it."""

    @property
    def name(self) -> str:
        """What it is called in logs."""

    @property
    def roles(self) -> frozenset[str]:
        """The stages that it runs now."""

    def take(self, orders: list[Order]) -> None:
        """Go on with these."""

    def cancel(self, model: str, ids: list[RequestId], error: MMServeError) -> None:
        """End these, by the ids that they have there."""

    def serve(self, roles: Iterable[str]) -> None:
        """Run these stages from now on."""


class Depot(Protocol):
    """Where states are between two workers."""

    def keep(self, parcel: Parcel) -> Parcel:
        """A parcel of the same bytes that is there even if the worker that made it ends. Raises ``TransferError``."""

    def sent(self, parcel: Parcel, worker: str) -> Parcel:
        """The same for ``worker`` to read."""

    def drop(self, parcel: Parcel) -> None:
        """Nobody reads it any more."""


class Coordinator:
    """``EngineLike``, over workers that come and go. Every method may be called from any thread."""

    def __init__(self, info: ModelInfo, engine: EngineConfig, settings: ClusterSettings, depot: Depot) -> None:
        self.info, self._engine, self._settings, self._depot = info, engine, settings, depot
        self._queue = WaitingQueue(engine)
        self._lock = threading.RLock()
        self._groups: dict[RequestId, Group] = {}
        self._waiting: dict[str, list[Part]] = {role: [] for role in ROLES}
        self._workers: dict[str, Worker] = {}
        self._stats: dict[str, Stats] = {}
        self._served = dict.fromkeys(ROLES, Served())
        self._seen = Seen()
        self._seconds = dict.fromkeys(ROLES, 0.0)  # means of what a request takes of a worker
        self._switching = Switching(settings.decide_seconds)
        self.switches = self.losses = 0  # roles changed, workers lost

    # --- as an engine ---

    def start(self) -> None:
        """Take requests from now on."""
        self._queue.refusal = ""

    def submit(self, request: Request, sink: Sink) -> None:
        """As of ``Engine.submit``; what a worker refuses comes as ``Failed``."""
        if request.adapter:
            raise Unimplemented("a model whose stages are on other machines takes no adapters")
        self._queue.check(request)
        group = Group(request, sink, time.monotonic())
        group.parts[None] = part = Part(group, None, Handover(request, Stage.QUEUED, None))
        with self._queue.lock:
            ahead = self._queue.take(request, group.due, of_session=False)
        with self._lock:
            self._groups[request.id] = group
            sink(Admitted(ahead))
            if not self._share_out(part):
                self._wait(part)
            self._dispatch()

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
            each = list(self._stats.values())
            stages = Counter({f"waiting_{role}": len(waiting) for role, waiting in self._waiting.items()})
            for one in each:
                stages.update(one.stages)
        total = _summed(each)
        return replace(
            total,
            live=self._queue.admitted,
            queued=self._queue.queued,
            shed=self._queue.shed,
            stages=dict(stages),
            expected_wait=self._queue.expected_wait(),
        )

    # --- what the fleet reports ---

    def joined(self, worker: Worker) -> None:
        """A worker is ready."""
        with self._lock:
            self._workers[worker.name] = worker
            self._dispatch()

    def left(self, name: str) -> None:
        """A worker has ended, or is given up: what it had goes on elsewhere."""
        with self._lock:
            self._workers.pop(name, None)
            self._stats.pop(name, None)
            self.losses += 1
            lost = [
                part for group in list(self._groups.values()) for part in group.parts.values() if part.worker == name
            ]
            for part in lost:
                self._lost(part)
            self._dispatch()

    def take(self, worker: str, items: Sequence[Item]) -> None:
        """What a worker reports of this model's requests, in order."""
        with self._lock:
            for item in items:
                if isinstance(item, Beat):
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
            self._dispatch()

    def tick(self, now: float) -> None:
        """To be called a few times a second; ``now`` is on the monotonic clock (seconds)."""
        self._queue.measure(now)
        with self._lock:
            for group in list(self._groups.values()):
                deadline = group.request.deadline
                if deadline is not None and deadline + _GRACE <= now:
                    self._fail(group, DeadlineExceeded("the deadline passed before the request finished"))

    def switch(self, now: float) -> None:
        """Change a worker's role where that is due; to be called about once a second."""
        with self._lock:
            in_hand = self._in_hand()
            workers = {name: (worker.roles, sum(in_hand[name].values())) for name, worker in self._workers.items()}
            busy: Counter[str] = Counter()
            for counts in in_hand.values():
                busy.update(counts)
            demand = {role: Demand(len(self._waiting[role]) + busy[role], self._seconds[role]) for role in ROLES}
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
            self._workers[change.name].serve([change.given_to])
            self._dispatch()

    # --- locked ---

    def _share_out(self, whole: Part) -> bool:
        """Whether several encode workers that have nothing to do share the media of a request, which waits for them."""
        in_hand = self._in_hand()
        idle = [name for name, each in self._workers.items() if "encode" in each.roles and not in_hand[name].total()]
        free = 0 if self._waiting["encode"] else len(idle)
        found = sharded(whole.point.request, free, self._settings.shard_pixels) if free > 1 else []
        for i, (chosen, request) in enumerate(found):
            shard = Part(whole.group, -1 - i, Handover(request, Stage.QUEUED, None), shard=chosen)
            whole.group.parts[shard.sample] = shard
            self._wait(shard)
        return bool(found)

    def _shard_ended(self, group: Group, shard: Part, item: Item) -> None:
        """A shard is encoded, or cannot be: then whoever has the whole request does that, and meets the error."""
        whole = group.parts[None]
        if isinstance(item, Moved):
            try:
                whole.seen.append(self._depot.keep(item.parcel))
            except TransferError as error:  # its worker has just ended
                logger.warning("a shard of request %s is lost: %s", group.id, error)
                self._lost(shard)
                return
        del group.parts[shard.sample]
        if not any(part.shard for part in group.parts.values()):
            self._wait(whole)

    def _forget_seen(self, part: Part) -> None:
        for parcel in part.seen:
            self._depot.drop(parcel)
        part.seen = []

    def _took(self, group: Group, part: Part, item: Item) -> None:
        if part.shard:
            self._shard_ended(group, part, item)
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
        try:
            parcel = self._depot.keep(item.parcel)
        except TransferError as error:  # its worker has just ended: what was saved before counts
            logger.warning("a state of request %s is lost: %s", group.id, error)
            if not item.stays:
                self._lost(part)
            return
        self._depot.drop(part.parcel)
        self._forget_seen(part)
        own = self._own(part)
        request = own if item.handover.stage is Stage.QUEUED else without_media(own)
        part.point, part.parcel = replace(item.handover, request=request), parcel
        if not item.stays:
            self._timed(part.stage, item.handover.run)
            self._wait(part)

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
            self._mean(role, ms / 1000)
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
            worker = self._workers.get(part.worker or "")
            if worker is not None:
                worker.cancel(self.info.name, [part.id], Cancelled("the request was cancelled"))
            elif part in self._waiting[part.stage]:
                self._waiting[part.stage].remove(part)
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
        self._wait(part)

    def _wait(self, part: Part) -> None:
        part.waits()
        part.cost = cost(part.stage, part.point)
        self._waiting[part.stage].append(part)

    def _dispatch(self) -> None:
        """Send what waits to workers that have room for it; the last stage first, which ends requests."""
        if not any(self._waiting.values()):
            return
        in_hand, loads = self._in_hand(), self._loads()
        orders: dict[str, list[Order]] = {}
        for role in reversed(ROLES):
            waiting, self._waiting[role] = self._waiting[role], []
            if not waiting:
                continue
            now = time.monotonic()
            waiting.sort(key=lambda part: part.group.due)
            entries, costs = [part.entry(now) for part in waiting], [part.cost for part in waiting]
            for i in fair_order(entries, costs, self._served[role]):
                part = waiting[i]
                name = self._chosen(role, part, in_hand, loads)
                if name is None:
                    self._waiting[role].append(part)
                    continue
                self._served[role] = charged(self._served[role], [(entries[i], costs[i])])
                in_hand[name][role] += 1
                loads[name, role] += part.cost
                self._leave_queue(part.group)
                sent = partial(self._depot.sent, worker=name)
                orders.setdefault(name, []).append(part.order(self.info.name, name, sent))
        for name, each in orders.items():
            self._workers[name].take(each)

    def _chosen(
        self, role: str, part: Part, in_hand: Mapping[str, Counter[str]], loads: Mapping[tuple[str, str], float]
    ) -> str | None:
        things = media(part.point.request) if role == "encode" else part.point.keys[:1] if role == "prefill" else ()
        candidates = [
            Candidate(name, loads.get((name, role), 0.0), self._seen.by(things, name))
            for name, worker in self._workers.items()
            if role in worker.roles and in_hand[name][role] < room(worker.roles, role, self._engine.max_running)
        ]
        name = choose(candidates, saved=part.cost)
        if name is not None:
            self._seen.note(things, name)
        return name

    def _loads(self) -> defaultdict[tuple[str, str], float]:
        """The cost of the requests that each worker has, by its name and the stage that they came for."""
        loads: defaultdict[tuple[str, str], float] = defaultdict(float)
        for group in self._groups.values():
            for part in group.parts.values():
                if part.worker is not None:
                    loads[part.worker, part.stage] += part.cost
        return loads

    def _in_hand(self) -> dict[str, Counter[str]]:
        """Requests that each worker has, by the stage that they came for."""
        found: dict[str, Counter[str]] = {name: Counter() for name in self._workers}
        for group in self._groups.values():
            for part in group.parts.values():
                if part.worker in found:
                    found[part.worker][part.stage] += 1
        return found

    def _timed(self, role: str, run: Mapping[str, float]) -> None:
        """Note what a stage took of a request that left it."""
        if role == "encode":
            self._mean(role, run.get("load", 0.0) + run.get("tokenize", 0.0) + run.get("encode", 0.0))
        elif role == "prefill":
            self._mean(role, run.get("prefill", 0.0))

    def _mean(self, role: str, seconds: float) -> None:
        before = self._seconds[role]
        self._seconds[role] = before + _NEW * (seconds - before) if before else seconds

    def _forget(self, item: Item) -> None:
        """A state of a request that has ended, or is elsewhere."""
        if isinstance(item, Moved):
            self._depot.drop(item.parcel)


def _summed(each: Sequence[Stats]) -> Stats:
    """The sums of what workers hold; caches are of the process that has most."""
    if not each:
        return Stats(0, 0, 0, 0)
    counts = ("pages_in_use", "held", "pages", "cached_pages", "prefix_lookups", "prefix_hits")
    steps = ("constraint_steps", "constraint_fallbacks", "constraint_late")
    sums = {name: sum(getattr(one, name) for one in each) for name in (*counts, *steps)}
    return replace(max(each, key=lambda one: one.token_cache.lookups), **sums)
