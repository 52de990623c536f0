"""Typed questions with known answers: from a file, or about generated scenes outside the bundled models' training
data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmserve.calibrate.fit import ScoredQuestion, unscaled
from mmserve.client import Choice, Client, Decisions, Score, YesNo
from mmserve.core.decisions import CHOICE, SCORE, YES_NO, Calibration, Decision
from mmserve.lines import json_object, known_keys, read_files, read_lines
from mmserve.reference.decisions import DECISIONS, Answered, Described, draw_answered
from mmserve.reference.items import TEST_SEEDS
from mmserve.reference.scenes import Scene

#: Questions of one prompt about a scene, in turn.
ROUND = (4, 1, 8, 2, 12, 6)
#: One of this many prompts is about a scene described in words.
TOLD = 5
_KEYS = ("text", "images", "questions")
_QUESTION_KEYS = ("type", "text", "instructions", "options", "low", "high", "answer")


@dataclass(frozen=True)
class Item:
    """One prompt: a context, and questions about it, each with the index of its correct answer."""

    text: str
    images: tuple[bytes, ...]
    questions: tuple[Decision, ...]
    right: tuple[int, ...]


def bundled_items(limit: int, seed: int) -> list[Item]:
    """Prompts about generated scenes with at least ``limit`` questions in total."""
    made: list[Item] = []
    asked = 0
    while asked < limit:
        number = len(made)
        rng = random.Random(f"decisions {TEST_SEEDS[seed % len(TEST_SEEDS)]} {number}")
        kind = "decisions_text" if number % TOLD == TOLD - 1 else "decisions"
        thing = DECISIONS[kind](rng)
        assert isinstance(thing, Scene | Described)
        made.append(_item(thing, draw_answered(thing, ROUND[number % len(ROUND)], rng)))
        asked += len(made[-1].questions)
    return made


def read_items(path: Path) -> list[Item]:
    """The prompts in a file of JSON lines: ``text`` and ``images`` (paths, relative to the file's folder) are the
    context, and ``questions`` have a ``type``, a ``text`` and an ``answer``, and ``options`` or ``low`` and ``high``.

    Raises ``ConfigError`` with the line number.
    """
    return read_lines(path, "--questions", partial(_read, path.parent))


def ask(client: Client, item: Item, model: str, order: Sequence[int] | None = None) -> Decisions:
    """The answers to the questions of ``item``, sent in ``order`` (None = the given order), returned in the given
    order."""
    numbers = range(len(item.questions)) if order is None else order
    questions = {str(number): typed(item.questions[number]) for number in numbers}
    return client.decide(item.text, questions, list(item.images), model=model)


def judged(
    client: Client, items: Sequence[Item], model: str, calibration: Calibration, report: Callable[[str], None]
) -> Iterator[ScoredQuestion]:
    """The model's decision on each question, with the ``calibration`` of its server undone."""
    for index, item in enumerate(items):
        if index % 20 == 0:
            report(f"{index} of {len(items)} prompts")
        for question, right, answer in zip(item.questions, item.right, ask(client, item, model), strict=True):
            scaling = calibration.of(question.kind)
            yield ScoredQuestion(question.kind, unscaled(tuple(answer.probabilities.values()), scaling), right)


def typed(question: Decision) -> YesNo | Choice | Score:
    """``question`` as the SDK's type."""
    if question.kind == YES_NO:
        yes, no = question.options or ("", "")
        return YesNo(question.text, yes, no, question.instructions)
    if question.kind == CHOICE:
        return Choice(question.text, question.options, question.instructions)
    return Score(question.text, question.low, question.high, question.options, question.instructions)


def _item(thing: Scene | Described, answered: Sequence[Answered]) -> Item:
    text, images = (thing.text, ()) if isinstance(thing, Described) else ("", (thing.png(),))
    return Item(text, images, tuple(a.decision for a in answered), tuple(a.right for a in answered))


def _read(folder: Path, line: str) -> Item:
    data = json_object(line, _KEYS)
    images = tuple(read_files(data, "images", folder))
    read = [_question(each) for each in data["questions"]]
    if not read:
        raise ValueError("questions must hold one at least")
    return Item(str(data.get("text", "")), images, tuple(q for q, _r in read), tuple(r for _q, r in read))


def _question(data: Any) -> tuple[Decision, int]:
    kind = known_keys(data, _QUESTION_KEYS)["type"]
    if kind not in (YES_NO, CHOICE, SCORE):
        raise ValueError(f"type must be {YES_NO}, {CHOICE} or {SCORE}, not {kind!r}")
    options = data.get("options", [])
    if not isinstance(options, list) or (kind == YES_NO and len(options) not in (0, 2)):
        raise ValueError(f"options must be an array{', of the meanings of yes and no' * (kind == YES_NO)}")
    made = Decision(
        kind=kind,
        text=str(data["text"]),
        options=tuple(map(str, options)),
        low=int(data.get("low", 0)),
        high=int(data.get("high", 9)),
        instructions=str(data.get("instructions", "")),
    )
    answer = str(data["answer"])
    if answer not in made.labels:
        raise ValueError(f"answer must be one of {', '.join(made.labels)}, not {answer!r}")
    return made, made.labels.index(answer)
