"""The client's state of a session: unsent requests, received responses, and answers so far; without I/O.

``blocking_video.py`` and ``asynchronous_video.py`` connect it to a server, and serialise its calls.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from mmserve.client.decisions import Decisions, TypedQuestion, to_decisions
from mmserve.client.video_requests import decide_message, push_bytes, question_message, watch_message
from mmserve.client.video_responses import from_error, from_moments
from mmserve.core.events import Event, Finished
from mmserve.core.session import Alert, Asked, Moment, PushFailed, Statistics
from mmserve.errors import (
    Cancelled,
    InvalidArgument,
    MMServeError,
    ResourceExhausted,
    TLSError,
    Unavailable,
)
from mmserve.v1 import video_pb2 as pb
from mmserve.wire.events import from_response
from mmserve.wire.plain import from_message

logger = logging.getLogger("mmserve.client")

#: Number of responses after which the client confirms them.
_CONFIRM_EVERY = 8
#: Maximum number of kept reports of failed pushes; the newest are kept.
_FAILURES = 256
#: Maximum number of unread alerts of a standing question; the newest are kept.
_UNREAD = 1024


@dataclass(eq=False)
class Pending:
    """A question in progress: unread events, and its result."""

    question_id: str
    samples: int
    asked: Asked | None = None
    events: deque[Event] = field(default_factory=deque)
    error: MMServeError | None = None
    finished: int = 0
    moments: dict[int, tuple[Moment, ...]] = field(default_factory=dict)  # by sample
    decisions: Decisions | None = None  # of typed questions

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return self.error is not None or self.finished == self.samples


@dataclass(eq=False)
class Watching:
    """A standing question: unread alerts, and the error with which it ended, if any."""

    watch_id: str
    alerts: deque[Alert] = field(default_factory=lambda: deque(maxlen=_UNREAD))
    dropped: int = 0  # number of alerts dropped because they were not read in time
    accepted: bool = False
    removed: bool = False
    error: MMServeError | None = None
    callback: Callable[[Alert], None] | None = None


@dataclass(eq=False)
class Turn:
    """A push that is being made: when it was called for (seconds of the session's clock), and its bytes once known."""

    called: float
    size: int = 0


class SessionState:
    """The client's whole state of a session."""

    def __init__(self, config: pb.ConfigureSession) -> None:
        self._config = config
        config.open_id = uuid.uuid4().hex
        self.configured: pb.SessionConfigured | None = None
        self.closed = False  # closed by the server
        self.error: MMServeError | None = None  # why nothing more can be had
        self.going_away: tuple[float, str] | None = None  # seconds that were left when it was announced, and why
        self.failures: deque[PushFailed] = deque(maxlen=_FAILURES)
        self.frames_taken = self.frames_dropped = 0
        self.seconds = 0.0  # of the newest frame taken
        self.ready = 0.0  # seconds from push to visible, of the last report
        self.resumes = 0
        self._statistics: deque[list[Statistics]] = deque()  # one for each request that is not answered
        self._questions: dict[str, Pending] = {}
        self._watches: dict[str, Watching] = {}
        self._received = self._confirmed = 0
        self._index = 0  # of the last request
        self._acknowledged = 0
        self._credit_pushes = self._credit_bytes = 0
        self._requests: deque[pb.SessionRequest] = deque()  # those that are not acknowledged
        self._turns: deque[Turn] = deque()  # of pushes that are made at once, in the order of their calls
        self._next = 0  # index of the next one to send on this connection
        self._may_send = False  # the connection has sent its state
        self.closing = False

    @property
    def over(self) -> bool:
        """Whether the session has ended."""
        return self.closed or self.error is not None

    # --- the connection ---

    @property
    def progress(self) -> int:
        """A counter that grows with each request received by the server, and with each response received."""
        return self._acknowledged + self._received

    @property
    def waiting(self) -> bool:
        """Whether the server has not received every request."""
        return bool(self._requests)

    def opening(self) -> pb.SessionRequest:
        """The first request of a new connection."""
        self._may_send = False
        if self.configured is None:
            return pb.SessionRequest(configure=self._config)
        self._confirmed = self._received
        resume = pb.ResumeSession(resume_handle=self.configured.resume_handle)
        return pb.SessionRequest(received=self._received, resume=resume)

    def next_request(self) -> pb.SessionRequest | None:
        """The next request to send on this connection; None if there is none now."""
        if not self._may_send:
            return None
        for request in self._requests:
            if request.index >= self._next:
                self._next = request.index + 1
                return self._stamped(request)
        if self._received - self._confirmed >= _CONFIRM_EVERY or (self.closed and self._received > self._confirmed):
            return self._stamped(pb.SessionRequest())
        return None

    def _stamped(self, request: pb.SessionRequest) -> pb.SessionRequest:
        request.received = self._confirmed = self._received
        return request

    # --- requests ---

    def enqueue(self, **request: Any) -> int:
        """Queue a request. Returns its index."""
        if self.error is not None:
            raise self.error
        if self.closing:
            raise Cancelled("the session is closed")
        self._index += 1
        self._requests.append(pb.SessionRequest(index=self._index, **request))
        return self._index

    def begin_push(self, called: float) -> Turn:
        """Start a push; pushes are sent in the order in which they were started."""
        turn = Turn(called)
        self._turns.append(turn)
        return turn

    def end_push(self, turn: Turn) -> None:
        """It is sent, or is not made."""
        self._turns.remove(turn)

    def is_next(self, turn: Turn) -> bool:
        """Whether every push started before is sent."""
        return self._turns[0] is turn

    def push_fits(self, size: int, turn: Turn | None = None) -> bool:
        """Whether there is credit for a push of ``size`` bytes after those whose turn is before ``turn``; raises why
        there never will be."""
        if self.error is not None:
            raise self.error
        if self.configured is not None and size > self.configured.limits.max_request_bytes:
            limit = self.configured.limits.max_request_bytes
            raise InvalidArgument.of("data", f"has {size} bytes; the server takes at most {limit} in one push")
        waiting = [push_bytes(r) for r in self._requests if r.WhichOneof("request") in ("push_image", "push_segment")]
        if turn is not None:
            waiting += [each.size for each in takewhile(lambda each: each is not turn, self._turns)]
        return len(waiting) < self._credit_pushes and sum(waiting) + size <= self._credit_bytes

    def ask(self, text: str | Sequence[Any], scope: Any, timeout: float | None, **how: Any) -> Pending:
        """Queue a question."""
        message = question_message(uuid.uuid4().hex, text, scope, timeout, **how)
        self.enqueue(ask=message)
        pending = Pending(message.question_id, message.request.sampling.n or 1)
        if not message.request.HasField("sampling") and self._config.sampling.n:
            pending.samples = self._config.sampling.n
        self._questions[message.question_id] = pending
        return pending

    def decide(
        self,
        questions: Sequence[TypedQuestion] | Mapping[str, TypedQuestion],
        text: str | Sequence[Any],
        scope: Any,
        timeout: float | None,
    ) -> Pending:
        """Ask typed questions."""
        message = decide_message(uuid.uuid4().hex, questions, text, scope, timeout)
        self.enqueue(decide=message)
        pending = self._questions[message.question_id] = Pending(message.question_id, 1)
        return pending

    def cancel(self, pending: Pending) -> None:
        """Cancel a question; no effect if it has ended."""
        if not pending.done and self.error is None and not self.closing:
            self.enqueue(cancel_ask=pb.CancelAsk(question_id=pending.question_id))

    def cancel_all(self) -> None:
        """Cancel every question in progress."""
        for pending in list(self._questions.values()):
            self.cancel(pending)

    def close(self) -> None:
        """End the session once everything before is done."""
        self.enqueue(close=pb.CloseSession())
        self.closing = True

    def watch(
        self,
        text: str,
        choices: Sequence[str] | None,
        wanted: str | None,
        callback: Callable[[Alert], None] | None,
        **numbers: float | None,
    ) -> Watching:
        """Queue a standing question; ``numbers``: fields of ``Watch`` by name."""
        message = watch_message(uuid.uuid4().hex, text, choices, wanted, numbers)
        self.enqueue(watch=message)
        watching = self._watches[message.watch_id] = Watching(message.watch_id, callback=callback)
        return watching

    def unwatch(self, watching: Watching) -> None:
        """Remove a standing question."""
        if not watching.removed and self.error is None and not self.closing:
            self.enqueue(unwatch=pb.Unwatch(watch_id=watching.watch_id))

    def ask_statistics(self) -> list[Statistics]:
        """Request statistics; they are appended to the returned list when they arrive."""
        self.enqueue(get_statistics=pb.GetStatistics())
        found: list[Statistics] = []
        self._statistics.append(found)
        return found

    # --- responses ---

    def take(self, response: pb.SessionResponse) -> Callable[[], None] | None:
        """Process a response; returns a callback to be called after releasing the lock, or None."""
        if response.index:
            if response.index <= self._received:
                return None
            self._received = response.index
        match response.WhichOneof("response"):
            case "configured":
                self.resumes += response.configured.resumed
                self.configured = response.configured
            case "acknowledged":
                self._acknowledge(response.acknowledged)
            case "frames_taken":
                frames = response.frames_taken
                self.frames_taken += frames.taken
                self.frames_dropped += frames.dropped
                self.seconds, self.ready = frames.seconds, frames.ready_seconds
            case "push_failed":
                failed = response.push_failed
                self.failures.append(PushFailed(failed.request_index, from_error(failed.error)))
            case "answer":
                self._answer(response.answer)
            case "alert":
                return self._alert(response.alert)
            case "watch_state":
                self._watch_state(response.watch_state)
            case "statistics":
                if self._statistics:
                    self._statistics.popleft().append(from_message(Statistics, response.statistics))
            case "go_away":
                self.going_away = (response.go_away.time_left_seconds, response.go_away.reason)
            case "closed":
                self.closed = True
        return None

    def fail(self, error: MMServeError) -> None:
        """End the session: every call that waits raises ``error``."""
        if self.error is None:
            self.error = error
        self._requests.clear()
        for pending in self._questions.values():
            if not pending.done:
                pending.error = self.error
        self._questions.clear()

    def _acknowledge(self, acknowledged: pb.Acknowledged) -> None:
        self._acknowledged = max(self._acknowledged, acknowledged.index)
        self._credit_pushes = acknowledged.credit.pushes
        self._credit_bytes = acknowledged.credit.bytes
        while self._requests and self._requests[0].index <= self._acknowledged:
            self._requests.popleft()
        if not self._may_send:  # the first of its connection: continue from there
            self._may_send = True
            self._next = self._acknowledged + 1

    def _answer(self, answer: pb.AnswerEvent) -> None:
        pending = self._questions.get(answer.question_id)
        if pending is None:
            return
        match answer.WhichOneof("event"):
            case "asked":
                pending.asked = from_message(Asked, answer.asked)
            case "error":
                pending.error = from_error(answer.error)
            case "decided":
                pending.decisions = to_decisions(answer.decided, pending.asked)
                pending.finished = pending.samples
            case "response":
                event = from_response(answer.response)
                pending.events.append(event)
                if isinstance(event, Finished):
                    pending.finished += 1
                    pending.moments[event.sample] = from_moments(answer)
        if pending.done:
            del self._questions[answer.question_id]

    def _alert(self, message: pb.Alert) -> Callable[[], None] | None:
        watching = self._watches.get(message.watch_id)
        if watching is None:
            return None
        alert = from_message(Alert, message)
        callback = watching.callback
        if callback is not None:
            return lambda: _call(callback, alert)
        if len(watching.alerts) == _UNREAD:
            if not watching.dropped:
                logger.warning("alerts of a standing question are not read: of more than %d, the oldest go", _UNREAD)
            watching.dropped += 1
        watching.alerts.append(alert)
        return None

    def _watch_state(self, state: pb.WatchState) -> None:
        watching = self._watches.get(state.watch_id)
        if watching is None:
            return
        match state.WhichOneof("state"):
            case "accepted":
                watching.accepted = True
            case "removed":
                watching.removed = True
            case "error":
                watching.error = from_error(state.error)
                watching.removed = True
        if watching.removed:
            del self._watches[state.watch_id]


def _call(callback: Callable[[Alert], None], alert: Alert) -> None:
    """Give an alert to its callback; its exceptions are logged, and the session continues."""
    try:
        callback(alert)
    except Exception:
        logger.exception("the callback of a standing question raised")


def lost(state: SessionState, error: MMServeError, *, from_server: bool) -> MMServeError:
    """The error to retry after for a connection that ended with ``error``, see ``Retries.delay``.

    An error that the server sends for an open session ends it and is raised, unless it names a time to retry after.
    """
    if state.configured is None or isinstance(error, TLSError):
        return error
    if not from_server:
        return error if isinstance(error, Unavailable) else Unavailable(f"the connection was lost: {error.message}")
    if isinstance(error, ResourceExhausted) and error.retry_after is not None:
        return error
    raise error
