"""Records one request while it is answered: for metrics, the access log, and its trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Self, cast

from mmserve.core.events import Delta, Event, Finished
from mmserve.core.progress import Progress
from mmserve.core.request import Request
from mmserve.errors import MMServeError
from mmserve.observe import calls
from mmserve.observe.metrics import Metrics

if TYPE_CHECKING:  # imports OpenTelemetry
    from mmserve.observe.spans import RequestTrace


class Watch:
    """Records one request, from its arrival to its last event or error."""

    def __init__(self, metrics: Metrics, trace: RequestTrace | None = None) -> None:
        self._metrics, self._trace = metrics, trace
        self._longest = 0  # tokens of the longest answer
        self._last: dict[int, float] = {}  # time of each sample's last text (monotonic, seconds)
        self.model = ""  # "" for an unknown model: a client's text is never a label
        self.tenant = ""
        self.left = ""  # error code after the client disconnected, "" = connected
        self.why_cancelled = "cancelled by the client"  # for the log, if the answer is no longer awaited

    def accepted(self, request: Request) -> Request:
        """``request`` as passed to the engine: with the client's request id as label, and with its trace context, if
        any."""
        request = replace(request, label=calls.current().request_id)
        if self._trace is None:
            return request
        self._trace.accepted(request)
        return replace(request, trace=self._trace.carrier)

    def sink(self, put: Callable[[Event], None]) -> Callable[[Event | Progress], None]:
        """The function to call with the engine's events: passes events to ``put``, and events and progress to the
        trace."""
        trace = self._trace
        if trace is None:  # without a trace the engine reports no progress
            return cast(Callable[[Event | Progress], None], put)

        def take(event: Event | Progress) -> None:
            trace.record(event)
            if not isinstance(event, Progress):
                put(event)

        return take

    def record(self, event: Event) -> None:
        """Record an event as it is sent to the client."""
        if isinstance(event, Finished):
            self._longest = max(self._longest, event.usage.completion_tokens)
            self._metrics.finished(self.model, event)
            self._metrics.tenants.finished(self.tenant, event)
            calls.current().prompt_tokens += event.usage.prompt_tokens
            calls.current().completion_tokens += event.usage.completion_tokens
        elif isinstance(event, Delta):
            now = time.monotonic()
            if event.sample in self._last:
                self._metrics.between(self.model, now - self._last[event.sample])
            self._last[event.sample] = now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self._metrics.answered(self.model, self._longest)
            self._metrics.tenants.ended(self.tenant, "OK")
            self._end_trace("")
            return
        code = error.code if isinstance(error, MMServeError) else "INTERNAL"
        if isinstance(error, asyncio.CancelledError | GeneratorExit):  # the latter: the stream of events was closed
            code = calls.current().failed or self.left or "CANCELLED"
        self._metrics.failed(self.model, code)
        self._metrics.tenants.ended(self.tenant, code)
        self._end_trace(code)

    def _end_trace(self, code: str) -> None:
        if self._trace is not None:
            self._trace.end(code)
