"""The HTTP port of a server: uvicorn on the server's event loop, started and stopped with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmserve.config import Config
from mmserve.errors import ConfigError
from mmserve.http.access import Access, Stalled
from mmserve.http.app import App
from mmserve.rpc.server import Server

logger = logging.getLogger("mmserve.http")
logging.getLogger("uvicorn").setLevel(logging.WARNING)
# uvicorn takes it for a bug of the application; the access log has the request
logging.getLogger("uvicorn.error").addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], Stalled))
)

#: Bytes of a request's head (its line and headers), and connections that wait to be accepted.
_HEAD_BYTES, _BACKLOG = 64 << 10, 2048
#: Chunks of a body that may be small, and bytes that those of a longer one have on average.
_TINY_PARTS, _TINY = 1024, 64
#: Seconds that a request's head may take to arrive.
PATIENCE = 10.0


class _Parts(h11.Connection):
    """Refuses a body of tiny chunks: each costs the event loop what a large one does, and one read may hold 40,000."""

    _parts = _bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As of h11; ``RemoteProtocolError`` for such a body."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._parts = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._parts, self._bytes = self._parts + 1, self._bytes + len(event.data)
            if self._parts > _TINY_PARTS and self._bytes < self._parts * _TINY:
                raise h11.RemoteProtocolError(f"chunks of less than {_TINY} bytes")
        return event


class _Connection(H11Protocol):
    """Closes a connection whose next request's head is not whole ``PATIENCE`` seconds after its first byte."""

    _slow: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _Parts(h11.SERVER, _HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does so for sockets whose protocol is named, which those of ``create_server`` are not. Without it the
        # second write of a response waits for the client's delayed acknowledgement of the first: 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        """Run the timer while a request is awaited, but not between two of a connection."""
        begun = self.conn.their_state is h11.IDLE and (self.cycle is None or bool(self.conn.trailing_data[0]))
        if not begun:
            self._unwatch()
        elif self._slow is None:
            self._slow = self.loop.call_later(PATIENCE, self.transport.close)

    def _unwatch(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the server that it is part of; ``listening`` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpFront:
    """Serves the HTTP APIs of ``server`` on ``[server] http_port`` of its configuration, with its certificate."""

    def __init__(self, server: Server, port: int | None = None) -> None:
        """``port``: in place of the configuration's; 0 = any free one."""
        self._server = server
        self._asked = server.config.server.http_port if port is None else port
        self._app: App | None = None
        self._uvicorn: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen; raises ``ConfigError`` where the port cannot be bound."""
        config = self._server.config.server
        listener = _listener(config.host, self._asked)
        self.port = listener.getsockname()[1]
        self._app = App(self._server)
        wrapped = Access(self._app.asgi, self._server.metrics, log=config.access_log, patience=config.message_seconds)
        settings = uvicorn.Config(
            wrapped,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            http=_Connection,
            loop="none",
            limit_concurrency=config.http_connections or None,
            timeout_keep_alive=int(config.connection_idle_seconds) or 1 << 30,
            ssl_certfile=config.tls_certificate or None,
            ssl_keyfile=config.tls_key or None,
            ssl_ca_certs=config.tls_client_ca or None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if config.tls_client_ca else ssl.CERT_NONE,
        )
        self._uvicorn = _Uvicorn(settings)
        self._task = asyncio.create_task(self._uvicorn.serve([listener]))
        listening = asyncio.create_task(self._uvicorn.listening.wait())
        await asyncio.wait((listening, self._task), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            listening.cancel()
            raise ConfigError(f"cannot serve HTTP on {config.host}:{self.port}: {self._task.exception()}")
        logger.info("HTTP on %s://%s:%d", "https" if config.tls_key else "http", config.host, self.port)

    async def stop(self, seconds: float) -> None:
        """Stop listening; answers in progress are sent for so many seconds."""
        if self._uvicorn is None or self._task is None:
            return
        self._uvicorn.should_exit = True
        done, _ = await asyncio.wait((self._task,), timeout=seconds)
        if not done:
            self._uvicorn.force_exit = True
            await asyncio.wait((self._task,))
        if self._app is not None:
            self._app.close()

    def follow(self, config: Config) -> None:
        """Use the certificates of ``config`` for new connections."""
        context = None if self._uvicorn is None else self._uvicorn.config.ssl
        if context is None:
            return
        context.load_cert_chain(config.server.tls_certificate, config.server.tls_key)
        if config.server.tls_client_ca:
            context.load_verify_locations(config.server.tls_client_ca)


def _listener(host: str, port: int) -> socket.socket:
    """A listening socket; ``ConfigError`` where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot serve HTTP on {host}:{port}: is the port in use? ({error})") from error
