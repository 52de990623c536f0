"""Where metrics are read: a port of its own that speaks HTTP."""

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

#: Seconds that a reader has for its handshake and for its question, and how many readers there may be at once.
_PATIENCE, _READERS = 10.0, 32


class Endpoint:
    """Serves a ``registry`` on ``config.metrics_host`` and ``metrics_port``, each reader on a thread, until closed.

    With the server's certificate, and its demand for one of the client's, where it has them. ``ConfigError`` where that
    cannot be.
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

    def follow(self, config: ServerConfig) -> None:
        """Use the TLS files of ``config`` as they are now, for new readers; those must be known to be good."""
        self._server.tls = tls_context(config)

    def close(self) -> None:
        """Stop listening. Blocks for up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Text(MetricsHandler):
    """Answers in Prometheus's text format, whatever a reader would like better.

    In OpenMetrics, which Prometheus 2 asks for, prometheus_client writes the colon of a sample's name as an underscore,
    and no name is then what dashboards call it (prometheus/client_python, issue 1177).
    """

    def do_GET(self) -> None:
        """Answer one question."""
        del self.headers["Accept"]
        super().do_GET()


class _Server(ThreadingHTTPServer):
    """Accepts readers whatever any of them does: a handshake is its own thread's, and so is a silent one's time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * _READERS  # of the system's: those beyond it would connect, and wait for a minute

    def __init__(
        self, address: tuple[str, int], handler: Any, family: socket.AddressFamily, tls: ssl.SSLContext | None
    ) -> None:
        self.address_family = family
        self.tls = tls
        self._places = threading.BoundedSemaphore(_READERS)
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more reader."""
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
    """With the TLS files of ``config`` as they are now, which must be known to be good; None without TLS."""
    if not config.tls_key:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.tls_certificate, config.tls_key)
    if config.tls_client_ca:
        context.load_verify_locations(config.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
