"""The ports that a server listens on, and why one of them cannot be had."""

from __future__ import annotations

import errno
import socket

from mmserve.errors import ConfigError


def try_port(host: str, port: int, key: str) -> None:
    """Listen for a moment; raises as ``cannot_listen`` has it where that is not possible."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # no matter who has just left the port
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise cannot_listen(host, port, key, error) from error


def cannot_listen(host: str, port: int, key: str, error: OSError) -> ConfigError:
    """What ``error`` means for the port that ``key`` of ``[server]`` sets."""
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        reason = f"another program uses the port; choose one with --set server.{key}=N"
    return ConfigError(f"cannot listen on {host}:{port}: {reason}")
