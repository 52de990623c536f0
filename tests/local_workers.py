"""Workers of a cluster that are real but for Ray: each with engines, shared memory and threads of its own, in this
process.

They end at once, in the middle of anything, as a process that is killed: nothing that they report afterwards counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from mmserve.cluster.asking import WorkerEnded
from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.coordinator import Coordinator
from mmserve.cluster.messages import STREAM, Order
from mmserve.cluster.payload_store import SharedPayloadStore
from mmserve.cluster.worker import Worker
from mmserve.config import Config
from mmserve.core.request import RequestId
from mmserve.errors import MMServeError
from mmserve.transfer.shared_memory import host_id


class LocalWorker:
    """As ``cluster.workers.Worker``; ``begin`` after the coordinator is known."""

    def __init__(self, name: str, roles: Iterable[str], config: Config, transport: str = "shared_memory") -> None:
        self.name, self.roles = name, frozenset(roles)
        self.worker, self.dead = Worker(), False
        self.described = self.worker.load(config, transport=transport, linked=True, kv_bits=0)
        self._commands, self._questions, self._streams = (ThreadPoolExecutor(1) for _ in range(3))
        self._reporting = threading.Thread(target=self._report, daemon=True)
        self._coordinator: Coordinator | None = None

    def begin(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        coordinator.load_adapters(self)
        self.serve(self.roles)
        self._reporting.start()
        coordinator.worker_ready(self)

    def take(self, orders: list[Order]) -> None:
        self._command(self.worker.take, orders)

    def cancel(self, model: str, ids: list[RequestId], error: MMServeError) -> None:
        self._command(self.worker.cancel, model, ids, error)

    def serve(self, roles: Iterable[str]) -> None:
        self.roles = frozenset(roles)
        self._command(self.worker.serve, self.roles, 2, 0)

    def ask(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        return self._asked(model, question, arguments).result()

    def post(self, model: str, question: str, arguments: Sequence[Any]) -> None:
        if not self.dead:
            self._asked(model, question, arguments)

    def kill(self) -> None:
        """It ends now, and is noticed."""
        self.dead = True
        if self._coordinator is not None:
            self._coordinator.worker_exited(self.name)

    def close(self) -> None:
        """Free what it has."""
        self.dead = True
        for threads in (self._commands, self._questions, self._streams):
            threads.shutdown()
        if self._reporting.ident is not None:
            self._reporting.join()
        self.worker.close()
        self.worker.parcels.close()

    def _command(self, call: Callable[..., Any], *arguments: Any) -> None:
        if not self.dead:
            self._commands.submit(call, *arguments)

    def _asked(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        if self.dead:
            raise WorkerEnded(f"worker {self.name} has ended")
        threads = self._streams if question.startswith(STREAM) else self._questions
        return threads.submit(self._answered, model, question, arguments)

    def _answered(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        answer = self.worker.ask(model, question, arguments) if not self.dead else None
        if self.dead:
            raise WorkerEnded(f"worker {self.name} has ended")
        return answer

    def _report(self) -> None:
        assert self._coordinator is not None
        for items in self.worker.events():
            if self.dead:
                return
            self._coordinator.take(
                self.name, [item for item in items if getattr(item, "model", None) or hasattr(item, "stats")]
            )


@contextmanager
def local_cluster(config: Config, settings: ClusterSettings, *workers: LocalWorker) -> Iterator[Coordinator]:
    """A coordinator of the one model of ``workers``; nothing is left at the end."""
    [(name, info)] = workers[0].described.models.items()
    arenas = {each.described.arena: each for each in workers}

    def reuse(ticket: Any) -> None:
        if (worker := arenas.get(ticket.address)) is not None and not worker.dead:
            worker._command(worker.worker.reuse, [ticket.number])

    payloads = SharedPayloadStore(lambda _name: host_id(), reuse)
    described = workers[0].described
    made = Coordinator(info, config.engine, settings, payloads, described.sessions[name], described.adapters[name])
    made.start()
    try:
        for worker in workers:
            worker.begin(made)
        yield made
        assert made.stats().live == 0
        assert payloads.held == 0, "no state is kept"
    finally:
        made.stop()
        for worker in workers:
            worker.close()
        payloads.close()
