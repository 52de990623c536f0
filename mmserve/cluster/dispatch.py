"""Dispatch of requests to workers: the queue of each stage, and the load of the workers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from mmserve.cluster.index import Index, beginning, media
from mmserve.cluster.messages import Order
from mmserve.cluster.requests import Part
from mmserve.cluster.routing import OF_TEXT, Candidate, choose, cost, max_requests, sharded
from mmserve.cluster.switching import Demand
from mmserve.cluster.workers import PayloadStore, Worker
from mmserve.core.handover import ROLES, Handover
from mmserve.core.plan import Served
from mmserve.core.request import Stage
from mmserve.schedule.fair import charged, fair_order

#: Weight of a new value in running means.
_NEW = 0.2
#: Whether a worker, given by its name, has the adapter with this key.
Holds = Callable[[str, str], bool]


class Dispatch:
    """The waiting parts of requests to ``model``, and the workers that they are sent to. Call with the coordinator's
    lock.

    ``parts``: all parts that have not ended. ``holds``: see ``Holds``. ``running``: number of answers that a worker
    decodes concurrently.
    """

    def __init__(
        self, model: str, running: int, payloads: PayloadStore, parts: Callable[[], Iterable[Part]], holds: Holds
    ) -> None:
        self._model, self._running, self._payloads, self._parts, self._holds = model, running, payloads, parts, holds
        self.workers: dict[str, Worker] = {}
        self.index = Index()
        self._waiting: dict[str, list[Part]] = {role: [] for role in ROLES}
        self._served = dict.fromkeys(ROLES, Served())
        self._seconds = dict.fromkeys(ROLES, 0.0)  # mean service time of each role

    def wait(self, part: Part) -> None:
        """Queue ``part``, to continue from its point on any worker of its next stage."""
        part.waits()
        part.cost = cost(part.stage, part.point)
        request = part.point.request
        whole = part.stage == "encode" and all(share.of == 1 for share in part.shard)
        part.media = media(request) if whole else ()
        if part.stage == "encode":
            part.prefix = () if part.shard else beginning(request)
        else:
            part.prefix = part.point.keys
        self._waiting[part.stage].append(part)

    def withdraw(self, part: Part) -> None:
        """Remove ``part`` from the queue."""
        if part in self._waiting[part.stage]:
            self._waiting[part.stage].remove(part)

    def waiting(self) -> dict[str, int]:
        """Number of waiting parts of each stage."""
        return {role: len(waiting) for role, waiting in self._waiting.items()}

    def shards(self, whole: Part, least: int) -> list[Part]:
        """Split the media of a request into a part for each idle encode worker; empty if there are fewer than two such
        workers, fewer than ``least`` pixels (0 = never split), or if one of these workers has all of it cached."""
        request_counts = self._requests_by_worker()
        idle = [
            name for name, each in self.workers.items() if "encode" in each.roles and not request_counts[name].total()
        ]
        free = 0 if self._waiting["encode"] else len(idle)
        found = sharded(whole.point.request, free, least) if free > 1 else []
        if found and any(self.index.share(media(whole.point.request), name) == 1 for name in idle):
            return []
        return [
            Part(whole.group, -1 - i, Handover(request, Stage.QUEUED, None), shard=chosen)
            for i, (chosen, request) in enumerate(found)
        ]

    def send(self) -> tuple[list[Part], list[Part], list[tuple[Part, Exception]]]:
        """Send waiting parts to workers with free capacity; later stages first, because they complete requests.

        Returns the parts sent; those whose adapter no worker has; and those that could not be sent because their state
        cannot be transferred, with the error.
        """
        sent: list[Part] = []
        without_adapter: list[Part] = []
        lost: list[tuple[Part, Exception]] = []
        if not any(self._waiting.values()):
            return sent, without_adapter, lost
        request_counts, loads = self._requests_by_worker(), self._loads()
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
                names = self._names_of(role)
                with_adapter = [name for name in names if self._holds(name, part.group.request.adapter)]
                if names and not with_adapter:
                    without_adapter.append(part)
                    continue
                name = part.reserved if part.reserved in with_adapter else None
                name = name or self._chosen(role, part, with_adapter, request_counts, loads)
                if name is None:
                    self._waiting[role].append(part)
                    continue
                reserved = part.reserved
                try:
                    order = part.order(self._model, name, partial(self._payloads.sent, worker=name))
                except Exception as error:  # noqa: BLE001 - TransferError, or Ray's: the others are sent
                    lost.append((part, error))
                    continue
                if reserved not in (None, name) and (other := self.workers.get(reserved or "")) is not None:
                    other.cancel(self._model, [part.id], None)
                self._served[role] = charged(self._served[role], [(entries[i], costs[i])])
                request_counts[name][role] += 1
                loads[name, role] += part.cost
                orders.setdefault(name, []).append(order)
                sent.append(part)
        for name, each in orders.items():
            self.workers[name].take(each)
        return sent, without_adapter, lost

    def reserve(self, part: Part) -> str | None:
        """The decode worker for K/V that are sent ahead while ``part`` is prefilled: one with free capacity; None if
        other parts wait for it."""
        if self._waiting["decode"]:
            return None
        adapter = part.group.request.adapter  # roles change: the worker with it may decode by now
        names = [name for name in self._names_of("decode") if name != part.worker and self._holds(name, adapter)]
        return self._chosen("decode", part, names, self._requests_by_worker(), self._loads())

    def record_service_time(self, role: str, seconds: float) -> None:
        """Record the service time of a request in the stage of ``role``."""
        before = self._seconds[role]
        self._seconds[role] = before + _NEW * (seconds - before) if before else seconds

    def demand(self) -> tuple[dict[str, Demand], dict[str, tuple[frozenset[str], int]]]:
        """The demand of each stage, and for each worker its roles and its number of requests."""
        request_counts = self._requests_by_worker()
        busy: Counter[str] = Counter()
        for counts in request_counts.values():
            busy.update(counts)
        demand = {role: Demand(len(self._waiting[role]) + busy[role], self._seconds[role]) for role in ROLES}
        return demand, {name: (worker.roles, request_counts[name].total()) for name, worker in self.workers.items()}

    def _names_of(self, role: str) -> list[str]:
        return [name for name, worker in self.workers.items() if role in worker.roles]

    def _chosen(
        self,
        role: str,
        part: Part,
        names: Iterable[str],
        request_counts: Mapping[str, Counter[str]],
        loads: Mapping[tuple[str, str], float],
    ) -> str | None:
        candidates = [
            Candidate(name, loads.get((name, role), 0.0), self._saved(role, part, name))
            for name in names
            if request_counts[name][role] < max_requests(self.workers[name].roles, role, self._running)
        ]
        name = choose(candidates)
        if name is not None:
            self.index.record(part.media, name)
            if "prefill" in self.workers[name].roles:
                self.index.record(part.prefix, name)
        return name

    def _saved(self, role: str, part: Part, name: str) -> float:
        """The part of the cost of ``part`` that the worker ``name`` saves by its caches."""
        if role == "encode":
            of_media = (part.cost - OF_TEXT) * self.index.share(part.media, name)
            return of_media + OF_TEXT * self.index.leading(part.prefix, name)
        return part.cost * self.index.leading(part.prefix, name) if role == "prefill" else 0.0

    def _loads(self) -> defaultdict[tuple[str, str], float]:
        """The total cost of each worker's requests, by its name and the stage for which they were sent."""
        loads: defaultdict[tuple[str, str], float] = defaultdict(float)
        for part in self._parts():
            if part.worker is not None:
                loads[part.worker, part.stage] += part.cost
            if part.reserved is not None:
                loads[part.reserved, "decode"] += 1.0
        return loads

    def _requests_by_worker(self) -> dict[str, Counter[str]]:
        """The number of each worker's requests, by the stage for which they were sent."""
        found: dict[str, Counter[str]] = {name: Counter() for name in self.workers}
        for part in self._parts():
            if part.worker in found:
                found[part.worker][part.stage] += 1
            if part.reserved in found:
                found[part.reserved]["decode"] += 1
        return found
