"""Connection limits: options of gRPC's C core.

There is none for the number of connections, which is limited by the operating system's maximum of open files.
"""

from __future__ import annotations

from mmserve.config import ServerConfig

#: gRPC's value for "unlimited": the largest 32-bit integer.
_UNLIMITED = (1 << 31) - 1
#: Maximum time until a connection speaks HTTP/2 (milliseconds); gRPC's default is two minutes.
_HANDSHAKE_MS = 20_000


def connection_options(config: ServerConfig) -> list[tuple[str, int]]:
    """The options of a ``grpc.aio.server`` for ``config``."""
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_concurrent_streams", config.connection_calls or _UNLIMITED),
        ("grpc.max_connection_idle_ms", _milliseconds(config.connection_idle_seconds)),
        ("grpc.max_connection_age_ms", _milliseconds(config.connection_age_seconds)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(config.connection_grace_seconds)),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.so_reuseport", 0),  # a second server on the port must be an error
        ("grpc.keepalive_time_ms", _milliseconds(config.keepalive_seconds)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # clients ping during long idle streams; gRPC would close their connections
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def _milliseconds(seconds: float) -> int:
    """``seconds`` in milliseconds for gRPC; 0 is unlimited."""
    return max(1, int(seconds * 1000)) if seconds else _UNLIMITED
