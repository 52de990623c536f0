"""A real engine with real threads around the tiny model, and ways to hold it still at a chosen point."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mmserve.config import EngineConfig, MediaConfig, resolve
from mmserve.core.events import Admitted, Delta, Event, Failed, Finished, Snapshot
from mmserve.core.request import Request, Stage
from mmserve.decode.schedulers import Discrete
from mmserve.engine.engine import Engine, Stats
from mmserve.errors import MMServeError
from mmserve.models.base import LoadedModel
from mmserve.tiers.caches import Caches

#: Seconds until a wait is given up: far more than anything here takes.
PATIENCE = 60.0

MAX_TOKENS = 128


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until ``condition`` holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.001)


def descriptors(of: str = "") -> int:
    """How many descriptors this process has of files whose names begin with ``of``.

    ``/memfd:`` are those of shared memory, which no thread that another test left opens or closes meanwhile. Objects
    that only wait for the garbage collector have none.
    """
    gc.collect()
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since it was listed, as the listing's own
            count += str(entry.readlink()).startswith(of)
    return count


class Call:
    """One submitted request and all its events."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.events: list[Event] = []
        self._ended = threading.Event()

    def sink(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, (Finished, Failed)):
            self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> Event:
        """The terminal event, checked to be the only one, the last one, and after ``Admitted``."""
        assert self._ended.wait(PATIENCE), f"{self.request.id} never ended: {self.events}"
        assert isinstance(self.events[0], Admitted)
        assert [isinstance(e, (Finished, Failed)) for e in self.events].count(True) == 1
        assert isinstance(self.events[-1], (Finished, Failed))
        return self.events[-1]

    def finished(self) -> Finished:
        last = self.wait()
        assert isinstance(last, Finished), last
        return last

    def error(self) -> MMServeError:
        last = self.wait()
        assert isinstance(last, Failed), last
        return last.error

    @property
    def deltas(self) -> list[str]:
        return [e.text for e in self.events if isinstance(e, Delta)]

    @property
    def snapshots(self) -> list[Snapshot]:
        return [e for e in self.events if isinstance(e, Snapshot)]


def stages_of(engine: Engine) -> dict[str, Any]:
    """What runs each step of requests, by the step's method."""
    found = engine.stages
    encoding = dict.fromkeys(("constrain", "load", "encode"), found.encoding)
    return {**encoding, "prefill": found.prefilling, "decode": found.decoding}


class Gate:
    """Holds a stage's batch before it runs, while closed and ``when`` says so of the batch's request ids."""

    def __init__(self, engine: Engine, stage: str, when: Callable[[set[str]], bool] = lambda _ids: True) -> None:
        self.entered, self._open = threading.Event(), threading.Event()
        owner = stages_of(engine)[stage]
        method = getattr(owner, stage)

        def held(batch: list[Any], *rest: Any) -> Any:
            if not self._open.is_set() and when({_id(item) for item in batch}):
                self.entered.set()
                assert self._open.wait(PATIENCE), "the gate was never opened"
            return method(batch, *rest)

        setattr(owner, stage, held)

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        assert self.entered.wait(PATIENCE), "no batch came to the gate"


def _id(item: Any) -> str:
    return item[0].id if isinstance(item, tuple) else item.id


class Bench:
    """An engine under test: what it was given, what its decode batches were, and each canvas at its end.

    After each step it checks that no committed token has changed; not so without ``watch``, for policies that edit.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        started: bool = True,
        watch: bool = True,
        schedulers: Mapping[str, Discrete] = MappingProxyType({}),
        cache: Caches | None = None,
        media: MediaConfig | None = None,
        **config: Any,
    ) -> None:
        rows = {"prefill_tokens": 2048, "decode_tokens": 4096}  # enough for all to share a batch
        settings = {
            "max_tokens": MAX_TOKENS,
            "torch_threads": 1,
            "page_size": 8,
            "max_pending_per_stage": 32,
            **rows,
            **config,
        }
        self.engine = Engine(model, resolve(EngineConfig(**settings)), media or MediaConfig(), schedulers, cache)
        self.gates: list[Gate] = []
        self.batches: list[list[str]] = []  # request ids of each decode batch
        self.canvases: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # tokens and committed_at after the latest step
        self.most_pages = 0
        if watch:
            self._watch()
        if started:
            self.engine.start()

    def _watch(self) -> None:
        decode, stages = self.engine.stages.decoding.decode, self.engine.stages

        def watched(batch: list[Request]) -> list[Any]:
            self.batches.append([r.id for r in batch])
            self.most_pages = max(self.most_pages, self.engine.stats().pages_in_use)
            outcomes = decode(batch)
            for request, result in zip(batch, outcomes, strict=True):
                if not isinstance(result, Exception):
                    self._keep(request.id, stages.decoding.live[request.id].canvas)
            return outcomes

        self.engine.stages.decoding.decode = watched  # type: ignore[method-assign]

    def _keep(self, name: str, canvas: Any) -> None:
        tokens, committed = canvas.tokens.copy(), canvas.committed_at.copy()
        if name in self.canvases:
            before, was = self.canvases[name]
            final = was <= canvas.step - 1
            assert (tokens[final] == before[final]).all(), "a committed token changed"
            assert (committed[final] == was[final]).all()
            assert (committed < 1 << 30).sum() > final.sum(), "a step committed nothing"
        self.canvases[name] = tokens, committed

    def gate(self, stage: str, when: Callable[[set[str]], bool] = lambda _ids: True) -> Gate:
        self.gates.append(Gate(self.engine, stage, when))
        return self.gates[-1]

    def submit(self, *requests: Request) -> list[Call]:
        calls = [Call(request) for request in requests]
        for call in calls:
            self.engine.submit(call.request, call.sink)
        return calls

    def submit_together(self, *requests: Request) -> list[Call]:
        """Submit, and hold decode until every request is prefilled: text is sooner than media."""
        gate, waiting = self.gate("decode"), (Stage.PREFILLED, Stage.STEPPING)
        calls = self.submit(*requests)
        eventually(lambda: all(self.stage(request.id) in waiting for request in requests), "all to be prefilled")
        gate.open()
        return calls

    def ask(self, request: Request) -> Finished:
        """One request, alone, to its end."""
        return self.submit(request)[0].finished()

    def stage(self, name: str) -> Stage | None:
        record = self.engine._live.by_id.get(name)
        return record.stage if record else None

    def await_stage(self, name: str, stage: Stage) -> None:
        eventually(lambda: self.stage(name) is stage, f"{name} is {stage.name}")

    def await_nothing_left(self) -> None:
        """Every page, reference and count comes back."""
        clean = Stats(live=0, queued=0, pages_in_use=0, held=0)
        eventually(lambda: self.engine.stats() == clean, f"{clean}, but {self.engine.stats()}")

    def close(self) -> None:
        for gate in self.gates:
            gate.open()
        self.engine.stop()
