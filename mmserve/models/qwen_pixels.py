"""Images and clips as rows of patches, for the towers of Qwen's vision models: any size and aspect ratio.

An image is resized to whole patches, within the checkpoint's pixel limits. Patches are ordered so that the
``merge_size`` × ``merge_size`` patches of one visual token are adjacent; each has ``temporal_patch_size`` frames, which
for an image are copies.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmserve.core.request import PixelRange
from mmserve.errors import ConfigError
from mmserve.models.keys import Keys
from mmserve.models.picture import CannotPrepare, Prepared
from mmserve.models.processors import IMAGES, check_resizes, image_settings, of_frames, video_settings
from mmserve.models.vision import describe_processor

#: Maximum aspect ratio that the processors accept.
MOST_ELONGATED = 200
#: Default minimum and maximum pixels of a video frame: 128 and 768 visual tokens.
FRAME_TOKENS = (128, 768)
#: Defaults of ``max_video_tokens`` if a video processor caps pixels: of a frame, and of all frames of a clip.
CAPPED_TOKENS = (768, 128_000)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Pixel limits of a frame or, if ``together``, of all frames of a clip.

    ``capped``: visual tokens to which ``cap_pixels_per_frame`` limits a frame or, if not ``together``, all frames of a
    clip; 0 = no limit.
    """

    least: int
    most: int
    together: bool
    capped: int = 0


class QwenPixels:
    """The image processor of a checkpoint, and its limits for ``clips``; ``frames``: the processor of clips' frames."""

    def __init__(
        self, processor: Qwen2VLImageProcessorPil, clips: Limits, frames: Qwen2VLImageProcessorPil | None = None
    ) -> None:
        self.processor, self.clips, self.frames = processor, clips, frames or processor
        self.frames_a_patch = int(processor.temporal_patch_size)

    @property
    def limits(self) -> tuple[PixelRange, PixelRange]:
        """The checkpoint's pixel limits of images and videos."""
        size = self.processor.size
        return PixelRange(size["shortest_edge"], size["longest_edge"]), PixelRange(self.clips.least, self.clips.most)

    def within(self, images: PixelRange, videos: PixelRange) -> QwenPixels:
        """The same with other limits: None keeps a limit, and the lower one never exceeds the upper one."""
        own, own_clips = self.limits
        least, most = _within(images, own)
        processor = copy.copy(self.processor)
        processor.size = type(processor.size)(shortest_edge=least, longest_edge=most)
        least, most = _within(videos, own_clips)
        return QwenPixels(processor, replace(self.clips, least=least, most=most), self.frames)

    def settings(self) -> Mapping[str, Any]:
        """All settings that affect an image's pixels."""
        both = {"images": describe_processor(self.processor), "frames": describe_processor(self.frames)}
        return {**both, "clips": vars(self.clips)}

    def image(self, image: Image.Image) -> Prepared:
        """``pixels`` fp32 ``[patches, channels * frames * patch * patch]``, ``grid`` int64 ``[1, 3]``: temporal
        patches, rows and columns. Raises ``CannotPrepare`` for an extreme aspect ratio."""
        check_shape(image)
        made = self.processor(image, return_tensors="np")
        pixels = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
        return {"pixels": torch.from_numpy(pixels), "grid": torch.from_numpy(made["image_grid_thw"])}

    def clip(self, frames: Sequence[Image.Image], seconds: Sequence[float]) -> Prepared:
        """As ``image``, with ``seconds`` (float64): start and end of each temporal patch, ``[frames, 2]``.

        The last frame is repeated if the clip's last temporal patch would be incomplete.
        """
        check_shape(frames[0])
        width, height = frames[0].size
        depth, p = self.frames_a_patch, self.frames
        rows, columns = fitted(
            height, width, len(frames), factor=p.patch_size * p.merge_size, depth=depth, limits=self.clips
        )
        missing = -len(frames) % depth
        times = torch.tensor([*seconds, *[seconds[-1]] * missing], dtype=torch.float64).view(-1, depth)
        flat = [self._patches(frame.resize((columns, rows), p.resample)) for frame in frames]
        flat += flat[-1:] * missing
        pixels = torch.cat([torch.stack(flat[i : i + depth], 2).flatten(1) for i in range(0, len(flat), depth)])
        grid = torch.tensor([[len(times), rows // p.patch_size, columns // p.patch_size]])
        return {"pixels": pixels, "grid": grid, "seconds": times[:, [0, -1]]}

    def _patches(self, frame: Image.Image) -> Tensor:
        """One frame's part of patches, fp32 ``[patches, channels, patch * patch]``."""
        made = self.frames(frame, do_resize=False, return_tensors="np")["pixel_values"]
        area = self.processor.patch_size**2
        whole = torch.from_numpy(np.ascontiguousarray(made, dtype=np.float32))
        return whole.view(len(whole), -1, self.frames_a_patch, area)[:, :, 0]


def _within(asked: PixelRange, own: PixelRange) -> tuple[int, int]:
    assert own.least is not None and own.most is not None
    most = own.most if asked.most is None else asked.most
    return min(own.least if asked.least is None else asked.least, most), most


def check_shape(image: Image.Image) -> None:
    """Raises ``CannotPrepare`` for an extreme aspect ratio."""
    long, short = max(image.size), min(image.size)
    if long > MOST_ELONGATED * short:
        raise CannotPrepare(
            f"is {image.size[0]} x {image.size[1]} pixels; the model takes pictures whose long side is at most "
            f"{MOST_ELONGATED} times the short one: crop it"
        )


def fitted(height: int, width: int, frames: int, *, factor: int, depth: int, limits: Limits) -> tuple[int, int]:
    """Height and width in pixels, multiples of ``factor``, that a clip's frames are resized to.

    About the same aspect ratio, with the most pixels within ``limits``: ``resize`` of transformers' video processors of
    Qwen2-VL or, if limits are ``together`` for all frames, of Qwen3-VL, which counts whole temporal patches of
    ``depth`` frames.
    """
    most, counted = _most(limits, frames, factor=factor, depth=depth), 1
    if limits.together:
        frames = max(frames, depth)
        counted = round(frames / depth) * depth
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
    else:
        frames = 1
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if counted * rows * columns > most:
        shrink = math.sqrt(frames * height * width / most)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif counted * rows * columns < limits.least:
        grow = math.sqrt(limits.least / (frames * height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def _most(limits: Limits, frames: int, *, factor: int, depth: int) -> int:
    """The maximum pixels of a clip of ``frames`` (see ``Limits.most``)."""
    if not limits.capped:
        return limits.most
    capped, least = limits.capped * factor**2, int(limits.least * 1.05)
    if limits.together:
        return max(min(capped, limits.most // frames), least) * frames
    return max(min(limits.most, int(capped * 0.9) * depth // frames), least)


def load_pixels(folder: Path, tower: Any, *, together: bool) -> QwenPixels:
    """The processor described by ``preprocessor_config.json``, or ``processor_config.json`` of transformers 5, for a
    ``tower`` (its configuration). Limits for videos come from their own file; for the defaults see ``FRAME_TOKENS``.

    Raises ``ConfigError`` if there is none, or if it does not fit the tower.
    """
    path, settings = image_settings(folder)
    if settings is None:
        raise ConfigError(f"{folder} has no {IMAGES}: the vision tower's image processor is unknown")
    kept = {k: v for k, v in settings.items() if k not in ("image_processor_type", "processor_class")}
    try:
        processor = Qwen2VLImageProcessorPil(**kept)
        made = processor(Image.new("RGB", (64, 64)), return_tensors="np")["pixel_values"]
    except (TypeError, ValueError, AttributeError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"{path}: {error}") from error
    check_resizes(processor, folder)
    fitting = (("patch_size", "patch_size"), ("temporal_patch_size",) * 2, ("merge_size", "spatial_merge_size"))
    for name, of_tower in fitting:
        if getattr(processor, name) != getattr(tower, of_tower):
            raise ConfigError(f"{path}: {name} must be the tower's {getattr(tower, of_tower)}")
    if made.shape[1] != tower.in_channels * tower.temporal_patch_size * tower.patch_size**2:
        raise ConfigError(f"{path} makes patches of {made.shape[1]} numbers, which the tower does not take")
    factor = tower.patch_size * tower.spatial_merge_size
    video_path, video = video_settings(folder)
    of_clips = {name: (getattr(tower, of_tower), None) for name, of_tower in fitting}
    Keys(video or {}, video_path).check({**of_clips, "do_resize": (True, None)})
    try:
        frames = Qwen2VLImageProcessorPil(**{**kept, **of_frames(video, without=("size", "max_image_size"))})
    except (TypeError, ValueError, AttributeError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"{video_path}: {error}") from error
    return QwenPixels(processor, _clip_limits(folder, factor, together=together), frames)


def _clip_limits(folder: Path, factor: int, *, together: bool) -> Limits:
    path, settings = video_settings(folder)
    least, most = (tokens * factor**2 for tokens in FRAME_TOKENS)
    size = (settings or {}).get("size") or {}
    if not isinstance(size, Mapping):
        raise ConfigError(f"{path}: size must be an object, not {size!r}")
    given = Keys({**(settings or {}), **size}, path)
    usual = CAPPED_TOKENS[0 if together else 1]
    capped = given.integer("max_video_tokens", default=usual) if given.flag("cap_pixels_per_frame") else 0
    old = () if together else ("min_pixels", "max_pixels")  # Qwen3-VL's class does not read these
    return Limits(
        least=given.integer(*old[:1], "shortest_edge", default=least),
        most=given.integer(*old[1:], "longest_edge", default=most),
        together=together,
        capped=capped,
    )
