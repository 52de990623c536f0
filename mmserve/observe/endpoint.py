"""The metrics endpoint: an HTTP server on its own port."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler

from mmserve.config import ServerConfig
from mmserve.config.ports import cannot_listen

logger = logging.getLogger("mmserve.observe")

#: Timeout of a client's handshake and of its request in seconds, and the maximum number of concurrent clients.
_PATIENCE, _READERS = 10.0, 32


class Endpoint:
    """Serves ``registry`` on ``config.metrics_host`` and ``metrics_port``, one thread a client, until closed.

    Uses the server's TLS certificate, and requires client certificates if the server does. Raises ``ConfigError`` if it
    cannot listen or load the TLS files.
    """

    def __init__(self, registry: CollectorRegistry, config: ServerConfig) -> None:
        host, port = config.metrics_host, config.metrics_port
        handler = _Text.factory(registry)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._server = _Server((host, port), handler, family, tls_context(config))
        except OSError as error:
            raise cannot_listen(host, port, "metrics_port", error) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="mmserve-metrics", daemon=True)
        self._thread.start()
        logger.info("metrics on %s://%s:%d/metrics", "https" if config.tls_key else "http", host, port)

    def reload_tls(self, config: ServerConfig) -> None:
        """Use the present TLS files of ``config`` for new clients; the files must have been validated."""
        self._server.tls = tls_context(config)

    def close(self) -> None:
        """Stop listening. Blocks for up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Text(MetricsHandler):
    """Always responds in Prometheus's text format, whatever the ``Accept`` header.

    In OpenMetrics, which Prometheus 2 requests, prometheus_client replaces the colon of a sample's name with an
    underscore, so that the names are not those of dashboards (prometheus/client_python, issue 1177).
    """

    def do_GET(self) -> None:
        """Respond to one request."""
        del self.headers["Accept"]
        super().do_GET()


class _Server(ThreadingHTTPServer):
    """Handles each client in its own thread, so that a slow handshake or an idle client does not block the others."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * _READERS  # backlog: clients beyond it would wait for a minute

    def __init__(
        self, address: tuple[str, int], handler: Any, family: socket.AddressFamily, tls: ssl.SSLContext | None
    ) -> None:
        self.address_family = family
        self.tls = tls
        self._places = threading.BoundedSemaphore(_READERS)
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether another client can be accepted: at most ``_READERS`` at a time."""
        return self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_PATIENCE)
        tls = self.tls
        if tls is None:
            super().finish_request(request, client_address)
            return
        with tls.wrap_socket(request, server_side=True) as secure:
            super().finish_request(secure, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a reader of metrics at %s went away", client_address, exc_info=True)


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """A context with the present TLS files of ``config``, which must have been validated; None without TLS."""
    if not config.tls_key:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.tls_certificate, config.tls_key)
    if config.tls_client_ca:
        context.load_verify_locations(config.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
