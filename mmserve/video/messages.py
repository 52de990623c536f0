"""Requests and responses of a session: plain data, which ``rpc/video_messages.py`` converts.

Times are seconds on the session's clock, unless a field's description differs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace

from mmserve.core.decisions import Decision
from mmserve.core.events import (
    CommittedToken,
    Delta,
    Draft,
    Event,
    Finished,
    Prefilled,
    PromptToken,
    Snapshot,
    ToolCallDelta,
)
from mmserve.core.request import Request
from mmserve.core.session import Alert, Asked, Moment, PushFailed, Statistics
from mmserve.errors import MMServeError
from mmserve.video.alerts import Rule
from mmserve.video.base import Scope

# --- requests ---


@dataclass(frozen=True)
class PushImage:
    """An image file, which is one frame; ``url``: where to download it, ``data`` is then empty."""

    data: bytes = field(repr=False)
    seconds: float
    url: str = ""


@dataclass(frozen=True)
class PushSegment:
    """A segment of encoded video that begins with a keyframe; ``start`` None = right after the previous one. ``url``:
    see ``PushImage``."""

    data: bytes = field(repr=False)
    init: bytes = field(repr=False, default=b"")
    start: float | None = None
    url: str = ""


#: Converts an event of the engine to those that the client gets.
Converted = Callable[[Event], Iterable[Event]]


def unchanged(event: Event) -> Iterable[Event]:
    """``event`` alone."""
    return (event,)


@dataclass(frozen=True)
class Ask:
    """A question; ``request`` creates the engine's request, and raises its validation errors. ``converted``: converts
    the events of that request."""

    question_id: str
    request: Callable[[], Request] = field(repr=False)
    scope: Scope | None = None
    converted: Callable[[Request], Converted] = field(default=lambda _request: unchanged, repr=False)


@dataclass(frozen=True)
class Typed:
    """Typed questions by their ``ids``, and the engine's request for all of them."""

    ids: tuple[str, ...]
    questions: tuple[Decision, ...]
    request: Request = field(repr=False)


@dataclass(frozen=True)
class Decide:
    """Typed questions; ``typed`` creates their request, and raises its validation errors."""

    question_id: str
    typed: Callable[[], Typed] = field(repr=False)
    scope: Scope | None = None


@dataclass(frozen=True)
class CancelAsk:
    """Cancel a question."""

    question_id: str


@dataclass(frozen=True)
class Watch:
    """A standing question, true while the answer is ``wanted``, one of ``choices``; ``error``: why it is not asked."""

    watch_id: str
    text: str
    choices: tuple[str, ...] = ("yes", "no")
    wanted: str = "yes"
    rule: Rule = field(default_factory=Rule)
    error: MMServeError | None = None


@dataclass(frozen=True)
class Unwatch:
    """Remove a standing question."""

    watch_id: str


@dataclass(frozen=True)
class GetStatistics:
    """Request ``Statistics``."""


@dataclass(frozen=True)
class Close:
    """End the session once all previous requests are done."""


Push = PushImage | PushSegment
SessionRequest = Push | Ask | Decide | CancelAsk | Watch | Unwatch | GetStatistics | Close


def push_bytes(push: Push) -> int:
    """Size of ``push`` in bytes."""
    return len(push.data) + len(push.url) + (len(push.init) if isinstance(push, PushSegment) else 0)


def push_field(push: Push) -> str:
    """The field of the file of ``push``, for errors."""
    message = "push_image" if isinstance(push, PushImage) else "push_segment"
    return f"{message}.{'url' if push.url else 'data'}"


# --- numbered responses, kept until they are confirmed ---


@dataclass(frozen=True)
class FramesTaken:
    """``seconds``: of the newest frame appended; ``ready``: seconds from push to visibility, of the slowest frame."""

    taken: int
    dropped: int
    seconds: float
    ready: float


@dataclass(frozen=True)
class Answer:
    """An event of a question; the last is a ``Finished`` for each sample, or an error.

    ``moments``: for a ``Finished``, the times in its text whose ``seconds`` are known.
    """

    question_id: str
    event: Asked | Event | MMServeError
    moments: tuple[Moment, ...] = ()


@dataclass(frozen=True)
class Decided:
    """The answers to typed questions: the final event of their request, and its duration (milliseconds)."""

    question_id: str
    typed: Typed
    finished: Finished
    total: float


@dataclass(frozen=True)
class WatchState:
    """A standing question was accepted or removed or, with ``error``, refused."""

    watch_id: str
    accepted: bool
    error: MMServeError | None = None


@dataclass(frozen=True)
class Closed:
    """The last response."""


Numbered = FramesTaken | PushFailed | Answer | Decided | Alert | WatchState | Statistics | Closed

# --- responses about the connection ---


@dataclass(frozen=True)
class Credit:
    """Number of pushes, and of their bytes, that may be sent beyond the acknowledged index."""

    pushes: int
    bytes: int


@dataclass(frozen=True)
class Acknowledged:
    """Every request up to ``index`` has been received."""

    index: int
    credit: Credit


@dataclass(frozen=True)
class GoAway:
    """The session ends in ``time_left`` seconds."""

    time_left: float
    reason: str


Unnumbered = Acknowledged | GoAway

#: Approximate bytes of a response besides its texts.
_OVERHEAD = 256


def response_bytes(response: Numbered) -> int:
    """Approximate size of ``response`` in bytes."""
    match response:
        case Answer(_, Delta(text)) | Answer(_, Snapshot(text)):
            return _OVERHEAD + 4 * len(text)
        case Answer(_, Draft(rows)):
            return _OVERHEAD * (1 + sum(1 + len(alternatives) for *_own, alternatives in rows))
        case Answer(_, Finished() as event, moments):
            texts = len(event.text) + sum(len(call.arguments) for call in event.tool_calls)
            return _OVERHEAD * (1 + len(moments)) + 4 * texts + sum(map(_token_bytes, event.tokens))
        case Answer(_, Prefilled() as event):
            ids = 4 * len(event.prompt_ids)
            return _OVERHEAD + ids + 4 * len(event.prompt_text) + sum(map(_token_bytes, event.prompt_tokens))
        case Answer(_, ToolCallDelta() as event):
            return _OVERHEAD + 4 * len(event.arguments)
        case Decided(_, typed):
            return _OVERHEAD * (1 + sum(1 + len(question.answers) for question in typed.questions))
        case Answer(_, MMServeError() as error) | PushFailed(_, error):
            return _OVERHEAD + 4 * len(error.message)
    return _OVERHEAD


def _token_bytes(token: CommittedToken | PromptToken) -> int:
    return _OVERHEAD * (1 + len(token.alternatives)) + 4 * len(token.text) + len(token.text_bytes)


def merge_key(response: Numbered) -> Hashable | None:
    """Unsent responses with the same key are merged (``both``); None = not merged."""
    match response:
        case FramesTaken():
            return FramesTaken
        case Answer(question_id, Delta() | Draft() | Snapshot() as event):
            return type(event), question_id, event.sample
    return None


def completed_keys(response: Numbered, keys: Iterable[Hashable]) -> list[Hashable]:
    """The keys of ``keys`` that are complete after ``response``: the id of a question may be used again."""
    match response:
        case Answer(question_id, Finished() as event):
            return [(kind, question_id, event.sample) for kind in (Delta, Draft, Snapshot)]
        case Answer(question_id, MMServeError()):
            return [key for key in keys if isinstance(key, tuple) and key[1] == question_id]
    return []


def both(old: Numbered, new: Numbered) -> Numbered:
    """Merges two responses with the same key: reports, deltas and drafts are concatenated, the newer snapshot is
    kept."""
    match old, new:
        case FramesTaken(), FramesTaken():
            ready = max(old.ready, new.ready)
            return FramesTaken(old.taken + new.taken, old.dropped + new.dropped, max(old.seconds, new.seconds), ready)
        case Answer(name, Delta() as first), Answer(_, Delta() as second):
            return Answer(name, Delta(first.text + second.text, first.sample))
        case Answer(name, Draft() as first), Answer(_, Draft() as second):
            return Answer(name, second.after(first))
        case Answer(name, Snapshot() as first), Answer(_, Snapshot() as second):
            return Answer(name, replace(second, edited=first.edited + second.edited))
    raise TypeError(f"{old!r} and {new!r} cannot be merged")
