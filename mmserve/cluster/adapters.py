"""LoRA adapters of a model whose stages run on the workers of a cluster: each worker reads its own folder, and loads
the adapters that are served or used by requests in progress."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mmserve.cluster.asking import Answers, WorkerEnded, ask_all
from mmserve.cluster.workers import Worker
from mmserve.core.info import AdapterInfo
from mmserve.core.request import Request
from mmserve.errors import FailedPrecondition, MMServeError, NotFound
from mmserve.models.adapters import key_of, name_of, no_folder, unknown

logger = logging.getLogger("mmserve.cluster")


class ClusterAdapters:
    """``AdaptersLike`` of ``model``; thread-safe. ``folder``: the setting; empty = no adapters can be loaded except for
    ``own``, those of its checkpoint, which are served from the start because every worker has them.

    ``in_use``: the keys of adapters of requests in progress. A worker keeps an adapter, by its key, as long as it is
    served or in use: requests that have begun with a dropped or replaced adapter continue with it.
    """

    def __init__(
        self, model: str, folder: str, in_use: Callable[[], set[str]], own: Sequence[AdapterInfo] = ()
    ) -> None:
        self._model, self._folder, self._in_use, self._own = model, folder, in_use, own
        self._changes = threading.Lock()  # serialises changes of the workers' adapters
        self._lock = threading.Lock()  # guards the fields below; held briefly
        self._served = {info.name: info for info in own}
        self._workers: dict[str, Worker] = {}
        self._held: dict[str, set[str]] = {}  # keys, by worker

    def load(self, name: str) -> AdapterInfo:
        """As ``models.adapters.Adapters.load``, on every worker or, for requests, on none.

        Raises the errors of that method, with the name of the worker, and ``FailedPrecondition`` if the files of
        workers differ.
        """
        with self._changes:
            answers = ask_all(self._all_workers(), self._model, "hold", name)
            with self._lock:
                for worker, info in answers.returned.items():
                    self._held.get(worker, set()).add(key_of(info))
            error = answers.error() or differing(name, answers)
            if error is None:
                info = next(iter(answers.returned.values()))
                with self._lock:
                    self._served[name] = info
            self._discard_unused()
        if error is not None:
            raise error
        return info

    def drop(self, name: str) -> None:
        """Stop serving ``name``; requests that have begun with it continue. Raises ``NotFound``."""
        with self._changes:
            with self._lock:
                if name not in self._served:
                    raise unknown(self._model, name, self._served)
                del self._served[name]
            self._discard_unused()

    def listed(self) -> list[AdapterInfo]:
        """The loaded adapters, by name."""
        with self._lock:
            return [self._served[name] for name in sorted(self._served)]

    def resolved(self, request: Request) -> Request:
        """``request`` with its adapter's name replaced by the key; raises ``NotFound``, or ``Unimplemented`` if none
        can be loaded. Call with the lock of ``in_use``, until the request is in progress."""
        if not request.adapter:
            return request
        with self._lock:
            info = self._served.get(request.adapter)
            if info is None:
                takes = self._folder or self._own
                raise unknown(self._model, request.adapter, self._served) if takes else no_folder()
        return replace(request, adapter=key_of(info))

    # --- workers ---

    def load_adapters(self, worker: Worker) -> None:
        """Load what is served and in use on a worker, before it gets requests; blocks.

        Adapters that it cannot read, or that differ from those of others, are logged, and requests for them go to
        others.
        """
        with self._changes:
            used = self._in_use()
            with self._lock:
                wanted = {key_of(info) for info in self._served.values()} | used
                self._workers[worker.name], self._held[worker.name] = worker, {key_of(info) for info in self._own}
            for name in sorted({name_of(key) for key in wanted}):
                try:
                    key = key_of(worker.ask(self._model, "hold", (name,)))
                except WorkerEnded:
                    self.worker_exited(worker.name)
                    return
                except MMServeError as error:
                    logger.error("worker %s cannot read the adapter %s: %s", worker.name, name, error)
                    continue
                if key not in wanted:
                    logger.error("worker %s has other files of the adapter %s than other workers", worker.name, name)
                with self._lock:
                    self._held.get(worker.name, set()).add(key)
            self._discard_unused()

    def worker_exited(self, worker: str) -> None:
        """A worker has exited."""
        with self._lock:
            self._workers.pop(worker, None)
            self._held.pop(worker, None)

    def holds(self, worker: str, key: str) -> bool:
        """Whether a worker has the adapter with this key; True for the empty key, which means no adapter."""
        with self._lock:
            return not key or key in self._held.get(worker, ())

    def tick(self) -> None:
        """Free adapters that are no longer needed; to be called regularly, without any lock. Does not block."""
        if self._changes.acquire(blocking=False):
            try:
                self._discard_unused()
            finally:
                self._changes.release()

    def _all_workers(self) -> list[Worker]:
        with self._lock:
            return list(self._workers.values())

    def _discard_unused(self) -> None:
        """Have workers free adapters that are neither served nor in use. Call with ``_changes``."""
        with self._lock:
            served = {key_of(info) for info in self._served.values()}
            if all(held <= served for held in self._held.values()):
                return
        wanted = served | self._in_use()
        with self._lock:
            for name, held in self._held.items():
                if unused := sorted(held - wanted):
                    held.difference_update(unused)
                    self._workers[name].post(self._model, "discard", (unused,))


def differing(name: str, answers: Answers) -> MMServeError | None:
    """An error that names the workers whose adapter ``name`` differs from the majority's; None if all are equal."""
    digests: Mapping[str, str] = {worker: info.digest for worker, info in answers.returned.items()}
    majority = Counter(digests.values()).most_common(1)[0][0]
    others = [f"worker {worker} has {digest}" for worker, digest in digests.items() if digest != majority]
    if not others:
        return None
    return FailedPrecondition(
        f"the files of the adapter {name!r} differ: {', '.join(others)}, and the other workers {majority}: "
        "[engine] adapter_folder must have the same contents on all hosts"
    )


def adapter_missing(key: str, role: str) -> MMServeError:
    """The error if no worker of ``role`` has the adapter that a request has begun with."""
    return NotFound(f"no worker that runs {role} has the adapter {name_of(key)!r} any more: load it again")
