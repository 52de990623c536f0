"""The ports of a server, and errors if they cannot be used."""

from __future__ import annotations

import errno
import socket

from mmserve.errors import ConfigError


def try_port(host: str, port: int, key: str) -> None:
    """Listen for a moment; raises the error of ``cannot_listen`` if that fails."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise cannot_listen(host, port, key, error) from error


def cannot_listen(host: str, port: int, key: str, error: OSError) -> ConfigError:
    """The error for the port set by ``key`` of ``[server]``, explaining ``error``."""
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        reason = f"another program uses the port; choose one with --set server.{key}=N"
    return ConfigError(f"cannot listen on {host}:{port}: {reason}")
