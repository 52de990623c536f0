"""Accuracy on streams by memory policy: the section ``accuracy`` of ``mmserve bench video``.

Streams of generated clips at one frame a second, with many more frames than fit into memory. After ``FRAMES`` frames,
questions about the last clip are asked at the end of each clip; with ``recall`` also about a clip a minute ago. Clips
last 4, 6 or 8 s, so that eviction can occur anywhere in them. For comparison, short streams without eviction
("unbounded"), and the same with a quarter of those rows.
"""

from __future__ import annotations

import argparse
import random
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mmserve.assembly import build_engines
from mmserve.bench.in_process import Answer
from mmserve.bench.measures import Figures, Progress, at_least
from mmserve.bench.video_clips import PART, StreamedClip, clips_of, frame_at
from mmserve.config import Config, ModelConfig
from mmserve.core.request import Diffusion, Message, Policy, Request, Sampling, Streaming, TextPart
from mmserve.core.session import Memory
from mmserve.core.tenant import ANONYMOUS
from mmserve.errors import ConfigError
from mmserve.reference.evaluate import row as share_of
from mmserve.reference.items import Question
from mmserve.reference.tasks import correct
from mmserve.video.base import Frame, Scope, Stream, Streams
from mmserve.video.streams import EngineStreams

#: Frames before the first question of a long and of an unbounded stream, and seconds with questions.
FRAMES, WHOLE_FRAMES, ASKED_SECONDS = 600, 64, 48
#: Concurrent streams for each unit of ``--limit``, and frames of each in progress.
STREAMS_EACH, UNDER_WAY = 4, 4
#: Seconds between an event and the question that recalls it.
AGO = 60
#: Maximum tokens of an answer, and its timeout in seconds.
ANSWER, PATIENCE = 32, 120.0
#: Goals: accuracy about the last clip with ``BUDGET``, about a clip a minute ago, and relative to unbounded memory.
RIGHT, RIGHT_AGO, OF_UNBOUNDED = 0.95, 0.9, 0.95
BUDGET = 256

#: Memory settings of long streams.
LONG = (
    *(Memory(policy, "renumber", BUDGET) for policy in ("window", "carrier", "similarity", "group")),
    *(Memory(policy, positions, BUDGET) for policy in ("window", "carrier") for positions in ("gaps", "reanchor")),
    *(Memory(policy, "renumber", budget) for policy in ("window", "carrier") for budget in (64, 128, 512)),
)


@dataclass
class Score:
    """Counts of questions and of correct answers, by task."""

    asked: dict[str, int] = field(default_factory=dict)
    right: dict[str, int] = field(default_factory=dict)

    def add(self, question: Question, answer: str) -> None:
        """Count an answer to ``question``."""
        self.asked[question.task] = self.asked.get(question.task, 0) + 1
        self.right[question.task] = self.right.get(question.task, 0) + correct(question, answer)

    @property
    def share(self) -> float:
        """The share of correct answers over all questions."""
        return sum(self.right.values()) / max(1, sum(self.asked.values()))

    def row(self, measured: str, **settings: Any) -> Figures:
        """A row of the report, with the 95% Wilson interval."""
        count = sum(self.asked.values())
        whole = share_of("", sum(self.right.values()), max(1, count))
        tasks = {task: round(self.right[task] / n, 4) for task, n in self.asked.items()}
        figures = {"accuracy": whole.accuracy, "low": whole.low, "high": whole.high, "n": count}
        return {"measured": f"accuracy: {measured}", **settings, **figures, "by_task": tasks}


class _Asked:
    """A question in progress."""

    def __init__(self, stream: Stream, question: Question, scope: Scope | None) -> None:
        self.question, self._answer = question, Answer()
        request = Request(
            id=uuid.uuid4().hex,
            model="",
            messages=(Message("user", (TextPart(question.text),)),),
            sampling=Sampling(max_new_tokens=ANSWER),
            diffusion=Diffusion(recompute=Policy(name="last")),
            streaming=Streaming(deltas=False),
        )
        stream.ask(request, scope, self._answer.sink)

    def text(self) -> str:
        """The answer; "" if there was none in time."""
        self._answer.over.wait(PATIENCE)
        return "" if self._answer.finished is None else self._answer.finished.text


class Running:
    """Concurrent streams of clips with one memory setting."""

    def __init__(self, streams: Streams, memory: Memory, seeds: Sequence[int], seconds: int) -> None:
        self.clips = [clips_of(seed, seconds) for seed in seeds]
        self.streams = [streams.open(memory, ANONYMOUS) for _ in seeds]
        self.rngs = [random.Random(f"questions {seed}") for seed in seeds]
        self.second = 0  # second of the next frame
        self.recalls = memory.policy == "recall"

    def advance(self, second: int) -> None:
        """Push the frames up to ``second``, and wait for them."""
        waiting: list[Any] = []
        for now in range(self.second, second):
            for clips, stream in zip(self.clips, self.streams, strict=True):
                waiting.append(stream.append(Frame(now + PART, frame_at(clips, now))))
            while len(waiting) > UNDER_WAY * len(self.streams):
                waiting.pop(0).result(PATIENCE)
        for each in waiting:
            each.result(PATIENCE)
        self.second = max(second, self.second)

    def scores(self, until: int) -> dict[str, Score]:
        """Scores of questions at each end of a clip before ``until``: about it ("last"), about one ``AGO`` ("ago")."""
        score, ago = Score(), Score()
        for second in range(self.second, until):
            self.advance(second + 1)
            asked = []
            for clips, stream, rng in zip(self.clips, self.streams, self.rngs, strict=True):
                ended = next((s for s in clips if s.end == second + 1), None)
                if ended is None:
                    continue
                asked += [(score, _Asked(stream, q, None)) for q in ended.questions(rng)]
                asked += [(ago, each) for each in self._recalled(clips, stream, rng, second)]
            for of, each in asked:
                of.add(each.question, each.text())
        return {"last": score, "ago": ago}

    def _recalled(self, clips: list[StreamedClip], stream: Stream, rng: random.Random, second: int) -> list[_Asked]:
        if not self.recalls:
            return []
        then = next((s for s in clips if s.begin <= second - AGO < s.end), None)
        if then is None:
            return []
        scope = Scope(then.begin, then.end)
        return [_Asked(stream, question, scope) for question in then.questions(rng)]

    def close(self) -> None:
        """Close the streams."""
        for stream in self.streams:
            stream.close()


@contextmanager
def engine_streams(arguments: argparse.Namespace) -> Iterator[EngineStreams]:
    """Streams of the bundled causal model, or of ``--model``, in an engine of this process."""
    path = arguments.model[0] if arguments.model else "bundled-causal"
    engine = next(iter(build_engines(Config(models=(ModelConfig(path=path),))).values()))
    if not engine.stages.model.spec.causal:
        raise ConfigError("accuracy about long streams is measured on a causal model: --model bundled-causal")
    engine.start()
    streams = EngineStreams(engine)
    try:
        yield streams
    finally:
        streams.stop()
        engine.stop()


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """Accuracy by memory policy, position rule and budget, compared with unbounded memory."""
    count = max(1, arguments.limit // STREAMS_EACH)
    seeds = range(1000 * arguments.seed, 1000 * arguments.seed + count)
    with engine_streams(arguments) as streams:
        rows, measures = _long(streams, seeds, progress)
        more_rows, more_measures = _unbounded(streams, seeds, progress)
    settings = {"frames": FRAMES, "whole_frames": WHOLE_FRAMES, "streams": count, "seed": arguments.seed}
    return {"rows": rows + more_rows, "measures": measures + more_measures, "settings": settings}


def _long(streams: Streams, seeds: Sequence[int], progress: Progress) -> tuple[list[Figures], list[Figures]]:
    rows, best = [], 0.0
    for memory in LONG:
        progress(f"accuracy: {memory.policy}, {memory.positions}, budget {memory.budget}, {FRAMES} frames")
        scores = _scores(streams, memory, seeds, FRAMES)
        rows.append(scores["last"].row("last clip", **_named(memory), frames=FRAMES))
        if memory.budget == BUDGET:
            best = max(best, scores["last"].share)
    progress(f"accuracy: recall, {AGO} s ago")
    ago = _scores(streams, Memory("recall", "renumber", BUDGET), seeds, FRAMES)["ago"]
    rows.append(ago.row(f"{AGO} s ago", **_named(Memory("recall", "renumber", BUDGET)), frames=FRAMES))
    return rows, [
        at_least(f"about the last clip after {FRAMES} frames, budget {BUDGET}", best, "share", RIGHT),
        at_least(f"about an event {AGO} s ago by recall", ago.share, "share", RIGHT_AGO),
    ]


def _unbounded(streams: Streams, seeds: Sequence[int], progress: Progress) -> tuple[list[Figures], list[Figures]]:
    """Scores without eviction, and with a quarter of the rows, on the same questions."""
    rows, shares = [], {}
    whole = 12 * (WHOLE_FRAMES + 4)
    for policy, budget in (("window", whole), *((policy, whole // 4) for policy in ("window", "carrier", "group"))):
        progress(f"accuracy: {policy}, budget {budget}, streams of {WHOLE_FRAMES} frames")
        memory = Memory(policy, "renumber", budget)
        score = _scores(streams, memory, seeds, WHOLE_FRAMES - ASKED_SECONDS)["last"]
        shares[policy, budget] = score.share
        rows.append(score.row("unbounded" if budget == whole else "a quarter of the rows", **_named(memory)))
    unbounded = shares.pop(("window", whole))
    best = max(shares.values()) / max(unbounded, 1e-9)
    return rows, [at_least("best of a quarter of the rows over unbounded", best, "x", OF_UNBOUNDED)]


def _scores(streams: Streams, memory: Memory, seeds: Sequence[int], frames: int) -> dict[str, Score]:
    running = Running(streams, memory, seeds, frames + ASKED_SECONDS + 8)
    try:
        running.advance(frames)
        return running.scores(frames + ASKED_SECONDS)
    finally:
        running.close()


def _named(memory: Memory) -> Figures:
    return {"policy": memory.policy, "positions": memory.positions, "budget": memory.budget}
