"""Encode, prefill and decode in three processes, and canvases that move between two of them: answers as of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from apart import ENGINE, ENGINES, Apart, cases, load
from gemma_checkpoints import save_gemma
from harness import Bench, eventually
from receiver import Receiver, receives_http

from mmserve.core.constraint import ConstraintSampling
from mmserve.core.events import Finished
from mmserve.core.request import Request
from mmserve.errors import Unimplemented

Make = Callable[..., Bench]
CASES = cases()
#: Three processes have to import everything first: seconds, but on a busy machine.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma(tmp_path_factory.mktemp("gemma"), 12, images=True)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receives_http() as found:
        yield found


@pytest.fixture(scope="module")
def apart(folder: Path, receiver: Receiver) -> Iterator[Apart]:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "50",  # milliseconds
    }
    made = Apart(folder, environment)
    yield made
    made.close()


@pytest.fixture(scope="module")
def together(folder: Path) -> dict[str, Finished]:
    """The answers of one process."""
    found: dict[str, Finished] = {}
    for name, requests in CASES.items():
        bench = Bench(
            load(name, str(folder)), watch=False, **{**ENGINE, "prefix_cache": False, **ENGINES.get(name, {})}
        )
        found |= {request.id: bench.ask(request) for request in requests}
        bench.close()
    return found


def check(done: Finished, reason: str, answer: object) -> None:
    """Text, tokens with their log-probabilities, and what it took are the same."""
    for name in (
        "text",
        "tokens",
        "forwards",
        "recomputed_tokens",
        "edits",
        "holes",
        "log_weight",
        "warnings",
        "decisions",
    ):
        assert getattr(answer, name) == getattr(done, name), name
    assert reason == done.reason
    assert answer.completion_tokens == done.usage.completion_tokens  # type: ignore[attr-defined]
    assert answer.kv_positions == done.usage.kv_positions  # type: ignore[attr-defined]


def test_the_requests_are_worth_comparing(together: dict[str, Finished]) -> None:
    for name, requests in CASES.items():
        assert len({together[request.id].text for request in requests}) == len(requests), name
        assert all(together[request.id].tokens for request in requests)


@pytest.mark.parametrize("name", CASES)
def test_three_processes_answer_as_one(apart: Apart, together: dict[str, Finished], name: str) -> None:
    for request in CASES[name]:
        done = together[request.id]
        prompt, reason, answer = apart.answered(name, request)
        check(done, reason, answer)
        usage = dataclasses.replace(done.usage, completion_tokens=0, kv_positions=0)
        assert prompt.usage == usage, request.id


def test_samples_that_learn_from_each_other_stay_in_one_process(apart: Apart) -> None:
    drawn = next(request for request in CASES["causal"] if request.id == "causal.awrs")
    assert drawn.constraint is not None
    asap = dataclasses.replace(drawn.constraint, sampling=ConstraintSampling.ASAP)
    with pytest.raises(Unimplemented, match="in one process; use 'awrs'"):
        apart.ask("encode", "encode", "causal", dataclasses.replace(drawn, constraint=asap))


def moving() -> list[tuple[str, Request]]:
    return [(name, request) for name, requests in CASES.items() for request in requests]


@pytest.mark.parametrize(("name", "request_"), [pytest.param(n, r, id=r.id) for n, r in moving()])
def test_a_canvas_may_move_after_every_step(
    apart: Apart, together: dict[str, Finished], name: str, request_: Request
) -> None:
    reason, answer, moves = apart.wandered(name, request_)
    check(together[request_.id], reason, answer)
    assert (moves > 0) == (not request_.decisions)  # these take one step


def test_a_request_that_goes_through_three_processes_is_one_trace(apart: Apart, receiver: Receiver) -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    request = next(r for r in CASES["masked"] if r.id == "masked.schema")
    request = dataclasses.replace(request, id="traced", trace={"traceparent": f"00-{trace_id}-{parent}-01"})
    apart.answered("masked", request)
    passes = ["mmserve.constraint.pass", "mmserve.load.pass", "mmserve.encode.pass", "mmserve.prefill.pass"]
    passes.append("mmserve.open.pass")
    eventually(lambda: all(receiver.named(name) for name in passes), "a span of each stage")
    found = {name: receiver.named(name)[0] for name in passes}
    assert {(span.trace_id, span.parent) for span in found.values()} == {(trace_id, parent)}
    by_process = {name: span.service["service.instance.id"] for name, span in found.items()}
    assert len({by_process[name] for name in passes[2:]}) == 3
    eventually(lambda: len(receiver.named("mmserve.transfer")) == 4, "both ends of both transfers")
    moved = {(s.parent, s.attributes["mmserve.transfer.operation"]) for s in receiver.named("mmserve.transfer")}
    encode, prefill, opened = (found[name].span_id for name in passes[2:])
    assert moved == {(encode, "send"), (prefill, "receive"), (prefill, "send"), (opened, "receive")}
    assert {span.trace_id for span in receiver.spans} == {trace_id}, "requests without a trace have no span"
