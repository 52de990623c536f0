"""The client that waits: ``Client``."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

import grpc
import PIL.Image

from mmserve.client.base import POLL_SECONDS, Base, check, chunks, serving, unready
from mmserve.client.blocking_video import VideoSession
from mmserve.client.options import Chat, Image, Options, documented
from mmserve.client.outgoing import build_request, file_bytes, request_label
from mmserve.client.result import Result, to_result
from mmserve.client.retries import Retries
from mmserve.client.schemas import Adapter
from mmserve.client.session_options import SessionOptions, documented_session
from mmserve.client.video_requests import configuration
from mmserve.core.events import Event, Finished
from mmserve.core.info import ModelInfo
from mmserve.errors import Cancelled, MMServeError
from mmserve.v1 import generation_pb2, model_pb2
from mmserve.wire.events import from_response
from mmserve.wire.models import from_model_info

T = TypeVar("T")


class Client(Base):
    """A connection to a server, for any number of threads. Use it as a context manager, or ``close`` it."""

    @overload
    def generate(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        schema: None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Result[None]: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        schema: type[T],
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Result[T]: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        schema: Adapter[T],
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Result[T]: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        schema: Any,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Result[Any]: ...

    @documented
    def generate(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        schema: Any = None,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Result[Any]:
        """The whole answer to a prompt or chat.

        Returns the first sample; ``Result.samples`` has all ``n``. ``Result.parsed`` is the value of an answer to a
        ``schema``. Raises the errors that ``mmserve.client`` exports, all of them ``MMServeError``.
        """
        label = request_label(request_id)
        message = build_request(prompt, images, deltas=False, snapshots=False, schema=schema, **options)
        events = self._events(message, self._retries(timeout), label)
        done = [event for event in events if isinstance(event, Finished)]
        return to_result(done, message.sampling.n or 1, label, schema)

    @documented
    def stream(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        schema: Any = None,
        snapshots: bool = False,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Generator[Event, None, None]:
        """The events of an answer as they arrive: ``Admitted``, ``Delta`` and ``Snapshot``, then ``Finished``.

        With ``n`` samples their events come in any order, each with its ``sample``, and each has its ``Finished``.
        Leaving the loop, or closing the generator, cancels the request. Raises the errors that
        ``mmserve.client`` exports, all of them ``MMServeError``.

        snapshots: whether ``Snapshot`` events with the whole canvas are sent; default False.
        """
        message = build_request(prompt, images, deltas=True, snapshots=snapshots, schema=schema, **options)
        return self._events(message, self._retries(timeout), request_label(request_id))

    @documented_session
    def video_session(self, *, timeout: float | None = None, **options: Unpack[SessionOptions]) -> VideoSession:
        """Open a session of streaming video; use it as a context manager, which closes it.

        timeout: seconds that the server may be unreachable, and that a push may wait; default the client's.
        """
        return VideoSession(self, configuration(**options), timeout)

    def upload(self, data: bytes | Path | PIL.Image.Image, *, timeout: float | None = None) -> str:
        """Store an image or a video on the server; its media id can stand for it in ``images`` or ``videos``."""
        content = file_bytes(data, "data")
        stub = self._open(grpc).media.UploadMedia
        return str(self._unary(lambda **how: stub(chunks(content), **how), timeout).media_id)

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
        """Return as soon as the server's health check reports SERVING; raises ``Unavailable`` after ``timeout``."""
        retries = self._retries(timeout)
        failure: MMServeError | None = None
        while remaining := retries.remaining():
            try:
                if serving(self._open(grpc).health.Check(check(), **self._check_call(remaining))):
                    return
                failure = None
            except grpc.RpcError as error:
                failure = unready(self._failure(error))
            time.sleep(min(POLL_SECONDS, retries.remaining()))
        raise self._not_ready(failure, timeout)

    def close(self) -> None:
        """Close the connection; calls under way end with ``Cancelled``."""
        with self._lock:  # who is opening it has done so, or finds it closed
            self._closed = True
        if self._opened is not None:
            self._opened.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))
            if self._closed:
                raise Cancelled("the client was closed")

    def _unary(self, call: Callable[..., Any], timeout: float | None) -> Any:
        retries = self._retries(timeout)
        while True:
            try:
                return call(timeout=retries.remaining(), metadata=self._metadata())
            except grpc.RpcError as error:
                pause = retries.delay(self._failure(error))
            self._pause(pause)

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
                pause = retries.delay(self._failure(error), started=started)
            finally:
                call.cancel()
            self._pause(pause)
