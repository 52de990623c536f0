"""Sessions of video for asyncio: ``AsyncVideoSession``, with the methods of ``VideoSession``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import PIL.Image

from mmserve.client.base import Base
from mmserve.client.decisions import Decisions, TypedQuestion
from mmserve.client.options import Chat
from mmserve.client.outgoing import file_bytes
from mmserve.client.result import Result
from mmserve.client.video_files import SEGMENT_SECONDS, due, file_segments
from mmserve.client.video_requests import Push, image_push, segment_push
from mmserve.client.video_state import Pending, Turn, Watching, lost
from mmserve.client.video_view import LEAVING_SECONDS, AlertsView, QuestionView, SessionView
from mmserve.core.changes import Changes
from mmserve.core.events import Event
from mmserve.core.session import Alert, Statistics
from mmserve.errors import Cancelled, DeadlineExceeded, Internal, MMServeError, Unavailable
from mmserve.v1 import video_pb2 as pb
from mmserve.wire.status import from_server

logger = logging.getLogger("mmserve.client")
_T = TypeVar("_T")


class AsyncVideoSession(SessionView["AsyncQuestion", "AsyncAlerts"]):
    """``VideoSession`` for asyncio: ``async with client.video_session(...) as session``; one event loop."""

    def __init__(self, client: Base, config: pb.ConfigureSession, timeout: float | None) -> None:
        super().__init__(client, config, timeout)
        self._changes = Changes()
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Connect; called by ``async with``."""
        self._client._open(grpc.aio)  # errors are raised to the caller
        self._running = asyncio.create_task(self._run())
        try:
            await self._until(self._opened, self._timeout, "the session was not opened")
        except (asyncio.CancelledError, DeadlineExceeded):  # the caller has no session to close
            await self._leave()
            raise
        self._check_opened()
        return self

    def _act(self, act: Callable[[], _T]) -> _T:
        found = act()
        self._changes.notify()
        return found

    def _question(self, pending: Pending, timeout: float, read: Mapping[str, Any]) -> AsyncQuestion:
        return AsyncQuestion(self, pending, timeout, read)

    def _alerts(self, watching: Watching) -> AsyncAlerts:
        return AsyncAlerts(self, watching)

    # --- frames ---

    async def push(
        self,
        image: bytes | Path | PIL.Image.Image | str,
        seconds: float | None = None,
        *,
        wait: bool = True,
        timeout: float | None = None,
    ) -> int:
        """As ``VideoSession.push``."""
        with self._pushing() as turn:
            data = image if isinstance(image, str) else await asyncio.to_thread(file_bytes, image, "image")
            return await self._push(turn, image_push(data, turn.called if seconds is None else seconds), wait, timeout)

    async def push_segment(
        self,
        data: bytes | str,
        start: float | None = None,
        *,
        init: bytes = b"",
        wait: bool = True,
        timeout: float | None = None,
    ) -> int:
        """As ``VideoSession.push_segment``."""
        with self._pushing() as turn:
            return await self._push(turn, segment_push(data, start, init), wait, timeout)

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

    async def _push(self, turn: Turn, push: Push, wait: bool, timeout: float | None) -> int:
        turn.size = push.size
        if not self._fits(turn, wait):
            fits = lambda: self._fits(turn, wait)  # noqa: E731
            await self._until(fits, self._limit(timeout), "the server had no room for the push")
        return self._act(lambda: self._state.enqueue(**push.request))

    # --- questions ---

    async def ask(
        self,
        text: str | Sequence[Chat],
        *,
        scope: Any = "now",
        schema: Any = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Result[Any]:
        """As ``VideoSession.ask``."""
        question = self.stream(text, scope=scope, schema=schema, timeout=timeout, **options)
        try:
            return await question.result()
        except asyncio.CancelledError:
            question.cancel()
            raise

    async def decide(
        self,
        questions: Sequence[TypedQuestion] | Mapping[str, TypedQuestion],
        text: str | Sequence[Chat] = "",
        *,
        scope: Any = "now",
        timeout: float | None = None,
    ) -> Decisions:
        """As ``VideoSession.decide``."""
        pending, seconds = self._begin_deciding(questions, text, scope, timeout)
        try:
            await self._until(lambda: pending.done, seconds, "the answers did not come")
        except (DeadlineExceeded, asyncio.CancelledError):
            self._act(lambda: self._state.cancel(pending))
            raise
        return self._decided(pending)

    async def statistics(self, timeout: float | None = None) -> Statistics:
        """As ``VideoSession.statistics``."""
        found = self._act(self._state.ask_statistics)
        await self._until(lambda: self._came(found), self._limit(timeout), "the statistics did not come")
        return self._first(found)

    # --- the end ---

    async def close(self, timeout: float | None = None) -> None:
        """As ``VideoSession.close``."""
        self._begin_closing()
        try:
            await self._until(lambda: self._state.over, self._limit(timeout), "the session was not done")
            if self._running is not None:
                await asyncio.wait({self._running}, timeout=LEAVING_SECONDS)
        finally:
            await self._leave()
        self._check_closed()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
            return
        self._act(self._state.cancel_all)
        try:
            await self.close(LEAVING_SECONDS)
        except MMServeError as failure:
            logger.debug("a session that was left: %r", failure)

    async def _leave(self) -> None:
        if not self._state.closed:
            self._fail(Cancelled("the session was closed"))
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running

    async def _until(self, so: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until ``so()``, which is still true when the caller continues: no other task runs in between."""
        try:
            async with asyncio.timeout(seconds):  # ``wait_for`` of Python 3.11 waits in a separate task
                await self._changes.until(so)
        except TimeoutError:
            raise DeadlineExceeded(f"{what} in time") from None

    # --- the connection ---

    async def _run(self) -> None:
        try:
            await self._connect()
        except asyncio.CancelledError:
            self._fail(Cancelled("the session was closed"))
            raise
        except MMServeError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - every waiting call must end
            self._fail(Internal(f"the session's task failed: {error!r}", error_id=""))
        finally:
            self._changes.notify()

    async def _connect(self) -> None:
        retries = self._client._retries(self._timeout)
        while not self._state.over:
            writing: asyncio.Task[None] | None = None
            if self._client._closed:
                raise Cancelled("the client was closed")
            call = self._client._open(grpc.aio).video.Session(metadata=self._client._metadata())
            self._connecting()
            try:
                writing = asyncio.create_task(self._write(call))
                async for response in call:
                    self._received(response)
                error: MMServeError = Unavailable("the server ended the connection")
                sent = False
            except grpc.RpcError as failed:
                error, sent = await asyncio.to_thread(self._client._failure, failed), from_server(failed)
            except asyncio.CancelledError:
                if self._client._closed:  # grpc.aio closed its channel
                    raise Cancelled("the client was closed") from None
                raise
            finally:
                call.cancel()
                if writing is not None:
                    writing.cancel()
            if self._state.over:
                return
            retries = self._resuming(retries)
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
        except (grpc.RpcError, asyncio.InvalidStateError):  # the connection is lost: its reader gets the error
            return


class AsyncQuestion(QuestionView):
    """A question in progress; iterating it yields its events (``Admitted``, ``Delta``, ``Snapshot``, ``Finished``)."""

    def __init__(self, session: AsyncVideoSession, pending: Pending, timeout: float, read: Mapping[str, Any]) -> None:
        super().__init__(session, pending, timeout, read)
        self._session = session

    async def __aiter__(self) -> AsyncIterator[Event]:
        while (event := await self._next()) is not None:
            yield event

    async def result(self) -> Result[Any]:
        """As ``Question.result``."""
        while await self._next() is not None:
            pass
        return self._result()

    async def _next(self) -> Event | None:
        try:
            await self._session._until(self._ready, self._left(), "the answer did not come")
        except DeadlineExceeded:
            self.cancel()
            raise
        return self._popped()


class AsyncAlerts(AlertsView):
    """The alerts of a standing question as they arrive; iteration waits for the next one, until ``close``."""

    def __init__(self, session: AsyncVideoSession, watching: Watching) -> None:
        super().__init__(session, watching)
        self._session = session

    async def __aiter__(self) -> AsyncIterator[Alert]:
        while (alert := await self.next()) is not None:
            yield alert

    async def next(self, timeout: float | None = None) -> Alert | None:
        """As ``Alerts.next``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):  # as ``_until``
                await self._session._changes.until(self._ready)
        return self._popped()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
