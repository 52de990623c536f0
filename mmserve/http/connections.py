"""Connections of the HTTP front end: uvicorn's, with additional limits.

``connection_class`` uses the fastest installed parser: httptools (llhttp, compiled) or h11.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from collections.abc import Iterable
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmserve.http.writes import JoinedWrites

logger = logging.getLogger("mmserve.http")

#: Maximum bytes of a request's head (request line and headers).
HEAD_BYTES = 64 << 10
#: Number of small chunks allowed in a body, and minimum mean bytes of chunks of a longer one.
TINY_PARTS, TINY = 1024, 64
#: Maximum seconds to receive a request's head, and the rest of a body after the response.
PATIENCE = 10.0
#: Key in the scope of a request whose client disconnected before the whole response was sent.
LEFT = "mmserve.left"
#: Key in the scope of a request beyond the limit of connections: the limit.
FULL = "mmserve.full"


class Parts:
    """Counts the chunks of a body: each costs the event loop about the same, however small, and one read may contain
    40,000."""

    def __init__(self) -> None:
        self._parts = self._bytes = 0

    def tiny(self, size: int) -> bool:
        """Count a chunk of ``size`` bytes. Returns whether the body has too many small chunks."""
        self._parts, self._bytes = self._parts + 1, self._bytes + size
        return self._parts > TINY_PARTS and self._bytes < self._parts * TINY


def wrong_head(method: bytes, version: bytes, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The reason why a head is refused: it is ambiguous (request smuggling), or meant for a proxy; empty if it is
    valid.

    headers: pairs of a name in lower case and a value.
    """
    hosts = codings = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            codings += 1
            if value.lower() != b"chunked":
                return "a transfer coding besides chunked"
    if version not in (b"1.1", b"1.0"):
        return "neither HTTP/1.1 nor HTTP/1.0"
    if codings > (version == b"1.1"):
        return "chunks in HTTP/1.0, or two transfer codings"
    if hosts > 1 or hosts < (version == b"1.1"):
        return "not one host"
    return "a tunnel" if method == b"CONNECT" else ""


class Limits(asyncio.Protocol):
    """Limits of both kinds of connections, mixed into uvicorn's protocols.

    A connection is closed if its next request's head is incomplete ``PATIENCE`` seconds after its first byte, if the
    rest of its request arrives that long after the response, or if it accepts nothing of a response for
    ``stall_seconds`` (0: unlimited).

    Requests of connections beyond ``most`` (0: unlimited) have ``FULL`` in their scope, and the connection is closed
    after their response, which should be short; so are others while more than ``most`` requests are running. uvicorn
    would refuse the requests of all connections beyond its limit, including health checks.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    client: tuple[str, int] | None
    cycle: Any
    app: Any
    connections: set[Any]
    tasks: set[asyncio.Task[None]]

    def __init__(self, *arguments: Any, stall_seconds: float = 0.0, most: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stall_seconds = stall_seconds
        self._most, self._beyond = most, False
        if most:
            self._whole_app, self.app = self.app, self._counted
        self._slow: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def _awaited(self) -> bool:
        """Whether the client must send something now: not between two requests, nor while one is running."""
        raise NotImplementedError

    def _unfinished(self) -> Iterable[Any]:
        """The requests without a complete response; maybe also some with one."""
        return () if self.cycle is None else (self.cycle,)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start with the limits of a first request."""
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        self._beyond = 0 < self._most < len(self.connections)
        # asyncio sets TCP_NODELAY only for sockets with a named protocol, not for those of ``create_server``. Without
        # it the second write of a response waits for the client's delayed acknowledgement of the first: 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(
            high=1
        )  # detect immediately what the system does not accept; 0 would stop TLS permanently
        self._watch()

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request; one beyond the limit has ``FULL`` in its scope."""
        self._beyond = self._beyond and len(self.connections) > self._most
        if not self._beyond and len(self.tasks) <= self._most:
            await self._whole_app(scope, receive, send)
            return
        scope[FULL] = self._most

        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await self._whole_app(scope, receive, last)

    def data_received(self, data: bytes) -> None:
        """Parse ``data``."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Continue with the next request."""
        super().on_response_complete()  # type: ignore[misc]
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and mark running and waiting requests as disconnected."""
        for cycle in self._unfinished():
            if not cycle.response_complete:
                cycle.scope[LEFT] = cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)
        for timer in (self._slow, self._stalled):
            if timer is not None:
                timer.cancel()
        self._slow = self._stalled = None

    def pause_writing(self) -> None:
        """The client currently accepts nothing."""
        super().pause_writing()
        if self._stall_seconds and self._stalled is None:
            self._stalled = self.loop.call_later(self._stall_seconds, self._leave)

    def resume_writing(self) -> None:
        """The client has accepted everything."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _leave(self) -> None:
        logger.info("%s took nothing for %g s (message_seconds)", self.client, self._stall_seconds)
        self.transport.abort()

    def _watch(self) -> None:
        if self.transport.is_closing() or not self._awaited():
            if self._slow is not None:
                self._slow.cancel()
                self._slow = None
        elif self._slow is None:
            self._slow = self.loop.call_later(PATIENCE, self.transport.close)


class _H11(h11.Connection):
    """Refuses ambiguous heads, overlong heads received in one read, and bodies of tiny chunks."""

    _seen = Parts()

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See h11; raises ``RemoteProtocolError`` for a refused request."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._seen = Parts()
            why = wrong_head(event.method, event.http_version, event.headers)
            if sum(len(name) + len(value) + 4 for name, value in event.headers) + len(event.target) > HEAD_BYTES:
                why = f"more than {HEAD_BYTES} bytes"
            if why:
                raise h11.RemoteProtocolError(why)
        elif isinstance(event, h11.Data) and self._seen.tiny(len(event.data)):
            raise h11.RemoteProtocolError(f"chunks of less than {TINY} bytes")
        return event


class H11Connection(Limits, H11Protocol):
    """A connection parsed by h11 (pure Python)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _H11(h11.SERVER, HEAD_BYTES)

    def _awaited(self) -> bool:
        if self.conn.their_state is h11.IDLE:
            return self.cycle is None or bool(self.conn.trailing_data[0])
        return self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete


def connection_class() -> type[Limits]:
    """The connection class with httptools if it is installed, else with h11."""
    try:
        found: type[Limits] = importlib.import_module("mmserve.http.llhttp").LlhttpConnection
    except ModuleNotFoundError as error:
        if error.name != "httptools":
            raise
        return H11Connection
    return found
