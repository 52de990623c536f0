"""Contents of a request's trace: spans of its waiting and processing times, and events of its answer.

Names are those of OpenTelemetry's semantic conventions for generative AI where they exist, and ``mmserve.…`` otherwise;
``docs/observability.md`` lists all. Text of clients or models is never recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from mmserve.core.constraint import JsonSchema
from mmserve.core.events import Event, Finished
from mmserve.core.progress import Progress, Reached, StageEntered, Step, StepTaken
from mmserve.core.request import TERMINAL, Request, RequestId, Stage
from mmserve.observe.calls import Call
from mmserve.transfer.base import Transport

#: Names of the spans of processing stages, except decode, which has a span for each block.
_WORK = {
    Stage.CONSTRAINING: "mmserve.constraint",
    Stage.LOADING: "mmserve.load",
    Stage.ENCODING: "mmserve.encode",
    Stage.PREFILLING: "mmserve.prefill",
}
#: What a request waits for in each of the other stages.
_AWAITED = {
    Stage.QUEUED: "start",
    Stage.CONSTRAINED: "encode",
    Stage.LOADED: "encode",
    Stage.ENCODED: "prefill",
    Stage.PREFILLED: "decode",
}


class Recorder:
    """Starts the traces of requests in one process, and the spans of its workers' passes."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def context_headers(self, headers: Iterable[tuple[str, Any]]) -> dict[str, str]:
        known = propagate.get_global_textmap().fields
        return {name: value for name, value in headers if name in known and isinstance(value, str)}

    def begin(self, call: Call) -> RequestTrace | None:
        arrived = time.time_ns() - int(1e9 * (time.monotonic() - call.started))
        parent = propagate.extract(call.headers)
        span = self._tracer.start_span("chat", parent, SpanKind.SERVER, start_time=arrived)
        if not span.is_recording():
            return None
        context = span.get_span_context()
        call.trace_id, call.span_id = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
        span.set_attribute("mmserve.method", call.method)
        span.set_attribute("mmserve.request_id", call.request_id)
        if call.tenant:
            span.set_attribute("mmserve.tenant", call.tenant)
        return RequestTrace(self._tracer, span)

    @contextmanager
    def stage_pass(self, stage: str, requests: Sequence[Request]) -> Iterator[None]:
        """See ``traces.stage_pass``: a span in the trace of the first request, linked to the traces of the others."""
        contexts = {r.trace["traceparent"]: propagate.extract(r.trace) for r in requests if "traceparent" in r.trace}
        if not contexts:
            yield
            return
        first, *others = contexts.values()
        with self._tracer.start_as_current_span(
            f"mmserve.{stage}.pass",
            first,
            attributes={"mmserve.batch.size": len(requests)},
            links=[Link(trace.get_current_span(other).get_span_context()) for other in others],
        ):
            yield

    def observed(self, transport: Transport, stage: str) -> Transport:
        return ObservedTransport(self._tracer, transport, stage)


class ObservedTransport:
    """``transport`` to ``stage`` with a span for each transfer within a traced pass.

    A transport may set further attributes of a transfer, such as its bytes, on the current span.
    """

    def __init__(self, tracer: Tracer, transport: Transport, stage: str) -> None:
        self._tracer, self._transport, self._stage = tracer, transport, stage

    @property
    def in_process(self) -> bool:
        """As in ``Transport``; so are the other methods."""
        return self._transport.in_process

    def send(self, request: RequestId, payload: Any) -> None:
        with self._span("send"):
            self._transport.send(request, payload)

    def receive(self, request: RequestId) -> Any:
        with self._span("receive"):
            return self._transport.receive(request)

    def drop(self, request: RequestId) -> None:
        self._transport.drop(request)

    @property
    def waiting(self) -> int:
        return self._transport.waiting

    @contextmanager
    def _span(self, operation: str) -> Iterator[None]:
        if not trace.get_current_span().is_recording():
            yield
            return
        attributes: dict[str, AttributeValue] = {
            "mmserve.transfer.operation": operation,
            "mmserve.transfer.stage": self._stage,
            "mmserve.transfer.in_process": self.in_process,
        }
        with self._tracer.start_as_current_span("mmserve.transfer", attributes=attributes):
            yield


class RequestTrace:
    """The trace of one request, from arrival to end. Written by the engine's thread and by the server's."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._within = trace.set_span_in_context(span)
        self._lock = threading.Lock()
        self._samples: dict[int, _Sample] = {}
        self._finished: list[Finished] = []
        self._encoded: int | None = None  # when the samples' traces diverge
        self._several = False
        self._ended = False
        self.carrier: dict[str, str] = {}  # for ``Request.trace``
        propagate.inject(self.carrier, self._within)

    def accepted(self, request: Request) -> None:
        """Record that the request was parsed from the client's message; it is queued from now on."""
        self._span.update_name(f"chat {request.model}")
        self._span.set_attributes(_asked(request))
        self._several = request.sampling.n > 1
        self._sample(0).enter(Stage.QUEUED, time.time_ns())

    def record(self, event: Event | Progress) -> None:
        """Record an event of the engine; ignored after the end."""
        with self._lock:
            if self._ended:
                return
            match event:
                case StageEntered(stage, at, sample):
                    if stage is Stage.ENCODED and self._encoded is None:
                        self._encoded = at
                    self._sample(sample).enter(stage, at)
                case StepTaken(step, at, sample):
                    self._sample(sample).step(step, at)
                case Reached(milestone, at, sample):
                    self._span.add_event(f"mmserve.first_{milestone}", {"mmserve.sample": sample}, at)
                case Finished():
                    self._finished.append(event)

    def end(self, code: str = "") -> None:
        """Record the end of the request: with the error ``code`` (the name of a gRPC status code), "" = success."""
        with self._lock:
            self._ended = True
            now = time.time_ns()
            for sample in self._samples.values():
                sample.end(now)
            if self._finished:
                self._span.set_attributes(_answered(self._finished))
            if code:
                self._span.set_attribute("error.type", code)
                self._span.set_status(Status(StatusCode.ERROR, code))
            self._span.end(now)

    def _sample(self, number: int) -> _Sample:
        if number not in self._samples:
            attributes = {"mmserve.sample": number} if self._several else {}
            self._samples[number] = _Sample(self._tracer, self._within, attributes)
            if number and self._encoded is not None:  # so far it shared the trace of the first
                self._samples[number].enter(Stage.ENCODED, self._encoded)
        return self._samples[number]


@dataclass
class _Block:
    """A block in decode."""

    span: Span
    number: int
    forwards: int  # before the block
    constraint_seconds: float
    committed: int = 0
    edited: int = 0


class _Sample:
    """Spans of one sample: of its present stage, and in decode of its present block."""

    def __init__(self, tracer: Tracer, within: Context, attributes: Mapping[str, AttributeValue]) -> None:
        self._tracer, self._within, self._attributes = tracer, within, attributes
        self._current: Span | None = None  # of its present stage
        self._decoding = False
        self._block: _Block | None = None
        self._last = 0  # end of the last step or start of decode
        self._step = Step(-1, 0, 0, 0, 0.0)

    def enter(self, stage: Stage, at: int) -> None:
        """Record that the sample entered ``stage`` at time ``at`` (ns)."""
        if stage is Stage.READY or (stage is Stage.STEPPING and self._decoding):
            return
        self._close(at)
        if stage is Stage.STEPPING:
            self._decoding, self._last = True, at
            self._current = self._start("mmserve.decode", at)
        elif stage in _WORK:
            self._current = self._start(_WORK[stage], at)
        elif stage not in TERMINAL:
            self._current = self._start("mmserve.queue", at, {"mmserve.queue.for": _AWAITED[stage]})

    def step(self, step: Step, at: int) -> None:
        """Record a step of the sample that ended at time ``at`` (ns)."""
        block, before = self._block, self._step
        if block is None or block.number != step.block:
            self._end_block()
            within = self._within if self._current is None else trace.set_span_in_context(self._current)
            span = self._start("mmserve.block", self._last, {"mmserve.block.index": step.block}, within)
            block = self._block = _Block(span, step.block, before.forwards, before.constraint_seconds)
        block.committed += step.committed
        block.edited += step.edited
        self._last, self._step = at, step

    def end(self, at: int) -> None:
        """Record that the sample ended at time ``at`` (ns), finished or not."""
        self._close(at)

    def _close(self, at: int) -> None:
        self._end_block()
        if self._current is not None:
            self._current.end(at)
        self._current, self._decoding = None, False

    def _end_block(self) -> None:
        block, last = self._block, self._step
        if block is None:
            return
        took = last.constraint_seconds - block.constraint_seconds
        block.span.set_attributes(
            {
                "mmserve.block.forwards": last.forwards - block.forwards,
                "mmserve.block.committed_tokens": block.committed,
                "mmserve.block.edited_tokens": block.edited,
                "mmserve.block.constraint_seconds": round(took, 6),
            }
        )
        block.span.end(self._last)
        self._block = None

    def _start(
        self, name: str, at: int, more: Mapping[str, AttributeValue] | None = None, within: Context | None = None
    ) -> Span:
        attributes = {**self._attributes, **(more or {})}
        return self._tracer.start_span(name, within or self._within, attributes=attributes, start_time=at)


def _asked(request: Request) -> dict[str, AttributeValue]:
    """Attributes of a request that are known before it is answered."""
    sampling, diffusion = request.sampling, request.diffusion
    kind = None if request.constraint is None else request.constraint.kind
    asked: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mmserve",
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.stream": request.streaming.deltas,
        "gen_ai.output.type": "json" if isinstance(kind, JsonSchema) else "text",
        "gen_ai.response.id": request.id,
        "gen_ai.response.model": request.model,
        "mmserve.recompute_policy": diffusion.recompute.name,
        "mmserve.commit_policy": diffusion.commit.name,
        "mmserve.pruner": request.vision.pruner,
    }
    if sampling.seed < 1 << 63:  # attributes are signed 64-bit integers
        asked["gen_ai.request.seed"] = sampling.seed
    if sampling.n > 1:
        asked["gen_ai.request.choice.count"] = sampling.n
    if kind is not None:
        asked["mmserve.constraint.kind"] = type(kind).__name__
    return asked


def _answered(finished: Sequence[Finished]) -> dict[str, AttributeValue]:
    """Attributes of a request's outcome."""
    samples = sorted(finished, key=lambda each: each.sample)
    prompt, output = samples[0].usage, sum(each.usage.completion_tokens for each in samples)
    forwards = sum(each.forwards for each in samples)
    return {
        "gen_ai.response.finish_reasons": [each.reason for each in samples],
        "gen_ai.usage.input_tokens": prompt.prompt_tokens,
        "gen_ai.usage.output_tokens": output,
        "gen_ai.usage.cache_read.input_tokens": prompt.cached_tokens,
        "mmserve.usage.visual_tokens": prompt.visual_tokens,
        "mmserve.forwards": forwards,
        "mmserve.tokens_per_forward": round(output / max(1, forwards), 4),
        "mmserve.recomputed_tokens": sum(each.recomputed_tokens for each in samples),
    }
