"""Access log and metrics of calls: each call is counted and timed, and logged when it ends."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from mmserve.observe import calls, traces
from mmserve.observe.calls import Call
from mmserve.observe.metrics import Metrics
from mmserve.rpc.status import DEADLINE_SLACK
from mmserve.wire import request_id

logger = logging.getLogger("mmserve.access")

#: Methods that clients call regularly (health): logged at DEBUG unless they fail.
_ROUTINE = ("/grpc.health.v1.Health/", "/health")
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
#: Handler constructors by (request streams, response streams).
_MAKE = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class Access(grpc.aio.ServerInterceptor):
    """Observes every call from its arrival to its status; the first interceptor, so that refused calls are included.

    ``log``: whether a line is written for each call.
    """

    def __init__(self, metrics: Metrics, *, log: bool) -> None:
        self._metrics = metrics
        self._log = log

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's handler, wrapped; ``observe.calls.current()`` is the call from here on."""
        metadata = handler_call_details.invocation_metadata
        headers = traces.context_headers(metadata or ())
        call = Call(handler_call_details.method, request_id=request_id.label_in(metadata), headers=headers)
        calls.begin(call)
        handler = await continuation(handler_call_details)
        if handler is None:  # gRPC itself answers
            ended(call, "UNIMPLEMENTED", self._metrics, log=self._log, known=False)
            return None
        return self._watched(handler, call)

    def _watched(self, handler: Any, call: Call) -> Any:
        answer = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def one(request: Any, context: Any) -> Any:
            try:
                with self._watch(call, context):
                    result = await answer(request, context)
                    return result if handler.response_streaming else serialize(result)  # here: its size is known then
            except grpc.aio.AbortError as error:
                _let_go(error)
                raise

        async def many(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                with self._watch(call, context):
                    async for message in answer(request, context):
                        yield message
            except grpc.aio.AbortError as error:
                _let_go(error)
                raise

        def parse(data: bytes) -> Any:
            call.received += len(data)
            return data if handler.request_deserializer is None else handler.request_deserializer(data)

        def serialize(message: Any) -> bytes:
            data = message if handler.response_serializer is None else handler.response_serializer(message)
            call.sent += len(data)
            return bytes(data)

        make = _MAKE[handler.request_streaming, handler.response_streaming]
        written = serialize if handler.response_streaming else None
        return make(many if inspect.isasyncgenfunction(answer) else one, parse, written)

    @contextmanager
    def _watch(self, call: Call, context: Any) -> Iterator[None]:
        calls.begin(call)
        call.peer = context.peer()
        try:
            yield
        except asyncio.CancelledError:
            left = context.time_remaining()
            late = left is not None and left <= DEADLINE_SLACK
            self._ended(call, "DEADLINE_EXCEEDED" if late else "CANCELLED")
            raise
        except BaseException:
            self._ended(call, _code(context) if context.code() else "UNKNOWN")
            raise
        self._ended(call, _code(context))

    def _ended(self, call: Call, code: str) -> None:
        ended(call, code, self._metrics, log=self._log)


def ended(call: Call, code: str, metrics: Metrics, *, log: bool, known: bool = True) -> None:
    """Count ``call``, which ended with ``code`` (a gRPC code's name), and write its log line.

    ``known``: whether its method exists; unknown methods are not used as labels.
    """
    seconds = time.monotonic() - call.started
    metrics.calls.handled((call.route or call.method) if known else "", code, seconds)
    if not log:
        return
    fields = {
        "method": call.method,
        "peer": call.peer,
        "tenant": call.tenant,
        "model": call.model,
        "code": code,
        "ms": round(1000 * seconds, 1),
        "received_bytes": call.received,
        "sent_bytes": call.sent,
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": call.completion_tokens,
        "request_id": call.request_id,
        "trace_id": call.trace_id,
    }
    routine = code == "OK" and call.method.startswith(_ROUTINE)
    text = " ".join(f"{name}={_plain(str(value))}" for name, value in fields.items() if value != "")
    logger.log(logging.DEBUG if routine else logging.INFO, "%s", text, extra={"fields": fields})


def _let_go(error: BaseException) -> None:
    """Clears tracebacks: gRPC keeps the error of an ended call until its client has read the status, and it must not
    reference frames."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def _code(context: Any) -> str:
    code = context.code() or 0
    return code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code, "UNKNOWN")


def _plain(value: str) -> str:
    """``value`` without characters that would break a log line or its fields: clients choose the method's name."""
    if value.isascii() and value.isprintable() and " " not in value:
        return value
    return "".join(c if c.isprintable() and not c.isspace() else c.encode("unicode_escape").decode() for c in value)
