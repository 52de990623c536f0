"""Tower, projector and image processor of LLaVA checkpoints in transformers' layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaOnevisionImageProcessorPil,
    SiglipImageProcessorPil,
)

from mmserve.errors import ConfigError
from mmserve.models.anyres import Anyres, check_pinpoints
from mmserve.models.checkpoint import CONFIG, Checkpoint, Target
from mmserve.models.keys import Keys
from mmserve.models.nested import UNREADABLE, read_processor
from mmserve.models.processors import of_frames, own_frames, video_settings
from mmserve.models.projectors import NewlineProjector, mlp_projector
from mmserve.models.towers import KINDS, load_tower
from mmserve.models.unfilled import unfilled
from mmserve.models.vision import LlavaVision, VideoSettings

#: Image processors of towers by ``image_processor_type``, without its suffixes.
_PROCESSORS = {
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "LlavaImageProcessor": LlavaImageProcessorPil,
    "SiglipImageProcessor": SiglipImageProcessorPil,
}
#: Layouts with videos, and the number of frames if neither ``mm_video_frames`` nor the video processor's settings have
#: it: as LLaVA-OneVision was trained with, and as in LLaVA-NeXT-Video's model card.
CLIPS = {"llava_onevision": 32, "llava_next_video": 8}


#: Defaults of LLaVA-NeXT-Video's video processor.
_CLIP_FRAMES = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}


class OneOfSeveral:
    """LLaVA-OneVision's processor for images of a chat with several: padded to a square with the mean colour."""

    pads = True

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, image: Image.Image, **options: Any) -> dict[str, np.ndarray]:
        made = self.processor([[image, Image.new("RGB", (1, 1))]], **options)["pixel_values"]
        return {"pixel_values": made[0]}


def load_llava_vision(checkpoint: Checkpoint, target: Target, config: Any, prefix: str, width: int) -> LlavaVision:
    """The encoder of visual tokens of ``width`` for ``config`` (of transformers); tensor names begin with ``prefix``.

    Raises ``ConfigError`` naming the key, tensor or file that is wrong.
    """
    folder, weights = checkpoint.folder, checkpoint.weights
    keys = Keys(checkpoint.config, folder / CONFIG)
    keys.check({"multimodal_projector_bias": (True,), "projector_hidden_act": ("gelu",)})
    tower_config = config.vision_config
    kind = KINDS.get(tower_config.model_type)
    if kind is None:
        raise ConfigError(
            f"{keys.path}: vision_config.model_type {tower_config.model_type!r} is not one of {sorted(KINDS)}"
        )
    cut = config.vision_feature_select_strategy == "default"
    if cut and not kind.has_cls:
        raise ConfigError(
            f"{keys.path}: vision_feature_select_strategy = 'default' would drop a patch; it can be 'full'"
        )
    side = int(tower_config.image_size)
    whole = (side // int(tower_config.patch_size)) ** 2
    select = keys.layer("vision_feature_layer", config.vision_feature_layer, tower_config.num_hidden_layers)
    tower, later, absent = load_tower(kind, tower_config, weights, f"{prefix}vision_tower.", select, target)
    with unfilled():
        projector: torch.nn.Module = mlp_projector("mlp2x_gelu", tower_config.hidden_size, width)
    names = {
        f"{ours}.{leaf}": f"{prefix}multi_modal_projector.{theirs}.{leaf}"
        for ours, theirs in (("0", "linear_1"), ("2", "linear_2"))
        for leaf in ("weight", "bias")
    }
    weights.fill(projector, names, target.dtype, target.device)
    anyres = None
    if config.model_type == "llava":
        processor = frames = read_processor(_processor_kind(folder), folder)
    else:
        if kind.has_cls and not cut:
            raise ConfigError(f"{keys.path}: tiles need vision_feature_select_strategy = 'default', not 'full'")
        processor, frames = _tile_processors(config.model_type, folder)
        anyres = _anyres(config, processor, side, keys)
        newline = weights.tensor(f"{prefix}image_newline", torch.Size([width]), target.dtype, target.device)
        projector = NewlineProjector(projector, newline)
    vision = LlavaVision(
        tower,
        projector.eval(),
        processor,
        select_layer=select + absent,
        has_cls=cut,
        video=_video(keys, config) if config.model_type in CLIPS else None,
        anyres=anyres,
        frames=frames,
        several=OneOfSeveral(processor) if config.model_type == "llava_onevision" else None,
        later=later,
    )
    if anyres is None and kind.has_cls and not cut:
        vision.tokens_per_image = whole + 1
    if config.model_type in CLIPS and "mm_video_frames" not in checkpoint.config:
        path, clips = video_settings(folder)
        vision.own_frames = own_frames("plain", clips, path)
    return vision


def _processor_kind(folder: Path) -> type[Any]:
    try:
        settings, _rest = CLIPImageProcessorPil.get_image_processor_dict(folder, local_files_only=True)
    except UNREADABLE as error:
        raise ConfigError(f"{folder}: the image processor's settings cannot be read: {error}") from error
    named = str(settings.get("image_processor_type", "CLIPImageProcessor"))
    found = _PROCESSORS.get(named.removesuffix("Fast").removesuffix("Pil"))
    if found is None:
        raise ConfigError(f"{folder}: image_processor_type {named!r} is not one of {sorted(_PROCESSORS)}")
    return found


def _tile_processors(architecture: str, folder: Path) -> tuple[Any, Any]:
    """The processor that tiles an image, and the one that makes a tile of a clip's frame, as the video processor
    does."""
    if architecture == "llava_next":
        return read_processor(LlavaNextImageProcessorPil, folder), None
    if architecture == "llava_next_video":
        processor = read_processor(LlavaNextImageProcessorPil, folder)
        path, video = video_settings(folder)
        frames = CLIPImageProcessorPil(**{**_CLIP_FRAMES, **(video or {})})
        if frames.crop_size.height != processor.crop_size["height"]:
            raise ConfigError(f"{path}: the video processor's crop_size {dict(frames.crop_size)} is not that of images")
        return processor, frames
    processor = read_processor(LlavaOnevisionImageProcessorPil, folder)
    settings = ("size", "resample", "image_mean", "image_std", "do_rescale", "rescale_factor", "do_normalize")
    values = {name: getattr(processor, name) for name in settings}
    path, video = video_settings(folder)
    frames = SiglipImageProcessorPil(**{**values, **of_frames(video, without=("max_image_size",))})
    if (frames.size.height, frames.size.width) != (processor.size.height, processor.size.width):
        raise ConfigError(f"{path}: the video processor's size {dict(frames.size)} is not the image processor's")
    return processor, frames


def _anyres(config: Any, processor: Any, tile: int, keys: Keys) -> Anyres:
    pinpoints = check_pinpoints(config.image_grid_pinpoints, tile, keys)
    if [tuple(pair) for pair in processor.image_grid_pinpoints] != pinpoints:
        raise ConfigError(f"{keys.path}: image_grid_pinpoints are not those of the image processor")
    limit = None
    if config.model_type == "llava_onevision":
        found = re.fullmatch(r"anyres_max_([1-9]\d*)", config.vision_aspect_ratio)
        if found is None:
            raise ConfigError(f"{keys.path}: vision_aspect_ratio = {config.vision_aspect_ratio!r} is no 'anyres_max_N'")
        limit = int(found[1])
    return Anyres(pinpoints=tuple(pinpoints), tile=tile, max_tiles=limit, rounded=True)


def _video(keys: Keys, config: Any) -> VideoSettings:
    """The settings of ``get_video_features``. LLaVA-OneVision: frames are pooled bilinearly to half a side, with one
    separator after the clip. LLaVA-NeXT-Video: the tower's features are pooled, without a separator."""
    frames = keys.integer("mm_video_frames", default=CLIPS[config.model_type])
    if config.model_type == "llava_onevision":
        return VideoSettings(frames=frames)
    mode, stride = config.spatial_pool_mode, config.spatial_pool_stride
    keys.check({"spatial_pool_mode": ("average", "max")})
    if stride != 2:
        raise ConfigError(f"{keys.path}: spatial_pool_stride = {stride!r} is not supported; it can be 2")
    return VideoSettings(frames=frames, stride=stride, mode=mode, newline="no_token", features=True)
