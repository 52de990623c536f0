"""Where metrics are read: a port of its own that speaks HTTP."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from mmserve.config import ServerConfig
from mmserve.errors import ConfigError


class Endpoint:
    """Serves a ``registry`` on ``config.metrics_host`` and ``metrics_port``, each reader on a thread, until closed.

    With the server's certificate, and its demand for one of the client's, where it has them. ``ConfigError`` where the
    port cannot be had.
    """

    def __init__(self, registry: CollectorRegistry, config: ServerConfig) -> None:
        try:
            self._server, self._thread = start_http_server(
                config.metrics_port,
                config.metrics_host,
                registry,
                certfile=config.tls_certificate or None,
                keyfile=config.tls_key or None,
                client_cafile=config.tls_client_ca or None,
                client_auth_required=bool(config.tls_client_ca),
            )
        except OSError as error:
            where = f"{config.metrics_host}:{config.metrics_port}"
            raise ConfigError(f"cannot serve metrics on {where}: is the port in use? ({error})") from error

    def close(self) -> None:
        """Stop listening. Takes up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
