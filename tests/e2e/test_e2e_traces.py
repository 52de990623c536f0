"""Traces of requests to a served model: what they hold, whose they are, and that they leave the process."""

from __future__ import annotations

import http.client
import io
import json
import logging
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from e2e_helpers import Running, gated, running, settings, wait_for
from helpers import picture
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from receiver import Receiver, receives_grpc, receives_http
from test_e2e_metrics import free_port

from mmserve.check import check
from mmserve.client import Admitted, Finished
from mmserve.errors import ConfigError, InvalidArgument
from mmserve.observe import traces
from mmserve.observe.logs import Json

PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # of W3C's examples: a trace, and a span of it


class Recorded:
    """A traced server and the spans that have ended."""

    def __init__(self, server: Running, exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
        self.server, self._exporter, self.provider = server, exporter, provider

    def root(self) -> ReadableSpan:
        """The span of the whole request, the only one since the last call of ``clear``."""
        wait_for("the request's span", lambda: self._roots())
        [root] = self._roots()
        return root

    def _roots(self) -> list[ReadableSpan]:
        return [s for s in self._exporter.get_finished_spans() if s.kind is trace.SpanKind.SERVER]

    def named(self, name: str) -> list[ReadableSpan]:
        found = [s for s in self._exporter.get_finished_spans() if s.name == name]
        return sorted(found, key=lambda span: span.start_time or 0)

    def clear(self) -> None:
        self._exporter.clear()


@pytest.fixture(scope="module")
def traced() -> Iterator[Recorded]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces.use(provider)
    try:
        with running(settings(server={"http_port": free_port()})) as server:
            yield Recorded(server, exporter, provider)
    finally:
        traces.use(None)


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    if "traced" in request.fixturenames:
        request.getfixturevalue("traced").clear()


def length(span: ReadableSpan) -> int:
    assert span.start_time is not None and span.end_time is not None
    assert span.end_time >= span.start_time
    return span.end_time - span.start_time


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_one_trace_shows_where_a_request_was_and_what_each_block_took(traced: Recorded) -> None:
    tracer = traced.provider.get_tracer("an application")
    asked: dict[str, Any] = {
        "max_new_tokens": 24,
        "block_length": 8,
        "regex": "[0-9]{20}",
        "request_id": "mine",
        "timeout": 60,
    }
    with tracer.start_as_current_span("work") as work:
        result = traced.server.client.generate("What is it?", [picture(7)], **asked)
    root = traced.root()
    mine = work.get_span_context()
    assert root.parent is not None and root.parent.span_id == mine.span_id
    assert root.name == "chat bundled"
    told = attributes(root)
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.request.model"] == "bundled"
    assert told["gen_ai.request.max_tokens"] == 24 and told["gen_ai.request.temperature"] == 0.0
    assert told["gen_ai.usage.input_tokens"] == result.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == result.usage.completion_tokens
    assert told["gen_ai.response.finish_reasons"] == (result.finish_reason,)
    assert told["mmserve.forwards"] == result.forwards and told["mmserve.request_id"] == "mine"
    assert told["mmserve.constraint.kind"] == "Regex" and "error.type" not in told

    names = ("mmserve.constraint", "mmserve.load", "mmserve.encode", "mmserve.prefill", "mmserve.decode")
    stages = [traced.named(name) for name in names]
    assert [len(found) for found in stages] == [1] * len(names)
    waits = traced.named("mmserve.queue")
    assert [attributes(wait)["mmserve.queue.for"] for wait in waits] == [
        "start",
        "encode",
        "encode",
        "prefill",
        "decode",
    ]
    in_order = sorted([*waits, *(found[0] for found in stages)], key=lambda span: span.start_time or 0)
    for before, after in pairwise(in_order):
        assert before.end_time == after.start_time, "a request is in one place at a time, and always in one"
    for span in in_order:
        assert span.context.trace_id == mine.trace_id
        assert span.parent is not None and span.parent.span_id == root.context.span_id

    blocks, [decode] = traced.named("mmserve.block"), traced.named("mmserve.decode")
    of_blocks = [attributes(block) for block in blocks]
    assert [each["mmserve.block.index"] for each in of_blocks] == [0, 1, 2]
    assert all(block.parent is not None and block.parent.span_id == decode.context.span_id for block in blocks)
    assert sum(each["mmserve.block.forwards"] for each in of_blocks) == result.forwards
    assert sum(each["mmserve.block.committed_tokens"] for each in of_blocks) == result.usage.completion_tokens
    assert result.constraint is not None
    took = sum(each["mmserve.block.constraint_seconds"] for each in of_blocks)
    assert took == pytest.approx(result.constraint.search_seconds, abs=1e-4) and took > 0
    assert blocks[0].start_time == decode.start_time and sum(map(length, blocks)) <= length(decode)
    assert all(before.end_time == after.start_time for before, after in pairwise(blocks))

    at = {event.name: event.timestamp for event in root.events}
    assert list(at) == ["mmserve.first_draft", "mmserve.first_commit", "mmserve.first_text"]
    [prefill] = traced.named("mmserve.prefill")
    assert prefill.end_time is not None and blocks[0].end_time is not None
    assert abs(at["mmserve.first_draft"] - prefill.end_time) < 50_000_000, "candidates come of prefill"
    assert at["mmserve.first_draft"] < at["mmserve.first_commit"] <= at["mmserve.first_text"]
    times = result.times
    assert 0 < times.first_draft < times.first_commit <= times.first_token <= times.total
    assert (at["mmserve.first_text"] - at["mmserve.first_draft"]) / 1e6 == pytest.approx(
        times.first_token - times.first_draft, abs=5
    )

    passes = {name: traced.named(f"mmserve.{name}.pass") for name in ("load", "encode", "prefill", "open")}
    assert [len(found) for found in passes.values()] == [1, 1, 1, 1]
    within = {found[0].context.span_id: name for name, found in passes.items()}
    moved = [
        (within[span.parent.span_id], attributes(span)["mmserve.transfer.operation"])
        for span in traced.named("mmserve.transfer")
        if span.parent is not None
    ]
    assert moved == [("encode", "send"), ("prefill", "receive"), ("prefill", "send"), ("open", "receive")]
    recorded = json.dumps([attributes(span) for span in traced._exporter.get_finished_spans()], default=str)
    assert "What is it" not in recorded and result.text not in recorded, "no word of a request or answer"


def test_samples_have_spans_of_their_own(traced: Recorded) -> None:
    result = traced.server.client.generate("How many?", max_new_tokens=8, n=2, temperature=1.0, seed=3)
    root = traced.root()
    told = attributes(root)
    assert told["gen_ai.request.choice.count"] == 2 and told["gen_ai.request.seed"] == 3
    assert told["gen_ai.usage.output_tokens"] == sum(each.usage.completion_tokens for each in result.samples)
    assert told["mmserve.forwards"] == sum(each.forwards for each in result.samples)
    for name in ("mmserve.prefill", "mmserve.decode"):
        assert sorted(attributes(span)["mmserve.sample"] for span in traced.named(name)) == [0, 1]
    waits = [attributes(w) for w in traced.named("mmserve.queue") if attributes(w)["mmserve.queue.for"] == "prefill"]
    assert sorted(wait["mmserve.sample"] for wait in waits) == [0, 1]
    drafts = [dict(e.attributes or {})["mmserve.sample"] for e in root.events if e.name == "mmserve.first_draft"]
    assert sorted(drafts) == [0, 1]


def test_http_and_grpc_go_on_with_the_callers_trace(traced: Recorded) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", traced.server.background.config.server.http_port, timeout=20)
    body = {"model": "bundled", "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 4}
    for flags, recorded in (("01", 1), ("00", 0)):
        traced.clear()
        headers = {"content-type": "application/json", "traceparent": f"00-{PARENT[0]}-{PARENT[1]}-{flags}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200 and json.loads(answer.read())
        if recorded:
            root = traced.root()
            assert root.parent is not None
            assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == PARENT
            assert attributes(root)["mmserve.method"] == "/v1/chat/completions"
        else:
            assert not traced._exporter.get_finished_spans(), "its caller's sampler has left it out"
    connection.close()
    traced.clear()
    traced.server.client.generate("How many?", max_new_tokens=4)
    assert traced.root().parent is None, "nobody's trace: one of its own"


def test_a_request_that_fails_or_is_left_has_its_code(traced: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument):
        traced.server.client.generate("?", temperature=-1.0)
    root = traced.root()
    assert attributes(root)["error.type"] == "INVALID_ARGUMENT" and root.status.status_code is trace.StatusCode.ERROR
    traced.clear()
    with gated(traced.server.engine, monkeypatch) as gates:
        gates.decode.close()
        events = traced.server.client.stream("?", max_new_tokens=24)
        assert isinstance(next(events), Admitted)
        wait_for("a decode batch", lambda: gates.decode.waiting)
        events.close()
        assert attributes(traced.root())["error.type"] == "CANCELLED"
        assert traced.named("mmserve.decode"), "what was under way ends with it"
        gates.open()


def test_a_pass_of_several_requests_is_linked_to_all_of_them(traced: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    with gated(traced.server.engine, monkeypatch) as gates:
        gates.encode.close()
        asked = [traced.server.ask(f"{name}: how many?", max_new_tokens=4) for name in ("one", "two", "three")]
        wait_for("all to wait", lambda: traced.server.engine.stats().live == 3)
        gates.open()
        assert all(each.result().forwards for each in asked)
    wait_for("three traces", lambda: len(traced._roots()) == 3)
    by_context = {root.context.span_id for root in traced._roots()}
    joined = 0
    for span in traced.named("mmserve.encode.pass"):
        members = [span.parent.span_id if span.parent else 0, *(link.context.span_id for link in span.links)]
        assert len(members) == attributes(span)["mmserve.batch.size"] and set(members) <= by_context
        joined += len(members) > 1
    assert joined, "some waited for the same worker"


def test_lines_of_the_log_name_the_request_its_tenant_and_its_trace(
    traced: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("mmserve")
    handler.setFormatter(Json())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    stages = traced.server.engine.stages
    commit = stages.decoder.commit

    def remarks(d: Any) -> Any:
        logging.getLogger("mmserve.constraint").warning("a remark")
        return commit(d)

    def broken(batch: list[Any]) -> list[Any]:
        raise RuntimeError("a bug of a stage")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(stages.decoder, "commit", remarks)
            traced.server.client.generate("How many?", max_new_tokens=4, request_id="good")
        good = traced.root()
        traced.clear()
        with monkeypatch.context() as patch:
            patch.setattr(stages.prefilling, "prefill", broken)
            with pytest.raises(Exception, match="internal error"):
                traced.server.client.generate("How many?", max_new_tokens=4, request_id="bad")
        bad = traced.root()
        wait_for("the access log", lambda: stream.getvalue().count("mmserve.access") == 2)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    for label, root in (("good", good), ("bad", bad)):
        own = [line for line in lines if line.get("request_id") == label]
        assert {line["trace_id"] for line in own} == {f"{root.context.trace_id:032x}"}
        assert len(own) >= 3, "admission, end, and the call's own line"
    remarked = [line for line in lines if line["message"] == "a remark"]
    assert remarked and all(line["request_id"] == "good" for line in remarked), "from the thread that decodes"
    [error] = [line for line in lines if line["level"] == "ERROR"]
    assert error["logger"] == "mmserve.engine" and error["request_id"] == "bad", "from the engine's own thread"
    assert "a bug of a stage" in error["exception"] and error["error_id"]
    assert all("request_id" in line for line in lines), "nothing was said of nobody"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_spans_leave_the_process_over_otlp(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with receives_grpc() if protocol == "grpc" else receives_http() as receiver:
        end = traces.configure(receiver.endpoint)
        try:
            exported(receiver)
        finally:
            end()
        [root] = receiver.named("chat bundled")
        assert root.attributes["gen_ai.request.model"] == "bundled" and not root.parent
        assert root.service["service.name"] == "mmserve" and root.service["deployment.environment.name"] == "test"
        blocks, [decode] = receiver.named("mmserve.block"), receiver.named("mmserve.decode")
        assert {block.parent for block in blocks} == {decode.span_id} and decode.parent == root.span_id
        assert {span.trace_id for span in receiver.spans} == {root.trace_id}


def exported(receiver: Receiver) -> None:
    with running() as server:
        last = list(server.client.stream("How many shapes are there?", max_new_tokens=8))[-1]
        assert isinstance(last, Finished)


def test_a_receiver_comes_from_the_environment_and_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    traces.configure()()
    assert traces._recorder is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    end = traces.configure()
    assert traces._recorder is not None
    end()
    assert traces._recorder is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    traces.configure()()
    assert traces._recorder is None
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke signals")
    with pytest.raises(ConfigError, match="smoke signals"):
        traces.configure()
    problems = {found.part: found.problem for found in check({"server": {"otlp_endpoint": "http://127.0.0.1:9"}}, "x")}
    assert "smoke signals" in problems["traces"]
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"pip install 'mmserve\[otel\]'"):
        traces.configure()
