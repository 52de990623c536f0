"""What becomes of an image or clip on its way to a decoder: prepared for the tower, then visual tokens in their text.

One form holds for all models: one tile or many, patches in rows or in a grid, separators, tags, time stamps between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from mmserve.core.own_frames import OwnFrames
from mmserve.core.request import PixelRange
from mmserve.prune.base import Evidence, GridView

#: What a tower takes of an image or clip: ``pixels`` (fp32, any shape), which go to its device and type, and whatever
#: else its encoder needs of it later (a grid, sizes, seconds), which is kept unchanged.
Prepared = Mapping[str, Tensor]
#: Width, height and pillow's filter of a resize.
Resize = tuple[int, int, int]
#: Text among visual tokens: what the tokenizer makes of a string (special tokens too), or token ids.
Text = str | tuple[int, ...]


#: Longest side of an image over its shortest, where it is scaled by the one, or padded to the other, before it is cut.
LONGEST_SIDE = 64
#: Pixels along a side where an image is padded to a square: a line of 13 kB in a file would else take gigabytes.
LONGEST_PADDED = 8192


class CannotPrepare(ValueError):
    """An image or clip that this model cannot take, though it is a sound file; the message is the reason."""


def check_shape(image: Image.Image) -> None:
    """Raise ``CannotPrepare`` for a picture so thin that whole it would fill the memory once it is scaled."""
    if max(image.size) > LONGEST_SIDE * min(image.size):
        raise CannotPrepare(f"is {image.width} x {image.height} pixels; this model takes sides up to {LONGEST_SIDE}:1")


def check_padded(image: Image.Image) -> None:
    """Raise ``CannotPrepare`` for a picture that would fill the memory once it is padded to a square."""
    check_shape(image)
    if max(image.size) > LONGEST_PADDED:
        why = f"this model pads pictures to a square, and takes up to {LONGEST_PADDED} a side: scale it down"
        raise CannotPrepare(f"is {image.width} x {image.height} pixels; {why}")


@dataclass(frozen=True)
class Tile:
    """Visual tokens that are adjacent, and what a pruner may know of those that are patches."""

    tokens: Tensor  # [n, D]
    patches: Tensor  # int64 [rows * columns], ascending: which of the tokens are the patches of ``view``
    view: GridView


@dataclass(frozen=True)
class Grid:
    """Patches side by side among a picture's visual tokens, and what a pruner may know of them."""

    patches: Tensor  # int64 [rows * columns], ascending: which of the picture's tokens they are
    view: GridView


@dataclass(frozen=True)
class Picture:
    """One image or clip as the decoder sees it. Tokens of no grid (a class token, separators) are never pruned."""

    tokens: Tensor  # [n, D], in their order
    grids: tuple[Grid, ...]  # what is pruned, each by itself; no token is in two of them
    pieces: tuple[Text | int, ...]  # the row that it becomes: text, and how many of the n tokens come next
    #: Int64 ``[3, n]`` for decoders whose positions have several axes: time, row and column of each token, counted from
    #: the first that has no text in front of it.
    coordinates: Tensor | None = None


def blank(rows: int, columns: int) -> Tile:
    """A tile of so many patches, its tokens without width: its form before a tower has run."""
    count = rows * columns
    return Tile(torch.empty(count, 0), torch.arange(count), GridView(rows, columns, {}))


def joined(parts: Iterable[Tile | Text], coordinates: Tensor | None = None) -> Picture:
    """The picture of tiles one after the other, with text between them; one tile at least."""
    tokens: list[Tensor] = []
    grids: list[Grid] = []
    pieces: list[Text | int] = []
    start = 0
    for part in parts:
        if isinstance(part, Tile):
            tokens.append(part.tokens)
            grids.append(Grid(start + part.patches, part.view))
            pieces.append(len(part.tokens))
            start += len(part.tokens)
        else:
            pieces.append(part)
    return Picture(torch.cat(tokens), tuple(grids), tuple(pieces), coordinates)


class VisionEncoder(nn.Module):
    """Tower and projector: pictures to visual tokens in the decoder's embedding space."""

    #: Visual tokens an image becomes; 0 where it depends on the image.
    tokens_per_image: int
    #: Frames that a video is sampled at; 0 = takes no video.
    frames_per_video: int = 0
    #: Frames of each second of a video, at most; 0 = no fewer of a short one.
    frames_per_second: float = 0.0
    #: The frames of a video file that the model's own processor takes; None = ``frames_per_video``, spread evenly.
    own_frames: OwnFrames | None = None
    #: Whether ``prepare_among`` makes anything else than ``prepare``.
    tells_several: bool = False
    #: Whether ``prepare_clip`` and ``prepare`` make the same pixels of a picture: a tower then sees both in one run.
    frames_are_images: bool = False
    #: Seconds after which the times in front of a stream's frames begin again at 0; 0 = they never do.
    time_period: float = 0.0

    #: Frames of a clip that go through the tower together, and are seen alike whatever else the clip shows: then
    #: ``see_frames`` and ``clip_of`` are there, and a prepared clip is ``pixels`` ``[frames, ...]`` and ``seconds``.
    #: 0 = a clip must be seen whole.
    frames_at_once: int = 0
    #: Frames of a clip that become one grid of patches.
    frames_per_grid: int = 1

    def stream_time(self, number: int, seconds: float) -> int:
        """Where the ``number``-th grid of a stream, ``seconds`` after its first, lies in time; for decoders whose
        positions have several axes."""
        raise NotImplementedError

    def label_seconds(self, seconds: float) -> float:
        """The time in a frame's label, ``seconds`` after the beginning of its video."""
        return seconds % self.time_period if self.time_period else seconds

    @property
    def evidence(self) -> frozenset[Evidence]:
        """What the tower can show to pruners."""
        return frozenset()

    def settings(self) -> Mapping[str, Any]:
        """All that decides, beside weights and tokenizer, what becomes of a picture; ``processor`` of it, what
        ``prepare`` and ``prepare_clip`` make."""
        raise NotImplementedError

    @property
    def pixel_limits(self) -> tuple[PixelRange, PixelRange] | None:
        """The checkpoint's own pixels of images and of videos; None where a request cannot name others."""
        return None

    def within(self, images: PixelRange, videos: PixelRange) -> VisionEncoder:
        """The same encoder with other pixel limits, where it has ``pixel_limits``; None keeps the checkpoint's."""
        raise NotImplementedError

    def first_resize(self, *, clip: bool, among: bool) -> Resize | None:
        """The resize of the whole picture that ``prepare`` (``among``: ``prepare_among``; ``clip``: ``prepare_clip``)
        begins with, whatever its shape: who has done it already gets the same result. None = there is no such one."""
        return None

    def prepare(self, image: Image.Image) -> Prepared:
        """An RGB image, resized, cut and normalised as the checkpoint states; may raise ``CannotPrepare``."""
        raise NotImplementedError

    def prepare_among(self, image: Image.Image) -> Prepared:
        """As ``prepare``, an image that is one of several of its request."""
        return self.prepare(image)

    def prepare_clip(
        self, frames: Sequence[Image.Image], seconds: Sequence[float], *, length: float | None = None
    ) -> Prepared:
        """A clip's frames, ``seconds`` after its start: by default each as an image, and the ``seconds`` (float64).

        ``length``: seconds of the whole video; None where that is not known, as in a stream.
        """
        pixels = torch.cat([self.prepare(frame)["pixels"] for frame in frames])
        return {"pixels": pixels, "seconds": torch.tensor(seconds, dtype=torch.float64)}

    def pieces(self, one: Prepared, *, clip: bool) -> tuple[Text | int, ...]:
        """The row that ``see`` will make of an image or a clip (``Picture.pieces``), known before the tower runs."""
        raise NotImplementedError

    def see(self, batch: Sequence[Prepared], wanted: frozenset[Evidence], *, clip: bool) -> list[Picture]:
        """What the decoder sees of each of ``batch``, all of them images or (``clip``) all of them clips of one shape,
        with the ``wanted`` evidence. The evidence asked for does not change the tokens."""
        raise NotImplementedError

    def see_frames(self, some: Prepared, wanted: frozenset[Evidence]) -> list[Tile]:
        """The tiles of at most ``frames_at_once`` frames of a clip (``prepare_clip`` of them), with the ``wanted``
        evidence."""
        raise NotImplementedError

    def clip_of(self, tiles: Sequence[Tile], seconds: Tensor, length: float) -> Picture:
        """What ``see`` makes of a clip, from the tiles of all its frames, their ``seconds`` (float64), and the
        seconds of the whole video."""
        raise NotImplementedError

    def see_frame(
        self, frame: Prepared, image: Prepared | None, wanted: frozenset[Evidence]
    ) -> tuple[Picture, Picture]:
        """A clip of one frame with the ``wanted`` evidence, and the same picture as an image by itself.

        ``image``: what ``prepare`` made of the picture; None where ``frames_are_images``.
        """
        [clip] = self.see([frame], wanted, clip=True)
        [alone] = self.see([frame if image is None else image], frozenset(), clip=False)
        return clip, alone
