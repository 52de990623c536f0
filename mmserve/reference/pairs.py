"""Questions about two pictures in one prompt: which one, and what differs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from mmserve.reference.items import Subject
from mmserve.reference.scenes import COLORS, KINDS, MAX_SHAPES, SIZES, Scene, Shape, draw_scene, draw_shapes, paint


@dataclass(frozen=True)
class Pair:
    """Two scenes; ``change`` describes what became of the first, None where they have nothing in common."""

    first: Scene
    second: Scene
    change: str | None


def draw_pair(rng: random.Random) -> Pair:
    """Two unrelated scenes, or one and the same with one change."""
    if rng.random() < 0.4:
        return Pair(draw_scene(rng), draw_scene(rng), None)
    before = draw_shapes(rng)
    after, change = _changed(before, rng)
    return Pair(Scene(before, paint(before, rng)), Scene(after, paint(after, rng)), change)


def _changed(shapes: tuple[Shape, ...], rng: random.Random) -> tuple[tuple[Shape, ...], str]:
    kinds = ["recolored", "reshaped"] + ["added"] * (len(shapes) < MAX_SHAPES) + ["removed"] * (len(shapes) > 1)
    change = rng.choice(kinds)
    if change == "added":
        free = [(r, c) for r in range(3) for c in range(3) if all((s.row, s.column) != (r, c) for s in shapes)]
        new = Shape(rng.choice(KINDS), rng.choice(tuple(COLORS)), rng.choice(SIZES), *rng.choice(free))
        after = tuple(sorted((*shapes, new), key=lambda s: (s.row, s.column)))
        return after, f"a {new.name} was added at the {new.position}"
    index = rng.randrange(len(shapes))
    old = shapes[index]
    if change == "removed":
        return shapes[:index] + shapes[index + 1 :], f"the {old.name} at the {old.position} was removed"
    if change == "recolored":
        new = replace(old, color=rng.choice([c for c in COLORS if c != old.color]))
        phrase = f"the {old.name} at the {old.position} turned {new.color}"
    else:
        new = replace(old, kind=rng.choice([k for k in KINDS if k != old.kind]))
        phrase = f"the {old.name} at the {old.position} became a {new.kind}"
    return (*shapes[:index], new, *shapes[index + 1 :]), phrase


def which(pair: Pair, rng: random.Random) -> tuple[str, str]:
    """Which picture has more shapes, or has a shape of a colour and kind."""
    if rng.random() < 0.4:
        one, two = len(pair.first.shapes), len(pair.second.shapes)
        answer = "the first" if one > two else "the second" if two > one else "neither"
        return "Which image has more shapes?", answer
    near = rng.choice((*pair.first.shapes, *pair.second.shapes)).name
    name = near if rng.random() < 0.8 else f"{rng.choice(tuple(COLORS))} {rng.choice(KINDS)}"
    first, second = (any(s.name == name for s in scene.shapes) for scene in (pair.first, pair.second))
    either = "the first" if first else "the second" if second else "neither"
    return f"Which image has a {name}?", "both" if first and second else either


def differs(pair: Pair, _rng: random.Random) -> tuple[str, str] | None:
    """What changed from the first picture to the second."""
    return None if pair.change is None else ("What is different in the second image?", pair.change)


def cells(pair: Pair, rng: random.Random) -> tuple[str, str]:
    """What each cell holds in either picture, in random order. Taught, not tested: it leads from a place in the one
    picture to the same place in the other."""
    held: dict[str, list[str]] = {}
    for index, scene in enumerate((pair.first, pair.second)):
        for shape in scene.shapes:
            held.setdefault(shape.position, ["nothing", "nothing"])[index] = shape.name
    parts = (
        f"{place}: {first} then {second}" for place, (first, second) in rng.sample(sorted(held.items()), len(held))
    )
    return "Compare the images cell by cell in any order.", ", ".join(parts)


PAIR = Subject(
    draw_pair,
    lambda pair: (pair.first.picture, pair.second.picture),
    {"which": which, "differs": differs},
)
CELLS = Subject(draw_pair, lambda pair: (pair.first.picture, pair.second.picture), {"cells": cells})
