"""Drawn scenes and questions about them: the data that the bundled model is trained and judged on.

Everything is a pure function of a ``random.Random``: the same seed gives the same scene, picture and question.
Training and evaluation draw from disjoint seeds (``TRAIN_SEEDS``, ``TEST_SEEDS``).
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw

KINDS = ("circle", "square", "triangle")
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 40),
    "purple": (150, 50, 180),
    "white": (240, 240, 240),
}
SIZES = ("small", "large")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")

#: Side of a drawn picture in pixels: three cells of 64 a side.
PICTURE = 192
CELL = PICTURE // 3
BACKGROUND = (20, 20, 20)

TRAIN_SEEDS = range(1 << 20, 1 << 30)
TEST_SEEDS = range(1 << 20)


@dataclass(frozen=True)
class Shape:
    """One drawn object: what it is, and which of the nine cells it stands in."""

    kind: str
    color: str
    size: str
    row: int
    column: int

    @property
    def position(self) -> str:
        return f"{ROWS[self.row]} {COLUMNS[self.column]}"


@dataclass(frozen=True)
class Scene:
    """Shapes in reading order (top to bottom, left to right), at most one a cell, and their picture."""

    shapes: tuple[Shape, ...]
    picture: Image.Image

    def png(self) -> bytes:
        """The picture as PNG bytes."""
        buffer = io.BytesIO()
        self.picture.save(buffer, "PNG")
        return buffer.getvalue()


@dataclass(frozen=True)
class Question:
    """A question about one scene, its task's name and the one right answer."""

    task: str
    text: str
    answer: str


def draw_scene(rng: random.Random, *, max_shapes: int = 3) -> Scene:
    """A scene of one to ``max_shapes`` shapes at random cells, colours, kinds, sizes and offsets."""
    cells = sorted(rng.sample([(r, c) for r in range(3) for c in range(3)], rng.randint(1, max_shapes)))
    shapes = tuple(
        Shape(rng.choice(KINDS), rng.choice(tuple(COLORS)), rng.choice(SIZES), row, column) for row, column in cells
    )
    return Scene(shapes, _draw(shapes, rng))


def _draw(shapes: tuple[Shape, ...], rng: random.Random) -> Image.Image:
    picture = Image.new("RGB", (PICTURE, PICTURE), BACKGROUND)
    pen = ImageDraw.Draw(picture)
    for shape in shapes:
        side = rng.randint(24, 30) if shape.size == "small" else rng.randint(46, 54)
        x = shape.column * CELL + rng.randint(4, CELL - side - 4)
        y = shape.row * CELL + rng.randint(4, CELL - side - 4)
        fill = tuple(max(0, min(255, channel + rng.randint(-12, 12))) for channel in COLORS[shape.color])
        if shape.kind == "circle":
            pen.ellipse([x, y, x + side, y + side], fill=fill)
        elif shape.kind == "square":
            pen.rectangle([x, y, x + side, y + side], fill=fill)
        else:
            pen.polygon([(x + side / 2, y), (x, y + side), (x + side, y + side)], fill=fill)
    return picture


def scene_json(scene: Scene) -> str:
    """The scene as compact JSON, the answer to ``Describe the scene as JSON.``"""
    objects = [{"shape": s.kind, "color": s.color, "size": s.size, "position": s.position} for s in scene.shapes]
    return json.dumps({"objects": objects}, separators=(",", ":"))


#: What a question may call a shape: by its kind, its colour, or both.
_NAMES: tuple[Callable[[Shape], str], ...] = (
    lambda s: s.kind,
    lambda s: f"{s.color} shape",
    lambda s: f"{s.color} {s.kind}",
)


def _count(scene: Scene, rng: random.Random) -> tuple[str, str]:
    kind = rng.choice((None, *KINDS))
    found = [s.position for s in scene.shapes if kind in (None, s.kind)]
    answer = f"{len(found)}: {', '.join(found)}" if found else "0"
    return f"How many {kind or 'shape'}s are there, and where?", answer


def _color(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    unique = [s for s in scene.shapes if sum(o.kind == s.kind for o in scene.shapes) == 1]
    if not unique:
        return None
    shape = rng.choice(unique)
    return f"What color is the {shape.kind}?", shape.color


def _position(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    name = rng.choice(_NAMES)
    names = [name(s) for s in scene.shapes]
    unique = [s for s in scene.shapes if names.count(name(s)) == 1]
    if not unique:
        return None
    shape = rng.choice(unique)
    return f"Where is the {name(shape)}?", shape.position


def _what_is_at(scene: Scene, rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.85:
        shape = rng.choice(scene.shapes)
        return f"What is at the {shape.position}?", f"a {shape.size} {shape.color} {shape.kind}"
    taken = {(s.row, s.column) for s in scene.shapes}
    row, column = rng.choice([(r, c) for r in range(3) for c in range(3) if (r, c) not in taken])
    return f"What is at the {ROWS[row]} {COLUMNS[column]}?", "nothing"


def _yes_no(scene: Scene, rng: random.Random) -> tuple[str, str]:
    name = rng.choice(_NAMES)
    there = {name(s): s.position for s in reversed(scene.shapes)}  # the first in reading order, of several
    absent = sorted({name(Shape(k, c, "", 0, 0)) for k in KINDS for c in COLORS} - set(there))
    if not absent or rng.random() < 0.5:
        asked = rng.choice(sorted(there))
        return f"Is there a {asked}?", f"yes, at the {there[asked]}"
    return f"Is there a {rng.choice(absent)}?", "no"


def caption(scene: Scene, rng: random.Random) -> Question:
    """The shapes in words and in random order. Taught, not tested: a reader who sees part of it must find the shape
    it speaks of by what it looks like, for its place in the list says nothing. Short answers need that skill and teach
    it slowly: after some 80,000 of them "Where is the red circle?" was still answered by guessing a shape."""
    shapes = rng.sample(scene.shapes, len(scene.shapes))
    said = ", ".join(f"a {s.size} {s.color} {s.kind} at the {s.position}" for s in shapes)
    return Question("caption", "Describe the scene in words.", said)


def _json(scene: Scene, _rng: random.Random) -> tuple[str, str]:
    return "Describe the scene as JSON.", scene_json(scene)


_ASK: dict[str, Callable[[Scene, random.Random], tuple[str, str] | None]] = {
    "count": _count,
    "color": _color,
    "position": _position,
    "what": _what_is_at,
    "yes_no": _yes_no,
    "json": _json,
}
SHORT_TASKS = ("count", "color", "position", "what", "yes_no")
TASKS = (*SHORT_TASKS, "json")


def ask(scene: Scene, task: str, rng: random.Random) -> Question | None:
    """A question of ``task`` about ``scene``, or None where the scene allows none (no shape is unique, say)."""
    asked = _ASK[task](scene, rng)
    return None if asked is None else Question(task, *asked)


def sample(rng: random.Random, task: str) -> tuple[Scene, Question]:
    """A fresh scene and a question of ``task`` about it."""
    while True:
        scene = draw_scene(rng)
        question = ask(scene, task, rng)
        if question is not None:
            return scene, question


def correct(question: Question, answer: str) -> bool:
    """Whether ``answer`` is right: equal as JSON values for the ``json`` task, equal as trimmed text otherwise."""
    if question.task != "json":
        return answer.strip() == question.answer
    try:
        return json.loads(answer) == json.loads(question.answer)
    except json.JSONDecodeError:
        return False
