"""Watches in ``mmserve bench video``: the cost of 32 of them a frame, and their accuracy.

Costs are measured on one thread, in turn: all questions in one pass, a single question, and all in sequence, as
separate requests would be. Answers are checked on generated pictures and on frames of generated clips, which are not in
the training data. False alarms are counted over a stream of such clips at one frame a second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mmserve.bench.in_process import torch_threads
from mmserve.bench.measures import Figures, Progress, at_least, at_most, percentile, stated
from mmserve.bench.video_alerts import event_to_alert
from mmserve.calibrate.fit import calibration_error
from mmserve.config import ModelConfig
from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel
from mmserve.models.packed import pack
from mmserve.models.registry import load_model
from mmserve.reference.clips import Clip, draw_clip
from mmserve.reference.images import yes_no
from mmserve.reference.items import TEST_SEEDS
from mmserve.reference.scenes import COLORS, KINDS, draw_scene
from mmserve.video.alerts import Rule, Watch
from mmserve.video.base import EncodedFrame
from mmserve.video.standing import Standing, StandingQuestion, TypedAnswer

#: Number of watches of a session.
WATCHES = 32
#: Goals: milliseconds a frame, speed-up over the questions in sequence, cost relative to one, accuracy,
#: expected calibration error.
FRAME_MS, CHEAPER, OVER_ONE, RIGHT, ECE = 100.0, 4.0, 4.0, 0.98, 0.03
#: Pictures to check, and frames of the stream for counting alarms, for each unit of ``--limit``.
PICTURES, FRAMES = 20, 15
#: Rounds of the timings for each unit of ``--repeats``.
ROUNDS = 5

Named = tuple[str | None, str | None]  # a colour and a kind; None = any


def names() -> list[Named]:
    """The subjects of the watches: every colour with every kind, colours, kinds, any shape."""
    kinds: list[str | None] = [*KINDS, None]
    return [(color, kind) for kind in kinds for color in COLORS] + [(None, kind) for kind in KINDS]


def question(name: Named) -> StandingQuestion:
    """The question whether there is a shape of that name."""
    color, kind = name
    return StandingQuestion(f"Is there a {' '.join(word for word in (color, kind or 'shape') if word)}?")


def watches() -> list[tuple[Named, StandingQuestion]]:
    """``WATCHES`` different questions: about shapes by name, and further ones with other wording."""
    asked = [(name, question(name)) for name in names()]
    extra = ("left", "center", "right")
    others = [StandingQuestion(f"Is there a {c} {KINDS[0]} at the {where}?") for c in COLORS for where in extra]
    return [*asked, *(((None, None), other) for other in others)][:WATCHES]


@dataclass(frozen=True)
class Judgement:
    """An answer to a yes/no question, and the expected one."""

    yes: float
    mass: float
    truth: bool

    @property
    def right(self) -> bool:
        """Whether the more likely answer is the expected one."""
        return (self.yes > 0.5) == self.truth


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """Costs, accuracy and alarms of watches with the bundled causal model, or with ``--model``."""
    path = arguments.model[0] if arguments.model else "bundled-causal"
    model = load_model(ModelConfig(path=path))
    if not isinstance(model, LoadedModel) or model.vision is None:
        raise ConfigError(f"{path} takes no images: it has no standing questions")
    with torch_threads(1):
        pack(model.decoder)
        return _measured(model, Standing(model), arguments, progress)


def _measured(model: LoadedModel, standing: Standing, arguments: argparse.Namespace, progress: Progress) -> Figures:
    seed = arguments.seed
    cost = _cost(model, standing, ROUNDS * arguments.repeats, seed, progress)
    pictures = _pictures(model, standing, PICTURES * arguments.limit, seed, progress)
    stream = _stream(model, standing, FRAMES * arguments.limit, seed, progress)
    known = [(each.text, partial(_holds_name, name) if any(name) else None) for name, each in watches()]
    alerts = event_to_alert(arguments, known, progress)
    rows = [{"measured": "watches: cost", **cost}, *pictures[0], stream[0], alerts[0]]
    measures = [
        at_most(f"{WATCHES} watches a frame", cost["together_ms"], "ms", FRAME_MS),
        at_least("one after another over together", cost["one_by_one_ms"] / cost["together_ms"], "x", CHEAPER),
        at_most(f"{WATCHES} watches over one", cost["together_ms"] / cost["one_ms"], "x", OVER_ONE),
        *pictures[1],
        *stream[1],
        *alerts[1],
    ]
    settings = {"model": model.spec.name, "threads": 1, "watches": WATCHES, "seed": seed}
    return {"rows": rows, "measures": measures, "settings": settings}


@torch.inference_mode()
def encode_frame(model: LoadedModel, picture: Any) -> EncodedFrame:
    """Encode and prefill a picture as a separate image."""
    assert model.vision is not None
    tokens = model.vision.encode([model.vision.prepare(picture)], frozenset(), clip=False)[0].tokens
    return EncodedFrame(0.0, tokens[:0], tokens)


def _cost(model: LoadedModel, standing: Standing, rounds: int, seed: int, progress: Progress) -> Figures:
    progress(f"watches: cost, {rounds} rounds")
    frame = encode_frame(model, draw_scene(random.Random(TEST_SEEDS[seed])).picture)
    asked = [each for _name, each in watches()]
    times: dict[str, list[float]] = {"together": [], "eight": [], "one": [], "one_by_one": []}
    ways: dict[str, list[list[StandingQuestion]]] = {
        "together": [asked],
        "eight": [asked[:8]],
        "one": [asked[:1]],
        "one_by_one": [[each] for each in asked],
    }
    for _round in range(rounds + 1):  # the first round is a warm-up
        for name, calls in ways.items():
            began = time.perf_counter()
            for call in calls:
                standing.judge(frame, call)
            times[name].append(1000 * (time.perf_counter() - began))
    return {f"{name}_ms": round(statistics.median(taken[1:]), 2) for name, taken in times.items()}


def _pictures(
    model: LoadedModel, standing: Standing, count: int, seed: int, progress: Progress
) -> tuple[list[Figures], list[Figures]]:
    """Accuracy on generated pictures and on frames of clips: half of the expected answers are yes."""
    progress(f"watches: {count} pictures and as many frames of clips")
    rng = random.Random(f"watched pictures {seed}")
    alone: list[Judgement] = []
    frames: list[Judgement] = []
    for _number in range(count):
        scene = draw_scene(random.Random(rng.choice(TEST_SEEDS)))
        text, answer = yes_no(scene, rng)
        judged = standing.judge(encode_frame(model, scene.picture), [StandingQuestion(text)])[0]
        alone.append(Judgement(judged.probability("yes"), judged.mass, answer.startswith("yes")))
        clip = draw_clip(random.Random(rng.choice(TEST_SEEDS)))
        moment = rng.uniform(0, clip.seconds - 0.01)
        wanted = rng.random() < 0.5
        named = [name for name in names() if holds(clip, moment, name) == wanted]
        if named:
            judged = standing.judge(
                encode_frame(model, clip.frames([moment]).pictures[0]), [question(rng.choice(named))]
            )[0]
            frames.append(Judgement(judged.probability("yes"), judged.mass, wanted))
    rows, measures = [], []
    for what, judgements in (("pictures", alone), ("frames of a stream", frames)):
        right = sum(j.right for j in judgements) / len(judgements)
        probabilities = [(j.yes, 1 - j.yes) for j in judgements]
        error = calibration_error(probabilities, [not j.truth for j in judgements], bins=20)
        rows.append(
            {
                "measured": f"watches: {what}",
                "n": len(judgements),
                "accuracy": round(right, 4),
                "calibration_error": round(error, 4),
                "mean_mass": round(statistics.mean(j.mass for j in judgements), 4),
                "least_mass": round(min(j.mass for j in judgements), 4),
            }
        )
        measures += [
            at_least(f"right about {what}", right, "share", RIGHT),
            at_most(f"calibration error about {what}", error, "share", ECE),
        ]
    return rows, measures


def holds(clip: Clip, moment: float, name: Named) -> bool:
    """Whether a shape of that name is visible at ``moment`` (seconds of the clip)."""
    color, kind = name
    return any(
        actor.there(moment) and color in (None, actor.color(moment)) and kind in (None, actor.shape.kind)
        for actor in clip.actors
    )


def _holds_name(name: Named, clip: Clip, moment: float) -> bool:
    return holds(clip, moment, name)


def _stream(
    model: LoadedModel, standing: Standing, count: int, seed: int, progress: Progress
) -> tuple[Figures, list[Figures]]:
    """Alarms of all questions over ``count`` frames of consecutive clips, one frame a second."""
    asked = [(name, each) for name, each in watches() if name != (None, None)]
    states = [Watch(Rule()) for _ in asked]
    rng = random.Random(f"watched stream {seed}")
    false = missed = events = 0
    before: list[bool] = [False] * len(asked)
    delays: list[float] = []
    clip, part, at = draw_clip(random.Random(rng.choice(TEST_SEEDS))), rng.random(), 0
    waiting: list[float | None] = [None] * len(asked)
    for second in range(count):
        if second % 100 == 0:
            progress(f"watches: {second} of {count} frames of a stream")
        if at == clip.seconds:
            clip, part, at = draw_clip(random.Random(rng.choice(TEST_SEEDS))), rng.random(), 0
        moment = at + part
        began = time.perf_counter()
        answers: list[TypedAnswer] = standing.judge(
            encode_frame(model, clip.frames([moment]).pictures[0]), [each for _name, each in asked]
        )
        taken = time.perf_counter() - began
        for i, ((name, _question), state, judged) in enumerate(zip(asked, states, answers, strict=True)):
            truth = holds(clip, moment, name)
            turned = state.update(judged.probability("yes"), judged.mass, float(second))
            if truth and not before[i]:
                events += 1
                waiting[i] = part  # seconds since the event, which is at a whole second
            if not truth and waiting[i] is not None:
                missed, waiting[i] = missed + 1, None
            if turned:
                false += not truth
                if (since := waiting[i]) is not None:
                    delays.append(since + taken)
                    waiting[i] = None
            elif truth and (since := waiting[i]) is not None:
                waiting[i] = since + 1
            before[i] = truth
        at += 1
    hours = count / 3600
    row = {
        "measured": "watches: stream",
        "frames": count,
        "watches": len(asked),
        "events": events,
        "missed": missed,
        "false_alarms": false,
    }
    measures = [
        stated(f"false alarms an hour of {len(asked)} watches", false / hours, "1/h"),
        stated("events without an alert", missed / max(1, events), "share"),
    ]
    if delays:
        row |= {"event_to_alert_s_p50": round(statistics.median(delays), 3)}
        measures.append(stated("event to alert p99, without a server", percentile(delays, 0.99), "s"))
    return row, measures
