"""Overload and bugs: who is refused knows when to come back, and one request's failure touches no other."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import pytest
from e2e_helpers import (
    PATIENCE,
    Gates,
    Running,
    answer,
    failure,
    gated,
    running,
    settings,
    short_asks,
    text_of,
    wait_for,
)
from harness import stages_of

import mmserve.engine.engine
from mmserve.client import AsyncClient, Client, Finished
from mmserve.core.request import Request, Stage
from mmserve.errors import Internal, MMServeError, ResourceExhausted
from mmserve.schedule.expected_wait import PROMPT_WORK, Measured
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import generation_pb2_grpc
from mmserve.wire.status import from_rpc_error

QUEUE = 5


@pytest.fixture(scope="module")
def small_server() -> Iterator[Running]:
    with running(settings(engine={"max_queued": QUEUE, "max_running": 4, "encode_batch": 1, "pages": 70})) as found:
        yield found


@pytest.fixture
def small(small_server: Running) -> Iterator[Running]:
    """A server with room for few."""
    yield small_server
    small_server.assert_serves()


def once(address: str, prompt: str, *, timeout: float = PATIENCE, **sampling: Any) -> pb.Finished:
    """One attempt, without the client's retries."""
    message = pb.GenerateRequest(
        messages=[{"role": "ROLE_USER", "parts": [{"text": prompt}]}], sampling={"max_new_tokens": 4, **sampling}
    )
    with grpc.insecure_channel(address) as channel:
        try:
            return list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(message, timeout=timeout))[-1]
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def test_a_full_queue_refuses_and_loses_nobody(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with gated(small.engine, monkeypatch) as gates:
        gates.encode.close()
        accepted = [small.start(once, small.address, "first")]
        small.reach("first", Stage.ENCODING)
        accepted += [small.start(once, small.address, f"queued {i}") for i in range(QUEUE)]
        wait_for("a full queue", lambda: small.engine.stats().queued == QUEUE)
        refused = [small.start(once, small.address, f"refused {i}") for i in range(20)]
        errors = [failure(future) for future in refused]
        assert {type(e) for e in errors} == {ResourceExhausted}
        assert all(e.retry_after is not None and 0 < e.retry_after <= 60 for e in errors)
        assert small.engine.stats().queued == QUEUE and not any(f.done() for f in accepted)
        gates.encode.open()
        answers = [future.result(PATIENCE) for future in accepted]
    assert [a.WhichOneof("event") for a in answers] == ["finished"] * (QUEUE + 1)
    assert len(answers) + len(errors) == 1 + QUEUE + 20


def test_who_would_wait_beyond_the_deadline_is_refused_at_once(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured, the engine ends a unit of work a second; 24 units wait already."""
    shed, due = small.engine.stats().shed, partial(once, small.address, timeout=20.0)
    monkeypatch.setattr(small.engine._queue, "_measured", Measured(work=10.0, seconds=10.0))
    monkeypatch.setattr("mmserve.engine.waiting.measured", lambda before, *_, **__: before)
    with gated(small.engine, monkeypatch) as gates, Client(small.address, timeout=50) as patient:
        assert due("idle").WhichOneof("event") == "finished"  # nobody is ahead: there is no wait
        gates.encode.close()
        accepted = [small.start(due, "first")]
        small.reach("first", Stage.ENCODING)
        accepted.append(small.start(due, "waits", max_new_tokens=24 - PROMPT_WORK))
        wait_for("a queue", lambda: small.engine.stats().queued == 1)
        time.sleep(0.3)  # deadlines travel in steps of up to 0.1 s, and only what is due earlier counts
        error = failure(small.start(due, "late"))
        assert isinstance(error, ResourceExhausted) and "would wait about 24" in str(error) and error.retry_after
        assert small.engine.stats().shed == shed + 1
        in_time = small.start(patient.generate, "in time", max_new_tokens=4)
        wait_for("a longer queue", lambda: small.engine.stats().queued == 2)
        assert small.engine.stats().expected_wait == pytest.approx(24.0 + PROMPT_WORK + 4)
        gates.encode.open()
        assert in_time.result(PATIENCE).forwards
        assert [f.result(PATIENCE).WhichOneof("event") for f in accepted] == ["finished"] * 2


def test_a_busy_engine_measures_what_it_ends(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.schedule.expected_wait.SETTLED_SECONDS", 0.02)
    monkeypatch.setattr("mmserve.schedule.expected_wait.LEAST_SECONDS", 0.1)
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            with suppress(ResourceExhausted):
                once(small.address, "busy")

    asking = [small.start(ask) for _ in range(24)]  # more than run, are handed over and wait
    try:
        wait_for("an expected wait", lambda: small.engine.stats().expected_wait > 0)
    finally:
        enough.set()
    for each in asking:
        each.result(PATIENCE)
    wait_for("an empty queue", lambda: not small.engine.stats().queued)
    assert small.engine.stats().expected_wait == 0.0
    monkeypatch.setattr(small.engine._queue, "_measured", Measured())


def test_a_rush_is_answered_or_refused_one_by_one(small: Running) -> None:
    """Nobody holds a gate here: whatever the order, everybody hears exactly one thing."""
    futures = [small.start(once, small.address, f"rush {i}") for i in range(48)]
    ended = [f.exception(PATIENCE) or f.result() for f in futures]
    answered = [e for e in ended if isinstance(e, pb.GenerateResponse)]
    refused = [e for e in ended if isinstance(e, ResourceExhausted)]
    assert len(answered) + len(refused) == 48, ended
    assert len(answered) > QUEUE
    assert all(e.retry_after > 0 for e in refused)


def test_the_client_comes_back_after_a_refusal(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with gated(small.engine, monkeypatch) as gates:
        gates.encode.close()
        first = small.ask("first")
        small.reach("first", Stage.ENCODING)
        queued = [small.ask(f"queued {i}") for i in range(QUEUE)]
        wait_for("a full queue", lambda: small.engine.stats().queued == QUEUE)
        refusals: list[Request] = []
        check = small.engine.stages.capabilities.check
        monkeypatch.setattr(small.engine.stages.capabilities, "check", lambda r: (refusals.append(r), check(r))[1])
        patient = small.ask("patient")
        wait_for("its first attempt", lambda: refusals)
        gates.encode.open()
        assert patient.result(PATIENCE).forwards
        assert [f.result(PATIENCE).forwards for f in (first, *queued)]


def test_a_client_with_time_asks_a_full_server_until_there_is_room(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmserve.client.retries._LAST_DELAY", 0.1)
    monkeypatch.setattr(small.engine._queue, "_seconds", 0.0)  # a request takes nothing: short waits
    check, attempts = small.engine.stages.capabilities.check, Counter[str]()

    def counted(request: Request) -> None:
        attempts[text_of(request)] += 1
        check(request)

    async def asked() -> Any:
        async with AsyncClient(small.address, timeout=PATIENCE) as client:
            return await client.generate("async", max_new_tokens=4)

    with gated(small.engine, monkeypatch) as gates:
        gates.encode.close()
        first = small.ask("first")
        small.reach("first", Stage.ENCODING)
        queued = [small.ask(f"queued {i}") for i in range(QUEUE)]
        wait_for("a full queue", lambda: small.engine.stats().queued == QUEUE)
        monkeypatch.setattr(small.engine.stages.capabilities, "check", counted)
        patient = [small.ask("blocking"), small.start(asyncio.run, asked())]
        wait_for("many attempts of both", lambda: min(attempts["blocking"], attempts["async"]) > 6)
        gates.encode.open()
        assert all(f.result(PATIENCE).forwards for f in (first, *queued, *patient))


def test_pages_for_one_largest_request_are_enough_for_many(small: Running) -> None:
    """70 pages of 16 hold one request of 1,024 tokens and a few small ones: the rest wait for pages, none starves."""
    small_ones = [small.ask(f"small {i}", max_new_tokens=4) for i in range(3)]
    large = small.ask("large", max_new_tokens=1000, block_length=1000, steps=2)
    assert large.result(PATIENCE).forwards <= 2
    assert [f.result(PATIENCE).forwards for f in small_ones]


class Poison:
    """Stands in for a stage's batch function and raises whenever the poisoned request is in the batch."""

    def __init__(self, run: Callable[..., Any], error: BaseException) -> None:
        self._run, self._error = run, error
        self.together = 0  # requests beside the poisoned one, at most

    def __call__(self, batch: list[Any], *rest: Any) -> Any:
        if any("poison" in text_of(_request(item)) for item in batch):
            self.together = max(self.together, len(batch) - 1)
            raise self._error
        return self._run(batch, *rest)


def _request(item: Any) -> Request:
    """The request in an item of an encode, a prefill or a decode batch."""
    if isinstance(item, tuple):
        return item[0]
    return item if isinstance(item, Request) else item.request


@pytest.mark.parametrize(
    ("part", "method", "stage"),
    [("encoder", "encode", "ENCODING"), ("decoder", "prefill", "PREFILLING"), ("decoder", "propose", "STEPPING")],
)
def test_a_bug_in_a_batch_fails_one_request_alone(
    server: Running,
    gates: Gates,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
    method: str,
    stage: str,
) -> None:
    asks = short_asks(5)
    alone = [answer(a.of(server.client)) for a in asks]
    owner = server.engine.stages.encoding.encoder if part == "encoder" else server.engine.stages.decoder
    poison = Poison(getattr(owner, method), RuntimeError("the secret of the bug"))
    monkeypatch.setattr(owner, method, poison)
    gate = getattr(gates, {"encode": "encode", "prefill": "prefill", "propose": "decode"}[method])
    gate.close()
    first = server.ask("holds the stage", images=asks[-1].images, max_new_tokens=4)  # the others gather behind it
    server.reach("holds the stage", Stage[stage])
    good = [server.start(a.of, server.client) for a in asks]
    bad = server.ask("poison", images=asks[0].images, max_new_tokens=4)
    waiting = {"encode": Stage.LOADED, "prefill": Stage.ENCODED, "propose": Stage.PREFILLED}[method]
    wait_for("all behind it", lambda: list(server.stages().values()).count(waiting) == 6)
    gate.open()
    error = failure(bad)
    assert isinstance(error, Internal) and error.error_id
    assert "secret" not in error.message, "what is in the log is not for clients"
    assert [answer(f.result(PATIENCE)) for f in good] == alone
    assert first.result(PATIENCE).forwards
    if method != "encode":  # on a CPU each request is encoded by itself
        assert poison.together > 0, "the bug must have met a batch of several"
    logged = [r for r in caplog.records if error.error_id in r.getMessage()]
    assert [r.levelno for r in logged] == [logging.ERROR]
    assert "the secret of the bug" in caplog.text and stage in logged[0].getMessage()


class Panic(BaseException):
    """As native code raises it: no ``Exception``."""


@pytest.mark.parametrize("stages", ["threads", "inline"])
@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
def test_a_panic_of_native_code_stops_no_worker(
    server: Running, inline_server: Running, monkeypatch: pytest.MonkeyPatch, stages: str, stage: str
) -> None:
    asked = server if stages == "threads" else inline_server
    owner = stages_of(asked.engine)[stage]
    with monkeypatch.context() as patch:
        patch.setattr(owner, stage, Poison(getattr(owner, stage), Panic("a panic")))
        error = failure(asked.ask("poison"))
    assert isinstance(error, Internal) and error.error_id
    asked.assert_serves()


@pytest.fixture(scope="module")
def inline_server() -> Iterator[Running]:
    with running(settings(engine={"stages": "inline"})) as found:
        yield found


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Let the next call of a function fail; the list tells that it did."""
    run, failed = getattr(owner, name), []

    def broken(*args: Any) -> Any:
        if not failed:
            failed.append(1)
            raise RuntimeError("a bug in the engine")
        return run(*args)

    monkeypatch.setattr(owner, name, broken)
    return failed


@pytest.mark.parametrize("held", ["encode", "prefill", "decode"])
@pytest.mark.parametrize("place", ["schedule", "expire", "_budgets"])
def test_a_bug_in_the_engines_own_thread_leaves_nobody_waiting(
    server: Running,
    gates: Gates,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    held: str,
    place: str,
) -> None:
    gate = getattr(gates, held)
    gate.close()
    asked = [server.ask(f"live {i}") for i in range(4)]
    wait_for("all live", lambda: server.engine.stats().live == 4)
    wait_for("a worker that holds one", lambda: gate.waiting)
    owner = {"schedule": mmserve.engine.engine, "expire": server.engine._live, "_budgets": server.engine}[place]
    failed = fail_once(monkeypatch, owner, place)
    server.engine.cancel("nobody")  # wakes the engine
    errors = [failure(f) for f in asked]
    assert failed and {type(e) for e in errors} == {Internal}
    assert len({e.error_id for e in errors}) == 1 and f"error id {errors[0].error_id}" in caplog.text
    assert "a bug in the engine" in caplog.text
    gate.open()
    server.assert_serves()


@pytest.mark.parametrize("held", ["encode", "prefill", "decode"])
def test_a_bug_in_taking_a_report_leaves_nobody_waiting(
    server: Running, gates: Gates, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    gate = getattr(gates, held)
    gate.close()
    asked = [server.ask(f"live {i}") for i in range(4)]
    wait_for("all live", lambda: server.engine.stats().live == 4)
    wait_for("a worker that holds one", lambda: gate.waiting)
    failed = fail_once(monkeypatch, server.engine._live, "advance")
    gate.open()
    ended = [f.exception(PATIENCE) for f in asked]
    assert failed and {type(e) for e in ended} <= {Internal, type(None)} and any(ended)


def test_a_bug_while_a_cancelled_request_is_freed_leaves_nothing(
    server: Running, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates.decode.close()
    with Client(server.address) as leaving:
        gone = server.start(leaving.generate, "gone")
        server.reach("gone", Stage.STEPPING)
    assert isinstance(failure(gone), MMServeError)
    wait_for("the engine to hear of it", lambda: server.aborted() == {"gone"})
    failed = fail_once(monkeypatch, server.engine._live, "advance")
    gates.decode.open()
    wait_for("the bug", lambda: failed)
    server.assert_serves()


def test_a_bug_in_a_requests_last_step_is_that_requests_alone(
    server: Running, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_once(monkeypatch, server.engine.stages.decoding, "finished")
    assert isinstance(failure(server.ask("unlucky")), Internal)
    assert failed
    assert isinstance(list(server.client.stream("next", max_new_tokens=2))[-1], Finished)
