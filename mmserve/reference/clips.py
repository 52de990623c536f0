"""Moving scenes and questions about them: direction, order of appearance, counts, times, changes.

A clip is drawn frame by frame from a script; ``h264`` writes it as a real file. Things happen at whole seconds.
"""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import av
from PIL import Image, ImageDraw

from mmserve.reference.items import Frames, Subject
from mmserve.reference.scenes import (
    BACKGROUND,
    CELL,
    COLORS,
    KINDS,
    PICTURE,
    SIDES,
    SIZES,
    TURN,
    Shape,
    distract,
    shade,
    speckle,
    stamp,
)

PER_SECOND = 4
SECONDS = (4, 6, 8)
DIRECTIONS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}


@dataclass(frozen=True)
class Actor:
    """A shape of a clip: when it is there (seconds), which way it moves, and what colour it turns into when."""

    shape: Shape
    appears: int = 0
    leaves: int | None = None
    moves: str = ""  # a key of DIRECTIONS; "" = it does not move
    turns: tuple[int, str] | None = None

    def there(self, time: float) -> bool:
        """Whether it is to be seen at ``time`` (seconds)."""
        return self.appears <= time and (self.leaves is None or time < self.leaves)

    def color(self, time: float) -> str:
        """Its colour at ``time``."""
        return self.turns[1] if self.turns is not None and time >= self.turns[0] else self.shape.color

    def place(self, time: float, seconds: int) -> tuple[float, float]:
        """Row and column, in cells, at ``time`` of a clip of ``seconds``; a moving shape crosses the grid in it."""
        row, column = float(self.shape.row), float(self.shape.column)
        if self.moves:
            down, right = DIRECTIONS[self.moves]
            way = 2 * time / seconds - 1  # from one side of the grid to the other
            row, column = row + down * way if down else row, column + right * way if right else column
        return row, column


@dataclass(frozen=True)
class Clip:
    """A script and its length; ``kind`` is what happens, ``look`` the seed of everything that is random to see."""

    kind: str
    actors: tuple[Actor, ...]
    seconds: int
    look: int

    def frames(self, times: Sequence[float] | None = None) -> Frames:
        """The clip drawn at ``PER_SECOND``, or only its pictures at ``times`` (seconds)."""
        every = [i / PER_SECOND for i in range(self.seconds * PER_SECOND)]
        return Frames(tuple(self._picture(t) for t in (every if times is None else times)), PER_SECOND)

    def _picture(self, time: float) -> Image.Image:
        rng = random.Random(self.look)  # the same lines, offsets and shades in every picture
        picture = Image.new("RGB", (PICTURE, PICTURE), BACKGROUND)
        pen = ImageDraw.Draw(picture)
        distract(pen, rng)
        for actor in self.actors:
            side = rng.randint(*SIDES[actor.shape.size])
            slack = (CELL - side) // 2 - 3
            offset = rng.randint(-slack, slack), rng.randint(-slack, slack)
            degrees = rng.uniform(-TURN, TURN)
            shades = {name: shade(name, rng) for name in COLORS}
            if actor.there(time):
                center = self._center(actor, time, offset)
                stamp(pen, actor.shape, center, side, degrees, shades[actor.color(time)])
        return speckle(picture, random.Random(f"{self.look} {time}"))

    def held(self, time: float) -> dict[tuple[int, int], tuple[str, str]]:
        """What is to be seen at ``time``: (row, column) of the nearest cell → (kind, colour)."""
        seen = {}
        for actor in self.actors:
            if actor.there(time):
                x, y = self._center(actor, time, (0, 0))
                seen[int(y // CELL), int(x // CELL)] = actor.shape.kind, actor.color(time)
        return seen

    def _center(self, actor: Actor, time: float, offset: tuple[int, int]) -> tuple[float, float]:
        row, column = actor.place(time, self.seconds)
        return (column + 0.5) * CELL + offset[0], (row + 0.5) * CELL + offset[1]


def h264(frames: Frames) -> bytes:
    """The clip as an MP4 file with H.264 video."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=frames.per_second, options={"preset": "veryfast", "crf": "20"})
        stream.width = stream.height = PICTURE
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, frames.per_second)
        stream.thread_count = 1
        for picture in frames.pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())
    return buffer.getvalue()


def through_h264(clip: Clip, times: list[float]) -> tuple[Image.Image, ...]:
    """The frames nearest below ``times`` of the clip written as a file and read again."""
    frames = clip.frames()
    with av.open(io.BytesIO(h264(frames)), "r") as container:
        container.streams.video[0].thread_count = 1
        decoded = [frame.to_image() for frame in container.decode(video=0)]
    return tuple(decoded[min(len(decoded) - 1, int(t * frames.per_second))] for t in times)


def draw_clip(rng: random.Random) -> Clip:
    """A clip of one kind: something moves, shapes appear one after another, or one thing changes."""
    kind = rng.choice(("moves", "appears", "appears", "changes"))
    seconds, look = rng.choice(SECONDS), rng.getrandbits(48)
    if kind == "moves":
        return Clip(kind, _moving(rng), seconds, look)
    shapes = _distinct(rng, rng.randint(2, 4) if kind == "appears" else rng.randint(1, 3))
    if kind == "appears":
        first = rng.randint(0, 1)  # shapes that are there from the start
        times = sorted(rng.sample(range(1, seconds), min(len(shapes) - first, seconds - 1)))
        rng.shuffle(shapes)
        actors = [Actor(s) for s in shapes[:first]]
        actors += [Actor(s, appears=t) for s, t in zip(shapes[first:], times, strict=False)]
        return Clip(kind, tuple(actors), seconds, look)
    actors = [Actor(s) for s in shapes]
    index, time = rng.randrange(len(actors)), rng.randint(1, seconds - 1)
    if rng.random() < 0.5 or len(actors) == 1:
        other = rng.choice([c for c in COLORS if c != actors[index].shape.color])
        actors[index] = replace(actors[index], turns=(time, other))
    else:
        actors[index] = replace(actors[index], leaves=time)
    return Clip(kind, tuple(actors), seconds, look)


def _moving(rng: random.Random) -> tuple[Actor, ...]:
    """One shape that crosses the picture, or does not move, and up to two in other rows and columns."""
    mover, *others = _distinct(rng, rng.randint(1, 3))
    way = rng.choice((*DIRECTIONS, *DIRECTIONS, ""))
    if way:
        down, _right = DIRECTIONS[way]
        mover = replace(mover, row=1, column=mover.column) if down else replace(mover, column=1)
        others = [o for o in others if (o.column != mover.column if down else o.row != mover.row)]
    return (Actor(mover, moves=way), *(Actor(o) for o in others))


def _distinct(rng: random.Random, count: int) -> list[Shape]:
    """Shapes in different cells, no two of one name."""
    cells = rng.sample([(r, c) for r in range(3) for c in range(3)], count)
    names = rng.sample([(kind, color) for kind in KINDS for color in COLORS], count)
    return [
        Shape(kind, color, rng.choice(SIZES), row, column)
        for (kind, color), (row, column) in zip(names, cells, strict=True)
    ]


def direction(clip: Clip, rng: random.Random) -> tuple[str, str] | None:
    """Which way a shape moves."""
    if clip.kind != "moves":
        return None
    actor = clip.actors[0] if rng.random() < 0.85 else rng.choice(clip.actors)
    return f"Which way does the {actor.shape.name} move?", actor.moves or "it stands still"


def order(clip: Clip, rng: random.Random) -> tuple[str, str] | None:
    """Which of two shapes appears first."""
    late = [a for a in clip.actors if a.appears]
    if len(late) < 2:
        return None
    one, two = rng.sample(late, 2)
    first = one if one.appears < two.appears else two
    return f"Which appears first, the {one.shape.name} or the {two.shape.name}?", f"the {first.shape.name}"


def events(clip: Clip, _rng: random.Random) -> tuple[str, str] | None:
    """How many shapes appear while the clip runs."""
    if clip.kind == "moves":
        return None
    return "How many shapes appear during the video?", str(sum(a.appears > 0 for a in clip.actors))


def when(clip: Clip, rng: random.Random) -> tuple[str, str] | None:
    """At which second something happens."""
    asked = [(f"When does the {a.shape.name} appear?", a.appears) for a in clip.actors if a.appears]
    asked += [(f"When does the {a.shape.name} disappear?", a.leaves) for a in clip.actors if a.leaves is not None]
    asked += [(f"When does the {a.shape.name} change color?", a.turns[0]) for a in clip.actors if a.turns is not None]
    if not asked:
        return None
    text, second = rng.choice(asked)
    return text, f"at {second} s"


def change(clip: Clip, _rng: random.Random) -> tuple[str, str] | None:
    """What changed."""
    if clip.kind == "appears":
        return None
    for actor in clip.actors:
        if actor.turns is not None:
            return "What changes in the video?", f"the {actor.shape.name} turns {actor.turns[1]}"
        if actor.leaves is not None:
            return "What changes in the video?", f"the {actor.shape.name} disappears"
    mover = clip.actors[0]
    return "What changes in the video?", f"the {mover.shape.name} moves {mover.moves}" if mover.moves else "nothing"


def narration(clip: Clip, rng: random.Random) -> tuple[str, str]:
    """Every shape and what becomes of it, in random order. Taught, not tested, as listings of pictures are: a reader
    who sees part of it must find the shape by its looks, and its times by the shape."""
    parts = []
    for actor in rng.sample(clip.actors, len(clip.actors)):
        phrase = f"the {actor.shape.name} at the {actor.shape.position}"
        if actor.moves:
            phrase = f"the {actor.shape.name} moves {actor.moves}"
        elif actor.appears:
            phrase += f" appears at {actor.appears} s"
        elif actor.leaves is not None:
            phrase += f" disappears at {actor.leaves} s"
        elif actor.turns is not None:
            phrase += f" turns {actor.turns[1]} at {actor.turns[0]} s"
        else:
            phrase += " stays"
        parts.append(phrase)
    return "Tell what happens in any order.", ", ".join(parts)


VIDEO = Subject(
    draw_clip,
    lambda clip: (clip.frames(),),
    {"direction": direction, "order": order, "events": events, "when": when, "change": change},
)
NARRATION = Subject(draw_clip, lambda clip: (clip.frames(),), {"narration": narration})
