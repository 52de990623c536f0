"""The common part of both clients: the channel, its stubs, and the metadata of calls."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from mmserve.client.address import TOKEN_VARIABLE, Address, parse_address
from mmserve.client.outgoing import UPLOAD_CHUNK
from mmserve.client.retries import Retries
from mmserve.client.tls import TLS, channel_credentials, mistake
from mmserve.errors import ConfigError, DeadlineExceeded, MMServeError, TLSError, Unavailable
from mmserve.v1 import (
    cache_pb2_grpc,
    decision_pb2_grpc,
    generation_pb2_grpc,
    media_pb2,
    media_pb2_grpc,
    model_pb2_grpc,
    video_pb2_grpc,
)
from mmserve.wire import request_id
from mmserve.wire.status import from_rpc_error, from_server


def chosen_tls(address: Address, given: TLS | bool | None) -> TLS | None:
    """The TLS settings of a channel; None = not encrypted. Raises ``ConfigError`` if they contradict the address."""
    if address.tls is False and given:
        raise ConfigError(f"{address.target} was given as grpc://, which is not encrypted, and with tls: use grpcs://")
    if address.tls and given is False:
        raise ConfigError(f"{address.target} was given as grpcs://, which is encrypted, and with tls=False")
    if isinstance(given, TLS):
        return given
    return TLS() if given or address.tls else None


def chosen_token(given: str | None, address: Address, *, encrypted: bool, allow_plaintext: bool) -> str | None:
    """The token of a client's calls, ``given`` or from the environment; None = none.

    Raises ``ConfigError`` for a token that cannot be sent, or that would be sent unencrypted.
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
    """The trace context of the caller's active OpenTelemetry span, as metadata; empty without a span.

    OpenTelemetry is used only if the program has imported it.
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
    """Options of a client's channel; message sizes are limited by the server."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Maximum delay until a restarted server is detected.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.use_local_subchannel_pool", 1),  # clients do not share failed connections
    ]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


#: Interval of health checks while waiting for a server, and timeout of each (seconds).
POLL_SECONDS = 0.1
_CHECK_SECONDS = 5.0
#: Prefixes of gRPC's messages if no connection was established.
_NOT_CONNECTED = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
#: Minimum interval (seconds) between diagnoses of TLS errors.
_LOOK_SECONDS = 1.0


#: Methods that are not idempotent.
_ONCE = frozenset({"LoadModel", "UnloadModel", "DropAdapter"})


def may_have_run(method: str, error: Any) -> bool:
    """Whether a call of ``method`` that failed with the ``grpc.RpcError`` ``error`` must not be repeated, because the
    server may have received it."""
    return method in _ONCE and not from_server(error) and not (error.details() or "").startswith(_NOT_CONNECTED)


class Stubs:
    """The stubs of the server's services over one channel."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self.decisions: Any = decision_pb2_grpc.DecisionServiceStub(channel)
        self.media: Any = media_pb2_grpc.MediaServiceStub(channel)
        self.models: Any = model_pb2_grpc.ModelServiceStub(channel)
        self.caches: Any = cache_pb2_grpc.CacheServiceStub(channel)
        self.video: Any = video_pb2_grpc.VideoServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)


class Base:
    """The settings of a client, before its first call.

    target: HOST:PORT, grpc://HOST:PORT, or grpcs://HOST:PORT for TLS; default ``MMSERVE_SERVER`` of the environment,
        else localhost:50051.
    token: bearer token, printable ASCII; default ``MMSERVE_TOKEN`` of the environment, else none.
    tls: True or ``TLS(…)`` for an encrypted connection; default not encrypted, unless the address is grpcs://.
    timeout: deadline in seconds of calls without a ``timeout`` argument; default 60.
    reconnect_seconds: seconds for which a call retries an unreachable server; default until its deadline.
    retries: whether calls are retried if the server did not begin to answer, and video sessions are resumed after a
        lost connection; default True.
    allow_plaintext_token: whether the token may be sent unencrypted to another machine; default False.

    Raises ``ConfigError``, a ``ValueError``, for invalid or contradictory settings.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        token: str | None = None,
        tls: TLS | bool | None = None,
        timeout: float = 60.0,
        reconnect_seconds: float | None = None,
        retries: bool = True,
        allow_plaintext_token: bool = False,
    ) -> None:
        self._address = parse_address(target)
        self._tls = chosen_tls(self._address, tls)
        self._token = chosen_token(
            token, self._address, encrypted=self._tls is not None, allow_plaintext=allow_plaintext_token
        )
        self.target = self._address.target
        self.timeout = timeout
        self.reconnect_seconds = reconnect_seconds
        self.retries = retries
        self._opened: Stubs | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._looked: tuple[float, TLSError | None] | None = None

    def _open(self, library: Any) -> Stubs:
        """The stubs, over a channel of ``library`` (``grpc`` or ``grpc.aio``) that is created at the first call."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            if self._opened is None:
                self._opened = Stubs(open_channel(library, self._address, self._tls))
            return self._opened

    def _failure(self, error: Any) -> MMServeError:
        """The error of a failed call; ``TLSError`` if the TLS settings of client and server do not match.

        May block until a server replies to a TLS handshake.
        """
        failure = from_rpc_error(error)
        if not isinstance(failure, Unavailable) or from_server(error):
            return failure
        with self._looking:  # of many concurrent failures, only one is diagnosed
            if self._looked is None or time.monotonic() > self._looked[0] + _LOOK_SECONDS:
                found = mistake(self._tls, self._address.host, self._address.port, failure.message)
                self._looked = time.monotonic(), found
            found = self._looked[1]
        if found is not None:
            return TLSError(f"{self.target}: {found.message}")
        if not failure.message.startswith(_NOT_CONNECTED):
            return failure
        return Unavailable(
            f"no connection to {self.target}: is a server running there, and is this its gRPC port? ({failure.message})"
        )

    def _retries(self, timeout: float | None) -> Retries:
        return Retries(self.timeout if timeout is None else timeout, self.reconnect_seconds, again=self.retries)

    def _metadata(self, label: str | None = None) -> list[tuple[str, str]]:
        return call_metadata(self._token, label)

    def _check_call(self, remaining: float) -> dict[str, Any]:
        return {"timeout": min(remaining, _CHECK_SECONDS), "metadata": self._metadata()}

    def _not_ready(self, error: Any, timeout: float) -> MMServeError:
        return Unavailable(f"{self.target} is not ready after {timeout:g} s: {error or 'it is not serving'}")


def check() -> Any:
    """The health check of the whole server."""
    return health_pb2.HealthCheckRequest()


def serving(reply: Any) -> bool:
    """Whether ``reply`` to the health check is SERVING."""
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def unready(failure: MMServeError) -> MMServeError:
    """The error of a server that may still become ready; raises any other error."""
    if isinstance(failure, TLSError) or not isinstance(failure, Unavailable | DeadlineExceeded):
        raise failure
    return failure


def chunks(data: bytes) -> Iterator[media_pb2.UploadMediaRequest]:
    """The messages that upload ``data``."""
    for start in range(0, len(data), UPLOAD_CHUNK):
        yield media_pb2.UploadMediaRequest(chunk=data[start : start + UPLOAD_CHUNK])
