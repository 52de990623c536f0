"""``[server]``: where and how the server listens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmserve.core.values import Range, at_least, value
from mmserve.errors import ConfigError
from mmserve.tenants import is_token

#: The most that gRPC, whose options are 32-bit integers, takes: a number, and seconds (in milliseconds).
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
    """Where and how the server listens."""

    host: str = value("127.0.0.1", meaning="address that it listens on")
    port: int = value(50051, _PORT, "0 = any free port")
    max_message_bytes: int = value(64 << 20, at_least(1, most=_MOST), "larger media are uploaded first (UploadMedia)")
    message_seconds: float = value(60.0, at_least(0, meaning="no limit"), "how long a message may take to come whole")
    connection_calls: int = value(1024, at_least(0, meaning="no limit", most=_MOST), "calls of a connection at once")
    connection_idle_seconds: float = value(600.0, _NO_LIMIT, "a connection without calls is closed after these")
    connection_age_seconds: float = value(0.0, _NO_LIMIT, "a connection is closed after these; its client reconnects")
    connection_grace_seconds: float = value(0.0, _NO_LIMIT, "how long its calls may then go on")
    tls_certificate: str = value("", meaning="PEM file; set with tls_key to serve TLS")
    tls_key: str = value("", meaning="PEM file")
    tls_client_ca: str = value("", meaning="PEM file; set to require client certificates (mTLS)")
    auth_tokens: tuple[str, ...] = value(
        (), _TOKENS, "bearer tokens, each a tenant without limits; none, and no tenants = none is asked for", repr=False
    )
    allow_plaintext_tokens: bool = value(False, meaning="accept tokens without TLS on a host that other machines reach")
    drain_seconds: float = value(30.0, at_least(0), "how long running requests may go on after SIGTERM")
    keepalive_seconds: float = value(30.0, at_least(1, most=_MOST_SECONDS), "between pings of a silent connection")
    metrics_port: int = value(0, _PORT, "Prometheus metrics over HTTP, or HTTPS where TLS is set; 0 = none")
    metrics_host: str = value(
        "127.0.0.1", meaning="any client that reaches it may read the metrics: no token is asked for"
    )
    http_port: int = value(0, _PORT, "the HTTP APIs (extra mmserve[http]) on host, with its TLS and tokens; 0 = none")
    http_names: tuple[str, ...] = value(
        (),
        meaning="further names (without port) under which it is reached, by a proxy; asked for without tokens on a "
        "loopback address, where the page of another host could reach it by DNS",
    )
    http_connections: int = value(1024, at_least(0, meaning="no limit"), "HTTP connections open at once")
    metrics_prefixes: tuple[str, ...] = value(
        (),
        _PREFIXES,
        "where vLLM has a metric, too, it is also served under these: 'vllm:' for its dashboards",
    )
    model_folder: str = value(
        "", meaning="folder whose subfolders are checkpoints that ModelService may load; empty = none can be"
    )
    load_reserve_bytes: int = value(256 << 20, at_least(0), "memory that stays free when ModelService loads a model")
    otlp_endpoint: str = value(
        "",
        meaning="OTLP receiver of traces, http://HOST:4317 (extra mmserve[otel]); empty = from the OTEL_… variables",
    )
    access_log: bool = value(True, meaning="write a line to the log for each call, but for health checks that succeed")


def check_server(server: ServerConfig, where: str) -> None:
    """Raise ``ConfigError`` for settings that do not go together."""
    for key in ("host", "metrics_host"):
        if not getattr(server, key):
            which = "'127.0.0.1' is this machine alone, '0.0.0.0' every network"
            raise ConfigError(f"{where} {key} must not be empty: {which}")
    for one, other in (("metrics_port", "port"), ("http_port", "port"), ("http_port", "metrics_port")):
        if getattr(server, one) and getattr(server, one) == getattr(server, other):
            raise ConfigError(f"{where} {one} must be another than {other}: they speak different protocols")
    if bool(server.tls_certificate) != bool(server.tls_key):
        raise ConfigError(f"{where} tls_certificate and tls_key go together")
    if server.tls_client_ca and not server.tls_key:
        raise ConfigError(f"{where} tls_client_ca needs tls_certificate and tls_key")
