"""What the sessions of both clients show of their state, without waiting for anything."""

from __future__ import annotations

import time
from typing import Any

from mmserve.client.base import Base
from mmserve.client.result import Result, to_result
from mmserve.client.video_state import Pending, SessionState, Watching
from mmserve.core.events import Event, Finished
from mmserve.core.session import Alert, Asked, Moment, PushFailed
from mmserve.v1 import video_pb2 as pb

#: How long a session that is left by an exception tries to close (seconds).
LEAVING_SECONDS = 2.0


class SessionView:
    """A session's state, and counters that need no waiting."""

    def __init__(self, client: Base, config: pb.ConfigureSession, timeout: float | None) -> None:
        self._client = client
        self._timeout = client.timeout if timeout is None else timeout
        self._state = SessionState(config)
        self._begun = time.monotonic()

    @property
    def push_failures(self) -> tuple[PushFailed, ...]:
        """Pushes that could not be taken, the last 256: each with its ``error``."""
        return tuple(self._state.failures.copy())

    @property
    def frames_taken(self) -> int:
        """Frames that questions can see, as far as the server has reported."""
        return self._state.frames_taken

    @property
    def frames_dropped(self) -> int:
        """Frames that the overload policy dropped."""
        return self._state.frames_dropped

    @property
    def seconds(self) -> float:
        """Of the newest frame that was taken, on the session's clock."""
        return self._state.seconds

    @property
    def resumes(self) -> int:
        """How often the session was resumed after a lost connection."""
        return self._state.resumes

    @property
    def going_away(self) -> tuple[float, str] | None:
        """Where the server has announced its end: the seconds that were left then, and why."""
        return self._state.going_away

    def _limit(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout

    def _at(self, seconds: float | None) -> float:
        """When an image was taken, on the session's clock."""
        return time.monotonic() - self._begun if seconds is None else seconds


class QuestionView:
    """A question in progress, and what is known of its answer."""

    def __init__(self, pending: Pending, schema: Any, timeout: float) -> None:
        self._pending, self._schema = pending, schema
        self._deadline = time.monotonic() + timeout
        self._finished: list[Finished] = []

    @property
    def asked(self) -> Asked | None:
        """What it is asked about, once the server has reported it."""
        return self._pending.asked

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Times that its answer (of several, the first) names, in seconds of the session's clock; () until it is
        finished, where there are none, and where the model's labels of frames are not known."""
        return self._pending.moments.get(0, ())

    def _ready(self) -> bool:
        return bool(self._pending.events) or self._pending.done

    def _left(self) -> float:
        """Seconds until its deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def _popped(self) -> Event | None:
        """The next event; None after the last one. Raises what the question failed with."""
        if self._pending.events:
            event = self._pending.events.popleft()
            if isinstance(event, Finished):
                self._finished.append(event)
            return event
        if self._pending.error is not None:
            raise self._pending.error
        return None

    def _result(self) -> Result[Any]:
        pending = self._pending
        return to_result(self._finished, pending.samples, pending.question_id, self._schema, pending.moments)


class AlertsView:
    """The alerts of a standing question that nobody has read yet."""

    def __init__(self, state: SessionState, watching: Watching) -> None:
        self._state, self._watching = state, watching

    def _ready(self) -> bool:
        return bool(self._watching.alerts) or self._watching.removed or self._state.over

    def _popped(self) -> Alert | None:
        """The next alert; None where there is none. Raises why the question is not asked any more."""
        watching, state = self._watching, self._state
        if watching.alerts:
            return watching.alerts.popleft()
        if watching.error is not None:
            raise watching.error
        if state.error is not None and not watching.removed:
            raise state.error
        return None
