"""The channel of a client: where to, how encrypted, and what its calls carry."""

from __future__ import annotations

import os
import sys
from typing import Any

from mmserve.client.address import TOKEN_VARIABLE, Address
from mmserve.client.tls import TLS, channel_credentials
from mmserve.errors import ConfigError
from mmserve.wire import request_id


def chosen_tls(address: Address, given: TLS | bool | None) -> TLS | None:
    """The TLS of a channel; None = not encrypted. Raises ``ConfigError`` where the address contradicts it."""
    if address.tls is False and given:
        raise ConfigError(f"{address.target} was given as grpc://, which is not encrypted, and with tls: use grpcs://")
    if address.tls and given is False:
        raise ConfigError(f"{address.target} was given as grpcs://, which is encrypted, and with tls=False")
    if isinstance(given, TLS):
        return given
    return TLS() if given or address.tls else None


def chosen_token(given: str | None, address: Address, *, encrypted: bool, allow_plaintext: bool) -> str | None:
    """The token of a client's calls, ``given`` or from the environment; None = none.

    Raises ``ConfigError`` for one that cannot be sent, or that could be read on the way.
    """
    token, source = given, "the token"
    if token is None:
        token, source = os.environ.get(TOKEN_VARIABLE) or None, f"the token in {TOKEN_VARIABLE}"
    if token is None:
        return None
    if not (token and token.isascii() and token.isprintable()):
        raise ConfigError("a token must be printable ASCII")
    if not (encrypted or address.local or allow_plaintext):
        raise ConfigError(
            f"{source} would be sent to {address.target} unencrypted: use TLS (tls=…, or grpcs://), or, on a network "
            "that you trust, allow_plaintext_token=True"
        )
    return token


def call_metadata(token: str | None, label: str | None = None) -> list[tuple[str, str]]:
    """The metadata of a call."""
    pairs = [("authorization", f"Bearer {token}")] if token else []
    pairs += [(request_id.KEY, label)] if label else []
    return [*pairs, *_trace_context()]


def _trace_context() -> list[tuple[str, str]]:
    """The trace context of the caller's active OpenTelemetry span, as metadata; empty without one.

    A program that has one has imported OpenTelemetry; the client itself does not need it.
    """
    if "opentelemetry.trace" not in sys.modules:
        return []
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return list(carrier.items())


def open_channel(library: Any, address: Address, tls: TLS | None) -> Any:
    """A channel of ``library`` (``grpc`` or ``grpc.aio``)."""
    options = _channel_options(tls)
    if tls is None:
        return library.insecure_channel(address.target, options)
    return library.secure_channel(address.target, channel_credentials(tls), options)


def _channel_options(tls: TLS | None) -> list[tuple[str, int | str]]:
    """Options of a client's channel; message sizes are the server's to limit."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # how long a server that is up again may go unnoticed
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.use_local_subchannel_pool", 1),  # one client's failed connection is not another's
    ]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options
