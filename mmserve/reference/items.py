"""What a question is made of: the media it shows, its text, and its one right answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mmserve.core.decisions import Decision

TRAIN_SEEDS = range(1 << 20, 1 << 30)
TEST_SEEDS = range(1 << 20)


@dataclass(frozen=True)
class Frames:
    """A clip as drawn: pictures at a steady rate. ``per_second`` frames a second."""

    pictures: tuple[Image.Image, ...]
    per_second: int

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return len(self.pictures) / self.per_second


Media = Image.Image | Frames


@dataclass(frozen=True)
class Question:
    """One question of a task and its answer.

    ``tools`` are offered with it, and ``turns`` follow it before the answer, both as chat templates take them.
    ``decision``: the typed question that follows ``text``; ``answer`` is then what its slot should hold.
    """

    task: str
    text: str
    answer: str
    tools: tuple[dict[str, Any], ...] = ()
    turns: tuple[dict[str, Any], ...] = ()
    decision: Decision | None = None


#: Draws something to ask about.
Draw = Callable[[random.Random], Any]
#: A question about what was drawn, as (text, answer), with tools and turns where it has some; None where the thing
#: allows none (no shape is unique, for example).
Ask = Callable[[Any, random.Random], tuple[Any, ...] | None]


@dataclass(frozen=True)
class Subject:
    """A kind of thing to ask about: how it is drawn, what of it is shown, and the tasks about it."""

    draw: Draw
    media: Callable[[Any], tuple[Media, ...]]
    tasks: Mapping[str, Ask]

    def ask(self, thing: Any, task: str, rng: random.Random) -> Question | None:
        """A question of ``task`` about ``thing``, or None where it allows none."""
        asked = self.tasks[task](thing, rng)
        return None if asked is None else Question(task, *asked)

    def sample(self, task: str, rng: random.Random) -> tuple[Any, Question]:
        """A fresh thing and a question of ``task`` about it."""
        while True:
            thing = self.draw(rng)
            question = self.ask(thing, task, rng)
            if question is not None:
                return thing, question
