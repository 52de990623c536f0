"""Calls of all workers of a cluster in parallel, with their errors combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from mmserve.cluster.workers import Worker
from mmserve.errors import Internal, InvalidArgument, MMServeError, Unavailable


class WorkerEnded(Unavailable):
    """A worker exited before it replied, or did not reply in time."""


@dataclass(frozen=True)
class Answers:
    """Results and exceptions of workers, by their names; workers that have exited are in neither."""

    returned: Mapping[str, Any]
    raised: Mapping[str, MMServeError]

    def error(self) -> MMServeError | None:
        """The combined error, naming the worker unless all of them raised the same; None if none did."""
        if not self.raised:
            return None
        name, error = next(iter(self.raised.items()))
        same = not self.returned and len({(type(each), each.message) for each in self.raised.values()}) == 1
        return error if same else of_worker(name, error)


def ask_all(workers: Sequence[Worker], model: str, question: str, *arguments: Any) -> Answers:
    """Call ``workers`` in parallel, and wait for all; raises ``Unavailable`` if none replies."""
    returned: dict[str, Any] = {}
    raised: dict[str, MMServeError] = {}

    def ask(worker: Worker) -> None:
        try:
            returned[worker.name] = worker.ask(model, question, arguments)
        except WorkerEnded:
            return  # its replacement has nothing to report
        except MMServeError as error:
            raised[worker.name] = error

    if workers:
        with ThreadPoolExecutor(len(workers), "mmserve-ask") as threads:
            list(threads.map(ask, workers))
    if not returned and not raised:
        raise _none_replies(model)
    return Answers(dict(sorted(returned.items())), dict(sorted(raised.items())))


def ask_any(workers: Sequence[Worker], model: str, question: str, *arguments: Any) -> Any:
    """The result of the first of ``workers`` that replies; raises its errors, and ``Unavailable`` if none does."""
    for worker in workers:
        try:
            return worker.ask(model, question, arguments)
        except WorkerEnded:
            continue
    raise _none_replies(model)


def _none_replies(model: str) -> Unavailable:
    return Unavailable(f"no worker of {model!r} answers: they are being replaced, try again in a few seconds")


def of_worker(name: str, error: MMServeError) -> MMServeError:
    """``error``, with the same type, prefixed by the name of the worker that raised it."""
    if isinstance(error, InvalidArgument):
        return InvalidArgument(*(replace(v, description=f"{v.description} (worker {name})") for v in error.violations))
    if isinstance(error, Internal):
        return error  # its id is in that worker's log
    return type(error)(f"{error.message} (worker {name})")
