"""The client SDK: ``Client``, and ``AsyncClient`` with the same methods for asyncio.

::

    with Client("localhost:50051") as client:
        print(client.generate("What is left of the circle?", images=[Path("scene.png")]).text)
        for event in client.stream("Tell me more.", commit=Threshold(0.9)):
            ...

Every call has a deadline, and fails only with the errors of ``mmserve.errors``. What surely was not begun is tried
again a few times: a server that could not be reached, or one that was full and said when it will not be.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import PIL.Image
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mmserve.core.events import (
    Admitted,
    CommittedToken,
    ConstraintStats,
    Delta,
    Event,
    Finished,
    Snapshot,
    StageTimes,
    Usage,
)
from mmserve.core.info import ModelInfo
from mmserve.core.request import ImagePart, Message, TextPart, VideoPart
from mmserve.errors import Cancelled, DeadlineExceeded, MMServeError, Unavailable
from mmserve.rpc.convert import from_model_info, from_response
from mmserve.rpc.outgoing import (
    TLS,
    UPLOAD_CHUNK,
    Chat,
    Image,
    Options,
    Result,
    Retries,
    build_request,
    call_metadata,
    channel_credentials,
    channel_options,
    file_bytes,
    request_label,
    to_result,
)
from mmserve.rpc.outgoing_constraint import Hole, Template
from mmserve.rpc.policies import (
    Adaptive,
    Blend,
    Confident,
    DkvDecode,
    DkvGreedy,
    DraftModel,
    EarlyCommit,
    Edit,
    EntropyBound,
    ExpectedAttention,
    Factor,
    Guided,
    HeavyHitters,
    Learned,
    LegoLink,
    Ngram,
    RandomReuse,
    Scheduler,
    SinkWindow,
    Threshold,
    VisualCache,
)
from mmserve.rpc.status import from_rpc_error
from mmserve.v1 import generation_pb2, generation_pb2_grpc, media_pb2, media_pb2_grpc, model_pb2, model_pb2_grpc

__all__ = [
    "TLS",
    "Adaptive",
    "Admitted",
    "AsyncClient",
    "Blend",
    "Client",
    "CommittedToken",
    "Confident",
    "ConstraintStats",
    "Delta",
    "DkvDecode",
    "DkvGreedy",
    "DraftModel",
    "EarlyCommit",
    "Edit",
    "EntropyBound",
    "Event",
    "ExpectedAttention",
    "Factor",
    "Finished",
    "Guided",
    "HeavyHitters",
    "Hole",
    "ImagePart",
    "Learned",
    "LegoLink",
    "Message",
    "ModelInfo",
    "Ngram",
    "Options",
    "RandomReuse",
    "Result",
    "Scheduler",
    "SinkWindow",
    "Snapshot",
    "StageTimes",
    "Template",
    "TextPart",
    "Threshold",
    "Usage",
    "VideoPart",
    "VisualCache",
]

_POLL_SECONDS = 0.1
_CHECK_SECONDS = 5.0


class _Stubs:
    """The server's services over one channel."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self.media: Any = media_pb2_grpc.MediaServiceStub(channel)
        self.models: Any = model_pb2_grpc.ModelServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)


class _Base:
    """What a client knows before its first call; ``timeout`` (seconds) is the deadline of calls that name none."""

    def __init__(
        self, target: str, *, token: str | None = None, tls: TLS | bool | None = None, timeout: float = 60.0
    ) -> None:
        if token is not None and not (token and token.isascii() and token.isprintable()):
            raise ValueError("a token must be printable ASCII")
        self.target = target
        self.timeout = timeout
        self._token = token
        self._tls = tls
        self._opened: _Stubs | None = None
        self._closed = False
        self._lock = threading.Lock()

    def _open(self, library: Any) -> _Stubs:
        """The stubs, over a channel of ``library`` (``grpc`` or ``grpc.aio``) that is made at the first call."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            if self._opened is None:
                self._opened = _Stubs(self._channel(library))
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


class Client(_Base):
    """A connection to a server, for any number of threads. Use it as a context manager, or ``close`` it."""

    def generate(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """The whole answer to a prompt or chat, with ``images`` in front of its last message; see ``Options``.

        ``videos`` (an option) go behind the images. With ``n`` samples, the first, and all as its ``samples``. With
        ``schema``, a JSON schema or a pydantic model, the answer is valid JSON under it, and ``parsed`` its value. With
        ``template``, texts and each ``Hole`` between them, ``holes`` is what fills them.
        """
        label = request_label(request_id)
        message = build_request(prompt, images, deltas=False, snapshots=False, **options)
        events = self._events(message, self._retries(timeout), label)
        done = [event for event in events if isinstance(event, Finished)]
        return to_result(done, message.sampling.n or 1, label, options.get("schema"))

    def stream(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        snapshots: bool = False,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Generator[Event, None, None]:
        """The answer as it comes: ``Admitted``, ``Delta`` (and ``Snapshot``), ``Finished``.

        With ``n`` samples their events come in any order, each with its ``sample``, and each has its ``Finished``.
        Leaving the loop, or closing the generator, cancels the request.
        """
        message = build_request(prompt, images, deltas=True, snapshots=snapshots, **options)
        return self._events(message, self._retries(timeout), request_label(request_id))

    def upload(self, data: bytes | Path | PIL.Image.Image, *, timeout: float | None = None) -> str:
        """Store an image or a video on the server; its media id can stand for it in ``images`` or ``videos``."""
        content = file_bytes(data, "data")
        stub = self._open(grpc).media.UploadMedia
        return str(self._unary(lambda **how: stub(_chunks(content), **how), timeout).media_id)

    def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """The server's models, its default first."""
        stub = self._open(grpc).models.ListModels
        reply = self._unary(lambda **how: stub(model_pb2.ListModelsRequest(), **how), timeout)
        return [from_model_info(model) for model in reply.models]

    def describe(self, name: str = "", *, timeout: float | None = None) -> ModelInfo:
        """One model, the server's default for an empty name."""
        stub = self._open(grpc).models.DescribeModel
        reply = self._unary(lambda **how: stub(model_pb2.DescribeModelRequest(model=name), **how), timeout)
        return from_model_info(reply.model)

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Return as soon as the server's health check says it is serving; raises ``Unavailable`` after ``timeout``."""
        retries = self._retries(timeout)
        failure: MMServeError | None = None
        while remaining := retries.remaining():
            try:
                if _serving(self._open(grpc).health.Check(_check(), **self._check_call(remaining))):
                    return
                failure = None
            except grpc.RpcError as error:
                failure = _unready(error)
            time.sleep(min(_POLL_SECONDS, retries.remaining()))
        raise self._not_ready(failure, timeout)

    def close(self) -> None:
        """Close the connection; calls under way end with ``Cancelled``."""
        self._closed = True
        if self._opened is not None:
            self._opened.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _unary(self, call: Callable[..., Any], timeout: float | None) -> Any:
        retries = self._retries(timeout)
        while True:
            try:
                return call(timeout=retries.remaining(), metadata=self._metadata())
            except grpc.RpcError as error:
                pause = retries.delay(from_rpc_error(error))
            time.sleep(pause)

    def _events(
        self, message: generation_pb2.GenerateRequest, retries: Retries, label: str
    ) -> Generator[Event, None, None]:
        while True:
            started = False
            call = self._open(grpc).generation.Generate(
                message, timeout=retries.remaining(), metadata=self._metadata(label)
            )
            try:
                for response in call:
                    started = True
                    yield from_response(response)
                return
            except grpc.RpcError as error:
                pause = retries.delay(from_rpc_error(error), started=started)
            finally:
                call.cancel()
            time.sleep(pause)


class AsyncClient(_Base):
    """``Client`` for asyncio: the same methods, to be awaited; one event loop per client."""

    async def generate(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """As ``Client.generate``."""
        label = request_label(request_id)
        message = await asyncio.to_thread(build_request, prompt, images, deltas=False, snapshots=False, **options)
        events = self._events(message, self._retries(timeout), label)
        done = [event async for event in events if isinstance(event, Finished)]
        return to_result(done, message.sampling.n or 1, label, options.get("schema"))

    async def stream(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        snapshots: bool = False,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Event, None]:
        """As ``Client.stream``; ``contextlib.aclosing`` around it cancels at once when the loop is left early."""
        label = request_label(request_id)
        retries = self._retries(timeout)
        message = await asyncio.to_thread(build_request, prompt, images, deltas=True, snapshots=snapshots, **options)
        events = self._events(message, retries, label)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def upload(self, data: bytes | Path | PIL.Image.Image, *, timeout: float | None = None) -> str:
        """As ``Client.upload``."""
        content = await asyncio.to_thread(file_bytes, data, "data")
        stub = self._open(grpc.aio).media.UploadMedia
        return str((await self._unary(lambda **how: stub(_async_chunks(content), **how), timeout)).media_id)

    async def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """As ``Client.models``."""
        stub = self._open(grpc.aio).models.ListModels
        reply = await self._unary(lambda **how: stub(model_pb2.ListModelsRequest(), **how), timeout)
        return [from_model_info(model) for model in reply.models]

    async def describe(self, name: str = "", *, timeout: float | None = None) -> ModelInfo:
        """As ``Client.describe``."""
        stub = self._open(grpc.aio).models.DescribeModel
        reply = await self._unary(lambda **how: stub(model_pb2.DescribeModelRequest(model=name), **how), timeout)
        return from_model_info(reply.model)

    async def wait_ready(self, timeout: float = 30.0) -> None:
        """As ``Client.wait_ready``."""
        retries = self._retries(timeout)
        failure: MMServeError | None = None
        while remaining := retries.remaining():
            try:
                if _serving(await self._open(grpc.aio).health.Check(_check(), **self._check_call(remaining))):
                    return
                failure = None
            except grpc.RpcError as error:
                failure = _unready(error)
            await asyncio.sleep(min(_POLL_SECONDS, retries.remaining()))
        raise self._not_ready(failure, timeout)

    async def close(self) -> None:
        """As ``Client.close``."""
        self._closed = True
        if self._opened is not None:
            await self._opened.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def _unary(self, call: Callable[..., Any], timeout: float | None) -> Any:
        retries = self._retries(timeout)
        while True:
            try:
                return await call(timeout=retries.remaining(), metadata=self._metadata())
            except grpc.RpcError as error:
                pause = retries.delay(from_rpc_error(error))
            except asyncio.CancelledError:
                _raise_if_closed(self._closed)
                raise
            await asyncio.sleep(pause)

    async def _events(
        self, message: generation_pb2.GenerateRequest, retries: Retries, label: str
    ) -> AsyncGenerator[Event, None]:
        while True:
            started = False
            call = self._open(grpc.aio).generation.Generate(
                message, timeout=retries.remaining(), metadata=self._metadata(label)
            )
            try:
                async for response in call:
                    started = True
                    yield from_response(response)
                return
            except grpc.RpcError as error:
                pause = retries.delay(from_rpc_error(error), started=started)
            except asyncio.CancelledError:
                _raise_if_closed(self._closed)
                raise
            finally:
                call.cancel()
            await asyncio.sleep(pause)


def _raise_if_closed(closed: bool) -> None:
    """grpc.aio says "cancelled" when its channel is closed; the caller's own task was not cancelled then."""
    task = asyncio.current_task()
    if closed and task is not None and not task.cancelling():
        raise Cancelled("the client was closed")


def _check() -> Any:
    return health_pb2.HealthCheckRequest()


def _serving(reply: Any) -> bool:
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _unready(error: grpc.RpcError) -> MMServeError:
    """What is wrong with a server that may yet come up; any other error is raised."""
    failure = from_rpc_error(error)
    if not isinstance(failure, Unavailable | DeadlineExceeded):
        raise failure from error
    return failure


def _chunks(data: bytes) -> Iterator[media_pb2.UploadMediaRequest]:
    for start in range(0, len(data), UPLOAD_CHUNK):
        yield media_pb2.UploadMediaRequest(chunk=data[start : start + UPLOAD_CHUNK])


async def _async_chunks(data: bytes) -> AsyncIterator[media_pb2.UploadMediaRequest]:
    for message in _chunks(data):
        yield message
