"""The server's certificate, key and client authority: checked when they are read, and replaced while it serves."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from mmserve.config import ServerConfig
from mmserve.errors import ConfigError


class Certificates:
    """The TLS files that ``config`` names, for new connections; those that are open keep theirs.

    Raises ``ConfigError`` where they cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._read = _configuration(config)
        self._sent = self._read

    def credentials(self) -> Any:
        """What a gRPC port is opened with; it follows what is read later."""
        configuration, requires = self._read
        return grpc.dynamic_ssl_server_credentials(configuration, self._latest, requires)

    def read(self, config: ServerConfig) -> Callable[[], None]:
        """Read the files as they are now; what is returned puts them into use. Raises ``ConfigError``."""
        found = _configuration(config)
        if found[1] != self._read[1]:
            raise ConfigError("[server] tls_client_ca can be set or removed only by a restart")

        def use() -> None:
            self._read = found

        return use

    def _latest(self) -> Any:
        """Asked by gRPC, on a thread of its own, before each handshake; None = as before."""
        if self._sent is self._read:
            return None
        self._sent = self._read
        return self._sent[0]


def check_certificates(config: ServerConfig) -> None:
    """Raises ``ConfigError`` where the TLS files that ``config`` names cannot be used."""
    if config.tls_key:
        _configuration(config)


def _configuration(config: ServerConfig) -> tuple[Any, bool]:
    """What gRPC takes, and whether clients must have a certificate. No error contains anything of the key."""
    certificate, key = _pem("tls_certificate", config.tls_certificate), _pem("tls_key", config.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # gRPC itself would only report that the port cannot be bound
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
