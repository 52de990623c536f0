"""Questions about one picture: short answers, captions, and the scene as JSON with the fields that are asked for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

from mmserve.reference.items import Subject
from mmserve.reference.scenes import COLORS, COLUMNS, KINDS, MAX_SHAPES, ROWS, SIZES, Scene, Shape, draw_scene

#: What a question may call a shape: by its kind, its colour, or both.
_NAMES: tuple[Callable[[Shape], str], ...] = (
    lambda s: s.kind,
    lambda s: f"{s.color} shape",
    lambda s: s.name,
)


def _unique(scene: Scene, key: str) -> list[Shape]:
    """Shapes that no other shape equals in ``key`` (kind, color or name)."""
    values = [getattr(s, key) for s in scene.shapes]
    return [s for s in scene.shapes if values.count(getattr(s, key)) == 1]


def count(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """How many shapes, of a kind or a colour or at all, and where each of them is."""
    what = rng.choice(("shape", "kind", "color"))
    color = rng.choice([s.color for s in scene.shapes] + [rng.choice(tuple(COLORS))]) if what == "color" else None
    kind = rng.choice(KINDS) if what == "kind" else None
    found = [s.position for s in scene.shapes if kind in (None, s.kind) and color in (None, s.color)]
    name = f"{color} shape" if color else kind or "shape"
    return f"How many {name}s are there, and where?", f"{len(found)}: {', '.join(found)}" if found else "0"


def color(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    """The colour of the only shape of its kind."""
    shapes = _unique(scene, "kind")
    if not shapes:
        return None
    shape = rng.choice(shapes)
    return f"What color is the {shape.kind}?", shape.color


def shape(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    """The kind of the only shape of its colour."""
    shapes = _unique(scene, "color")
    if not shapes:
        return None
    chosen = rng.choice(shapes)
    return f"What shape is {chosen.color}?", chosen.kind


def position(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    """The cell of a shape that is alone in its kind, its colour or both, whichever the question names."""
    name = rng.choice(_NAMES)
    names = [name(s) for s in scene.shapes]
    shapes = [s for s in scene.shapes if names.count(name(s)) == 1]
    if not shapes:
        return None
    chosen = rng.choice(shapes)
    return f"Where is the {name(chosen)}?", chosen.position


def what(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """What a cell holds."""
    if rng.random() < 0.85:
        chosen = rng.choice(scene.shapes)
        return f"What is at the {chosen.position}?", f"a {chosen.size} {chosen.name}"
    taken = {(s.row, s.column) for s in scene.shapes}
    row, column = rng.choice([(r, c) for r in range(3) for c in range(3) if (r, c) not in taken])
    return f"What is at the {ROWS[row]} {COLUMNS[column]}?", "nothing"


def comparison(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    """Which of two is larger, or whether one is left of or above another."""
    shapes = _unique(scene, "name")
    if len(shapes) < 2:
        return None
    one, two = rng.sample(shapes, 2)
    if one.size != two.size and rng.random() < 0.6:
        larger = one if one.size == "large" else two
        return f"Which is larger, the {one.name} or the {two.name}?", f"the {larger.name}"
    if one.column != two.column and (one.row == two.row or rng.random() < 0.5):
        return f"Is the {one.name} left of the {two.name}?", "yes" if one.column < two.column else "no"
    if one.row != two.row:
        return f"Is the {one.name} above the {two.name}?", "yes" if one.row < two.row else "no"
    return None


def yes_no(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Whether a kind, a colour or both together are there, and where: half of the time they are."""
    name = rng.choice(_NAMES)
    there = {name(s): s.position for s in reversed(scene.shapes)}  # the first in reading order, of several
    colors = sorted({s.color for s in scene.shapes}) if rng.random() < 0.5 else list(COLORS)
    absent = sorted({name(Shape(k, c, "", 0, 0)) for k in KINDS for c in colors} - set(there))
    if not absent or rng.random() < 0.5:
        asked = rng.choice(sorted(there))
        return f"Is there a {asked}?", f"yes, at the {there[asked]}"
    return f"Is there a {rng.choice(absent)}?", "no"


def caption(scene: Scene, _rng: random.Random) -> tuple[str, str]:
    """Every shape in words, in reading order."""
    return "Describe the scene in words.", ", ".join(f"a {s.size} {s.name} at the {s.position}" for s in scene.shapes)


def listing(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Every shape in words and in random order, for training only: a shape of the list must be found by its features,
    because its place there is random.

    Short answers need that skill and train it poorly: after 100,000 of them, questions such as "Where is the red
    circle?" were answered by guessing a shape.
    """
    shapes = rng.sample(scene.shapes, len(scene.shapes))
    phrase = ", ".join(f"a {s.size} {s.name} at the {s.position}" for s in shapes)
    return "Describe the scene in any order.", phrase


#: The question that asks for every field of each object.
EVERYTHING = "Describe the scene as JSON."
#: Fields of an object, in the order in which they are written.
FIELDS = ("shape", "color", "size", "position")


def _object(shape: Shape, fields: tuple[str, ...]) -> dict[str, object]:
    every: dict[str, object] = {
        "shape": shape.kind,
        "color": shape.color,
        "size": shape.size,
        "position": {"row": ROWS[shape.row], "column": COLUMNS[shape.column]},
    }
    return {field: every[field] for field in fields}


def scene_json(scene: Scene, *, fields: tuple[str, ...], count: bool = False, colors: bool = False) -> str:
    """The scene as compact JSON with the asked fields of each object, and the count and colours if wanted."""
    value: dict[str, object] = {}
    if count:
        value["count"] = len(scene.shapes)
    if colors:
        value["colors"] = sorted({s.color for s in scene.shapes})
    if fields:
        value["objects"] = [_object(s, fields) for s in scene.shapes]
    return json.dumps(value, separators=(",", ":"))


def as_json(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """The scene as JSON; the question names the fields."""
    if rng.random() < 0.35:
        return EVERYTHING, scene_json(scene, fields=FIELDS)
    fields = tuple(f for f in FIELDS if rng.random() < 0.6)
    count, colors = rng.random() < 0.4, rng.random() < 0.3
    if not (fields or count or colors):
        fields = (rng.choice(FIELDS),)
    wanted = ["count"] * count + ["colors"] * colors
    if fields:
        wanted.append(f"objects ({', '.join(fields)})")
    return f"Give JSON with {', '.join(wanted)}.", scene_json(scene, fields=fields, count=count, colors=colors)


def scene_schema(*, fields: tuple[str, ...], count: bool = False, colors: bool = False) -> dict[str, Any]:
    """A JSON schema that ``scene_json`` with the same arguments obeys, for any scene."""
    some = {"type": "array", "minItems": 1, "maxItems": MAX_SHAPES}
    described: dict[str, Any] = {
        "shape": {"enum": list(KINDS)},
        "color": {"enum": list(COLORS)},
        "size": {"enum": list(SIZES)},
        "position": _exactly({"row": {"enum": list(ROWS)}, "column": {"enum": list(COLUMNS)}}),
    }
    parts: dict[str, Any] = {}
    if count:
        parts["count"] = {"type": "integer", "minimum": 1, "maximum": MAX_SHAPES}
    if colors:
        parts["colors"] = {**some, "items": described["color"]}
    if fields:
        parts["objects"] = {**some, "items": _exactly({field: described[field] for field in fields})}
    return _exactly(parts)


def schema_asked(text: str) -> dict[str, Any]:
    """The JSON schema of what ``text``, a question of ``as_json``, asks for."""
    wanted, _, described = text.partition("objects (")
    fields = tuple(field for field in FIELDS if field in re.findall(r"\w+", described))
    if text == EVERYTHING:
        return scene_schema(fields=FIELDS)
    return scene_schema(fields=fields, count="count" in wanted, colors="colors" in wanted)


def _exactly(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


IMAGE = Subject(
    draw_scene,
    lambda scene: (scene.picture,),
    {
        "count": count,
        "color": color,
        "shape": shape,
        "position": position,
        "what": what,
        "comparison": comparison,
        "yes_no": yes_no,
        "caption": caption,
    },
)
#: Tasks with a short answer.
SHORT_TASKS = tuple(task for task in IMAGE.tasks if task != "caption")
LISTING = Subject(draw_scene, lambda scene: (scene.picture,), {"listing": listing})
#: A question that is asked of picture after picture: its text comes before the picture.
WATCH = Subject(draw_scene, lambda scene: (scene.picture,), {"yes_no": yes_no})
JSON = Subject(draw_scene, lambda scene: (scene.picture,), {"json": as_json})
