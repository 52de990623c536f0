"""The HTTP port of a server: uvicorn on the server's event loop, started and stopped with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import uvicorn

from mmserve.config import Config
from mmserve.config.ports import cannot_listen
from mmserve.errors import ConfigError
from mmserve.http.access import Access
from mmserve.http.app import App
from mmserve.http.connections import connection_class
from mmserve.observe.endpoint import tls_context
from mmserve.rpc.server import Server

logger = logging.getLogger("mmserve.http")
logging.getLogger("uvicorn").setLevel(logging.WARNING)

#: Maximum connections waiting to be accepted.
_BACKLOG = 2048


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers, which the server has; ``listening`` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Replaceable(ssl.SSLContext):
    """A listening context whose connections use the ``latest`` context, because CAs and session ticket keys cannot be
    removed from a context."""

    latest: ssl.SSLContext

    def wrap_bio(self, *given: Any, **named: Any) -> ssl.SSLObject:
        """See ``SSLContext.wrap_bio``."""
        return self.latest.wrap_bio(*given, **named)


class HttpFront:
    """Serves the HTTP APIs of ``server`` on ``[server] http_port`` of its configuration, with its certificate."""

    def __init__(self, server: Server, port: int | None = None) -> None:
        """``port``: overrides the configuration's; 0 = any free port."""
        self._server = server
        self._asked = server.config.server.http_port if port is None else port
        self._app: App | None = None
        self._uvicorn: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        self._tls: _Replaceable | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen; raises ``ConfigError`` if the port cannot be bound."""
        config = self._server.config.server
        listener = _listener(config.host, self._asked)
        self.port = listener.getsockname()[1]
        self._app = App(self._server)
        wrapped = Access(self._app.asgi, self._server.metrics, log=config.access_log)
        settings = uvicorn.Config(
            wrapped,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            http=cast(
                Any, partial(connection_class(), stall_seconds=config.message_seconds, most=config.http_connections)
            ),
            loop="none",
            timeout_keep_alive=int(config.connection_idle_seconds) or 1 << 30,
        )
        settings.load()
        if (context := tls_context(config)) is not None:
            settings.ssl = self._tls = _Replaceable(ssl.PROTOCOL_TLS_SERVER)
            self._tls.latest = context
        self._uvicorn = _Uvicorn(settings)
        self._task = asyncio.create_task(self._uvicorn.serve([listener]))
        listening = asyncio.create_task(self._uvicorn.listening.wait())
        await asyncio.wait((listening, self._task), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            listening.cancel()
            raise ConfigError(f"cannot serve HTTP on {config.host}:{self.port}: {self._task.exception()}")
        logger.info("HTTP on %s://%s:%d", "https" if config.tls_key else "http", config.host, self.port)

    async def stop(self, seconds: float) -> None:
        """Stop listening; responses in progress get ``seconds`` to be sent."""
        if self._uvicorn is None or self._task is None:
            return
        self._uvicorn.should_exit = True
        done, _ = await asyncio.wait((self._task,), timeout=seconds)
        if not done:
            self._uvicorn.force_exit = True
            await asyncio.wait((self._task,))
        if self._app is not None:
            self._app.close()

    def reload_tls(self, config: Config) -> None:
        """Use the certificates of ``config`` for new connections."""
        if self._tls is not None and (context := tls_context(config.server)) is not None:
            self._tls.latest = context


def _listener(host: str, port: int) -> socket.socket:
    """A listening socket; raises ``ConfigError`` if the port cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise cannot_listen(host, port, "http_port", error) from error
