"""A session's interface to its server: decoding, threads, quotas and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mmserve.config import VideoConfig
from mmserve.core.events import Event
from mmserve.errors import InvalidArgument, MMServeError
from mmserve.observe.counters import SessionMetrics
from mmserve.video import messages as m
from mmserve.video.base import EncodedFrame, Frame
from mmserve.video.standing import StandingQuestion, TypedAnswer

#: Calls a blocking function on another thread.
Work = Callable[..., Awaitable[Any]]
#: Downloads a URL, the first argument; the second is the name of its field.
Fetched = Callable[[str, str], AbstractAsyncContextManager[bytes]]


class Reader(Protocol):
    """Decodes pushes to frames, one push after another."""

    def read(self, push: m.Push, take: Callable[[Frame], None], check: Callable[[], None]) -> None:
        """Pass the frames of ``push`` to ``take`` in order; ``check`` raises to cancel."""
        ...


class FrameQuestions(Protocol):
    """Answers standing questions (see ``standing.Standing``)."""

    def check(self, question: StandingQuestion, path: str = "question") -> None:
        """Raises ``InvalidArgument`` for a question that cannot be judged; ``path`` names it in the request."""
        ...

    def judge(self, frame: EncodedFrame, questions: Sequence[StandingQuestion]) -> list[TypedAnswer]:
        """The answers to ``questions`` about ``frame``, in order."""
        ...


class QuestionRecorder(Protocol):
    """Records one question for quotas and metrics."""

    def begin(self) -> None:
        """The question arrived; raises ``ResourceExhausted`` if its tenant's quota is exhausted."""
        ...

    def record(self, event: Event) -> None:
        """An event of its answer."""
        ...

    def end(self, error: MMServeError | None) -> None:
        """It was answered, or ended with ``error``."""
        ...


@dataclass(frozen=True)
class SessionContext:
    """The common context of a model's sessions.

    ``work`` calls a blocking function on another thread, ``judge`` one that runs the model. ``cancel`` ends a request
    of the engine; ``recorder`` creates the recorder of a question; ``standing`` is None if the model does not support
    standing questions. ``fetched`` downloads a URL, and counts its bytes until it is closed; the field is for errors.
    ``label_period``: period (seconds) of the labels of the model's frames; 0 = labels are not known to be seconds.
    """

    config: VideoConfig
    work: Work
    judge: Work
    cancel: Callable[[str], None]
    recorder: Callable[[], QuestionRecorder]
    metrics: SessionMetrics
    standing: FrameQuestions | None
    fetched: Fetched
    label_period: int = 0

    @asynccontextmanager
    async def filled(self, push: m.Push) -> AsyncIterator[m.Push]:
        """``push`` with its file, downloaded if it has a URL; raises ``InvalidArgument`` if it has both."""
        if not push.url:
            yield push
            return
        if push.data:
            raise InvalidArgument.of(m.push_field(push), "must not be set with data: a push has one file")
        async with self.fetched(push.url, m.push_field(push)) as data:
            yield replace(push, data=data)
