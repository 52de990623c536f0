"""Images and clips for InternVL: tiles according to the image's aspect ratio, then a thumbnail; numbered frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import GotOcr2ImageProcessorPil, InternVLVisionModel
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

from mmserve.errors import ConfigError
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.evidence import OF_CLASS, OF_PATCHES, AttentionModules
from mmserve.models.keys import Keys
from mmserve.models.nested import load_part, read_processor
from mmserve.models.picture import Picture, Prepared, Text, Tile, joined
from mmserve.models.processors import check_resizes, of_frames, pixels_of, video_settings
from mmserve.models.shuffle import ShuffledTower, ShuffledVision, with_parts

_BEGIN, _END = "<img>", "</img>"
#: A clip's text in the chat template, tokenised together with the preceding text.
CLIP_BEGIN = "Frame"
#: Default number of frames of a video, as in InternVL's own examples.
FRAMES = 8
#: Maximum tiles of an image.
_MOST_TILES = 1024


class InternVision(ShuffledVision):
    """An image processor that cuts tiles, followed by ``tower``; videos are sampled at ``frames_per_video`` frames."""

    frame = (_BEGIN, _END)
    evidence = OF_PATCHES | OF_CLASS

    def __init__(self, tower: ShuffledTower, processor: Any, frames: Any | None, frames_per_video: int) -> None:
        super().__init__(tower, processor, frames)
        self.frames_per_video = frames_per_video

    def prepare(self, image: Image.Image) -> Prepared:
        """``pixels [tiles, 3, side, side]``, the thumbnail last if there are several tiles; ``grid``: rows and columns
        of the others."""
        p = self._processor
        size = (p.size.height, p.size.width)
        columns, rows = get_optimal_tiled_canvas((image.height, image.width), size, p.min_patches, p.max_patches)
        return {"pixels": pixels_of(p([image], return_tensors="np")), "grid": torch.tensor([rows, columns])}

    def prepare_clip(
        self, frames: Sequence[Image.Image], seconds: Sequence[float], *, length: float | None = None
    ) -> Prepared:
        """``pixels [frames, 3, side, side]`` and the frames' ``seconds``."""
        assert self._frames is not None
        pixels = pixels_of(self._frames(list(frames), return_tensors="np"))
        return {"pixels": pixels, "seconds": torch.tensor(seconds, dtype=torch.float64)}

    def clip_of(self, tiles: Sequence[Tile], seconds: Tensor, length: float) -> Picture:
        return joined(_clip(tiles))

    def row(self, tiles: Sequence[Tile], one: Prepared, *, clip: bool) -> Sequence[Tile | Text]:
        if clip:
            return _clip(tiles)
        grid = one["grid"].tolist() if len(tiles) > 1 else (0, 0)
        return [_BEGIN, *with_parts(tiles, *grid), _END]


def load_intern_vision(checkpoint: Checkpoint, target: Target, config: Any, prefix: str) -> InternVision:
    """Tower, projector and processors of a checkpoint, whose tensor names begin with ``prefix``; raises
    ``ConfigError``."""
    folder = checkpoint.folder
    processor = read_processor(GotOcr2ImageProcessorPil, folder, crop_to_patches=True)
    check_fit(folder, config, processor)
    tower = load_part(
        lambda: InternVLVisionModel._from_config(config.vision_config), f"{prefix}vision_tower.", checkpoint, target
    )
    projector = load_part(
        lambda: InternVLMultiModalProjector(config), f"{prefix}multi_modal_projector.", checkpoint, target
    )
    frames = video_frames(folder)
    one_tile = _frame_processor(folder, config) if frames else None
    return InternVision(shuffled_tower(config, tower, projector), processor, one_tile, frames)


def check_fit(folder: Path, config: Any, processor: Any) -> None:
    """Raises ``ConfigError`` if ``config`` (``InternVLConfig``) is not supported, or does not match the tiles of
    ``processor``."""
    check_resizes(processor, folder)
    least, most = processor.min_patches, processor.max_patches
    if type(least) is not int or type(most) is not int or not 0 < least <= most <= _MOST_TILES:
        raise ConfigError(
            f"{folder}: min_patches = {least!r} and max_patches = {most!r} of the image processor must be 1 to "
            f"{_MOST_TILES}, in this order"
        )
    keys, vision = Keys(config.to_dict(), folder / "config.json"), config.vision_config
    keys.check({"vision_feature_select_strategy": ("default",), "downsample_ratio": (0.5, 0.25, 1.0)})
    keys.layer("vision_feature_layer", config.vision_feature_layer, vision.num_hidden_layers)
    size = (processor.size.height, processor.size.width)
    if tuple(vision.image_size) != size or size[0] != size[1]:
        raise ConfigError(f"{folder}: the image processor makes tiles of {size}, the tower takes {vision.image_size}")
    factor = int(1 / config.downsample_ratio)
    if size[0] % (vision.patch_size[0] * factor) or vision.patch_size[0] != vision.patch_size[1]:
        raise ConfigError(
            f"{folder}: tiles of {size[0]} pixels are not whole squares of {factor} x {factor} patches of "
            f"{vision.patch_size}"
        )


def shuffled_tower(config: Any, tower: nn.Module, projector: nn.Module) -> ShuffledTower:
    """``tower`` and ``projector``, combined by pixel shuffle as in ``config`` (``InternVLConfig``)."""
    inner: Any = tower.get_submodule("encoder.layer")
    attentions = [layer.attention for layer in inner]  # norms, or identities, follow queries and keys
    layers = [AttentionModules(a.q_norm, a.k_norm, a.num_heads, a.scale) for a in attentions]
    select, factor = config.vision_feature_layer, int(1 / config.downsample_ratio)
    from_end = select if select < 0 else select - len(layers) - 1
    return ShuffledTower(tower, projector, layers, factor=factor, select_layer=from_end, first=1)


def video_frames(folder: Path) -> int:
    """Number of frames sampled from a video; 0 if the checkpoint has no settings for videos. Raises ``ConfigError``."""
    path, settings = video_settings(folder)
    if settings is None:
        return 0
    keys = Keys(settings, path)
    keys.check({"initial_shift": (True, None), "do_center_crop": (False, None)})
    if settings.get("num_frames") is None:
        keys.check({"fps": (None,)})  # a rate without a number is not supported
    return keys.integer("num_frames", default=FRAMES)


def _frame_processor(folder: Path, config: Any) -> Any:
    """The processor that makes one tile of a clip's frame, with the video processor's settings, if any."""
    path, settings = video_settings(folder)
    processor = read_processor(GotOcr2ImageProcessorPil, folder, crop_to_patches=False, **of_frames(settings))
    size = (processor.size.height, processor.size.width)
    if not processor.do_resize:
        raise ConfigError(f"{path}: do_resize = False of the video processor is not supported")
    if tuple(config.vision_config.image_size) != size:
        tower = config.vision_config.image_size
        raise ConfigError(f"{path}: the video processor makes frames of {size}, the tower takes {tower}")
    return processor


def _clip(frames: Sequence[Tile]) -> list[Tile | Text]:
    """A clip's row after ``CLIP_BEGIN``, as in ``InternVLProcessor``."""
    parts: list[Tile | Text] = []
    for i, frame in enumerate(frames, start=1):
        parts += [f"{_END}\n{CLIP_BEGIN}" * (i > 1) + f"{i}: {_BEGIN}", frame]
    return [*parts, _END]
