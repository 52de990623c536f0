"""A minute of generated scenes as a video session: questions and watches while frames arrive.

The scenes are consecutive clips at one frame a second, pushed over gRPC faster than real time. After the end of a clip,
a question about its interval of the stream is asked while the next frames are pushed. The watches ask for the shapes
that appear and disappear most often. The expected answer, from the script of the clips, is printed with every answer
and alert.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from mmserve.bench.video_clips import PART, StreamedClip, clip_at, clips_of, shapes
from mmserve.bench.video_served import ReadyTimes, file_of, push
from mmserve.cli.options import connected, print_json, requested_model
from mmserve.client import Alert, Delta
from mmserve.client.blocking_video import VideoSession
from mmserve.errors import ConfigError, MMServeError
from mmserve.reference.items import Question
from mmserve.reference.tasks import correct
from mmserve.video.clock import on_the_clock

#: Frames pushed a second by default; the stream has one frame a second.
SPEED = 8.0
#: Number of watches, and the maximum length of an answer in tokens.
WATCHES, ANSWER = 2, 24
#: A change of the answer: the time of its first frame in seconds, and whether the answer becomes yes.
Turn = tuple[float, bool]


@dataclass(frozen=True)
class Answered:
    """One question: ``seconds`` is the stream time of the newest frame pushed before it.

    ``on_clock`` and ``expected_on_clock`` are the actual and the expected answer with frame labels ("at 3 s") replaced
    by stream time in seconds.
    """

    seconds: float
    task: str
    question: str
    expected: str
    answer: str = ""
    correct: bool = False
    expected_on_clock: str = ""
    on_clock: str = ""
    first_token_ms: float = 0.0
    total_ms: float = 0.0
    error: str = ""


@dataclass
class Watched:
    """A watch: its alerts, and the expected changes of its answer."""

    question: str
    truth: list[Turn]
    alerts: list[Turn] = field(default_factory=list)

    def report(self) -> dict[str, object]:
        """The JSON object of this watch in the output of ``--json``."""
        return {**asdict(self), "right": len(set(self.alerts) & set(self.truth))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve demo --video``."""
    parser.add_argument(
        "--video", action="store_true", help="show a video session instead: questions while frames arrive"
    )
    parser.add_argument(
        "--seconds", type=int, default=60, metavar="S", help="with --video: length of the video (default 60)"
    )
    parser.add_argument(
        "--realtime",
        action="store_true",
        help=f"with --video: push frames in real time (default: {SPEED:g} times as fast)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Push frames, ask, watch, check; exit code 0 if every frame was accepted and every question answered."""
    if arguments.seconds < 1:
        raise ConfigError(f"--seconds must be at least 1, not {arguments.seconds}")
    if not (arguments.server or arguments.config or arguments.model):
        arguments.model = ["bundled-causal"]
    show = _Lines(quiet=arguments.json)
    with connected(arguments) as client:
        client.wait_ready(timeout=60)
        show.line(f"Serving on {client.target}. {arguments.seconds} s of newly drawn scenes, one frame a second:")
        with client.video_session(model=requested_model(arguments)) as session:
            played = _Played(session, arguments, show)
            played.play()
    return played.report(arguments)


class _Lines:
    """Output lines for people: on stdout, or on stderr with ``quiet`` (``--json``). Thread-safe."""

    def __init__(self, *, quiet: bool) -> None:
        self._file = sys.stderr if quiet else sys.stdout
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        with self._lock:
            print(text, file=self._file, flush=True)

    def at(self, seconds: float, text: str) -> None:
        """Print a line with the stream time it is about."""
        self.line(f"{seconds:6.1f} s  {text}")


class _Played:
    """One session that plays the generated stream."""

    def __init__(self, session: VideoSession, arguments: argparse.Namespace, show: _Lines) -> None:
        self._session, self._show = session, show
        self._seconds, self._save = arguments.seconds, arguments.save
        self._interval = 1.0 if arguments.realtime else 1.0 / SPEED
        self._clips = [clip for clip in clips_of(arguments.seed, self._seconds) if clip.begin < self._seconds]
        self._questions = _questions(self._clips, self._seconds, arguments.items, arguments.seed)
        self._watched = [Watched(f"Is there a {name}?", turns) for name, turns in _names(self._clips, self._seconds)]
        self._answers: list[Answered] = []
        self._ready = ReadyTimes()
        self._wall = 0.0

    def play(self) -> None:
        """Push every frame and ask the questions; returns once the session has processed all frames and questions."""
        for watched in self._watched:
            self._show.line(f"          standing question: {watched.question}")
            self._session.watch(watched.question, callback=partial(self._alert, watched))
        begun, asking = time.monotonic(), []
        try:
            for second in range(self._seconds):
                time.sleep(max(0.0, begun + second * self._interval - time.monotonic()))
                self._push(second)
                if second in self._questions:
                    asking.append(threading.Thread(target=self._ask, args=(second + PART, *self._questions[second])))
                    asking[-1].start()
            for thread in asking:
                thread.join()
            self._session.statistics()  # returns once every frame is processed
        finally:
            self._ready.stop()
        self._wall = time.monotonic() - begun

    def _push(self, second: int) -> None:
        shown = clip_at(self._clips, second)
        if second == shown.begin:
            self._show.at(second + PART, f"scene of {shown.clip.seconds} s: {', '.join(sorted(shapes(shown.clip)))}")
        if self._save is not None:
            self._save.mkdir(parents=True, exist_ok=True)
            (self._save / f"frame-{second:03}.png").write_bytes(file_of(shown.clip, second - shown.begin))
        self._ready.pushed(self._session)
        push(self._session, self._clips, second)

    def _ask(self, seconds: float, shown: StreamedClip, question: Question) -> None:
        asked = Answered(seconds, question.task, question.text, question.answer)
        began, first = time.monotonic(), 0.0
        try:
            stream = self._session.stream(question.text, scope=(shown.begin, shown.end), max_new_tokens=ANSWER)
            for event in stream:
                if not first and isinstance(event, Delta):
                    first = time.monotonic() - began
            total, text = time.monotonic() - began, stream.result().text
        except MMServeError as error:
            answered = replace(asked, error=f"{error.code}: {error.message}")
        else:
            span = (stream.asked.begin, stream.asked.end) if stream.asked is not None else (0.0, seconds)
            answered = replace(
                asked,
                answer=text,
                correct=correct(question, text),
                expected_on_clock=on_the_clock(question.answer, *span),
                on_clock=on_the_clock(text, *span),
                first_token_ms=round(1000 * (first or total), 1),
                total_ms=round(1000 * total, 1),
            )
        self._answers.append(answered)
        self._show.at(seconds, _line(answered, self._session.seconds))

    def _alert(self, watched: Watched, alert: Alert) -> None:
        turn = (alert.seconds, alert.active)
        watched.alerts.append(turn)
        now = "yes" if alert.active else "no"
        verdict = "right" if turn in watched.truth else "WRONG, the answer did not change then"
        self._show.at(
            alert.seconds,
            f"alert: {watched.question} Now {now}, probability of yes {alert.probability:.2f}   [{verdict}]",
        )

    def report(self, arguments: argparse.Namespace) -> int:
        """Print the results; returns the exit code."""
        answers = sorted(self._answers, key=lambda each: each.seconds)
        right, taken = sum(each.correct for each in answers), self._session.frames_taken
        ready = round(1000 * statistics.median(self._ready.seconds or [0.0]), 1)
        first = round(statistics.median([each.first_token_ms for each in answers if not each.error] or [0.0]), 1)
        ok = taken == self._seconds and not any(each.error for each in answers)
        if arguments.json:
            from mmserve.observe.machine import describe

            print_json(
                {
                    "ok": ok,
                    "frames_pushed": self._seconds,
                    "frames_taken": taken,
                    "answers": [asdict(each) for each in answers],
                    "right": right,
                    "watches": [watched.report() for watched in self._watched],
                    "frame_to_ready_ms": ready,
                    "first_token_ms": first,
                    "wall_s": round(self._wall, 2),
                    "machine": describe(),
                }
            )
            return 0 if ok else 1
        for watched in self._watched:
            missed = [turn for turn in watched.truth if turn not in watched.alerts]
            turns = ", ".join(f"{'yes' if on else 'no'} at {at:g} s" for at, on in watched.truth) or "always no"
            self._show.line(f"          {watched.question} Truth: {turns}; {len(missed)} missed")
        self._show.line(
            f"\n{right} of {len(answers)} answers right, {taken} of {self._seconds} frames taken, {self._wall:.1f} s. "
            f"Median time from push to ready {ready:g} ms, from question to first token {first:g} ms."
        )
        return 0 if ok else 1


def _line(answered: Answered, newest: float) -> str:
    """An answer formatted for people; ``newest`` is the newest frame processed in the meantime."""
    if answered.error:
        return f"{answered.question} No answer: {answered.error}"
    verdict = "right" if answered.correct else f"WRONG, it is {answered.expected_on_clock}"
    times = f"first token {answered.first_token_ms:.0f} ms, frames up to {newest:g} s are taken"
    return f"{answered.question} {answered.on_clock}   [{verdict}; {times}]"


def _questions(
    clips: Sequence[StreamedClip], seconds: int, most: int, seed: int
) -> dict[int, tuple[StreamedClip, Question]]:
    """Up to ``most`` questions, keyed by the second after whose frame they are asked: the last frame of their clip."""
    rng, counts = random.Random(f"questions of the demo {seed}"), Counter[str]()
    found: dict[int, tuple[StreamedClip, Question]] = {}
    for shown in clips:
        choices = shown.questions(rng)
        if choices and shown.end <= seconds and len(found) < most:
            question = min(choices, key=lambda each: counts[each.task])  # of the least asked task so far
            counts[question.task] += 1
            found[shown.end - 1] = shown, question
    return found


def _names(clips: Sequence[StreamedClip], seconds: int) -> list[tuple[str, list[Turn]]]:
    """The ``WATCHES`` shapes, by colour and kind, that appear and disappear most often, with the times of the
    changes."""
    seen: dict[str, list[bool]] = {name: [] for shown in clips for name in sorted(shapes(shown.clip))}
    for shown in clips:
        for second in range(shown.clip.seconds):
            now = {f"{color} {kind}" for kind, color in shown.clip.held(second + PART).values()}
            for name, before in seen.items():
                before.append(name in now)
    turns = {name: _turns(there[:seconds]) for name, there in seen.items()}
    return sorted(turns.items(), key=lambda each: -len(each[1]))[:WATCHES]


def _turns(there: Sequence[bool]) -> list[Turn]:
    """The times at which a shape appears and disappears; ``there``: whether it is visible, by second. Hidden at
    first."""
    return [
        (i + PART, now) for i, (before, now) in enumerate(zip([False, *there], there, strict=False)) if now != before
    ]
