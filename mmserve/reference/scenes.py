"""Drawn scenes: shapes in a grid of nine cells, slightly rotated, over noise and distractors.

Everything is a pure function of a ``random.Random``: the same seed gives the same scene and picture.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
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
MAX_SHAPES = 4

#: Side of a drawn picture and of a cell in pixels.
PICTURE = 144
CELL = PICTURE // 3
BACKGROUND = (20, 20, 20)
#: Sides of small and large shapes in pixels, and how far (degrees) they are turned at most.
SIDES = {"small": (16, 20), "large": (31, 36)}
TURN = 12
MAX_NOISE = 8.0


@dataclass(frozen=True)
class Shape:
    """One drawn object: what it is, and which of the nine cells it is in."""

    kind: str
    color: str
    size: str
    row: int
    column: int

    @property
    def position(self) -> str:
        """Its cell in words, as in ``top left``."""
        return f"{ROWS[self.row]} {COLUMNS[self.column]}"

    @property
    def name(self) -> str:
        """Colour and kind, as in ``red circle``."""
        return f"{self.color} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """Shapes in reading order (top to bottom, left to right), at most one a cell, and their picture."""

    shapes: tuple[Shape, ...]
    picture: Image.Image

    def png(self) -> bytes:
        """The picture as PNG bytes."""
        return png(self.picture)


def png(picture: Image.Image) -> bytes:
    """A picture as PNG bytes."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def draw_shapes(rng: random.Random, *, most: int = MAX_SHAPES) -> tuple[Shape, ...]:
    """One to ``most`` shapes at random cells, in reading order."""
    cells = sorted(rng.sample([(r, c) for r in range(3) for c in range(3)], rng.randint(1, most)))
    return tuple(
        Shape(rng.choice(KINDS), rng.choice(tuple(COLORS)), rng.choice(SIZES), row, column) for row, column in cells
    )


def draw_scene(rng: random.Random) -> Scene:
    """A scene of one to ``MAX_SHAPES`` shapes."""
    shapes = draw_shapes(rng)
    return Scene(shapes, paint(shapes, rng))


def paint(shapes: Iterable[Shape], rng: random.Random) -> Image.Image:
    """A picture of ``shapes`` at random offsets in their cells, over lines, dots and noise."""
    picture = Image.new("RGB", (PICTURE, PICTURE), BACKGROUND)
    pen = ImageDraw.Draw(picture)
    distract(pen, rng)
    for shape in shapes:
        side = rng.randint(*SIDES[shape.size])
        x = shape.column * CELL + rng.randint(3, CELL - side - 3) + side / 2
        y = shape.row * CELL + rng.randint(3, CELL - side - 3) + side / 2
        stamp(pen, shape, (x, y), side, rng.uniform(-TURN, TURN), shade(shape.color, rng))
    return speckle(picture, rng)


def shade(color: str, rng: random.Random) -> tuple[int, int, int]:
    """A colour by name, a little lighter or darker in each channel."""
    red, green, blue = (max(0, min(255, channel + rng.randint(-12, 12))) for channel in COLORS[color])
    return red, green, blue


def stamp(
    pen: ImageDraw.ImageDraw,
    shape: Shape,
    center: tuple[float, float],
    side: float,
    degrees: float,
    fill: tuple[int, int, int],
) -> None:
    """Draw one shape of ``side`` pixels around ``center``, turned by ``degrees``."""
    x, y = center
    half = side / 2
    if shape.kind == "circle":
        pen.ellipse([x - half, y - half, x + half, y + half], fill=fill)
        return
    square = [(-half, -half), (half, -half), (half, half), (-half, half)]
    corners = square if shape.kind == "square" else [(0.0, -half), (half, half), (-half, half)]
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    pen.polygon([(x + c * a - s * b, y + s * a + c * b) for a, b in corners], fill=fill)


def distract(pen: ImageDraw.ImageDraw, rng: random.Random) -> None:
    """Up to three thin grey lines and as many dots: things that are no shapes."""
    for _ in range(rng.randint(0, 3)):
        grey = rng.randint(45, 85)
        ends = [rng.randint(0, PICTURE) for _ in range(4)]
        pen.line(ends, fill=(grey, grey, grey), width=rng.randint(1, 2))
    for _ in range(rng.randint(0, 3)):
        grey, x, y = rng.randint(60, 110), rng.randint(0, PICTURE), rng.randint(0, PICTURE)
        pen.ellipse([x - 2, y - 2, x + 2, y + 2], fill=(grey, grey, grey))


def speckle(picture: Image.Image, rng: random.Random) -> Image.Image:
    """The picture with Gaussian noise of a random strength."""
    strength = rng.uniform(0, MAX_NOISE)
    noise = np.random.default_rng(rng.getrandbits(64)).standard_normal((PICTURE, PICTURE, 3), np.float32)
    noisy = np.asarray(picture, np.float32) + strength * noise
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
