"""The standing questions of one session, and their answers for each frame."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mmserve.core.changes import Changes
from mmserve.core.session import Alert
from mmserve.errors import InvalidArgument, MMServeError, ResourceExhausted, Unimplemented
from mmserve.video import messages as m
from mmserve.video.alerts import Watch as WatchRule
from mmserve.video.base import EncodedFrame
from mmserve.video.reported import reported
from mmserve.video.session_context import FrameQuestions, SessionContext
from mmserve.video.standing import MAX_QUESTIONS, StandingQuestion, TypedAnswer


@dataclass(eq=False)
class Watching:
    """An active standing question."""

    request: m.Watch
    question: StandingQuestion
    state: WatchRule


class Watches:
    """Standing questions in the order of a session's requests; used on its event loop.

    ``report`` sends a response; ``changed`` is called after a frame is judged.
    """

    def __init__(
        self, context: SessionContext, report: Callable[[m.Numbered], None], changed: Callable[[], None]
    ) -> None:
        self._context, self._report, self._changed = context, report, changed
        self._named: dict[str, m.Watch] = {}  # by id: the newest request that was not removed
        self._asked: dict[str, Watching] = {}
        self._to_judge: deque[tuple[EncodedFrame, tuple[Watching, ...]]] = deque()
        self._wakes = Changes()
        self.alerts = 0
        self.waiting = 0  # number of frames not judged yet

    @property
    def asked(self) -> tuple[Watching, ...]:
        """The questions for the next frame."""
        return tuple(self._asked.values())

    # --- when a request arrives ---

    def name(self, request: m.Watch) -> None:
        """Reserve the id of ``request``; raises ``InvalidArgument`` if it is in use."""
        if request.watch_id in self._named:
            raise InvalidArgument.of("watch.watch_id", f"{request.watch_id!r} is a standing question already")
        self._named[request.watch_id] = request

    def release_id(self, watch_id: str) -> None:
        """Release the id."""
        self._named.pop(watch_id, None)

    # --- after the preceding frames ---

    async def add(self, request: m.Watch) -> None:
        """Ask it about every frame from now on, or report why not."""
        question = StandingQuestion(request.text, request.choices)
        config, standing = self._context.config, self._context.standing
        try:
            if request.error is not None:
                raise request.error
            if len(self._asked) >= config.max_watches:
                limit = f"{config.max_watches} ([video] max_watches)"
                raise ResourceExhausted(f"a session has at most {limit} standing questions; remove one first")
            if standing is None:
                raise Unimplemented("this model cannot be asked standing questions")
            if request.wanted not in request.choices:
                raise InvalidArgument.of("watch.choices.wanted", "must be one of the options")
            request.rule.check("watch")
            await self._context.work(standing.check, question, "watch")
        except Exception as error:  # noqa: BLE001 - one question's failure is its own
            self._refuse(request, reported(error))
            return
        self._asked[request.watch_id] = Watching(request, question, WatchRule(request.rule))
        self._report(m.WatchState(request.watch_id, accepted=True))

    def remove(self, watch_id: str) -> None:
        """Remove it."""
        if self._asked.pop(watch_id, None) is not None:
            self._report(m.WatchState(watch_id, accepted=False))

    def enqueue(self, seen: EncodedFrame, watches: tuple[Watching, ...]) -> None:
        """Queue a frame to be judged by ``watches``, the questions that were active when it was appended."""
        if watches:
            self.waiting += 1
            self._to_judge.append((seen, watches))
            self._wakes.notify()

    async def judge(self) -> None:
        """Judge frames until the session ends."""
        while True:
            await self._wakes.until(lambda: bool(self._to_judge))
            seen, watches = self._to_judge.popleft()
            still = [each for each in watches if self._asked.get(each.request.watch_id) is each]
            if still and self._context.standing is not None:
                for begin in range(0, len(still), MAX_QUESTIONS):
                    await self._ask(self._context.standing, seen, still[begin : begin + MAX_QUESTIONS])
            self.waiting -= 1
            del seen, watches, still
            self._changed()

    def clear(self) -> None:
        """Drop all queued frames."""
        self._to_judge.clear()

    async def _ask(self, standing: FrameQuestions, seen: EncodedFrame, watches: list[Watching]) -> None:
        """Judge a frame by some of its questions, in one call."""
        try:
            judged = await self._context.judge(standing.judge, seen, [each.question for each in watches])
            for each, found in zip(watches, judged, strict=True):
                self._judged(each, found, seen.seconds)
        except Exception as error:  # noqa: BLE001 - the same
            for each in watches:
                self._stop(each, reported(error))

    def _judged(self, watching: Watching, found: TypedAnswer, seconds: float) -> None:
        request = watching.request
        if self._asked.get(request.watch_id) is not watching:
            return
        probability = found.probability(request.wanted)
        turned = watching.state.update(probability, found.mass, seconds)
        if turned is not None:
            self.alerts += 1
            self._context.metrics.alerted()
            self._report(Alert(request.watch_id, turned, probability, found.mass, seconds, found.answer))

    def _stop(self, watching: Watching, error: MMServeError) -> None:
        if self._asked.get(watching.request.watch_id) is watching:
            del self._asked[watching.request.watch_id]
            self._refuse(watching.request, error)

    def _refuse(self, request: m.Watch, error: MMServeError) -> None:
        if self._named.get(request.watch_id) is request:  # a later request may have the same id
            del self._named[request.watch_id]
        self._report(m.WatchState(request.watch_id, accepted=False, error=error))
