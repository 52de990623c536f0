"""The non-blocking part of both clients' sessions: asking, and reading the state.

``blocking_video.py`` and ``asynchronous_video.py`` add blocking methods, and the connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from mmserve.client.base import Base
from mmserve.client.decisions import Decisions
from mmserve.client.options import Chat
from mmserve.client.result import Result, to_result
from mmserve.client.retries import LONGEST, Retries, bounded
from mmserve.client.video_state import Pending, SessionState, Turn, Watching
from mmserve.core.events import Event, Finished, Prefilled
from mmserve.core.session import Alert, Asked, Moment, PushFailed
from mmserve.errors import MMServeError, ResourceExhausted
from mmserve.v1 import video_pb2 as pb

#: Maximum seconds for closing a session whose context raised an exception.
LEAVING_SECONDS = 2.0
#: Minimum duration (seconds) of a connection that counts as useful if there was nothing to send.
_LASTING_SECONDS = 1.0

_T = TypeVar("_T")
QuestionT = TypeVar("QuestionT")
AlertsT = TypeVar("AlertsT")


class SessionView(Generic[QuestionT, AlertsT]):
    """A session's state, and its non-blocking methods."""

    def __init__(self, client: Base, config: pb.ConfigureSession, timeout: float | None) -> None:
        self._client = client
        self._timeout = bounded(client.timeout if timeout is None else timeout)
        self._state = SessionState(config)
        self._begun = time.monotonic()
        self._connected = (self._begun, 0)  # start of the last connection, and the progress at that time
        self._acknowledged = False  # whether the server has acknowledged something on it

    def _act(self, act: Callable[[], _T]) -> _T:
        """Modify the state, and wake all waiting calls."""
        raise NotImplementedError

    def _question(self, pending: Pending, timeout: float, read: Mapping[str, Any]) -> QuestionT:
        """The caller's object for a question."""
        raise NotImplementedError

    def _alerts(self, watching: Watching) -> AlertsT:
        """The caller's object for a standing question."""
        raise NotImplementedError

    # --- questions ---

    def stream(
        self,
        text: str | Sequence[Chat],
        *,
        scope: Any = "now",
        schema: Any = None,
        snapshots: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> QuestionT:
        """Ask without waiting; iterating the result yields the events. Several questions may be in progress at once.

        Arguments as ``ask``; snapshots: whether ``Snapshot`` events with the whole canvas are sent. Not to be awaited.
        """
        seconds = self._question_seconds(timeout)
        how: dict[str, Any] = {"schema": schema, "snapshots": snapshots, "options": options}
        pending = self._act(lambda: self._state.ask(text, scope, seconds, **how))
        return self._question(pending, seconds, {"schema": schema, "tools": options.get("tools")})

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
    ) -> AlertsT:
        """Ask a standing question of every frame from now on; iterate the result for its alerts. Not to be awaited.

        text: a question with the answer yes or no, or with one of ``choices``.
        choices, wanted: the allowed answers, and the one that counts as true; default the first of them.
        on, off: becomes true at a probability of at least ``on`` (default 0.7), false at most ``off`` (default 0.3).
        min_interval: minimum seconds between two alerts for becoming true; default 0.
        frames: number of consecutive frames that must reach ``on``; default 1.
        min_mass: frames are ignored if all allowed answers together have a lower probability; default 0.5.
        callback: called with each alert instead; it must return quickly.
        """
        numbers: dict[str, float | None] = {
            "on_threshold": on,
            "off_threshold": off,
            "min_interval_seconds": min_interval,
            "frames": frames,
            "min_mass": min_mass,
        }
        return self._alerts(self._act(lambda: self._state.watch(text, choices, wanted, callback, **numbers)))

    # --- state ---

    @property
    def push_failures(self) -> tuple[PushFailed, ...]:
        """Failed pushes, the last 256: each with its ``error``, and the ``index`` that the push returned."""
        return tuple(self._state.failures.copy())

    @property
    def frames_taken(self) -> int:
        """Number of frames visible to questions, as last reported by the server."""
        return self._state.frames_taken

    @property
    def frames_dropped(self) -> int:
        """Number of frames dropped by the overload policy."""
        return self._state.frames_dropped

    @property
    def seconds(self) -> float:
        """The time of the newest frame on the session's clock (seconds)."""
        return self._state.seconds

    @property
    def resumes(self) -> int:
        """Number of times that the session was resumed after a lost connection."""
        return self._state.resumes

    @property
    def going_away(self) -> tuple[float, str] | None:
        """If the server has announced its end: the seconds that were left at that time, and the reason."""
        return self._state.going_away

    # --- for blocking methods ---

    def _limit(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else min(timeout, LONGEST)

    def _question_seconds(self, timeout: float | None) -> float:
        return bounded(self._client.timeout if timeout is None else timeout)

    @contextmanager
    def _pushing(self) -> Iterator[Turn]:
        """Context of a push; pushes of several threads or tasks keep the order of calls."""
        turn = self._act(lambda: self._state.begin_push(time.monotonic() - self._begun))
        try:
            yield turn
        finally:
            self._act(lambda: self._state.end_push(turn))

    def _begin_deciding(self, questions: Any, text: Any, scope: Any, timeout: float | None) -> tuple[Pending, float]:
        """Ask typed questions. Returns the pending answers, and the timeout (seconds)."""
        seconds = self._question_seconds(timeout)
        return self._act(lambda: self._state.decide(questions, text, scope, seconds)), seconds

    def _decided(self, pending: Pending) -> Decisions:
        """The answers to typed questions; raises their error."""
        if pending.decisions is None:
            assert pending.error is not None
            raise pending.error
        return pending.decisions

    def _fits(self, turn: Turn, wait: bool) -> bool:
        """Whether a push can be sent now; if there is no credit and not ``wait``, raises."""
        fits = self._state.push_fits(turn.size, turn)
        if not (fits or wait):
            raise ResourceExhausted("the server has no room for another push now; try again later")
        return fits and self._state.is_next(turn)

    def _opened(self) -> bool:
        """Whether opening the session is complete, or has failed."""
        return self._state.configured is not None or self._state.error is not None

    def _came(self, found: Sequence[_T]) -> bool:
        """Whether a requested item has arrived, or cannot arrive any more."""
        return bool(found) or self._state.error is not None

    def _first(self, found: Sequence[_T]) -> _T:
        """The requested item; raises the session's error if it is missing."""
        if not found:
            assert self._state.error is not None
            raise self._state.error
        return found[0]

    def _begin_closing(self) -> None:
        if self._state.error is None and not self._state.closing:
            self._act(self._state.close)

    def _fail(self, error: MMServeError) -> None:
        """End the session: all waiting calls raise ``error``."""
        self._act(lambda: self._state.fail(error))

    def _connecting(self) -> None:
        """Record the start of a connection."""
        self._connected, self._acknowledged = (time.monotonic(), self._state.progress), False

    def _received(self, response: pb.SessionResponse) -> None:
        """Process a response."""
        then = self._act(lambda: self._state.take(response))
        if then is not None:
            then()
        self._acknowledged |= response.WhichOneof("response") == "acknowledged"

    def _resuming(self, retries: Retries) -> Retries:
        """The retries after a lost connection: new ones, or the previous ones if the connection was useless.

        Useless means that the server acknowledged nothing, or received none of the waiting requests: one of these may
        be the reason why connections fail, such as a message that is too large for a proxy.
        """
        begun, progress = self._connected
        least = self._timeout if self._state.waiting else min(_LASTING_SECONDS, self._timeout)
        of_use = self._state.progress > progress or time.monotonic() - begun >= least
        return self._client._retries(self._timeout) if self._acknowledged and of_use else retries

    def _check_opened(self) -> None:
        """Raises the error with which opening the session failed."""
        if self._state.error is not None:
            raise self._state.error

    def _check_closed(self) -> None:
        """Raises the session's error; no effect if the client ended it."""
        if self._state.error is not None and not self._state.closed:
            raise self._state.error


class QuestionView:
    """A question in progress, and the current state of its answer; ``read``: arguments of ``to_result``."""

    def __init__(
        self, session: SessionView[Any, Any], pending: Pending, timeout: float, read: Mapping[str, Any]
    ) -> None:
        self._view, self._pending, self._read = session, pending, read
        self._deadline = time.monotonic() + timeout
        self._results: list[Event] = []  # the events that its result is made of

    @property
    def asked(self) -> Asked | None:
        """The frames that it is about, once the server has reported them."""
        return self._pending.asked

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Times that its answer (of several, the first) mentions, in seconds of the session's clock; empty until it is
        finished, if there are none, and if the model's labels of frames are not known to be seconds."""
        return self._pending.moments.get(0, ())

    def cancel(self) -> None:
        """Cancel it; ``result`` then raises ``Cancelled``. Not to be awaited."""
        self._view._act(lambda: self._view._state.cancel(self._pending))

    def _ready(self) -> bool:
        return bool(self._pending.events) or self._pending.done

    def _left(self) -> float:
        """Seconds until its deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def _popped(self) -> Event | None:
        """The next event; None after the last one. Raises the question's error."""
        if self._pending.events:
            event = self._pending.events.popleft()
            if isinstance(event, Prefilled | Finished):
                self._results.append(event)
            return event
        if self._pending.error is not None:
            raise self._pending.error
        return None

    def _result(self) -> Result[Any]:
        pending = self._pending
        return to_result(self._results, pending.samples, pending.question_id, moments=pending.moments, **self._read)


class AlertsView:
    """The unread alerts of a standing question."""

    def __init__(self, session: SessionView[Any, Any], watching: Watching) -> None:
        self._view, self._watching = session, watching

    @property
    def dropped(self) -> int:
        """Number of alerts dropped because they were not read in time: the newest 1,024 are kept."""
        return self._watching.dropped

    def close(self) -> None:
        """Remove the standing question. Not to be awaited."""
        self._view._act(lambda: self._view._state.unwatch(self._watching))

    def _ready(self) -> bool:
        return bool(self._watching.alerts) or self._watching.removed or self._view._state.over

    def _popped(self) -> Alert | None:
        """The next alert; None if there is none. Raises the error with which the question ended."""
        watching, state = self._watching, self._view._state
        if watching.alerts:
            return watching.alerts.popleft()
        if watching.error is not None:
            raise watching.error
        if state.error is not None and not watching.removed:
            raise state.error
        return None
