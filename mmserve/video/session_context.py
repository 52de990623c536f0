"""What a session needs of its server: decoding, threads, quotas and metrics."""

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
from mmserve.video.base import Frame, Seen
from mmserve.video.standing import Judged, StandingQuestion

#: Calls a blocking function elsewhere.
Work = Callable[..., Awaitable[Any]]
#: The file of a URL, which is in the field that is named second.
Fetched = Callable[[str, str], AbstractAsyncContextManager[bytes]]


class Reader(Protocol):
    """Makes frames of what is pushed, one push after another."""

    def read(self, push: m.Push, take: Callable[[Frame], None], check: Callable[[], None]) -> None:
        """Give the frames of ``push`` to ``take`` in order; ``check`` raises to end that."""
        ...


class Judge(Protocol):
    """Answers standing questions, as ``standing.Standing`` does."""

    def check(self, question: StandingQuestion, path: str = "question") -> None:
        """Raise ``InvalidArgument`` for a question that cannot be judged; ``path`` names it in the request."""
        ...

    def judge(self, frame: Seen, questions: Sequence[StandingQuestion]) -> list[Judged]:
        """The answers to ``questions`` about ``frame``, in their order."""
        ...


class Noted(Protocol):
    """What takes note of one question, for quotas and metrics."""

    def begin(self) -> None:
        """It came; raises ``ResourceExhausted`` where its tenant may not ask now."""
        ...

    def see(self, event: Event) -> None:
        """Something of its answer was made."""
        ...

    def end(self, error: MMServeError | None) -> None:
        """It was answered, or ended with ``error``."""
        ...


@dataclass(frozen=True)
class SessionContext:
    """What sessions of one model share.

    ``work`` calls a blocking function elsewhere, and ``judge`` one that runs the model.
    ``cancel`` ends a request of the engine; ``noted`` makes what takes note of a question; ``standing`` is None where
    the model cannot be asked standing questions. ``fetched`` has the file of a URL, and counts its bytes until it is
    closed; the field is for errors. ``label_period``: seconds after which the labels of the model's frames repeat; 0 =
    they are not known to be seconds.
    """

    config: VideoConfig
    work: Work
    judge: Work
    cancel: Callable[[str], None]
    noted: Callable[[], Noted]
    metrics: SessionMetrics
    standing: Judge | None
    fetched: Fetched
    label_period: int = 0

    @asynccontextmanager
    async def filled(self, push: m.Push) -> AsyncIterator[m.Push]:
        """``push`` with its file, which is fetched where it has a URL; raises ``InvalidArgument`` where it has both."""
        if not push.url:
            yield push
            return
        if push.data:
            raise InvalidArgument.of(m.push_field(push), "must not be set with data: a push has one file")
        async with self.fetched(push.url, m.push_field(push)) as data:
            yield replace(push, data=data)
