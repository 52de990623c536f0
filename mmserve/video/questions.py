"""The questions of one session: from their request, through the queue of frames, to their last event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from mmserve.core.events import Event, Failed, Finished
from mmserve.core.request import Request
from mmserve.core.session import Asked, Moment
from mmserve.engine.request_state import Sink
from mmserve.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    MMServeError,
    ResourceExhausted,
)
from mmserve.video import messages as m
from mmserve.video.base import Scope
from mmserve.video.clock import moments
from mmserve.video.reported import reported
from mmserve.video.session_context import QuestionRecorder, SessionContext


@dataclass(eq=False)
class Question:
    """A question in progress."""

    ask: m.Ask | m.Decide
    request: Request
    recorder: QuestionRecorder
    left: int  # number of unfinished samples
    converted: m.Converted
    typed: m.Typed | None = None  # set for typed questions
    submitted: bool = False
    late: asyncio.TimerHandle | None = None  # timer that ends it at its deadline, until it is asked
    asked: Asked | None = None
    early: list[Event] | None = field(default_factory=list)  # events that arrived before ``Asked``
    begun: float = field(default_factory=time.monotonic)


class Questions:
    """Used on the event loop of their session.

    ``ask`` asks the stream; ``report`` sends a response; ``call_soon`` schedules a call on the loop, from any thread;
    ``changed`` is called when a question has ended.
    """

    def __init__(
        self,
        context: SessionContext,
        ask: Callable[[Request, Scope | None, Sink], Awaitable[Asked]],
        report: Callable[[m.Numbered], None],
        call_soon: Callable[..., None],
        changed: Callable[[], None],
    ) -> None:
        self._context, self._ask = context, ask
        self._report, self._call_soon, self._changed = report, call_soon, changed
        self._questions: dict[str, Question] = {}
        self.count = 0  # total number of questions

    def __len__(self) -> int:
        """Number of questions in progress."""
        return len(self._questions)

    # --- when a request arrives ---

    def begin(self, ask: m.Ask | m.Decide) -> Question | None:
        """Accept a question; None = it is refused, which is reported.

        Raises ``InvalidArgument`` if another question in progress has the same id.
        """
        if ask.question_id in self._questions:
            raise InvalidArgument.of("ask.question_id", f"{ask.question_id!r} is a question in progress")
        self.count += 1
        recorder = self._context.recorder()
        try:
            if len(self._questions) >= (most := self._context.config.max_questions):
                raise ResourceExhausted(
                    f"a session has at most {most} ([video] max_questions) questions at once; "
                    "wait for one to be answered"
                )
            recorder.begin()
            typed: m.Typed | None = None
            converted: m.Converted = m.unchanged
            if isinstance(ask, m.Decide):
                typed = ask.typed()
                request = typed.request
            else:
                request = ask.request()
                converted = ask.converted(request)
        except Exception as error:  # noqa: BLE001 - one question's failure is its own
            failure = reported(error)
            recorder.end(failure)
            self._report(m.Answer(ask.question_id, failure))
            return None
        question = Question(ask, request, recorder, request.sampling.n, converted, typed)
        self._questions[ask.question_id] = question
        if (deadline := request.deadline) is not None:
            loop = asyncio.get_running_loop()
            question.late = loop.call_later(deadline - time.monotonic(), self._late, question)
        return question

    def cancel(self, question_id: str) -> None:
        """Cancel a question; no effect if it has ended."""
        question = self._questions.get(question_id)
        if question is None:
            return
        if question.asked is not None:
            self._stop(question)
        else:
            self._end(question, Cancelled("the question was cancelled"))

    def end_all(self, error: MMServeError) -> None:
        """End every question."""
        for question in list(self._questions.values()):
            self._end(question, error)

    # --- after the preceding frames ---

    async def submit(self, question: Question, *, frames: bool) -> None:
        """Ask the stream; ``frames``: whether it has any frames."""
        if self._questions.get(question.ask.question_id) is not question:
            return  # cancelled
        try:
            if not frames:
                raise FailedPrecondition("no frame has been appended yet; push one before asking")
            question.submitted = True
            sink = partial(self._call_soon, self._answered, question)
            question.asked = await self._ask(question.request, question.ask.scope, sink)
        except asyncio.CancelledError:  # the session ended during the call
            self._stop(question)
            raise
        except Exception as error:  # noqa: BLE001 - the same
            self._end(question, reported(error))
            return
        early, question.early = question.early or [], None
        if self._questions.get(question.ask.question_id) is not question:  # it ended before the engine received it
            self._stop(question)
            return
        self._report(m.Answer(question.ask.question_id, question.asked))
        for event in early:
            self._answered(question, event)

    def _stop(self, question: Question) -> None:
        """Cancel its request in the engine."""
        self._context.cancel(question.request.id)

    def _answered(self, question: Question, event: Event) -> None:
        """Process an event of the question's request."""
        if question.early is not None:
            question.early.append(event)
            return
        if self._questions.get(question.ask.question_id) is not question:
            return
        if not isinstance(event, Failed):
            question.recorder.record(event)
        if question.typed is None:
            for sent in question.converted(event):
                if isinstance(sent, Failed):
                    self._end(question, reported(sent.error))
                    return
                self._report(m.Answer(question.ask.question_id, sent, self._moments(question, sent)))
        elif isinstance(event, Failed):
            self._end(question, reported(event.error))
            return
        elif isinstance(event, Finished):
            total = 1000 * (time.monotonic() - question.begun)
            self._report(m.Decided(question.ask.question_id, question.typed, event, total))
        question.left -= isinstance(event, Finished)
        if not question.left:
            self._end(question, None)

    def _moments(self, question: Question, event: Event) -> tuple[Moment, ...]:
        """The times mentioned in an answer that are known on the session's clock."""
        asked, period = question.asked, self._context.label_period
        if not isinstance(event, Finished) or asked is None or not period:
            return ()
        return tuple(x for x in moments(event.text, asked.begin, asked.end, period) if x.seconds is not None)

    def _late(self, question: Question) -> None:
        if question.asked is None:  # otherwise the engine ends it
            self._end(question, DeadlineExceeded("the deadline passed while the question waited for its stream"))

    def _end(self, question: Question, error: MMServeError | None) -> None:
        """End a question: its answer is complete, or it failed with ``error``, which is reported."""
        if self._questions.get(question.ask.question_id) is not question:
            return
        del self._questions[question.ask.question_id]
        if question.late is not None:
            question.late.cancel()
        question.recorder.end(error)
        if error is not None:
            if question.submitted:
                self._stop(question)
            self._report(m.Answer(question.ask.question_id, error))
        self._changed()
