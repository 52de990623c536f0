"""The server's certificate, key and client CA: validated when they are read, and replaceable while it serves."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from mmserve.config import ServerConfig
from mmserve.errors import ConfigError


class Certificates:
    """The TLS files of ``config``, used for new connections; open connections keep theirs.

    Raises ``ConfigError`` if they are invalid.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._read = _configuration(config)
        self._sent = self._read

    def credentials(self) -> Any:
        """The credentials of a gRPC port; they follow later reads."""
        configuration, requires = self._read
        return grpc.dynamic_ssl_server_credentials(configuration, self._latest, requires)

    def read(self, config: ServerConfig) -> Callable[[], None]:
        """Read the files. Calling the result puts them into use. Raises ``ConfigError``."""
        found = _configuration(config)
        if found[1] != self._read[1]:
            raise ConfigError("[server] tls_client_ca can be set or removed only by a restart")

        def use() -> None:
            self._read = found

        return use

    def _latest(self) -> Any:
        """Called by gRPC, on its own thread, before each handshake; None = unchanged."""
        if self._sent is self._read:
            return None
        self._sent = self._read
        return self._sent[0]


def check_certificates(config: ServerConfig) -> None:
    """Raises ``ConfigError`` if the TLS files of ``config`` are invalid."""
    if config.tls_key:
        _configuration(config)


def _configuration(config: ServerConfig) -> tuple[Any, bool]:
    """The configuration for gRPC, and whether clients must have a certificate. Errors contain nothing of the key."""
    certificate, key = _pem("tls_certificate", config.tls_certificate), _pem("tls_key", config.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # gRPC would only report that the port cannot be bound
        context.load_cert_chain(config.tls_certificate, config.tls_key, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"[server] tls_certificate and tls_key are not a pair (PEM, key not encrypted): {error}"
        ) from error
    client_ca = _pem("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None
    if client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except ssl.SSLError as error:
            raise ConfigError(f"[server] tls_client_ca holds no certificate (PEM): {error}") from error
    configuration = grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)
    return configuration, client_ca is not None


def _pem(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"[server] {name}: cannot read {path}: {error.strerror}") from error
