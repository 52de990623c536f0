"""Typed questions: the cost of 32 relative to one, and calibration of the probabilities: ``mmserve bench
decisions``."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmserve.assembly import BackgroundServer
from mmserve.bench.measures import Figures, Progress, at_most, stated
from mmserve.bench.settings import named_tasks
from mmserve.calibrate.fit import calibration_error
from mmserve.calibrate.items import Item, ask, bundled_items, typed
from mmserve.cli.options import any_port, read_config
from mmserve.client import Client, YesNo
from mmserve.config import Config
from mmserve.models.registry import model_folder
from mmserve.reference.decisions import Described, draw_answered, draw_described
from mmserve.reference.scenes import Scene, draw_scene

SECTIONS = ("picture", "context", "accuracy", "order")
#: Number of questions compared with one, tokens of the long context, and goals of the ratios and of the calibration.
MANY, CONTEXT_TOKENS = 32, 2000
PICTURE_GOAL, CONTEXT_GOAL, ERROR_GOAL = 5.0, 1.5, 0.03
#: Maximum positions of the checkpoint's copy for the long context, more than the bundled models support.
POSITIONS = 4096


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """Rows for each section, and their measures with goals."""
    sections = named_tasks(arguments, SECTIONS)
    config = any_port(read_config(arguments))
    rows: list[Figures] = []
    measures: list[Figures] = []
    with _client(config) as client:
        model = client.describe()
        if "picture" in sections:
            progress("one picture")
            row = _cost(client, arguments.repeats, lambda rng: ("", draw_scene(rng)), arguments.seed)
            rows.append({"measured": "picture", **row})
            measures.append(at_most("32 questions over one, a picture", row["ratio"], "ratio", PICTURE_GOAL))
        if "accuracy" in sections:
            rows += (found := _accuracy(client, arguments.limit, arguments.seed, progress))
            error = found[-1]["calibration_error"]
            measures.append(at_most("expected calibration error, fresh scenes", error, "probability", ERROR_GOAL))
        if "order" in sections:
            row = _order(client, max(1, arguments.limit // 4), arguments.seed, progress)
            rows.append(row)
            measures.append(stated("answers that another order of the questions changes", row["changed"], "share"))
    if "context" in sections:
        progress(f"a context of {CONTEXT_TOKENS} tokens")
        with _longer(config) as longer, _client(longer) as client:
            row = _cost(client, arguments.repeats, _long_context, arguments.seed)
        rows.append({"measured": "context", **row})
        measures.append(at_most("32 questions over one, 2,000 tokens", row["ratio"], "ratio", CONTEXT_GOAL))
    settings = {"model": model.name, "decisions": model.decisions, "questions": MANY, "seed": arguments.seed}
    return {"rows": rows, "measures": measures, "settings": settings}


@contextmanager
def _client(config: Config) -> Iterator[Client]:
    with BackgroundServer(config) as server, server.client(3600) as client:
        yield client


@contextmanager
def _longer(config: Config) -> Iterator[Config]:
    """``config`` with a copy of its model that admits ``POSITIONS`` positions: same times, answers are not used."""
    [entry] = config.models
    with tempfile.TemporaryDirectory(prefix="mmserve-bench-") as folder:
        copy = Path(folder) / "model"
        shutil.copytree(model_folder(entry.path), copy)
        path = copy / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": POSITIONS}))
        engine = replace(config.engine, max_tokens=max(config.engine.max_tokens, POSITIONS))
        yield replace(config, models=(replace(entry, path=str(copy)),), engine=engine)


def _cost(
    client: Client, repeats: int, draw: Callable[[random.Random], tuple[str, Scene | None]], seed: int
) -> Figures:
    """Medians of the time of one question and of ``MANY``, in turn, each about a new context."""
    seconds: dict[int, list[float]] = {1: [], MANY: []}
    tokens: dict[int, int] = {}
    rounds = max(3, 5 * repeats)
    for round_ in range(-1, rounds):  # the first round is a warm-up
        for count in seconds:
            rng = random.Random(f"{seed} {round_} {count}")
            text, scene = draw(rng)
            questions = _questions(scene or draw_scene(rng), count, rng)
            images = [] if scene is None else [scene.png()]
            begun = time.perf_counter()
            tokens[count] = client.decide(text, questions, images).usage.prompt_tokens
            if round_ >= 0:
                seconds[count].append(time.perf_counter() - begun)
    one, many = (statistics.median(seconds[count]) for count in (1, MANY))
    counts = {"tokens_of_one": tokens[1], "tokens_of_many": tokens[MANY]}
    return {"one_ms": round(1000 * one, 2), "many_ms": round(1000 * many, 2), "ratio": round(many / one, 3), **counts}


def _questions(scene: Scene, count: int, rng: random.Random) -> list[Any]:
    """``count`` questions about ``scene``; repeated with variations if the scene has fewer."""
    found = [typed(each.decision) for each in draw_answered(scene, count, rng)]
    return found + [YesNo(f"Is there a red circle? ({number})") for number in range(count - len(found))]


def _long_context(rng: random.Random) -> tuple[str, None]:
    """Scenes in words, of about ``CONTEXT_TOKENS`` tokens of about five characters in the bundled tokenizer."""
    text = ""
    while len(text) < 5 * CONTEXT_TOKENS:
        described: Described = draw_described(rng)
        text += f"{described.text} "
    return text, None


def _accuracy(client: Client, limit: int, seed: int, progress: Progress) -> list[Figures]:
    """Accuracy, mass and expected calibration error of each kind of question, and of all, on held-out scenes."""
    kinds: dict[str, list[tuple[tuple[float, ...], int, float]]] = {}
    items = bundled_items(limit, seed + 1000)
    for index, item in enumerate(items):
        if index % 20 == 0:
            progress(f"accuracy: {index} of {len(items)} prompts")
        for question, right, answer in zip(item.questions, item.right, ask(client, item, ""), strict=True):
            row = tuple(answer.probabilities.values()), right, answer.mass
            kinds.setdefault(question.kind, []).append(row)
    kinds = {**dict(sorted(kinds.items())), "all": [row for held in kinds.values() for row in held]}
    return [_judged(kind, held) for kind, held in kinds.items()]


def _judged(kind: str, held: Sequence[tuple[tuple[float, ...], int, float]]) -> Figures:
    right = sum(row.index(max(row)) == index for row, index, _mass in held)
    return {
        "measured": "accuracy",
        "task": kind,
        "n": len(held),
        "accuracy": round(right / len(held), 4),
        "calibration_error": round(calibration_error([row for row, _i, _m in held], [i for _r, i, _m in held]), 4),
        "least_mass": round(min(mass for _row, _index, mass in held), 4),
    }


def _order(client: Client, limit: int, seed: int, progress: Progress) -> Figures:
    """The effect of another order of a prompt's questions on their probabilities, answers and accuracy."""
    moved: list[float] = []
    changed = right = right_after = 0
    items: list[Item] = [item for item in bundled_items(4 * limit, seed + 2000) if len(item.questions) > 1]
    for index, item in enumerate(items):
        if index % 20 == 0:
            progress(f"order: {index} of {len(items)} prompts")
        order = list(range(len(item.questions)))
        random.Random(index).shuffle(order)
        before, after = ask(client, item, ""), ask(client, item, "", order)
        for number, own in enumerate(item.right):
            one, other = (tuple(each[str(number)].probabilities.values()) for each in (before, after))
            moved.append(max(abs(a - b) for a, b in zip(one, other, strict=True)))
            changed += one.index(max(one)) != other.index(max(other))
            right += one.index(max(one)) == own
            right_after += other.index(max(other)) == own
    count = len(moved)
    return {
        "measured": "order",
        "n": count,
        "changed": round(changed / count, 4),
        "mean_move": round(statistics.mean(moved), 4),
        "accuracy": round(right / count, 4),
        "accuracy_in_another_order": round(right_after / count, 4),
    }
