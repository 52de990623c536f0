"""A member of the cluster, and its current worker process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from mmserve.cluster import ray_actors
from mmserve.cluster.asking import WorkerEnded
from mmserve.cluster.config import ClusterSettings, WorkerSettings
from mmserve.cluster.messages import Described, Order
from mmserve.core.request import RequestId
from mmserve.errors import MMServeError
from mmserve.transfer.nixl import Region
from mmserve.transfer.shared_memory import Ticket


class Member:
    """A worker's slot: the roles remain when its process is replaced."""

    def __init__(self, index: int, settings: WorkerSettings, cluster: ClusterSettings) -> None:
        self.index, self.settings, self._cluster = index, settings, cluster
        self.roles = settings.stages
        self.threads = max(1, int(settings.cpus))  # torch threads
        self.name = f"{index}"
        self.actor: ray_actors.Actor | None = None
        self.described: Described | None = None  # set while it serves
        self.silent = 0.0  # seconds since its last report
        self.begun = 0  # number of processes so far
        self._free: list[Ticket | Region] = []  # memory that the worker can reuse
        #: Held while a process is started, removed or drained, until the coordinators know: they refer to the member by
        #: its process's name, and would otherwise call the next process by it.
        self.changing = threading.Lock()
        self._noting = threading.Lock()
        self._assigning = threading.Lock()
        self._drained: frozenset[str] | None = None  # its roles, while it is drained because it is slow

    def take(self, orders: list[Order]) -> None:
        """See ``workers.Worker.take``."""
        self._call("take", orders)

    def cancel(self, model: str, ids: list[RequestId], error: MMServeError | None) -> None:
        """See ``workers.Worker.cancel``."""
        self._call("cancel", model, ids, error)

    def serve(self, roles: Iterable[str]) -> None:
        """See ``workers.Worker.serve``; a drained worker gets these roles when it resumes."""
        with self._assigning:
            if self._drained is None:
                self._run(frozenset(roles))
            else:
                self._drained = frozenset(roles)

    def ask(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        """See ``workers.Worker.ask``."""
        if (actor := self.actor) is None:  # read once: other threads may clear it
            raise WorkerEnded(f"worker {self.name} has ended")
        return actor.ask(model, question, arguments)

    def post(self, model: str, question: str, arguments: Sequence[Any]) -> None:
        """See ``workers.Worker.post``."""
        if (actor := self.actor) is not None:
            actor.post(model, question, arguments)

    def drain(self) -> None:
        """Run no stage until ``resume``: its requests continue on other workers."""
        with self._assigning:
            self._drained = self.roles
            self._run(frozenset())

    def resume(self) -> None:
        """Restore its roles after ``drain``, if that was called."""
        with self._assigning:
            if self._drained is not None:
                roles, self._drained = self._drained, None
                self._run(roles)

    def _run(self, roles: frozenset[str]) -> None:
        self.roles = roles
        self._call("serve", list(roles), self._cluster.save_every, self._cluster.ahead_kb << 10)

    @property
    def drained(self) -> bool:
        """Whether it has no roles because it is slow."""
        return self._drained is not None

    def reuse(self, ticket: Ticket | Region) -> None:
        """Record memory that the worker can reuse."""
        with self._noting:
            self._free.append(ticket)

    def flush(self) -> None:
        """Send the worker the memory recorded by ``reuse``, if it belongs to the current process; each process numbers
        its memory from 1."""
        with self._noting:
            free, self._free = self._free, []
        actor, described = self.actor, self.described  # in this order: no process gets another's numbers
        if actor is None or described is None:
            return
        if numbers := [ticket.number for ticket in free if ticket.address == described.arena]:
            actor.call("reuse", numbers)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call the worker's method ``name``, unless it has exited."""
        if (actor := self.actor) is not None:
            actor.call(name, *arguments)
