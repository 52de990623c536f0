"""Requests that end early, wherever they stand: the client knows at once, and nothing of them stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from e2e_helpers import PATIENCE, Gates, Running, answer, failure, gated, running, settings, text_of, wait_for

from mmserve.client import Admitted, Client, Delta, Finished, Snapshot
from mmserve.core.request import RUNNING, Stage
from mmserve.errors import Cancelled, DeadlineExceeded, Unavailable

#: Every stage that a live request without a constraint can be in, from the last to the first: so they are filled.
STAGES = (
    Stage.READY,
    Stage.STEPPING,
    Stage.PREFILLED,
    Stage.PREFILLING,
    Stage.ENCODED,
    Stage.ENCODING,
    Stage.QUEUED,
)
#: One token a step: a request is to stand still between two steps.
STEP_BY_STEP: dict[str, Any] = {"quality": "exact"}
ONE_BY_ONE = {"encode_batch": 1, "prefill_tokens": 1, "decode_tokens": 1}


@pytest.fixture(scope="module")
def narrow_server() -> Iterator[Running]:
    with running(settings(engine=ONE_BY_ONE)) as found:
        yield found


@pytest.fixture
def narrow(narrow_server: Running) -> Iterator[Running]:
    """A server whose stages take one request at a time."""
    yield narrow_server
    narrow_server.assert_serves()


class Caller:
    """A streaming client of its own for one request."""

    def __init__(self, server: Running, prompt: str, **options: Any) -> None:
        self.client = Client(server.address, timeout=10 * PATIENCE)
        self.events: list[Any] = []
        self.done: Future[None] = server.start(self._run, prompt, options)

    def _run(self, prompt: str, options: dict[str, Any]) -> None:
        for event in self.client.stream(prompt, **{"max_new_tokens": 8, "snapshots": True, **STEP_BY_STEP, **options}):
            self.events.append(event)


@contextmanager
def one_in_each_stage(server: Running, gates: Gates, **options: Any) -> Iterator[dict[Stage, Caller]]:
    """Seven clients, each with a request that stands still in another stage; a request's prompt is its stage."""
    callers: dict[Stage, Caller] = {}

    def call(stage: Stage, reaches: Stage) -> None:
        callers[stage] = Caller(server, stage.name, **options)
        server.reach(stage.name, reaches)

    gates.decode.close()
    call(Stage.READY, Stage.STEPPING)
    call(Stage.STEPPING, Stage.PREFILLED)
    gates.decode.let_through_until(lambda batch: [text_of(each) for each in batch] == [Stage.STEPPING.name])
    server.reach(Stage.READY.name, Stage.READY)
    call(Stage.PREFILLED, Stage.PREFILLED)
    gates.prefill.close()
    call(Stage.PREFILLING, Stage.PREFILLING)
    call(Stage.ENCODED, Stage.ENCODED)
    gates.encode.close()
    call(Stage.ENCODING, Stage.ENCODING)
    call(Stage.QUEUED, Stage.QUEUED)
    assert server.stages() == {stage.name: stage for stage in STAGES}
    try:
        yield callers
    finally:
        gates.open()
        for caller in callers.values():
            caller.client.close()


@pytest.fixture
def gates(narrow: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    with gated(narrow.engine, monkeypatch) as found:
        yield found


HELD = {stage.name for stage in STAGES if stage in RUNNING}


def assert_only_held_ones_stay(server: Running) -> None:
    """Requests in no worker's hands are gone at once, the others as soon as their workers report."""
    wait_for("the waiting ones to be freed", lambda: set(server.stages()) == HELD)
    assert server.aborted() == HELD
    stats = server.engine.stats()
    assert (stats.live, stats.queued) == (3, 0)


def test_a_request_can_be_cancelled_in_every_stage(narrow: Running, gates: Gates) -> None:
    with one_in_each_stage(narrow, gates) as callers:
        for caller in callers.values():
            caller.client.close()
        errors = {stage: failure(caller.done) for stage, caller in callers.items()}
        assert {stage: type(error) for stage, error in errors.items()} == dict.fromkeys(STAGES, Cancelled)
        assert_only_held_ones_stay(narrow)


def test_a_deadline_ends_a_request_in_every_stage(narrow: Running, gates: Gates) -> None:
    with one_in_each_stage(narrow, gates) as callers:
        for record in list(narrow.engine._live.by_id.values()):
            record.request = replace(record.request, deadline=time.monotonic())
        narrow.engine.cancel("nobody")  # wakes the engine, which looks at deadlines then
        errors = {stage: failure(caller.done) for stage, caller in callers.items()}
        assert {stage: type(error) for stage, error in errors.items()} == dict.fromkeys(STAGES, DeadlineExceeded)
        for stage, error in errors.items():
            assert error.message == f"the deadline passed while the request was {stage.name}"
        assert_only_held_ones_stay(narrow)


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
def test_the_clients_own_deadline_frees_a_request_that_a_stage_holds(narrow: Running, gates: Gates, stage: str) -> None:
    getattr(gates, stage).close()
    asked = [narrow.ask(f"late {i}", timeout=1.0) for i in range(3)]
    for future in asked:
        assert isinstance(failure(future), DeadlineExceeded)
    wait_for(
        "only the one that the gate holds",
        lambda: set(narrow.stages()) == narrow.aborted() and len(narrow.aborted()) <= 1,
    )


def test_requests_ended_early_leave_the_others_their_answers(narrow: Running, gates: Gates) -> None:
    alone = answer(narrow.client.generate("How many shapes are there?", max_new_tokens=8))
    with one_in_each_stage(narrow, gates) as callers:
        neighbours = [narrow.start(narrow.client.generate, "How many shapes are there?", max_new_tokens=8)]
        for stage in (Stage.READY, Stage.ENCODING, Stage.PREFILLED, Stage.QUEUED):
            callers.pop(stage).client.close()
        gates.open()
        assert answer(neighbours[0].result(PATIENCE)) == alone
        for caller in callers.values():
            caller.done.result(PATIENCE)
            assert isinstance(caller.events[-1], Finished)


def test_leaving_a_stream_cancels_its_request(narrow: Running, gates: Gates) -> None:
    gates.decode.close()
    stream = narrow.client.stream("left early")
    assert isinstance(next(stream), Admitted)
    narrow.reach("left early", Stage.STEPPING)
    stream.close()
    wait_for("the engine to hear of it", lambda: narrow.aborted() == {"left early"})


def test_a_cancel_that_comes_after_the_end_is_ignored(narrow: Running) -> None:
    seen: list[str] = []
    submit = narrow.engine.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow.engine, "submit", lambda request, sink: (seen.append(request.id), submit(request, sink)))
        narrow.client.generate("x", max_new_tokens=2)
    narrow.engine.cancel(seen[0])
    narrow.engine.cancel(seen[0], DeadlineExceeded("late"))
    narrow.assert_serves()


PEER = """
import sys
from mmserve.client import Client
with Client(sys.argv[1], timeout=600) as client:
    for event in client.stream(sys.argv[2], snapshots=True, max_new_tokens=64):
        print(type(event).__name__, flush=True)
"""


@pytest.mark.parametrize("stage", [Stage.STEPPING, Stage.ENCODING])
def test_a_client_that_is_killed_leaves_nothing(narrow: Running, gates: Gates, stage: Stage) -> None:
    (gates.decode if stage is Stage.STEPPING else gates.encode).close()
    peer = subprocess.Popen([sys.executable, "-c", PEER, narrow.address, "killed"], stdout=subprocess.PIPE)
    with peer:
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"Admitted\n"
        narrow.reach("killed", stage)
        assert not narrow.aborted()
        peer.kill()
    assert peer.returncode == -signal.SIGKILL
    wait_for("the engine to hear of it", lambda: narrow.aborted() == {"killed"})


def test_a_client_that_stops_reading_holds_up_nobody(narrow: Running) -> None:
    lazy = narrow.client.stream("lazy", snapshots=True, max_new_tokens=32)
    assert isinstance(next(lazy), Admitted)
    narrow.assert_serves()  # waits for the engine to be empty: the lazy client's request is through as well
    rest = list(lazy)
    assert isinstance(rest[-1], Finished)
    assert "".join(e.text for e in rest if isinstance(e, Delta)) == rest[-1].text
    assert any(isinstance(e, Snapshot) for e in rest)


def test_a_stopping_server_ends_requests_in_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running(settings(engine=ONE_BY_ONE, server={"drain_seconds": 0.0})) as server,
        gated(server.engine, monkeypatch) as gates,
        one_in_each_stage(server, gates) as callers,
    ):
        drained = server.drain()
        errors = {stage: failure(caller.done) for stage, caller in callers.items()}
        assert {stage: type(error) for stage, error in errors.items()} == dict.fromkeys(STAGES, Unavailable)
        assert_only_held_ones_stay(server)
        assert not drained.done(), "workers still hold requests"
        gates.open()
        drained.result(PATIENCE)
