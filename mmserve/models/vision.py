"""CLIP-style vision towers with LLaVA's MLP projector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from mmserve.models.anyres import Anyres
from mmserve.models.evidence import OF_CLASS, OF_PATCHES, Watched, layers_of
from mmserve.models.picture import (
    Picture,
    Prepared,
    Resize,
    Text,
    Tile,
    VisionEncoder,
    check_padded,
    check_shape,
    joined,
)
from mmserve.models.processors import pixels_of
from mmserve.models.projectors import (
    NewlineProjector,
    pool_grid,
    pooled_evidence,
    pooled_side,
    separated,
)
from mmserve.models.tower_pixels import TowerPixels
from mmserve.prune.base import Evidence, GridView

#: Maximum timestamp (seconds) that models with timestamps were trained with.
TIME_PERIOD = 8.0
#: Tiles that go through a tower together: the outputs of all its layers are in memory meanwhile.
_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """The visual tokens of clips, as in LLaVA-NeXT's ``llava_arch.py``, with the additional options ``frames`` and
    ``time``.

    ``frames``: number of sampled frames; the grid of each one's projected patches is pooled over squares of ``stride``
    by ``mode`` (``average``, ``max`` or ``bilinear``). ``newline``: where the checkpoint's separator, if it has one, is
    inserted: after every row of a frame (``grid``), every frame (``frame``), the clip (``one_token``) or nowhere
    (``no_token``). ``time``: a format string with ``seconds`` (an integer) for the text before each frame; empty =
    none. ``features``: pooling is applied before the projector, not after it.
    """

    frames: int
    stride: int = 2
    mode: str = "bilinear"
    newline: str = "one_token"
    time: str = ""
    features: bool = False


class LlavaVision(VisionEncoder):
    """A tower, one layer's patch features, and LLaVA's ``mlpNx_gelu`` projector.

    ``tower`` is a ``ClipTower``, or a vision model of transformers with the same layers; ``processor`` a pillow-backed
    image processor; ``select_layer``: index of hidden states as in LLaVA (-2 = the second last layer); ``has_cls``:
    whether the first position is a class token, which LLaVA drops. ``video`` is None without video support, ``anyres``
    is None if an image is one tile; otherwise ``processor`` returns ``[1, T, 3, height, width]``, and ``frames`` is the
    processor of a clip's frames; ``several``, if given, makes one tile of an image of a request with several. ``pool``:
    stride and mode of pooling an image's patches, as in ``PooledProjector``. ``later``: the tower's layers after those
    that run, for pruners; None = the checkpoint lacks them.
    """

    def __init__(
        self,
        tower: nn.Module,
        projector: nn.Module,
        processor: Any,
        *,
        select_layer: int,
        has_cls: bool,
        video: VideoSettings | None = None,
        anyres: Anyres | None = None,
        frames: Any | None = None,
        several: Any | None = None,
        pool: tuple[int, str] | None = None,
        later: nn.ModuleList | None = None,
    ) -> None:
        super().__init__()
        self.tower, self.projector, self.processor = tower, projector, processor
        self.select_layer, self.has_cls = select_layer, has_cls
        self.video = video
        self.frames_per_video = video.frames if video is not None else 0
        config: Any = tower.config
        self.anyres, self.frames, self._several = anyres, frames or processor, several
        self.tells_several = several is not None
        self.frames_are_images = anyres is None and self.frames is processor
        self.frames_at_once = _AT_ONCE
        self._layers, self.later = layers_of(tower), later
        self.pool, self._side = pool, int(config.image_size) // int(config.patch_size)
        self._cells = self._side if pool is None else pooled_side(self._side, *pool)
        self.tokens_per_image = 0 if anyres is not None else self._cells**2

    def first_resize(self, *, clip: bool, among: bool) -> Resize | None:
        if clip:
            return _first_resize(self.frames)
        if among and self._several is not None:
            return _first_resize(self._several)
        return _first_resize(self.processor) if self.anyres is None else None

    def prepare(self, image: Image.Image) -> Prepared:
        if self.anyres is None:
            _check(self.processor, image)
            return {"pixels": _pixels(self.processor, image)}
        return {"pixels": _pixels(self.processor, image)[0], "size": torch.tensor([image.height, image.width])}

    def prepare_among(self, image: Image.Image) -> Prepared:
        if self._several is None:
            return self.prepare(image)
        _check(self._several, image)
        return {"pixels": _pixels(self._several, image)}

    def prepare_clip(
        self, frames: Sequence[Image.Image], seconds: Sequence[float], *, length: float | None = None
    ) -> Prepared:
        for frame in frames:
            _check(self.frames, frame)
        pixels = torch.cat([_pixels(self.frames, frame) for frame in frames])
        return {"pixels": pixels, "seconds": torch.tensor(seconds, dtype=torch.float64)}

    @property
    def evidence(self) -> frozenset[Evidence]:
        if not self._first:
            return OF_PATCHES
        return OF_PATCHES | OF_CLASS - (frozenset({Evidence.LAST_CLS_ROW}) if self.later is None else frozenset())

    @property
    def _first(self) -> int:
        """Index of the first patch among the tower's positions."""
        return int(hasattr(self.tower.get_submodule("embeddings"), "class_embedding"))

    def settings(self) -> Mapping[str, Any]:
        tower: Any = self.tower
        return {
            "processor": {
                "images": describe_processor(self.processor),
                "frames": describe_processor(self.frames),
                "several": None if self._several is None else describe_processor(self._several),
                "anyres": None if self.anyres is None else asdict(self.anyres),
            },
            "tower": tower.config.to_dict(),
            "select_layer": self.select_layer,
            "has_cls": self.has_cls,
            "video": None if self.video is None else asdict(self.video),
            "pool": self.pool,
        }

    def forward(self, pixels: Tensor) -> Tensor:
        """Visual tokens ``[B, tokens_per_image, D]`` of ``pixels [B, 3, height, width]``, each an image's single
        tile."""
        return self.projector(self._features(self._hidden(pixels)))

    def pieces(self, one: Prepared, *, clip: bool) -> tuple[Text | int, ...]:
        if clip:
            counts = self._frame_counts(len(one["pixels"]))
            return tuple(part for i, n in enumerate(counts) for part in (self.frame_text(float(one["seconds"][i])), n))
        if self.anyres is None:
            return (self.tokens_per_image,)
        if "size" not in one:
            return (self._cells**2 + 1,)
        height, width = one["size"].tolist()
        return (self.anyres.count(self._cells, height, width),)

    def encode(self, batch: Sequence[Prepared], wanted: frozenset[Evidence], *, clip: bool) -> list[Picture]:
        if clip:
            return [self._encode_clip(one, wanted) for one in batch]
        features, seen = self._look(torch.cat([one["pixels"] for one in batch]), wanted)
        if self.pool is not None:
            seen = {kind: pooled_evidence(values, *self.pool) for kind, values in seen.items()}
        if self.anyres is None:
            return [joined([tile]) for tile in self._images(features, seen)]
        pictures, start = [], 0
        for one in batch:
            own = slice(start, start + len(one["pixels"]))
            pictures.append(self._tiles(one, features[own], {kind: values[own] for kind, values in seen.items()}))
            start = own.stop
        return pictures

    def _encode_clip(self, one: Prepared, wanted: frozenset[Evidence]) -> Picture:
        parts = ({"pixels": some} for some in one["pixels"].split(_AT_ONCE))
        return self.clip_of([tile for part in parts for tile in self.encode_frames(part, wanted)], one["seconds"], 0.0)

    def encode_frames(self, some: Prepared, wanted: frozenset[Evidence]) -> list[Tile]:
        return self._frames(*self._watched_features(some["pixels"], wanted))

    def clip_of(self, tiles: Sequence[Tile], seconds: Tensor, length: float) -> Picture:
        tiles = list(tiles)
        if self._newline_at_end and isinstance(self.projector, NewlineProjector):
            newline = self.projector.newline.to(tiles[-1].tokens)
            tiles[-1] = replace(tiles[-1], tokens=torch.cat([tiles[-1].tokens, newline[None]]))
        times = (self.frame_text(float(at)) for at in seconds)
        return joined(part for pair in zip(times, tiles, strict=True) for part in pair)

    @property
    def _newline_at_end(self) -> bool:
        """Whether one separator follows a clip's last frame."""
        position = None if self.video is None else self.video.newline
        return isinstance(self.projector, NewlineProjector) and position not in ("no_token", "grid", "frame")

    def encode_frame(
        self, frame: Prepared, image: Prepared | None, wanted: frozenset[Evidence]
    ) -> tuple[Picture, Picture]:
        if image is not None:
            return super().encode_frame(frame, image, wanted)
        features, seen = self._look(frame["pixels"], wanted)
        [alone] = self._images(features, {})
        return self.clip_of(self._frames(features, seen), frame["seconds"], 0.0), joined([alone])

    def _look(self, pixels: Tensor, wanted: frozenset[Evidence]) -> tuple[Tensor, Mapping[Evidence, Tensor]]:
        """The features of tiles ``[B, 3, height, width]``, and their evidence."""
        features: list[Tensor] = []
        seen: list[Mapping[Evidence, Tensor]] = []
        for some in pixels.split(_AT_ONCE):
            made, shown = self._watched_features(some, wanted)
            features.append(made)
            seen.append(shown)
        if len(seen) == 1:
            return features[0], seen[0]
        return torch.cat(features), {kind: torch.cat([one[kind] for one in seen]) for kind in wanted}

    def _watched_features(
        self, pixels: Tensor, wanted: frozenset[Evidence]
    ) -> tuple[Tensor, Mapping[Evidence, Tensor]]:
        hidden, shown = self._watched(pixels, wanted)
        return self._features(hidden), shown

    def _watched(
        self, pixels: Tensor, wanted: frozenset[Evidence]
    ) -> tuple[Sequence[Tensor], Mapping[Evidence, Tensor]]:
        """The tower's hidden states, and the evidence of that run."""
        if not wanted:
            return self._hidden(pixels), {}
        watched = Watched(self._layers, self.select_layer, wanted, later=tuple(self.later or ()))
        with watched.running():
            hidden = self._hidden(pixels)
        return hidden, watched.evidence(hidden, first=self._first)

    def _tiles(self, one: Prepared, features: Tensor, seen: Mapping[Evidence, Tensor]) -> Picture:
        if "size" not in one:
            return joined(self._images(features, seen))
        project = self.projector
        assert self.anyres is not None and isinstance(project, NewlineProjector)
        height, width = one["size"].tolist()
        return self.anyres.picture(project.projector(features), seen, project.newline, height, width)

    def _frame_counts(self, frames: int) -> list[int]:
        """Number of tokens of each frame of a clip, including separators."""
        if self.video is None:
            raise NotImplementedError("this model takes no videos")
        side = pooled_side(self._side, self.video.stride, self.video.mode)
        newline = torch.empty(0) if isinstance(self.projector, NewlineProjector) else None
        blanks = torch.empty(frames, side, side, 0)
        return [len(tokens) for tokens in separated(blanks, newline, self.video.newline)]

    def _images(self, features: Tensor, seen: Mapping[Evidence, Tensor]) -> list[Tile]:
        tokens = self.projector(features)
        side = self._cells
        first = features.shape[1] - self._side**2  # after a class token, if it is kept
        patches = torch.arange(side * side) + first
        return [
            Tile(own, patches, GridView(side, side, {kind: values[i] for kind, values in seen.items()}))
            for i, own in enumerate(tokens)
        ]

    def _frames(self, features: Tensor, seen: Mapping[Evidence, Tensor]) -> list[Tile]:
        """Frames of a clip, without a separator at its end; evidence is pooled like the patches."""
        if self.video is None:
            raise NotImplementedError("this model takes no videos")
        video, project = self.video, self.projector
        newline: Tensor | None = None
        if isinstance(project, NewlineProjector):
            newline, project = project.newline, project.projector
        if video.features:
            grid_FHWD = project(pool_grid(features, video.stride, video.mode))
        else:
            grid_FHWD = pool_grid(project(features), video.stride, video.mode)
        position = "no_token" if self._newline_at_end else video.newline
        tokens = separated(grid_FHWD, None if newline is None else newline.to(grid_FHWD.dtype), position)
        pooled = {kind: pooled_evidence(values, video.stride, video.mode) for kind, values in seen.items()}
        _frames, rows, columns, _width = grid_FHWD.shape
        patches = torch.arange(rows * columns)
        if newline is not None and video.newline == "grid":
            patches = patches + patches // columns
        return [
            Tile(own, patches, GridView(rows, columns, {kind: values[i] for kind, values in pooled.items()}))
            for i, own in enumerate(tokens)
        ]

    @property
    def time_period(self) -> float:  # type: ignore[override]
        return TIME_PERIOD if self.video is not None and self.video.time else 0.0

    def frame_text(self, seconds: float) -> str:
        """Text before a frame ``seconds`` after the clip's start."""
        return self.video.time.format(seconds=int(seconds)) if self.video is not None else ""

    def _hidden(self, pixels: Tensor) -> Sequence[Tensor]:
        hidden: Sequence[Tensor] = self.tower(pixels, output_hidden_states=True).hidden_states
        return hidden

    def _features(self, hidden: Sequence[Tensor]) -> Tensor:
        selected = hidden[self.select_layer]
        return selected[:, 1:] if self.has_cls else selected


def _check(processor: Any, image: Image.Image) -> None:
    """Raises ``CannotPrepare`` for a shape that would take too much memory before it becomes one tile."""
    own = hasattr(processor, "pad_to_square") and processor.do_pad  # transformers' LlavaImageProcessor
    if own or getattr(processor, "pads", False):
        check_padded(image)
    elif not getattr(getattr(processor, "size", None), "height", None):  # or else the shape is lost at once
        check_shape(image)


def _first_resize(processor: Any) -> Resize | None:
    """``VisionEncoder.first_resize`` for a processor of transformers, or a wrapper of one."""
    if isinstance(processor, TowerPixels):
        return processor.first_resize()
    if getattr(processor, "pads", False):
        return None
    from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil  # seconds, and imported with a processor

    if type(processor) not in (CLIPImageProcessorPil, SiglipImageProcessorPil) or not processor.do_resize:
        return None  # others first pad or crop
    size, resample = processor.size, processor.resample
    if not (size.height and size.width and isinstance(resample, int)) or size.shortest_edge or size.max_height:
        return None  # sides that depend on the image's, or a filter that pillow lacks
    return int(size.width), int(size.height), int(resample)


def _pixels(processor: Any, image: Image.Image) -> Tensor:
    return pixels_of(processor(image, return_tensors="np"))


def describe_processor(processor: Any) -> dict[str, Any]:
    """The settings of a processor of transformers, or of a wrapper of one, as plain values."""
    inner = getattr(processor, "processor", None)
    values = describe_processor(inner) if inner is not None else dict(processor.to_dict())
    return {"class": type(processor).__name__, "settings": values}
