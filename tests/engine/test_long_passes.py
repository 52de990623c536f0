"""A request whose passes are long does not hold up short ones: they run between its layers, with the same answers."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from harness import PATIENCE, Bench
from helpers import ask, tiny_model

from mmserve.config import EngineConfig, resolve
from mmserve.core.request import Policy, Request
from mmserve.engine.workers import Workers
from mmserve.models.base import Attention

Make = Callable[..., Bench]
#: Rows of a batch; a long request has more in each pass, a short one less.
BUDGET = 80


def long_one() -> Request:
    return ask("long", "two shapes left of " * 12, max_new_tokens=8)


def short_ones() -> list[Request]:
    """Of fewer rows together, all steps counted, than may run within a pass of the long one."""
    return [ask(f"short{i}", f"{i}", max_new_tokens=4) for i in range(3)]


def make(bench: Make) -> Bench:
    return bench(max_tokens=256, prefill_tokens=BUDGET, decode_tokens=BUDGET)


@pytest.fixture
def alone(bench: Make) -> dict[str, list[int]]:
    b = bench(max_tokens=256, stages="inline")
    for request in (long_one(), *short_ones()):
        b.ask(request)
    assert len(b.canvases["long"][0]) > BUDGET > max(len(b.canvases[r.id][0]) for r in short_ones())
    return {name: tokens.tolist() for name, (tokens, _committed) in b.canvases.items()}


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_short_requests_end_within_one_layer_of_a_long_pass(
    bench: Make, alone: dict[str, list[int]], stage: str
) -> None:
    """The long pass is held in its first layer until all of them have ended."""
    b = make(bench)
    decoder = b.engine.stages.decoder
    method = {"prefill": "prefill", "decode": "propose"}[stage]
    way, run = decoder.parts.runner.yield_callbacks[stage], getattr(decoder, method)
    entered, ended, in_flight = threading.Event(), threading.Event(), list[set[str]]()

    def running(batch: list[Any]) -> Any:
        requests = (each[0] if isinstance(each, tuple) else each.request for each in batch)
        in_flight.append({request.id for request in requests})
        try:
            return run(batch)
        finally:
            in_flight.pop()

    def patient() -> None:
        if in_flight == [{"long"}]:
            entered.set()
            while not ended.wait(0.001):
                way()

    setattr(decoder, method, running)
    decoder.parts.runner.yield_callbacks[stage] = patient
    [long] = b.submit(long_one())
    assert entered.wait(PATIENCE)
    shorts = b.submit(*short_ones())
    for call in shorts:
        call.finished()
    assert not long.ended
    ended.set()
    long.finished()
    assert {name: tokens.tolist() for name, (tokens, _committed) in b.canvases.items()} == alone
    b.await_nothing_left()


def test_a_long_request_runs_no_more_rows_than_each_short_one_beside_it(bench: Make) -> None:
    """And not a pass for each of their steps."""
    b, steps = make(bench), 12
    shorts = [ask(f"short{i}", f"{i}", max_new_tokens=steps) for i in range(3)]
    for call in b.submit_together(long_one(), *shorts):
        call.finished()
    rows = {name: len(tokens) for name, (tokens, _committed) in b.canvases.items()}
    last = max(i for i, batch in enumerate(b.batches) if batch[0] != "long")
    ran = rows["long"] * sum("long" in batch for batch in b.batches[:last])
    assert ran <= steps * rows["short0"] + 3 * rows["long"] < steps * rows["long"]


def test_a_long_request_that_is_cancelled_leaves_those_within_its_pass(
    bench: Make, alone: dict[str, list[int]]
) -> None:
    b = make(bench)
    decoder, held = b.engine.stages.decoder, threading.Event()
    way, entered = decoder.parts.runner.yield_callbacks["decode"], threading.Event()

    def patient() -> None:
        if not held.is_set() and not entered.is_set():
            entered.set()
            b.engine.cancel("long")
            while not held.wait(0.001):
                way()

    decoder.parts.runner.yield_callbacks["decode"] = patient
    [long] = b.submit(long_one())
    assert entered.wait(PATIENCE)
    long.error()
    shorts = b.submit(*short_ones())
    for call in shorts:
        call.finished()
    held.set()
    assert all(b.canvases[call.request.id][0].tolist() == alone[call.request.id] for call in shorts)
    b.await_nothing_left()


def test_long_answers_take_turns(bench: Make) -> None:
    """What a request asks for in all is not what its steps run: none of them is a long pass, and all are one batch."""
    plain = tiny_model(vision=False)
    spec = dataclasses.replace(plain.spec, attention=Attention.CAUSAL, logit_shift=1, end_ids=frozenset({-1}))
    b = bench(dataclasses.replace(plain, spec=spec), max_tokens=256, decode_tokens=BUDGET)
    requests = [ask(f"{i}", max_new_tokens=2 * BUDGET, recompute=Policy(name="last")) for i in range(6)]
    calls = b.submit_together(*requests)
    for call in calls:
        call.finished()
    steps = Counter({request.id: 0 for request in requests})
    for batch in b.batches:
        steps.update(batch)
        assert max(steps.values()) <= min(steps.values()) + 2, steps
    assert set(steps.values()) == {2 * BUDGET}


def test_nothing_runs_within_a_pass_that_has_ended() -> None:
    """A job that was given to a long pass, and came too late for it, is an ordinary one."""
    workers = Workers(resolve(EngineConfig(torch_threads=1)))
    workers.start()
    own: queue.SimpleQueue[bool] = queue.SimpleQueue()
    go = threading.Event()

    def long(is_own: bool) -> None:
        go.wait(PATIENCE)
        own.put(is_own)

    try:
        workers.run("decode", long, 100)
        assert workers.within() == {"decode": 100} and "decode" not in workers.idle()
        workers.run("decode", own.put, 90)
        assert workers.within() == {}, "one job at a time"
        go.set()
        assert [own.get(timeout=PATIENCE), own.get(timeout=PATIENCE)] == [True, False]
        workers.ended("decode", own=True)
        assert workers.within() == {} and "decode" not in workers.idle()
        workers.ended("decode", own=False)
        assert workers.within() == {} and "decode" in workers.idle()
    finally:
        assert workers.stop(PATIENCE) == []
