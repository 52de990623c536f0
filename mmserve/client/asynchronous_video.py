"""Sessions of video for asyncio: ``AsyncVideoSession``, with the methods of ``VideoSession``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import PIL.Image

from mmserve.client.base import Base
from mmserve.client.outgoing import file_bytes
from mmserve.client.result import Result
from mmserve.client.video_files import SEGMENT_SECONDS, due, file_segments
from mmserve.client.video_state import Pending, Watching, lost
from mmserve.client.video_view import LEAVING_SECONDS, AlertsView, QuestionView, SessionView
from mmserve.core.changes import Changes
from mmserve.core.events import Event
from mmserve.core.session import Alert, Statistics
from mmserve.errors import Cancelled, DeadlineExceeded, Internal, MMServeError, ResourceExhausted, Unavailable
from mmserve.v1 import video_pb2 as pb
from mmserve.wire.status import from_server

logger = logging.getLogger("mmserve.client")


class AsyncVideoSession(SessionView):
    """``VideoSession`` for asyncio: ``async with client.video_session(...) as session``; one event loop."""

    def __init__(self, client: Base, config: pb.ConfigureSession, timeout: float | None) -> None:
        super().__init__(client, config, timeout)
        self._changes = Changes()
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Connect; what ``async with`` does."""
        self._running = asyncio.create_task(self._run())
        await self._changes.until(lambda: self._state.configured is not None or self._state.error is not None)
        if self._state.error is not None:
            raise self._state.error
        return self

    # --- frames ---

    async def push(
        self,
        image: bytes | Path | PIL.Image.Image,
        seconds: float | None = None,
        *,
        wait: bool = True,
        timeout: float | None = None,
    ) -> None:
        """As ``VideoSession.push``."""
        at = self._at(seconds)
        data = await asyncio.to_thread(file_bytes, image, "image")
        await self._push(len(data), wait, timeout, push_image=pb.PushImage(data=data, seconds=at))

    async def push_segment(
        self,
        data: bytes,
        start: float | None = None,
        *,
        init: bytes = b"",
        wait: bool = True,
        timeout: float | None = None,
    ) -> None:
        """As ``VideoSession.push_segment``."""
        segment = pb.PushSegment(data=data, init=init, start_seconds=start)
        await self._push(len(data) + len(init), wait, timeout, push_segment=segment)

    async def push_file(
        self,
        path: Path | str,
        *,
        realtime: bool = False,
        start: float = 0.0,
        segment_seconds: float = SEGMENT_SECONDS,
        timeout: float | None = None,
    ) -> float:
        """As ``VideoSession.push_file``."""
        begun, end = time.monotonic(), start
        segments = file_segments(path, segment_seconds)
        while (segment := await asyncio.to_thread(next, segments, None)) is not None:
            if realtime:
                await asyncio.sleep(due(begun, segment.end, 1.0))
            await self.push_segment(segment.data, start + segment.start, timeout=timeout)
            end = start + segment.end
        return end

    async def _push(self, size: int, wait: bool, timeout: float | None, **request: Any) -> None:
        if not self._state.push_fits(size):
            if not wait:
                raise ResourceExhausted("the server has no room for another push now; try again later")
            await self._until(lambda: self._state.push_fits(size), timeout, "the server had no room for the push")
        self._state.enqueue(**request)
        self._changes.notify()

    # --- questions ---

    async def ask(
        self, text: str, *, scope: Any = "now", schema: Any = None, timeout: float | None = None, **options: Any
    ) -> Result[Any]:
        """As ``VideoSession.ask``."""
        return await self.stream(text, scope=scope, schema=schema, timeout=timeout, **options).result()

    def stream(
        self,
        text: str,
        *,
        scope: Any = "now",
        schema: Any = None,
        snapshots: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncQuestion:
        """As ``VideoSession.stream``; not to be awaited."""
        seconds = self._client.timeout if timeout is None else timeout
        pending = self._state.ask(text, scope, seconds, schema=schema, snapshots=snapshots, options=options)
        self._changes.notify()
        return AsyncQuestion(self, pending, schema, seconds)

    def watch(
        self,
        text: str,
        *,
        choices: Sequence[str] | None = None,
        wanted: str | None = None,
        on: float | None = None,
        off: float | None = None,
        min_interval: float | None = None,
        frames: int | None = None,
        min_mass: float | None = None,
        callback: Callable[[Alert], None] | None = None,
    ) -> AsyncAlerts:
        """As ``VideoSession.watch``; not to be awaited."""
        watching = self._state.watch(
            text,
            choices,
            wanted,
            callback,
            on_threshold=on,
            off_threshold=off,
            min_interval_seconds=min_interval,
            frames=frames,
            min_mass=min_mass,
        )
        self._changes.notify()
        return AsyncAlerts(self, watching)

    async def statistics(self, timeout: float | None = None) -> Statistics:
        """As ``VideoSession.statistics``."""
        found = self._state.ask_statistics()
        self._changes.notify()
        came = lambda: bool(found) or self._state.error is not None  # noqa: E731
        await self._until(came, timeout, "the statistics did not come")
        if not found:
            assert self._state.error is not None
            raise self._state.error
        return found[0]

    # --- the end ---

    async def close(self, timeout: float | None = None) -> None:
        """As ``VideoSession.close``."""
        if self._state.error is None and not self._state.closing:
            self._state.close()
            self._changes.notify()
        try:
            await self._until(lambda: self._state.over, timeout, "the session was not done")
            if self._running is not None:
                await asyncio.wait({self._running}, timeout=LEAVING_SECONDS)
        finally:
            await self._leave()
        if self._state.error is not None and not self._state.closed:
            raise self._state.error

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
            return
        self._state.cancel_all()
        self._changes.notify()
        try:
            await self.close(LEAVING_SECONDS)
        except MMServeError as failure:
            logger.debug("a session that was left: %r", failure)

    async def _leave(self) -> None:
        if not self._state.closed:
            self._state.fail(Cancelled("the session was closed"))
            self._changes.notify()
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running

    async def _until(self, so: Callable[[], bool], timeout: float | None, what: str) -> None:
        try:
            await asyncio.wait_for(self._changes.until(so), self._limit(timeout))
        except TimeoutError:
            raise DeadlineExceeded(f"{what} in time") from None

    # --- the connection ---

    async def _run(self) -> None:
        try:
            await self._connect()
        except asyncio.CancelledError:
            self._state.fail(Cancelled("the session was closed"))
            raise
        except MMServeError as error:
            self._state.fail(error)
        except Exception as error:  # noqa: BLE001 - every waiting call must end
            self._state.fail(Internal(f"the session's task failed: {error!r}", error_id=""))
        finally:
            self._changes.notify()

    async def _connect(self) -> None:
        retries = self._client._retries(self._timeout)
        while not self._state.over:
            writing: asyncio.Task[None] | None = None
            call = self._client._open(grpc.aio).video.Session(metadata=self._client._metadata())
            try:
                writing = asyncio.create_task(self._write(call))
                async for response in call:
                    then = self._state.take(response)
                    self._changes.notify()
                    if then is not None:
                        then()
                    if response.WhichOneof("response") == "acknowledged":
                        retries = self._client._retries(self._timeout)
                error: MMServeError = Unavailable("the server ended the connection")
                sent = False
            except grpc.RpcError as failed:
                error, sent = await asyncio.to_thread(self._client._failure, failed), from_server(failed)
            except asyncio.CancelledError:
                if self._client._closed:  # set by grpc.aio when its channel is closed
                    raise Cancelled("the client was closed") from None
                raise
            finally:
                call.cancel()
                if writing is not None:
                    writing.cancel()
            if self._state.over:
                return
            await asyncio.sleep(retries.delay(lost(self._state, error, from_server=sent)))

    async def _write(self, call: Any) -> None:
        """Send the requests of one connection."""
        try:
            await call.write(self._state.opening())
            while True:
                request = self._state.next_request()
                if request is not None:
                    await call.write(request)
                elif self._state.closed:
                    await call.done_writing()
                    return
                else:
                    await self._changes.changed()
        except (grpc.RpcError, asyncio.InvalidStateError):  # the connection is lost: its reader has the error
            return


class AsyncQuestion(QuestionView):
    """A question in progress; iterating it gives its events (``Admitted``, ``Delta``, ``Snapshot``, ``Finished``)."""

    def __init__(self, session: AsyncVideoSession, pending: Pending, schema: Any, timeout: float) -> None:
        super().__init__(pending, schema, timeout)
        self._session = session

    async def __aiter__(self) -> AsyncIterator[Event]:
        while (event := await self._next()) is not None:
            yield event

    async def result(self) -> Result[Any]:
        """As ``Question.result``."""
        while await self._next() is not None:
            pass
        return self._result()

    def cancel(self) -> None:
        """As ``Question.cancel``."""
        self._session._state.cancel(self._pending)
        self._session._changes.notify()

    async def _next(self) -> Event | None:
        try:
            await self._session._until(self._ready, self._left(), "the answer did not come")
        except DeadlineExceeded:
            self.cancel()
            raise
        return self._popped()


class AsyncAlerts(AlertsView):
    """The alerts of a standing question as they come; iterating waits for the next one, until ``close``."""

    def __init__(self, session: AsyncVideoSession, watching: Watching) -> None:
        super().__init__(session._state, watching)
        self._session = session

    async def __aiter__(self) -> AsyncIterator[Alert]:
        while (alert := await self.next()) is not None:
            yield alert

    async def next(self, timeout: float | None = None) -> Alert | None:
        """As ``Alerts.next``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._session._changes.until(self._ready), timeout)
        return self._popped()

    def close(self) -> None:
        """As ``Alerts.close``."""
        self._session._state.unwatch(self._watching)
        self._session._changes.notify()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
