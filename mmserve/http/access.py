"""Access log and metrics of HTTP requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmserve.http.connections import LEFT
from mmserve.http.errors import STATUS
from mmserve.observe import calls, traces
from mmserve.observe.calls import Call
from mmserve.observe.metrics import Metrics
from mmserve.rpc.access import ended

#: Names of gRPC codes by HTTP status, for metrics and the log; the first of those with the same status.
_CODES = {int(status): code for code, status in reversed(STATUS.items())}
_UNKNOWN_ROUTE = 404, 405


class Access:
    """Wraps ``app``; ``log``: whether lines are written."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, log: bool) -> None:
        self._app, self._metrics, self._log = app, metrics, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host, port = scope.get("client") or ("", 0)
        headers = traces.context_headers(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        )
        call = Call(scope["path"], peer=f"{host}:{port}", headers=headers)
        calls.begin(call)
        status, whole = 500, False

        async def counted() -> Message:
            message = await receive()
            call.received += len(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            nonlocal status, whole
            status = message.get("status", status)
            call.sent += len(message.get("body", b""))
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._app(scope, counted, sent)
        finally:
            known = bool(call.request_id) or ("endpoint" in scope and status not in _UNKNOWN_ROUTE)
            code = call.failed or ("OK" if whole and LEFT not in scope else "CANCELLED")
            if status >= 400:
                code = _CODES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
            ended(call, code, self._metrics, log=self._log, known=known)
