"""One session: requests in, frames to the model in order, questions between them, responses out.

Everything runs on one event loop, except for what ``Work`` runs: decoding, and calls of the model's stream. Requests
are received once each, by their index (``indexes.py``). Pushes are decoded one after another, and their frames wait for
the model (``overload.py``); a question keeps its position among them, so that it sees exactly the frames pushed before
it. Connections may change; work in progress continues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from mmserve.core.changes import Changes
from mmserve.core.session import PushFailed, Statistics
from mmserve.core.tenant import Tenant
from mmserve.errors import Cancelled, Internal, InvalidArgument, MMServeError, ResourceExhausted
from mmserve.video import messages as m
from mmserve.video.base import EncodedFrame, Frame, Stream, StreamLost
from mmserve.video.connection import Connection
from mmserve.video.indexes import Requests, Window
from mmserve.video.overload import Origin, Overload, Waiting, WaitingFrame
from mmserve.video.questions import Question, Questions
from mmserve.video.reported import reported
from mmserve.video.request_queue import QueuedPush, QueuedRequest, RequestQueue
from mmserve.video.response_queue import ResponseQueue
from mmserve.video.session_context import Reader, SessionContext
from mmserve.video.stream_calls import StreamCalls
from mmserve.video.watches import Watches, Watching

logger = logging.getLogger("mmserve.video")


class _Closing:
    pass


class Session:
    """A session of ``tenant``, created on the running loop, which runs it.

    ``ended`` is called once, when the session cannot be resumed any more.
    """

    def __init__(
        self,
        handle: str,
        tenant: Tenant,
        stream: Stream,
        reader: Reader,
        context: SessionContext,
        overload: Overload,
        ended: Callable[[Session], None],
    ) -> None:
        self.handle, self.tenant = handle, tenant
        self.greeting: Any = None  # first response of its connections; set by the caller
        self.owner: Any = None  # the engine of its stream; set by the caller
        self.adapter = ""  # of its questions; set by the caller
        self.open_id = ""  # the client's name for it until it knows the handle, set by its opener
        self.last_request = time.monotonic()
        self.error: MMServeError | None = None  # error with which it ended
        self.over = False
        self._stream, self._reader, self._context, self._ended = stream, reader, context, ended
        self._config = config = context.config
        self._loop = asyncio.get_running_loop()
        self._changes = Changes()
        self._requests = Requests()
        self._window = Window(config.credit_pushes, config.credit_bytes)
        self._response_queue = ResponseQueue(
            config.outbox_bytes,
            lambda: m.Acknowledged(self._requests.taken, self._window.credit),
            self._finished,
            self.detach,
            self.end,
        )
        self._to_decode = RequestQueue(config.credit_pushes)
        self._waiting = Waiting(overload, config.waiting_frames, config.waiting_bytes)
        self._taking = False  # whether the first waiting item is being processed
        self._appending = 0  # frames being appended to the stream
        self._watches = Watches(context, self._report, self._wake)
        self._calls = StreamCalls(stream, context.work)
        self._questions = Questions(
            context, lambda *args: self._calls.call(stream.ask, *args), self._report, self._call_soon, self._wake
        )
        self._closing = False
        self._closed = False
        self._stats = Statistics()
        self._tasks = [asyncio.create_task(loop()) for loop in (self._decode, self._take, self._watches.judge)]
        for task in self._tasks:
            task.add_done_callback(self._broken)

    # --- connections ---

    def attach(self, received: int | None = None) -> Connection:
        """Create a connection, which replaces any other; ``received``: when resuming, the index of the last response
        received.

        Raises ``FailedPrecondition`` if a later response is not kept any more.
        """
        if received is not None:
            self._response_queue.responses.resume(received)
            self._stats = replace(self._stats, resumes=self._stats.resumes + 1)
            self._context.metrics.resumed()
        self.last_request = time.monotonic()
        return self._response_queue.attach()

    def detach(self, connection: Connection) -> None:
        """``connection`` is lost; no effect if it was replaced."""
        if self._response_queue.detach(connection) and self._closed and connection.done:
            self.end(None)

    def go_away(self, notice: m.GoAway) -> None:
        """Announce a planned end."""
        self._response_queue.go_away(notice)

    @property
    def detached(self) -> float | None:
        """Since when it has had no connection (monotonic clock, seconds); None if it has one."""
        return self._response_queue.detached

    @property
    def _in_flight(self) -> int:
        """Number of frames that are being appended, or judged by standing questions."""
        return self._appending + self._watches.waiting

    @property
    def untouched(self) -> bool:
        """Whether no request has come but the one that opened it."""
        return not self._requests.taken

    @property
    def idle(self) -> bool:
        """Whether nothing is in progress."""
        decoded = not (self._to_decode or self._window.waiting)
        return decoded and not (self._questions or self._in_flight or len(self._waiting) or self._taking)

    def end(self, error: MMServeError | None) -> None:
        """End with ``error``, None = the client ended it: work in progress is cancelled, and everything is released."""
        if self.over:
            return
        self.over, self.error = True, error
        for task in self._tasks:
            task.remove_done_callback(self._broken)
            task.cancel()
        self._questions.end_all(Cancelled("the session ended"))
        for queue in (self._to_decode, self._waiting, self._watches, self._response_queue.responses):
            queue.clear()  # immediately: a connection whose client does not read may keep the session object alive
        if not self._closed:
            self._tasks.append(self._loop.create_task(self._calls.close()))
        self._response_queue.fail(error)
        self._ended(self)

    # --- requests ---

    def take(self, index: int, received: int, request: m.SessionRequest | None, size: int) -> None:
        """Receive a request of ``size`` bytes, if it is new; None is an empty one, which confirms responses.

        Errors of one push or question are reported in its response. Raises errors that end the session:
        ``InvalidArgument`` for wrong indices, ``ResourceExhausted`` for a client that keeps pushing without credit.
        """
        self.last_request = time.monotonic()
        if received:
            self._response_queue.responses.confirm(received)
            self._response_queue.wake()
        if request is None:
            if index:
                raise InvalidArgument.of("request", "must be one that this server knows")
            return
        if not self._requests.take(index):
            return
        self._response_queue.acknowledge()
        if self._closing:
            raise InvalidArgument.of("request", "must not come after close")
        match request:
            case m.PushImage() | m.PushSegment():
                self._push(index, request)
            case m.Ask() | m.Decide():
                if (question := self._questions.begin(request)) is not None:
                    self._queue(QueuedRequest(question, size))
            case m.CancelAsk(question_id):
                self._questions.cancel(question_id)
            case m.Watch():
                self._watches.name(request)
                self._queue(QueuedRequest(request, size))
            case m.Unwatch(watch_id):
                self._watches.release_id(watch_id)
                self._queue(QueuedRequest(request, size))
            case m.GetStatistics():
                self._queue(QueuedRequest(request, size))
            case m.Close():
                self._closing = True
                self._queue(QueuedRequest(_Closing(), size))
        self._changes.notify()

    def _push(self, index: int, push: m.Push) -> None:
        size, origin = m.push_bytes(push), Origin(index, time.monotonic())
        if size > self._config.credit_bytes:
            limit = f"the limit is {self._config.credit_bytes} ([video] credit_bytes of the server)"
            self._fail_push(origin, InvalidArgument.of("data", f"has {size} bytes; {limit}"))
        elif self._window.push(size):
            self._queue(QueuedPush(push, origin, size))
        else:
            self._fail_push(origin, ResourceExhausted("the push was sent without credit; wait for `credit`"))

    def _queue(self, item: QueuedPush | QueuedRequest) -> None:
        self._to_decode.put(item, len(self._waiting) - self._waiting.frames)

    # --- decoding, one push after another ---

    async def _decode(self) -> None:
        while True:
            await self._changes.until(lambda: len(self._to_decode) > 0 and not self._waiting.full)
            item = self._to_decode.pop()
            if isinstance(item, QueuedPush):
                await self._read(item)
            else:
                self._waiting.put(item)
            del item  # otherwise an idle session would keep its last push
            self._changes.notify()

    async def _read(self, pushed: QueuedPush) -> None:
        def take(frame: Frame) -> None:
            self._loop.call_soon_threadsafe(self._frame, WaitingFrame(frame, pushed.origin))

        try:
            async with self._context.filled(pushed.push) as push:
                await self._context.work(self._reader.read, push, take, self._check)
        except Exception as error:  # noqa: BLE001 - one push's failure is its own
            self._fail_push(pushed.origin, reported(error))
        finally:
            self._window.done(pushed.size)
            self._response_queue.acknowledge()

    def _check(self) -> None:
        if self.over:
            raise Cancelled("the session ended")

    def _frame(self, frame: WaitingFrame) -> None:
        if self.over:
            return
        dropped = self._waiting.put(frame)
        if dropped:
            self._stats = replace(self._stats, frames_dropped=self._stats.frames_dropped + dropped)
            self._context.metrics.dropped(dropped)
            self._report(m.FramesTaken(0, dropped, self._stats.seconds, 0.0))
        self._changes.notify()

    # --- the model's stream ---

    async def _take(self) -> None:
        while True:
            await self._changes.until(
                lambda: len(self._waiting) > 0 and self._in_flight < self._config.frames_under_way
            )
            item, self._taking = self._waiting.pop(), True
            self._changes.notify()
            await self._taken(item)
            del item
            self._taking = False
            self._response_queue.wake()

    async def _taken(self, first: object) -> None:
        """Process the first waiting item."""
        if isinstance(first, WaitingFrame):
            await self._append(first)
            return
        assert isinstance(first, QueuedRequest)
        self._to_decode.done(first)
        await self._changes.until(lambda: not self._appending)
        match item := first.item:
            case Question():
                await self._questions.submit(item, frames=self._stats.frames_taken > 0)
            case m.GetStatistics():
                await self._report_statistics()
            case m.Watch():
                await self._watches.add(item)
            case m.Unwatch(watch_id):
                self._watches.remove(watch_id)
            case _Closing():
                await self._changes.until(lambda: not self._questions and not self._in_flight)
                await self._calls.close()
                self._closed = True
                self._report(m.Closed())

    async def _append(self, waiting: WaitingFrame) -> None:
        try:
            future: Future[EncodedFrame] = await self._calls.call(self._stream.append, waiting.frame)
        except Exception as error:  # noqa: BLE001 - the same
            self._failed_frame(waiting, error)
            return
        self._appending += 1
        watches = self._watches.asked
        future.add_done_callback(lambda done: self._call_soon(self._seen, waiting, watches, done))

    def _seen(self, waiting: WaitingFrame, watches: tuple[Watching, ...], done: Future[EncodedFrame]) -> None:
        self._appending -= 1
        self._changes.notify()
        if self.over:
            return
        error = Cancelled("the stream was closed") if done.cancelled() else done.exception()
        if error is not None:
            self._failed_frame(waiting, error)
            return
        self._watches.enqueue(done.result(), watches)
        seconds = waiting.frame.seconds
        self._stats = replace(self._stats, frames_taken=self._stats.frames_taken + 1, seconds=seconds)
        ready = time.monotonic() - waiting.origin.arrived
        self._context.metrics.taken(ready)
        self._report(m.FramesTaken(1, 0, seconds, ready))

    def _failed_frame(self, waiting: WaitingFrame, error: BaseException) -> None:
        if isinstance(error, StreamLost):
            self.end(reported(error))
        else:
            self._fail_push(waiting.origin, reported(error))

    # --- the rest ---

    async def _report_statistics(self) -> None:
        of = await self._calls.stats()
        self._report(
            replace(
                self._stats,
                questions=self._questions.count,
                alerts=self._watches.alerts,
                waiting_bytes=self._window.bytes + self._waiting.bytes,
                kept_rows=of.kept_rows,
                evicted_rows=of.evicted_rows,
                kv_bytes=of.kv_bytes,
                feature_bytes=of.feature_bytes,
            )
        )

    # --- responses ---

    def _fail_push(self, push: Origin, error: MMServeError) -> None:
        """Report a push that failed, once."""
        if self.over or push.failed:
            return
        push.failed = True
        self._stats = replace(self._stats, pushes_failed=self._stats.pushes_failed + 1)
        self._context.metrics.push_failed(error.code)
        self._report(PushFailed(push.index, error))

    def _report(self, response: m.Numbered) -> None:
        if not self.over:
            self._response_queue.report(response)

    def _wake(self) -> None:
        """Wake the session's loops and its connection."""
        self._changes.notify()
        self._response_queue.wake()

    def _finished(self, half_closed: bool) -> bool:
        """Whether a connection is complete."""
        responses = self._response_queue.responses
        if self._closed:
            return responses.confirmed or (half_closed and not responses.pending)
        return half_closed and self.idle and not responses.pending

    def _call_soon(self, call: Callable[..., None], *args: Any) -> None:
        """Schedule a call on the loop, from any thread."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: the server has stopped
            logger.debug("an event after the end of the server")

    def _broken(self, task: asyncio.Task[None]) -> None:
        """A bug ends this session, but no other."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end(Internal.logged(error, "a session of video", logger))
