"""The blocking client: ``Client``."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

import grpc
import PIL.Image

from mmserve.client.base import POLL_SECONDS, Base, check, chunks, may_have_run, serving, unready
from mmserve.client.blocking_video import VideoSession
from mmserve.client.cache import Cache
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
from mmserve.v1 import generation_pb2, model_pb2
from mmserve.wire.events import from_response
from mmserve.wire.models import from_model_info
from mmserve.wire.plain import from_message

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
        schema: type[T] | Adapter[T],
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

    @documented(Options, ARGUMENTS)
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
        received = list(events)
        return to_result(received, message.sampling.n or 1, label, schema, tools=options.get("tools"))

    @documented(Options, ARGUMENTS)
    def stream(
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
    ) -> Generator[Event, None, None]:
        """The events of an answer as they arrive: ``Admitted``; ``Delta``, ``Draft`` and ``Snapshot``; ``Finished``.

        With ``n`` samples their events come in any order, each with its ``sample``, and each has its ``Finished``.
        Leaving the loop, or closing the generator, cancels the request. Raises the errors that
        ``mmserve.client`` exports, all of them ``MMServeError``.

        snapshots: whether ``Snapshot`` events with the whole canvas are sent; default False.
        drafts: whether ``Draft`` events are sent, with what each step changed of the canvas; default False.
        prefilled: whether a ``Prefilled`` event with the prompt's tokens is sent before the answer; default False.
        """
        message = build_request(
            prompt,
            images,
            deltas=True,
            snapshots=snapshots,
            drafts=drafts,
            prefilled=prefilled,
            schema=schema,
            **options,
        )
        return self._events(message, self._retries(timeout), request_label(request_id))

    @documented(SessionOptions)
    def video_session(self, *, timeout: float | None = None, **options: Unpack[SessionOptions]) -> VideoSession:
        """Open a session of streaming video; use it as a context manager, which closes it.

        timeout: seconds that opening it may take, that the server may be unreachable, and that a push may wait; default
            the client's.
        """
        return VideoSession(self, configuration(**options), timeout)

    def decide(
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
        """Answer typed questions about a context, with probabilities, without generating text.

        prompt: the context: a text, or a chat as in ``generate``; may be empty.
        questions: ``YesNo``, ``Choice`` and ``Score``, as a sequence, or as a mapping of names to them.
        images, videos, video_sampling: inserted before the context's last text, as in ``generate``.
        model: name of a model the server has; default its first.
        timeout: seconds until the call fails; default the client's.

        Raises ``InvalidArgument`` for invalid questions, and every error of the server.
        """
        message = build_decision(prompt, questions, images, videos, video_sampling, model)
        return to_decisions(self._call("decisions", "Decide", message, timeout))

    def upload(self, data: bytes | Path | PIL.Image.Image, *, timeout: float | None = None) -> str:
        """Store an image or a video on the server; its media id can replace it in ``images`` or ``videos``."""
        content = file_bytes(data, "data")
        reply = self._call("media", "UploadMedia", lambda: chunks(content), timeout)
        return str(reply.media_id)

    def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """The server's models, its default first."""
        reply = self._call("models", "ListModels", model_pb2.ListModelsRequest(), timeout)
        return [from_model_info(model) for model in reply.models]

    def describe(self, name: str = "", *, timeout: float | None = None) -> ModelInfo:
        """One model, the server's default for an empty name."""
        reply = self._call("models", "DescribeModel", model_pb2.DescribeModelRequest(model=name), timeout)
        return from_model_info(reply.model)

    def load_model(self, path: str, name: str = "", *, dtype: str = "", timeout: float | None = None) -> ModelInfo:
        """Load the checkpoint ``path`` of the server's ``model_folder``, and serve it as ``name``; returns its info.

        ``dtype`` is as under ``[[models]]``. Loading continues after ``timeout``. Raises ``ResourceExhausted`` with the
        amount of missing memory, ``FailedPrecondition`` if the name is taken, ``InvalidArgument`` for invalid files.
        """
        message = model_pb2.LoadModelRequest(path=path, name=name, dtype=dtype)
        return from_model_info(self._call("models", "LoadModel", message, timeout).model)

    def unload_model(self, name: str, *, drain_seconds: float | None = None, timeout: float | None = None) -> bool:
        """Unload a model; its requests may continue for up to ``drain_seconds`` (default the server's).

        Returns, once its memory is free, whether all of them finished within that time.
        """
        message = model_pb2.UnloadModelRequest(model=name, drain_seconds=drain_seconds)
        return bool(self._call("models", "UnloadModel", message, timeout).ended)

    def adapters(self, model: str = "", *, timeout: float | None = None) -> list[AdapterInfo]:
        """The loaded adapters of a model, by default of the server's default model."""
        reply = self._call("models", "ListAdapters", model_pb2.ListAdaptersRequest(model=model), timeout)
        return [from_message(AdapterInfo, adapter) for adapter in reply.adapters]

    def load_adapter(self, name: str, *, model: str = "", timeout: float | None = None) -> AdapterInfo:
        """Load the adapter ``name`` from the server's ``adapter_folder``, replacing a loaded one of that name."""
        message = model_pb2.LoadAdapterRequest(model=model, adapter=name)
        return from_message(AdapterInfo, self._call("models", "LoadAdapter", message, timeout).adapter)

    def drop_adapter(self, name: str, *, model: str = "", timeout: float | None = None) -> None:
        """Unload the adapter ``name``; requests in progress with it continue."""
        message = model_pb2.DropAdapterRequest(model=model, adapter=name)
        self._call("models", "DropAdapter", message, timeout)

    @property
    def cache(self) -> Cache:
        """The server's caches of prompts and media."""
        return Cache(partial(self._call, "caches"))

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
        """Close the connection; calls in progress end with ``Cancelled``."""
        with self._lock:  # another thread has opened it, or finds it closed
            self._closed = True
        if self._opened is not None:
            self._opened.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))
            if self._closed:
                raise Cancelled("the client was closed")

    def _call(self, service: str, method: str, message: Any, timeout: float | None) -> Any:
        """The reply of a ``method`` to one ``message``, or to the stream of messages that ``message()`` creates for
        each attempt."""
        stub = getattr(getattr(self._open(grpc), service), method)
        retries = self._retries(timeout)
        while True:
            try:
                sent = message() if callable(message) else message
                return stub(sent, timeout=retries.remaining(), metadata=self._metadata())
            except grpc.RpcError as error:
                pause = retries.delay(self._failure(error), started=may_have_run(method, error))
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
