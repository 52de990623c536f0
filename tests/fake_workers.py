"""A coordinator whose workers are objects of the test, and a payloads whose states come when the test lets them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from harness import Call

from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.coordinator import Coordinator
from mmserve.cluster.messages import Order, RequestEvent
from mmserve.cluster.questions import QUESTIONS
from mmserve.config import EngineConfig
from mmserve.core.events import Finished, StageTimes, Usage
from mmserve.core.info import AdapterInfo
from mmserve.core.request import Request
from mmserve.errors import MMServeError
from mmserve.video.support import SessionSupport

MODEL, PATIENCE = "m", 60.0
ALL = frozenset({"encode", "prefill", "decode"})


class PayloadStore:
    """Parcels are strings; one that is ``slow`` is handed on once the test lets it. ``held``: those that are there."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.held: list[str] = []

    def persist(self, parcel: Any) -> Any:
        if parcel == "slow":
            self.entered.set()
            assert self.go_on.wait(PATIENCE)
        if parcel is not None:
            self.held.append(parcel)
        return parcel

    def own(self, parcel: Any) -> Any:
        return self.persist(parcel)

    def sent(self, parcel: Any, worker: str) -> Any:
        return parcel

    def drop(self, parcel: Any) -> None:
        if parcel is not None:
            self.held.remove(parcel)


@dataclass
class Worker:
    """Takes note of its orders, and answers questions as ``answers`` has them: a value, an error or a function."""

    name: str
    roles: frozenset[str] = ALL
    answers: dict[str, Any] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    asked: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def take(self, orders: list[Order]) -> None:
        self.orders += orders

    def cancel(self, model: str, ids: list[str], error: MMServeError) -> None:
        self.cancelled += ids

    def serve(self, roles: Any) -> None:
        self.roles = frozenset(roles)

    def ask(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        assert model == MODEL and question in QUESTIONS
        self.asked.append((question, tuple(arguments)))
        answer = self.answers[question]
        if isinstance(answer, MMServeError):
            raise answer
        return answer(*arguments) if callable(answer) else answer

    def post(self, model: str, question: str, arguments: Sequence[Any]) -> None:
        assert question in QUESTIONS
        self.asked.append((question, tuple(arguments)))

    def discarded(self) -> list[str]:
        """Keys of adapters that it was asked to discard."""
        return [key for question, arguments in self.asked if question == "discard" for key in arguments[0]]


def coordinator(
    *workers: Worker,
    payloads: PayloadStore | None = None,
    support: SessionSupport | None = None,
    settings: ClusterSettings | None = None,
    own: Sequence[AdapterInfo] = (),
    **engine: Any,
) -> Coordinator:
    config = EngineConfig(**{"max_running": 4, "adapter_folder": "/adapters", **engine})
    more: dict[str, Any] = {"adapters": own} if support is None else {"adapters": own, "support": support}
    made = Coordinator(
        SimpleNamespace(name=MODEL), config, settings or ClusterSettings(), payloads or PayloadStore(), **more
    )  # type: ignore[arg-type]
    made.start()
    for worker in workers:
        join(made, worker)
    return made


def join(made: Coordinator, worker: Worker) -> None:
    made.load_adapters(worker)
    made.worker_ready(worker)


def submit(made: Coordinator, request: Request) -> Call:
    call = Call(request)
    made.submit(request, call.sink)
    return call


def finish(made: Coordinator, worker: Worker, name: str, sample: int | None = None) -> None:
    usage, times = Usage(1, 0, 1), StageTimes(0.0, 0.0, 0.0, 0.0, 0.0)
    own = {} if sample is None else {"sample": sample}
    event = Finished(reason="stop", text="", usage=usage, times=times, forwards=1, recomputed_tokens=0, **own)
    made.take(worker.name, [RequestEvent(MODEL, name, sample, event)])
