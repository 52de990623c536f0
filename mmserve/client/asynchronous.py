"""The client for asyncio: ``AsyncClient``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

import grpc
import PIL.Image

from mmserve.client.asynchronous_video import AsyncVideoSession
from mmserve.client.base import POLL_SECONDS, Base, check, chunks, may_have_run, serving, unready
from mmserve.client.cache import AsyncCache
from mmserve.client.decisions import Decisions, TypedQuestion, build_decision, to_decisions
from mmserve.client.options import ARGUMENTS, Chat, Image, Options, Video, documented
from mmserve.client.outgoing import build_request, file_bytes, request_label
from mmserve.client.result import Result, to_result
from mmserve.client.retries import Retries
from mmserve.client.schemas import Adapter
from mmserve.client.session_options import SessionOptions
from mmserve.client.video_requests import configuration
from mmserve.core.events import Event
from mmserve.core.info import AdapterInfo, ModelInfo
from mmserve.core.request import VideoSampling
from mmserve.errors import Cancelled, MMServeError
from mmserve.v1 import generation_pb2, media_pb2, model_pb2
from mmserve.wire.events import from_response
from mmserve.wire.models import from_model_info
from mmserve.wire.plain import from_message

T = TypeVar("T")


class AsyncClient(Base):
    """``Client`` for asyncio: the same methods, to be awaited; one event loop per client."""

    @overload
    async def generate(
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
    async def generate(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        schema: type[T] | Adapter[T],
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Result[T]: ...

    @overload
    async def generate(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        schema: Any,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Result[Any]: ...

    @documented(Options, ARGUMENTS)
    async def generate(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        schema: Any = None,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Result[Any]:
        """As ``Client.generate``."""
        label = request_label(request_id)
        message = await asyncio.to_thread(
            build_request, prompt, images, deltas=False, snapshots=False, schema=schema, **options
        )
        events = self._events(message, self._retries(timeout), label)
        received = [event async for event in events]
        return to_result(received, message.sampling.n or 1, label, schema, tools=options.get("tools"))

    @documented(Options, ARGUMENTS)
    async def stream(
        self,
        prompt: str | Sequence[Chat],
        images: Sequence[Image] = (),
        *,
        schema: Any = None,
        snapshots: bool = False,
        drafts: bool = False,
        prefilled: bool = False,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Event, None]:
        """As ``Client.stream``; ``contextlib.aclosing`` around it cancels at once when the loop is left early.

        snapshots: whether ``Snapshot`` events with the whole canvas are sent; default False.
        drafts: whether ``Draft`` events are sent, with what each step changed of the canvas; default False.
        prefilled: whether a ``Prefilled`` event with the prompt's tokens is sent before the answer; default False.
        """
        label = request_label(request_id)
        retries = self._retries(timeout)
        message = await asyncio.to_thread(
            build_request,
            prompt,
            images,
            deltas=True,
            snapshots=snapshots,
            drafts=drafts,
            prefilled=prefilled,
            schema=schema,
            **options,
        )
        events = self._events(message, retries, label)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    @documented(SessionOptions)
    def video_session(self, *, timeout: float | None = None, **options: Unpack[SessionOptions]) -> AsyncVideoSession:
        """A session of streaming video; ``async with`` opens and closes it.

        timeout: seconds that opening it may take, that the server may be unreachable, and that a push may wait; default
            the client's.
        """
        return AsyncVideoSession(self, configuration(**options), timeout)

    async def decide(
        self,
        prompt: str | Sequence[Chat],
        questions: Sequence[TypedQuestion] | Mapping[str, TypedQuestion],
        images: Sequence[Image] = (),
        *,
        videos: Sequence[Video] = (),
        video_sampling: VideoSampling | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> Decisions:
        """As ``Client.decide``."""
        message = await asyncio.to_thread(build_decision, prompt, questions, images, videos, video_sampling, model)
        return to_decisions(await self._call("decisions", "Decide", message, timeout))

    async def upload(self, data: bytes | Path | PIL.Image.Image, *, timeout: float | None = None) -> str:
        """As ``Client.upload``."""
        content = await asyncio.to_thread(file_bytes, data, "data")
        reply = await self._call("media", "UploadMedia", lambda: _async_chunks(content), timeout)
        return str(reply.media_id)

    async def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """As ``Client.models``."""
        reply = await self._call("models", "ListModels", model_pb2.ListModelsRequest(), timeout)
        return [from_model_info(model) for model in reply.models]

    async def describe(self, name: str = "", *, timeout: float | None = None) -> ModelInfo:
        """As ``Client.describe``."""
        reply = await self._call("models", "DescribeModel", model_pb2.DescribeModelRequest(model=name), timeout)
        return from_model_info(reply.model)

    async def load_model(
        self, path: str, name: str = "", *, dtype: str = "", timeout: float | None = None
    ) -> ModelInfo:
        """As ``Client.load_model``."""
        message = model_pb2.LoadModelRequest(path=path, name=name, dtype=dtype)
        return from_model_info((await self._call("models", "LoadModel", message, timeout)).model)

    async def unload_model(
        self, name: str, *, drain_seconds: float | None = None, timeout: float | None = None
    ) -> bool:
        """As ``Client.unload_model``."""
        message = model_pb2.UnloadModelRequest(model=name, drain_seconds=drain_seconds)
        return bool((await self._call("models", "UnloadModel", message, timeout)).ended)

    async def adapters(self, model: str = "", *, timeout: float | None = None) -> list[AdapterInfo]:
        """As ``Client.adapters``."""
        reply = await self._call("models", "ListAdapters", model_pb2.ListAdaptersRequest(model=model), timeout)
        return [from_message(AdapterInfo, adapter) for adapter in reply.adapters]

    async def load_adapter(self, name: str, *, model: str = "", timeout: float | None = None) -> AdapterInfo:
        """As ``Client.load_adapter``."""
        message = model_pb2.LoadAdapterRequest(model=model, adapter=name)
        reply = await self._call("models", "LoadAdapter", message, timeout)
        return from_message(AdapterInfo, reply.adapter)

    async def drop_adapter(self, name: str, *, model: str = "", timeout: float | None = None) -> None:
        """As ``Client.drop_adapter``."""
        message = model_pb2.DropAdapterRequest(model=model, adapter=name)
        await self._call("models", "DropAdapter", message, timeout)

    @property
    def cache(self) -> AsyncCache:
        """As ``Client.cache``."""
        return AsyncCache(partial(self._call, "caches"))

    async def wait_ready(self, timeout: float = 30.0) -> None:
        """As ``Client.wait_ready``."""
        retries = self._retries(timeout)
        failure: MMServeError | None = None
        while remaining := retries.remaining():
            try:
                if serving(await self._open(grpc.aio).health.Check(check(), **self._check_call(remaining))):
                    return
                failure = None
            except grpc.RpcError as error:
                failure = unready(await self._failed(error))
            await asyncio.sleep(min(POLL_SECONDS, retries.remaining()))
        raise self._not_ready(failure, timeout)

    async def close(self) -> None:
        """As ``Client.close``."""
        with self._lock:  # another thread has opened it, or finds it closed
            self._closed = True
        if self._opened is not None:
            await self._opened.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, POLL_SECONDS))
            _raise_if_closed(self._closed)

    async def _failed(self, error: grpc.RpcError) -> MMServeError:
        if self._closed and error.code() is grpc.StatusCode.CANCELLED:  # at its beginning, a call ends like this
            return Cancelled("the client was closed")
        return await asyncio.to_thread(self._failure, error)

    async def _call(self, service: str, method: str, message: Any, timeout: float | None) -> Any:
        """The reply of a ``method`` to one ``message``, or to the stream of messages that ``message()`` creates for
        each attempt."""
        stub = getattr(getattr(self._open(grpc.aio), service), method)
        retries = self._retries(timeout)
        while True:
            try:
                sent = message() if callable(message) else message
                return await stub(sent, timeout=retries.remaining(), metadata=self._metadata())
            except grpc.RpcError as error:
                pause = retries.delay(await self._failed(error), started=may_have_run(method, error))
            except asyncio.CancelledError:
                _raise_if_closed(self._closed)
                raise
            await self._pause(pause)

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
                pause = retries.delay(await self._failed(error), started=started)
            except asyncio.CancelledError:
                _raise_if_closed(self._closed)
                raise
            finally:
                call.cancel()
            await self._pause(pause)


def _raise_if_closed(closed: bool) -> None:
    """Raises ``Cancelled`` for a closed client: grpc.aio reports a cancellation, but the caller's task was not
    cancelled."""
    task = asyncio.current_task()
    if closed and task is not None and not task.cancelling():
        raise Cancelled("the client was closed")


async def _async_chunks(data: bytes) -> AsyncIterator[media_pb2.UploadMediaRequest]:
    for message in chunks(data):
        yield message
