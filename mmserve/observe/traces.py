"""Traces of requests with OpenTelemetry: the interface for the rest of the server.

Disabled until ``configure`` or ``use`` is called: until then OpenTelemetry is not imported, requests have no ``trace``,
and the functions here do nothing. ``spans.py`` defines what is recorded. A process has one recorder, as it has one log;
a worker process calls ``configure`` itself, and receives the trace context with each request (``Request.trace``).
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import mmserve
from mmserve.core.request import Request
from mmserve.errors import ConfigError
from mmserve.observe.calls import Call
from mmserve.transfer.base import Transport

if TYPE_CHECKING:  # imports OpenTelemetry
    from opentelemetry.trace import TracerProvider

    from mmserve.observe.spans import Recorder, RequestTrace

logger = logging.getLogger("mmserve.observe")

#: Standard environment variables with the address of a trace receiver.
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_GRPC, _HTTP = "grpc", "http/protobuf"

_recorder: Recorder | None = None


def use(provider: TracerProvider | None) -> None:
    """Record traces with ``provider``, set up by the application that embeds a server; None = stop recording.

    To be called before engines are created: transports created earlier are not traced.
    """
    global _recorder
    if provider is None:
        _recorder = None
        return
    from mmserve.observe.spans import Recorder

    _recorder = Recorder(provider.get_tracer("mmserve", mmserve.__version__))


def configure(endpoint: str = "") -> Callable[[], None]:
    """Send traces to the OTLP receiver at ``endpoint``, by default at the one of the ``OTEL_…`` environment variables.

    Nothing is traced without either, or with ``OTEL_SDK_DISABLED=true`` or ``OTEL_TRACES_EXPORTER=none``. The protocol
    is ``OTEL_EXPORTER_OTLP_PROTOCOL``, by default gRPC; samplers, headers and resource attributes are read from the
    environment. Returns a function that flushes the remaining spans and stops tracing. Raises ``ConfigError`` if the
    SDK is not installed or the protocol is unknown.
    """
    named = endpoint or any(os.environ.get(name) for name in _ENDPOINTS)
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    if not named or off:
        return lambda: None
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("traces need OpenTelemetry's SDK: pip install 'mmserve[otel]'") from error

    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
    use(provider)
    logger.info("traces go to %s", endpoint or next(os.environ[name] for name in _ENDPOINTS if os.environ.get(name)))

    def end() -> None:
        use(None)
        provider.shutdown()

    return end


def context_headers(headers: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """The headers (or metadata) of a call that carry its trace context, by name."""
    return {} if _recorder is None else _recorder.context_headers(headers)


def begin(call: Call) -> RequestTrace | None:
    """The trace of the request of ``call``; None if tracing is disabled or the trace is not sampled."""
    return None if _recorder is None else _recorder.begin(call)


def stage_pass(stage: str, requests: Sequence[Request]) -> AbstractContextManager[None]:
    """A context in which a worker runs ``stage`` on a batch of ``requests``."""
    return nullcontext() if _recorder is None else _recorder.stage_pass(stage, requests)


def observed(transport: Transport, stage: str) -> Transport:
    """``transport`` to ``stage`` with a span for each transfer, in the span of its pass; unchanged without tracing."""
    return transport if _recorder is None else _recorder.observed(transport, stage)


def _exporter(endpoint: str) -> Any:
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), _GRPC)
    try:
        if protocol == _GRPC:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            return Grpc(endpoint=endpoint or None)
        if protocol == _HTTP:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            return Http(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
    except ImportError as error:
        raise ConfigError("traces need OpenTelemetry's OTLP exporters: pip install 'mmserve[otel]'") from error
    raise ConfigError(f"{_PROTOCOLS[1]} must be {_GRPC} or {_HTTP}, not {protocol!r}")


def _resource() -> Any:
    """The OpenTelemetry resource of this process: from the environment variables, with the default name ``mmserve``."""
    from opentelemetry.sdk.resources import Resource

    found = Resource.create({"service.version": mmserve.__version__, "service.instance.id": uuid.uuid4().hex})
    unnamed = str(found.attributes["service.name"]).startswith("unknown_service")
    return found.merge(Resource({"service.name": "mmserve"})) if unnamed else found
