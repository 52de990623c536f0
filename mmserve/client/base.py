"""What both clients are made of: the channel, its stubs, and what a call carries."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mmserve.client.connection import TLS, call_metadata, channel_credentials, channel_options
from mmserve.client.retries import Retries
from mmserve.errors import ConfigError, DeadlineExceeded, MMServeError, Unavailable
from mmserve.rpc.outgoing import UPLOAD_CHUNK
from mmserve.rpc.status import from_rpc_error
from mmserve.v1 import generation_pb2_grpc, media_pb2, media_pb2_grpc, model_pb2_grpc

#: How often a server is asked whether it is ready, and how long it may take to say so (seconds).
POLL_SECONDS = 0.1
_CHECK_SECONDS = 5.0


class Stubs:
    """The server's services over one channel."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self.media: Any = media_pb2_grpc.MediaServiceStub(channel)
        self.models: Any = model_pb2_grpc.ModelServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)


class Base:
    """What a client knows before its first call; ``timeout`` (seconds) is the deadline of calls that name none."""

    def __init__(
        self, target: str, *, token: str | None = None, tls: TLS | bool | None = None, timeout: float = 60.0
    ) -> None:
        if token is not None and not (token and token.isascii() and token.isprintable()):
            raise ConfigError("a token must be printable ASCII")
        self.target = target
        self.timeout = timeout
        self._token = token
        self._tls = tls
        self._opened: Stubs | None = None
        self._closed = False
        self._lock = threading.Lock()

    def _open(self, library: Any) -> Stubs:
        """The stubs, over a channel of ``library`` (``grpc`` or ``grpc.aio``) that is made at the first call."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            if self._opened is None:
                self._opened = Stubs(self._channel(library))
            return self._opened

    def _channel(self, library: Any) -> Any:
        credentials, options = channel_credentials(self._tls), channel_options(self._tls)
        if credentials is None:
            return library.insecure_channel(self.target, options)
        return library.secure_channel(self.target, credentials, options)

    def _retries(self, timeout: float | None) -> Retries:
        return Retries(self.timeout if timeout is None else timeout)

    def _metadata(self, label: str | None = None) -> list[tuple[str, str]]:
        return call_metadata(self._token, label)

    def _check_call(self, remaining: float) -> dict[str, Any]:
        return {"timeout": min(remaining, _CHECK_SECONDS), "metadata": self._metadata()}

    def _not_ready(self, error: Any, timeout: float) -> MMServeError:
        return Unavailable(f"{self.target} is not ready after {timeout:g} s: {error or 'it is not serving'}")


def check() -> Any:
    """The question whether the server as a whole is serving."""
    return health_pb2.HealthCheckRequest()


def serving(reply: Any) -> bool:
    """Whether ``reply`` to it says so."""
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def unready(error: grpc.RpcError) -> MMServeError:
    """What is wrong with a server that may yet come up; any other error is raised."""
    failure = from_rpc_error(error)
    if not isinstance(failure, Unavailable | DeadlineExceeded):
        raise failure from error
    return failure


def chunks(data: bytes) -> Iterator[media_pb2.UploadMediaRequest]:
    """The messages of an upload of ``data``."""
    for start in range(0, len(data), UPLOAD_CHUNK):
        yield media_pb2.UploadMediaRequest(chunk=data[start : start + UPLOAD_CHUNK])
