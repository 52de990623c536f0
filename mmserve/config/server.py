"""``[server]``: addresses, security and limits of the server."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmserve.core.values import Range, at_least, value
from mmserve.errors import ConfigError
from mmserve.tenants import is_token

#: Maximum values for gRPC, whose options are 32-bit integers: a number, and seconds (in milliseconds).
_MOST = (1 << 31) - 1
_MOST_SECONDS = _MOST // 1000
_PORT = at_least(0, most=65535)
_NO_LIMIT = at_least(0, meaning="no limit", most=_MOST_SECONDS)
_PREFIXES = Range(
    "letters, digits and '_' with ':' at the end, not 'mmserve:'",
    lambda prefixes: all(re.fullmatch("(?!mmserve:)[a-zA-Z_][a-zA-Z0-9_]*:", prefix) for prefix in prefixes),
)
_TOKENS = Range("printable ASCII, and none of them empty", lambda tokens: all(map(is_token, tokens)))


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Addresses, security and limits of the server."""

    host: str = value("127.0.0.1", meaning="address to listen on")
    port: int = value(50051, _PORT, "0 = any free port")
    max_message_bytes: int = value(
        64 << 20, at_least(1, most=_MOST), "bytes of one message; upload larger media first (UploadMedia)"
    )
    message_seconds: float = value(60.0, at_least(0, meaning="no limit"), "time for a whole message to arrive")
    connection_calls: int = value(1024, at_least(0, meaning="no limit", most=_MOST), "concurrent calls of a connection")
    connection_idle_seconds: float = value(600.0, _NO_LIMIT, "a connection without calls is closed after this time")
    connection_age_seconds: float = value(
        0.0, _NO_LIMIT, "a connection is closed after this time; its client reconnects"
    )
    connection_grace_seconds: float = value(0.0, _NO_LIMIT, "time for the calls of such a connection to end")
    tls_certificate: str = value("", meaning="PEM file; set with tls_key to serve TLS")
    tls_key: str = value("", meaning="PEM file")
    tls_client_ca: str = value("", meaning="PEM file; set to require client certificates (mTLS)")
    auth_tokens: tuple[str, ...] = value(
        (),
        _TOKENS,
        "bearer tokens, each of them a tenant without limits; without any, and without [[tenants]], no token is needed",
        repr=False,
    )
    allow_plaintext_tokens: bool = value(
        False, meaning="accept tokens without TLS on an address that other machines can reach"
    )
    drain_seconds: float = value(
        30.0, at_least(0, most=_MOST_SECONDS), "time for running requests to end after SIGTERM"
    )
    keepalive_seconds: float = value(
        30.0, at_least(1, most=_MOST_SECONDS), "interval of keepalive pings on an idle connection"
    )
    metrics_port: int = value(0, _PORT, "Prometheus metrics over HTTP, or HTTPS where TLS is set; 0 = none")
    metrics_host: str = value(
        "127.0.0.1",
        meaning="address of the metrics port; it needs no token, so every client that reaches it can read the metrics",
    )
    http_port: int = value(
        0, _PORT, "port of the HTTP APIs (extra mmserve[http]), with the same host, TLS and tokens; 0 = none"
    )
    http_names: tuple[str, ...] = value(
        (),
        meaning="further host names (without port) under which clients reach the HTTP port, as through a proxy; needed "
        "only without tokens on a loopback address, where other names are refused (DNS rebinding)",
    )
    http_connections: int = value(1024, at_least(0, meaning="no limit"), "concurrent HTTP connections")
    metrics_prefixes: tuple[str, ...] = value(
        (),
        _PREFIXES,
        "further prefixes for metrics that vLLM has too: 'vllm:' for vLLM's dashboards",
    )
    model_folder: str = value(
        "", meaning="folder of checkpoints that can be loaded at run time (ModelService); empty = none"
    )
    load_reserve_bytes: int = value(256 << 20, at_least(0), "memory to keep free when a model is loaded at run time")
    otlp_endpoint: str = value(
        "",
        meaning="OTLP receiver of traces, http://HOST:4317 (extra mmserve[otel]); empty = as in the environment",
    )
    access_log: bool = value(True, meaning="log a line for each call, except health checks that succeed")


def check_server(server: ServerConfig, where: str) -> None:
    """Raises ``ConfigError`` for conflicting settings."""
    for key in ("host", "metrics_host"):
        if not getattr(server, key):
            which = "'127.0.0.1' for this machine only, '0.0.0.0' for every network"
            raise ConfigError(f"{where} {key} must not be empty: {which}")
    for one, other in (("metrics_port", "port"), ("http_port", "port"), ("http_port", "metrics_port")):
        if getattr(server, one) and getattr(server, one) == getattr(server, other):
            raise ConfigError(f"{where} {one} must differ from {other}: they serve different protocols")
    if bool(server.tls_certificate) != bool(server.tls_key):
        raise ConfigError(f"{where} tls_certificate and tls_key must be set together")
    if server.tls_client_ca and not server.tls_key:
        raise ConfigError(f"{where} tls_client_ca needs tls_certificate and tls_key")
