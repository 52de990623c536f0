"""Video sessions of the blocking client: ``VideoSession``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import PIL.Image

from mmserve.client.base import Base
from mmserve.client.decisions import Decisions, TypedQuestion
from mmserve.client.options import Chat
from mmserve.client.outgoing import file_bytes
from mmserve.client.result import Result
from mmserve.client.retries import LONGEST
from mmserve.client.video_files import SEGMENT_SECONDS, due, file_segments
from mmserve.client.video_requests import Push, image_push, segment_push
from mmserve.client.video_state import Pending, Turn, Watching, lost
from mmserve.client.video_view import LEAVING_SECONDS, AlertsView, QuestionView, SessionView
from mmserve.core.events import Event
from mmserve.core.session import Alert, Statistics
from mmserve.errors import Cancelled, DeadlineExceeded, Internal, MMServeError, Unavailable
from mmserve.v1 import video_pb2 as pb
from mmserve.wire.status import from_server

logger = logging.getLogger("mmserve.client")
_T = TypeVar("_T")


class VideoSession(SessionView["Question", "Alerts"]):
    """One session of video; made by ``Client.video_session``. All methods may be called from several threads.

    Frames are processed once each, in the order of the calls that push them, over any number of connections: after a
    lost connection the session is resumed automatically. A question is about all frames pushed before it.
    """

    def __init__(self, client: Base, config: pb.ConfigureSession, timeout: float | None) -> None:
        super().__init__(client, config, timeout)
        self._changed = threading.Condition()
        self._call: Any = None
        self._leaving = False
        client._open(grpc)  # errors are raised to the caller
        self._thread = threading.Thread(target=self._run, name="mmserve-session", daemon=True)
        self._thread.start()
        try:
            with self._changed:
                self._until(self._opened, self._timeout, "the session was not opened")
        except BaseException as error:  # also Ctrl+C: the caller has no session to close
            self._leave(error if isinstance(error, DeadlineExceeded) else Cancelled("the session was not waited for"))
            raise
        self._check_opened()

    def _act(self, act: Callable[[], _T]) -> _T:
        with self._changed:
            found = act()
            self._changed.notify_all()
        return found

    def _question(self, pending: Pending, timeout: float, read: Mapping[str, Any]) -> Question:
        return Question(self, pending, timeout, read)

    def _alerts(self, watching: Watching) -> Alerts:
        return Alerts(self, watching)

    # --- frames ---

    def push(
        self,
        image: bytes | Path | PIL.Image.Image | str,
        seconds: float | None = None,
        *,
        wait: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Push one image, which is one frame.

        image: the bytes of its file, its path, a picture, or a URL that the server may fetch.
        seconds: its time on the session's clock, later than that of all previous frames; default the time since the
            session was opened.
        wait: whether to wait if the server cannot accept a frame now; False raises ``ResourceExhausted`` instead.
        timeout: maximum seconds to wait, then ``DeadlineExceeded`` is raised; default the session's.

        Returns its index, by which ``push_failures`` reports a push that failed on the server.
        """
        with self._pushing() as turn:
            data = image if isinstance(image, str) else file_bytes(image, "image")
            return self._push(turn, image_push(data, turn.called if seconds is None else seconds), wait, timeout)

    def push_segment(
        self,
        data: bytes | str,
        start: float | None = None,
        *,
        init: bytes = b"",
        wait: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Push a piece of encoded video that begins with a keyframe (MP4, MPEG-TS, WebM, Matroska, H.264, H.265).

        data: its bytes, or a URL that the server may fetch.
        start: time of its first frame on the session's clock; default the end of the previous segment.
        init: initialisation segment of fragmented MP4 or WebM; also used for later segments.
        wait, timeout: as ``push``.
        """
        with self._pushing() as turn:
            return self._push(turn, segment_push(data, start, init), wait, timeout)

    def push_file(
        self,
        path: Path | str,
        *,
        realtime: bool = False,
        start: float = 0.0,
        segment_seconds: float = SEGMENT_SECONDS,
        timeout: float | None = None,
    ) -> float:
        """Push a video file in segments that are not re-encoded; returns the time of its end on the session's clock.

        realtime: whether to push it at playback speed, like a camera; default as fast as the server accepts it.
        start: time of its start on the session's clock (seconds).
        segment_seconds: minimum length of a segment.
        timeout: maximum seconds that each push waits; default the session's.

        Requires PyAV (``pip install av``); raises ``ConfigError`` without it.
        """
        begun, end = time.monotonic(), start
        for segment in file_segments(path, segment_seconds):
            if realtime:
                time.sleep(due(begun, segment.end, 1.0))
            self.push_segment(segment.data, start + segment.start, timeout=timeout)
            end = start + segment.end
        return end

    def _push(self, turn: Turn, push: Push, wait: bool, timeout: float | None) -> int:
        with self._changed:
            turn.size = push.size
            self._until(lambda: self._fits(turn, wait), self._limit(timeout), "the server had no room for the push")
            return self._act(lambda: self._state.enqueue(**push.request))

    def _until(self, so: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait, with the lock, until ``so()``."""
        if not self._changed.wait_for(so, seconds):
            raise DeadlineExceeded(f"{what} in time")

    # --- questions ---

    def ask(
        self,
        text: str | Sequence[Chat],
        *,
        scope: Any = "now",
        schema: Any = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Result[Any]:
        """The whole answer to a question about the frames pushed so far.

        text: the question, or a chat that ends with it.
        scope: "now" (the frames in the session's memory), "all", or (begin, end) in seconds, either of them None.
        schema: JSON schema, or Python type, of the answer; default none.
        timeout: deadline in seconds; default the client's.
        options: those of ``Client.generate`` that are about the answer (``max_new_tokens``, ``regex`` …).
        """
        question = self.stream(text, scope=scope, schema=schema, timeout=timeout, **options)
        try:
            return question.result()
        except BaseException:  # also Ctrl+C
            question.cancel()
            raise

    def decide(
        self,
        questions: Sequence[TypedQuestion] | Mapping[str, TypedQuestion],
        text: str | Sequence[Chat] = "",
        *,
        scope: Any = "now",
        timeout: float | None = None,
    ) -> Decisions:
        """Probabilities of the answers to typed questions about the frames pushed so far, all from one forward pass.

        questions: ``YesNo``, ``Choice`` and ``Score``, or a mapping of ids to them.
        text: further context, or a chat of texts; default none.
        scope, timeout: as ``ask``.
        """
        pending, seconds = self._begin_deciding(questions, text, scope, timeout)
        try:
            with self._changed:
                self._until(lambda: pending.done, seconds, "the answers did not come")
        except BaseException:  # also Ctrl+C
            self._act(lambda: self._state.cancel(pending))
            raise
        return self._decided(pending)

    def statistics(self, timeout: float | None = None) -> Statistics:
        """Counters of the session, once the server has started on all earlier pushes and questions."""
        with self._changed:
            found = self._act(self._state.ask_statistics)
            self._until(lambda: self._came(found), self._limit(timeout), "the statistics did not come")
            return self._first(found)

    # --- the end ---

    def close(self, timeout: float | None = None) -> None:
        """Wait until all frames and questions are processed, and end the session; later calls have no effect."""
        try:
            with self._changed:
                self._begin_closing()
                self._until(lambda: self._state.over, self._limit(timeout), "the session was not done")
        except DeadlineExceeded as error:
            self._leave(error)
            raise
        self._thread.join(LEAVING_SECONDS)
        if self._thread.is_alive():
            self._leave(Cancelled("the session was closed"))
        self._check_closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        self._act(self._state.cancel_all)
        try:
            self.close(LEAVING_SECONDS)
        except MMServeError as failure:
            logger.debug("a session that was left: %r", failure)

    def _leave(self, error: MMServeError) -> None:
        with self._changed:
            self._leaving = True
            self._state.fail(error)
            call, self._call = self._call, None
            self._changed.notify_all()
        if call is not None:
            call.cancel()

    # --- the connection, on a separate thread ---

    def _run(self) -> None:
        try:
            self._connect()
        except MMServeError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - every waiting call must end
            self._fail(Internal(f"the session's thread failed: {error!r}", error_id=""))

    def _connect(self) -> None:
        retries = self._client._retries(self._timeout)
        while not self._state.over and not self._leaving:
            own = object()
            try:
                with self._changed:
                    if self._leaving:
                        return
                    stub = self._client._open(grpc).video.Session
                    call = self._call = stub(self._outgoing(own), metadata=self._client._metadata())
                    self._connection = own
                    self._connecting()
                for response in call:
                    self._received(response)
                error: MMServeError = Unavailable("the server ended the connection")
                sent = False
            except grpc.RpcError as failed:
                error, sent = self._client._failure(failed), from_server(failed)
            except (RuntimeError, ValueError) as failed:  # the channel is closed
                if not self._client._closed:
                    raise
                raise Cancelled("the client was closed") from failed
            finally:
                self._act(self._disconnect)
            if self._state.over or self._leaving:
                return
            retries = self._resuming(retries)
            self._pause(retries.delay(lost(self._state, error, from_server=sent)))

    def _outgoing(self, own: object) -> Iterator[pb.SessionRequest]:
        """The requests of one connection."""
        with self._changed:
            if self._connection is not own:  # lost before gRPC requested its first message
                return
            opening = self._state.opening()
        yield opening
        while True:
            with self._changed:
                while True:
                    if self._connection is not own:
                        return
                    request = self._state.next_request()
                    if request is not None:
                        break
                    if self._state.closed:
                        return
                    self._changed.wait()
            yield request

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._leaving, seconds)

    def _disconnect(self) -> None:
        self._connection = None


class Question(QuestionView):
    """A question in progress; iterating it yields its events (``Admitted``, ``Delta``, ``Snapshot``, ``Finished``)."""

    def __init__(self, session: VideoSession, pending: Pending, timeout: float, read: Mapping[str, Any]) -> None:
        super().__init__(session, pending, timeout, read)
        self._session = session

    def __iter__(self) -> Iterator[Event]:
        while (event := self._next()) is not None:
            yield event

    def result(self) -> Result[Any]:
        """The whole answer; raises the error of the question."""
        for _ in self:
            pass
        return self._result()

    def _next(self) -> Event | None:
        with self._session._changed:
            try:
                self._session._until(self._ready, self._left(), "the answer did not come")
            except DeadlineExceeded:
                self.cancel()
                raise
            return self._popped()


class Alerts(AlertsView):
    """The alerts of a standing question as they arrive; iteration waits for the next one, until ``close``."""

    def __init__(self, session: VideoSession, watching: Watching) -> None:
        super().__init__(session, watching)
        self._session = session

    def __iter__(self) -> Iterator[Alert]:
        while (alert := self.next()) is not None:
            yield alert

    def next(self, timeout: float | None = None) -> Alert | None:
        """The next alert; None after ``timeout`` seconds, or if none can follow. Raises the error of the question."""
        with self._session._changed:
            self._session._changed.wait_for(self._ready, None if timeout is None else min(timeout, LONGEST))
            return self._popped()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
