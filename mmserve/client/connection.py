"""The channel of a client: its address, its encryption, and what its calls carry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from mmserve.rpc import request_id


@dataclass(frozen=True, kw_only=True)
class TLS:
    """How to trust the server (``ca``: PEM bytes or file, None = the system's) and who the client is (mTLS)."""

    ca: bytes | Path | None = None
    certificate: bytes | Path | None = None
    key: bytes | Path | None = None
    server_name: str | None = None  # name in the server's certificate, where it is not the target's host


def call_metadata(token: str | None, label: str | None = None) -> list[tuple[str, str]]:
    """The metadata of a call."""
    pairs = [("authorization", f"Bearer {token}")] if token else []
    return [*pairs, (request_id.KEY, label)] if label else pairs


def channel_options(tls: TLS | bool | None) -> list[tuple[str, int | str]]:
    """Options of a client's channel; message sizes are the server's to limit."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.use_local_subchannel_pool", 1),  # one client's failed connection is not another's
    ]
    if isinstance(tls, TLS) and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def channel_credentials(tls: TLS | bool | None) -> Any:
    """The channel credentials for ``tls``; None = not encrypted."""
    if not tls:
        return None
    chosen = tls if isinstance(tls, TLS) else TLS()
    return grpc.ssl_channel_credentials(_pem(chosen.ca), _pem(chosen.key), _pem(chosen.certificate))


def _pem(source: bytes | Path | None) -> bytes | None:
    return source.read_bytes() if isinstance(source, Path) else source
