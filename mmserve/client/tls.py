"""TLS settings of a client's channel, and diagnosis of mismatches with the server."""

from __future__ import annotations

import socket
import ssl
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from mmserve.errors import ConfigError, TLSError

#: Timeout (seconds) of a probing handshake.
_PROBE_SECONDS = 2.0
_PLAINTEXT = (
    "the server does not speak TLS on this port: connect with tls=None or grpc:// (in a shell: without --tls), or turn "
    "TLS on in the server"
)
_ENCRYPTED = (
    "the server speaks TLS on this port: connect with tls=TLS(ca=Path(…)), tls=True or grpcs:// (in a shell: with "
    "--tls-ca FILE or --tls)"
)
_UNTRUSTED = (
    "the server's certificate is not signed by a trusted authority: give the certificate of its authority as "
    "TLS(ca=Path(…))"
)
_OTHER_NAME = (
    "the server's certificate is for another name than {name!r}: connect to a name that the certificate has, or give "
    "that name as TLS(server_name=…)"
)
_NO_IDENTITY = "the server asks for a client certificate: give TLS(certificate=Path(…), key=Path(…))"
_WRONG_IDENTITY = (
    "the server does not accept the client certificate: give one that is signed by the authority it trusts, and that "
    "has not expired"
)


@dataclass(frozen=True, kw_only=True)
class TLS:
    """TLS settings of a client: trusted authorities and its own certificate, as PEM bytes or files.

    ca: certificates of the authorities trusted to sign the server's; None = gRPC's built-in ones.
    certificate, key: the client's certificate and its private key, for servers that require one (mTLS).
    server_name: name in the server's certificate, if it differs from the host of the address.
    """

    ca: bytes | Path | None = None
    certificate: bytes | Path | None = None
    key: bytes | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs both certificate and key, or neither")


def channel_credentials(tls: TLS) -> Any:
    """The channel credentials for ``tls``.

    Raises ``ConfigError`` for invalid certificates and keys, ``OSError`` for unreadable files.
    """
    _context(tls)
    return grpc.ssl_channel_credentials(_pem(tls.ca), _pem(tls.key), _pem(tls.certificate))


def mistake(tls: TLS | None, host: str | None, port: int, details: str) -> TLSError | None:
    """The TLS mismatch of client and server, if a connection failed with ``details``; None = not about TLS.

    gRPC reports "Socket closed" both if a server exits and if it refuses a client without TLS or a certificate. These
    are distinguished by a TLS handshake with ``host`` and ``port``, which blocks.
    """
    if tls is not None:
        if "WRONG_VERSION_NUMBER" in details:
            return TLSError(_PLAINTEXT)
        if "CERTIFICATE_VERIFY_FAILED" in details:
            return TLSError(_UNTRUSTED)
        if "Hostname Verification" in details:
            return TLSError(_OTHER_NAME.format(name=tls.server_name or host))
    if host is None or "Connection refused" in details:
        return None
    accepted = _handshake(tls or TLS(), host, port)
    if accepted is not None and tls is None:
        return TLSError(_ENCRYPTED)
    if accepted is False and tls is not None:
        return TLSError(_NO_IDENTITY if tls.certificate is None else _WRONG_IDENTITY)
    return None


def _handshake(tls: TLS, host: str, port: int) -> bool | None:
    """Whether a TLS server accepts this client; None if none responds in TLS."""
    context = _context(tls)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # gRPC has verified the server's certificate
    try:
        plain = socket.create_connection((host, port), _PROBE_SECONDS)
        with plain, context.wrap_socket(plain, server_hostname=tls.server_name or host) as secured:
            try:
                # With TLS 1.3 a client is refused after the handshake: gRPC's servers then close the connection instead
                # of sending their HTTP/2 settings.
                return bool(secured.recv(1))
            except (ssl.SSLError, ConnectionError):
                return False
    except OSError:
        return None


def _context(tls: TLS) -> ssl.SSLContext:
    """An ``ssl.SSLContext`` with the settings of ``tls``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    ca, certificate, key = _pem(tls.ca), _pem(tls.certificate), _pem(tls.key)
    try:
        if ca is not None:
            context.load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"TLS.ca holds no PEM certificate that can be used: {error}") from error
    if certificate is not None and key is not None:
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.NamedTemporaryFile()) for _ in range(2)]
            for file, data in zip(files, (certificate, key), strict=True):
                file.write(data)
                file.flush()
            try:
                context.load_cert_chain(files[0].name, files[1].name, password=lambda: b"")
            except (ssl.SSLError, ValueError) as error:
                raise ConfigError(f"TLS.certificate and TLS.key are no PEM pair without password: {error}") from error
    return context


def _pem(source: bytes | Path | None) -> bytes | None:
    return source.read_bytes() if isinstance(source, Path) else source
