"""Sessions of video for the client that waits: ``VideoSession``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from mmserve.core.events import Event
from mmserve.core.session import Alert, Statistics
from mmserve.errors import Cancelled, DeadlineExceeded, Internal, MMServeError, ResourceExhausted, Unavailable
from mmserve.v1 import video_pb2 as pb
from mmserve.wire.status import from_server

logger = logging.getLogger("mmserve.client")


class VideoSession(SessionView):
    """One session of video; made by ``Client.video_session``. All methods may be called from several threads.

    Frames are taken in the order in which they are pushed, each once, over any number of connections: after a lost
    connection the session is resumed by itself. A question sees every frame that was pushed before it.
    """

    def __init__(self, client: Base, config: pb.ConfigureSession, timeout: float | None) -> None:
        super().__init__(client, config, timeout)
        self._changed = threading.Condition()
        self._call: Any = None
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="mmserve-session", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._state.configured is not None or self._state.error is not None)
            if self._state.error is not None:
                raise self._state.error

    # --- frames ---

    def push(
        self,
        image: bytes | Path | PIL.Image.Image,
        seconds: float | None = None,
        *,
        wait: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Push one image, which is one frame.

        image: the bytes of its file, its path, or a picture.
        seconds: when it was taken, on the session's clock, after every frame before it; default the time since the
            session was opened.
        wait: whether to wait where the server has no room now; False raises ``ResourceExhausted`` instead.
        timeout: seconds to wait at most; default the session's. Raises ``DeadlineExceeded`` after them.

        A push that the server cannot take is reported in ``push_failures``.
        """
        data = file_bytes(image, "image")
        at = self._at(seconds)
        self._push(len(data), wait, timeout, push_image=pb.PushImage(data=data, seconds=at))

    def push_segment(
        self,
        data: bytes,
        start: float | None = None,
        *,
        init: bytes = b"",
        wait: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Push a piece of encoded video that begins with a keyframe (MP4, MPEG-TS, WebM, Matroska, H.264, H.265).

        start: when its first frame was taken, on the session's clock; default right after the segment before.
        init: what fragmented MP4 or WebM has in front of its segments; it counts for later segments, too.
        wait, timeout: as ``push``.
        """
        segment = pb.PushSegment(data=data, init=init, start_seconds=start)
        self._push(len(data) + len(init), wait, timeout, push_segment=segment)

    def push_file(
        self,
        path: Path | str,
        *,
        realtime: bool = False,
        start: float = 0.0,
        segment_seconds: float = SEGMENT_SECONDS,
        timeout: float | None = None,
    ) -> float:
        """Push a video file, cut at keyframes and not encoded anew; returns where it ends on the session's clock.

        realtime: whether to push it as fast as it plays, as a camera would; default as fast as the server takes it.
        start: where it begins on the session's clock (seconds).
        segment_seconds: least length of a segment.
        timeout: seconds that each push may wait; default the session's.

        Needs PyAV (``pip install av``); raises ``ConfigError`` without it.
        """
        begun, end = time.monotonic(), start
        for segment in file_segments(path, segment_seconds):
            if realtime:
                time.sleep(due(begun, segment.end, 1.0))
            self.push_segment(segment.data, start + segment.start, timeout=timeout)
            end = start + segment.end
        return end

    def _push(self, size: int, wait: bool, timeout: float | None, **request: Any) -> None:
        with self._changed:
            if not self._state.push_fits(size):
                if not wait:
                    raise ResourceExhausted("the server has no room for another push now; try again later")
                if not self._changed.wait_for(lambda: self._state.push_fits(size), self._limit(timeout)):
                    raise DeadlineExceeded("the server had no room for the push in time")
            self._state.enqueue(**request)
            self._changed.notify_all()

    # --- questions ---

    def ask(
        self,
        text: str,
        *,
        scope: Any = "now",
        schema: Any = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Result[Any]:
        """The whole answer to a question about the frames pushed so far.

        text: the question, or a chat that ends with it.
        scope: "now" (what the session's memory keeps), "all", or (begin, end) in seconds, either of them None.
        schema: JSON schema, or Python type, of the answer; default none.
        timeout: seconds that it may take; default the client's.
        options: those of ``Client.generate`` that are about the answer (``max_new_tokens``, ``regex`` …).
        """
        return self.stream(text, scope=scope, schema=schema, timeout=timeout, **options).result()

    def stream(
        self,
        text: str,
        *,
        scope: Any = "now",
        schema: Any = None,
        snapshots: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> Question:
        """Ask without waiting: the ``Question`` is iterated for its events. Several may be in progress at once.

        Arguments as ``ask``; snapshots: whether ``Snapshot`` events with the whole canvas are sent.
        """
        seconds = self._client.timeout if timeout is None else timeout
        with self._changed:
            pending = self._state.ask(text, scope, seconds, schema=schema, snapshots=snapshots, options=options)
            self._changed.notify_all()
        return Question(self, pending, schema, seconds)

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
    ) -> Alerts:
        """Ask a standing question of every frame from now on; iterate the result for its alerts.

        text: a question with the answer yes or no, or with one of ``choices``.
        choices, wanted: the allowed answers, and the one that makes it true; default the first of them.
        on, off: it turns true at this probability or more (default 0.7), and false at this or less (default 0.3).
        min_interval: seconds between two alerts that it turned true, at least; default 0.
        frames: frames in a row that must be at ``on``; default 1.
        min_mass: frames are ignored where the model gives less to all allowed answers together; default 0.5.
        callback: called with each alert instead; it must return quickly.
        """
        with self._changed:
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
            self._changed.notify_all()
        return Alerts(self, watching)

    def statistics(self, timeout: float | None = None) -> Statistics:
        """Counters of the session, once everything asked for and pushed before is under way."""
        with self._changed:
            found = self._state.ask_statistics()
            self._changed.notify_all()
            came = lambda: bool(found) or self._state.error is not None  # noqa: E731
            if not self._changed.wait_for(came, self._limit(timeout)):
                raise DeadlineExceeded("the statistics did not come in time")
            if not found:
                assert self._state.error is not None
                raise self._state.error
        return found[0]

    # --- the end ---

    def close(self, timeout: float | None = None) -> None:
        """Wait until everything is taken and answered, and end the session; nothing happens a second time."""
        with self._changed:
            if self._state.error is None and not self._state.closing:
                self._state.close()
                self._changed.notify_all()
            in_time = self._changed.wait_for(lambda: self._state.over, self._limit(timeout))
        if not in_time:
            self._leave(DeadlineExceeded("the session was not done in time"))
            raise DeadlineExceeded("the session was not done in time")
        self._thread.join(LEAVING_SECONDS)
        if self._thread.is_alive():
            self._leave(Cancelled("the session was closed"))
        if self._state.error is not None and not self._state.closed:
            raise self._state.error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with self._changed:
            self._state.cancel_all()
            self._changed.notify_all()
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

    # --- the connection: a thread of its own ---

    def _run(self) -> None:
        try:
            self._connect()
        except MMServeError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - every waiting call must end
            self._end(Internal(f"the session's thread failed: {error!r}", error_id=""))

    def _connect(self) -> None:
        retries = self._client._retries(self._timeout)
        while not self._state.over and not self._leaving:
            own = object()
            try:
                with self._changed:
                    stub = self._client._open(grpc).video.Session
                    call = self._call = stub(self._outgoing(own), metadata=self._client._metadata())
                    self._connection = own
                for response in call:
                    with self._changed:
                        then = self._state.take(response)
                        self._changed.notify_all()
                    if then is not None:
                        then()
                    if response.WhichOneof("response") == "acknowledged":
                        retries = self._client._retries(self._timeout)
                error: MMServeError = Unavailable("the server ended the connection")
                sent = False
            except grpc.RpcError as failed:
                error, sent = self._client._failure(failed), from_server(failed)
            except (RuntimeError, ValueError) as failed:  # the client's channel is closed
                raise Cancelled("the client was closed") from failed
            finally:
                with self._changed:
                    self._connection = None
                    self._changed.notify_all()
            if self._state.over or self._leaving:
                return
            self._pause(retries.delay(lost(self._state, error, from_server=sent)))

    def _outgoing(self, own: object) -> Iterator[pb.SessionRequest]:
        """The requests of one connection."""
        with self._changed:
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

    def _end(self, error: MMServeError) -> None:
        with self._changed:
            self._state.fail(error)
            self._changed.notify_all()


class Question(QuestionView):
    """A question in progress; iterating it gives its events (``Admitted``, ``Delta``, ``Snapshot``, ``Finished``)."""

    def __init__(self, session: VideoSession, pending: Pending, schema: Any, timeout: float) -> None:
        super().__init__(pending, schema, timeout)
        self._session = session

    def __iter__(self) -> Iterator[Event]:
        while (event := self._next()) is not None:
            yield event

    def result(self) -> Result[Any]:
        """The whole answer; raises what it failed with."""
        for _ in self:
            pass
        return self._result()

    def cancel(self) -> None:
        """End it early; ``result`` then raises ``Cancelled``."""
        with self._session._changed:
            self._session._state.cancel(self._pending)
            self._session._changed.notify_all()

    def _next(self) -> Event | None:
        with self._session._changed:
            if not self._session._changed.wait_for(self._ready, self._left()):
                self._session._state.cancel(self._pending)
                self._session._changed.notify_all()
                raise DeadlineExceeded("the answer did not come in time")
            return self._popped()


class Alerts(AlertsView):
    """The alerts of a standing question as they come; iterating waits for the next one, until ``close``."""

    def __init__(self, session: VideoSession, watching: Watching) -> None:
        super().__init__(session._state, watching)
        self._session = session

    def __iter__(self) -> Iterator[Alert]:
        while (alert := self.next()) is not None:
            yield alert

    def next(self, timeout: float | None = None) -> Alert | None:
        """The next alert; None after ``timeout`` seconds, or where none will come. Raises why it is not asked."""
        with self._session._changed:
            self._session._changed.wait_for(self._ready, timeout)
            return self._popped()

    def close(self) -> None:
        """Ask it no more."""
        with self._session._changed:
            self._session._state.unwatch(self._watching)
            self._session._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
