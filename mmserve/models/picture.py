"""The representation of images and clips: prepared for the tower, then visual tokens with text between them.

Common to all models: one tile or several, patches in rows or in a grid, separators, tags, timestamps.
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

#: A tower's input for an image or clip: ``pixels`` (fp32, any shape), which are moved to its device and dtype, and
#: other tensors that its encoder needs later (a grid, sizes, seconds), which are kept unchanged.
Prepared = Mapping[str, Tensor]
#: Width, height and pillow's filter of a resize.
Resize = tuple[int, int, int]
#: Text between visual tokens: a string to be tokenised (including special tokens), or token ids.
Text = str | tuple[int, ...]


#: Maximum aspect ratio of an image that is scaled by one side, or padded to the other, before it is cropped.
LONGEST_SIDE = 64
#: Maximum side of an image that is padded to a square: otherwise a 13 kB file with a thin line could take gigabytes.
LONGEST_PADDED = 8192


class CannotPrepare(ValueError):
    """A valid image or clip that this model cannot process; the message has the reason."""


def check_shape(image: Image.Image) -> None:
    """Raises ``CannotPrepare`` for an image so thin that scaling it would take too much memory."""
    if max(image.size) > LONGEST_SIDE * min(image.size):
        raise CannotPrepare(f"is {image.width} x {image.height} pixels; this model takes sides up to {LONGEST_SIDE}:1")


def check_padded(image: Image.Image) -> None:
    """Raises ``CannotPrepare`` for an image that would take too much memory when padded to a square."""
    check_shape(image)
    if max(image.size) > LONGEST_PADDED:
        why = f"this model pads pictures to a square, and takes up to {LONGEST_PADDED} a side: scale it down"
        raise CannotPrepare(f"is {image.width} x {image.height} pixels; {why}")


@dataclass(frozen=True)
class Tile:
    """Adjacent visual tokens, with the evidence for pruners of those that are patches."""

    tokens: Tensor  # [n, D]
    patches: Tensor  # int64 [rows * columns], ascending: indices of the tokens that are patches of ``view``
    view: GridView


@dataclass(frozen=True)
class Grid:
    """A grid of patches among an image's visual tokens, with the evidence for pruners."""

    patches: Tensor  # int64 [rows * columns], ascending: their indices among the image's tokens
    view: GridView


@dataclass(frozen=True)
class Picture:
    """The decoder's input for one image or clip. Tokens outside of grids (class token, separators) are never pruned."""

    tokens: Tensor  # [n, D], in their order
    grids: tuple[Grid, ...]  # pruned separately; they share no tokens
    pieces: tuple[Text | int, ...]  # its row: texts, and numbers of consecutive tokens
    #: Int64 ``[3, n]`` for decoders with several position axes: time, row and column of each token, relative to the
    #: first one without text before it.
    coordinates: Tensor | None = None


def blank(rows: int, columns: int) -> Tile:
    """A tile of ``rows`` × ``columns`` patches with tokens of width 0: its form before the tower runs."""
    count = rows * columns
    return Tile(torch.empty(count, 0), torch.arange(count), GridView(rows, columns, {}))


def joined(parts: Iterable[Tile | Text], coordinates: Tensor | None = None) -> Picture:
    """The picture of consecutive tiles with text between them; at least one tile."""
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
    """Tower and projector: images to visual tokens in the decoder's embedding space."""

    #: Visual tokens of an image; 0 if their number varies.
    tokens_per_image: int
    #: Number of frames sampled from a video; 0 = no videos.
    frames_per_video: int = 0
    #: Maximum sampled frames per second of a video; 0 = unlimited.
    frames_per_second: float = 0.0
    #: Frame sampling of the model's own processor; None = ``frames_per_video``, evenly spaced.
    own_frames: OwnFrames | None = None
    #: Whether ``prepare_among`` differs from ``prepare``.
    tells_several: bool = False
    #: Whether ``prepare_clip`` and ``prepare`` give the same pixels: one run of the tower then serves both.
    frames_are_images: bool = False
    #: Period (seconds) after which the timestamps of a stream's frames restart at 0; 0 = never.
    time_period: float = 0.0

    #: Frames of a clip that go through the tower together, independently of other frames: then ``encode_frames`` and
    #: ``clip_of`` are implemented, and a prepared clip is ``pixels`` ``[frames, ...]`` and ``seconds``. 0 = a clip must
    #: be encoded whole.
    frames_at_once: int = 0
    #: Frames of a clip that form one grid of patches.
    frames_per_grid: int = 1

    def stream_time(self, number: int, seconds: float) -> int:
        """The time position of the ``number``-th grid of a stream, ``seconds`` after its first; for decoders with
        several position axes."""
        raise NotImplementedError

    def label_seconds(self, seconds: float) -> float:
        """The time in a frame's label, ``seconds`` after the start of its video."""
        return seconds % self.time_period if self.time_period else seconds

    @property
    def evidence(self) -> frozenset[Evidence]:
        """The kinds of evidence that the tower provides."""
        return frozenset()

    def settings(self) -> Mapping[str, Any]:
        """All settings that affect an image's tokens, besides weights and tokenizer; ``processor``: those that affect
        ``prepare`` and ``prepare_clip``."""
        raise NotImplementedError

    @property
    def pixel_limits(self) -> tuple[PixelRange, PixelRange] | None:
        """The checkpoint's pixel limits of images and videos; None if a request cannot change them."""
        return None

    def within(self, images: PixelRange, videos: PixelRange) -> VisionEncoder:
        """The same encoder with other pixel limits, if it has ``pixel_limits``; None keeps the checkpoint's."""
        raise NotImplementedError

    def first_resize(self, *, clip: bool, among: bool) -> Resize | None:
        """The resize of the whole image with which ``prepare`` begins for any shape (``among``: ``prepare_among``;
        ``clip``: ``prepare_clip``): doing it earlier gives the same result. None = there is none."""
        return None

    def prepare(self, image: Image.Image) -> Prepared:
        """An RGB image, resized, cropped and normalised with the checkpoint's settings; may raise ``CannotPrepare``."""
        raise NotImplementedError

    def prepare_among(self, image: Image.Image) -> Prepared:
        """As ``prepare``, for one of several images of a request."""
        return self.prepare(image)

    def prepare_clip(
        self, frames: Sequence[Image.Image], seconds: Sequence[float], *, length: float | None = None
    ) -> Prepared:
        """A clip's frames, ``seconds`` after its start: by default each as an image, and the ``seconds`` (float64).

        ``length``: duration of the whole video (seconds); None if unknown, as in a stream.
        """
        pixels = torch.cat([self.prepare(frame)["pixels"] for frame in frames])
        return {"pixels": pixels, "seconds": torch.tensor(seconds, dtype=torch.float64)}

    def pieces(self, one: Prepared, *, clip: bool) -> tuple[Text | int, ...]:
        """The row of an image or clip (``Picture.pieces``), known before the tower runs."""
        raise NotImplementedError

    def encode(self, batch: Sequence[Prepared], wanted: frozenset[Evidence], *, clip: bool) -> list[Picture]:
        """The pictures of ``batch``, all of them images or (``clip``) all of them clips of the same shape, with the
        ``wanted`` evidence, which does not affect the tokens."""
        raise NotImplementedError

    def encode_frames(self, some: Prepared, wanted: frozenset[Evidence]) -> list[Tile]:
        """The tiles of at most ``frames_at_once`` frames of a clip (from ``prepare_clip``), with the ``wanted``
        evidence."""
        raise NotImplementedError

    def clip_of(self, tiles: Sequence[Tile], seconds: Tensor, length: float) -> Picture:
        """The result of ``see`` for a clip, from the tiles of all its frames, their ``seconds`` (float64), and the
        duration of the whole video (seconds)."""
        raise NotImplementedError

    def encode_frame(
        self, frame: Prepared, image: Prepared | None, wanted: frozenset[Evidence]
    ) -> tuple[Picture, Picture]:
        """A clip of one frame with the ``wanted`` evidence, and the same frame as an image.

        ``image``: the result of ``prepare``; None if ``frames_are_images``.
        """
        [clip] = self.encode([frame], wanted, clip=True)
        [alone] = self.encode([frame if image is None else image], frozenset(), clip=False)
        return clip, alone
