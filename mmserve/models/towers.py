"""Vision towers of LLaVA-style checkpoints: configuration, weights and image processor from local files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from PIL import Image
from torch import nn
from transformers.image_utils import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from mmserve.errors import ConfigError
from mmserve.models.anyres import LlavaTiles, anyres_of
from mmserve.models.checkpoint import Checkpoint, Target, Weights, read_json
from mmserve.models.clip_tower import CLIP, SIGLIP, ClipTower, TowerConfig, read_tower
from mmserve.models.counts import check_counts
from mmserve.models.keys import Keys
from mmserve.models.layouts import NEWLINE, PROJECTOR, TOWER, projector_tensor
from mmserve.models.processors import IMAGES, image_settings
from mmserve.models.projectors import NewlineProjector, PooledProjector, mlp_projector, pooled_side
from mmserve.models.tower_pixels import TowerPixels
from mmserve.models.unfilled import unfilled
from mmserve.models.vision import LlavaVision, VideoSettings

_log = logging.getLogger(__name__)

#: The subfolder of a checkpoint with its tower's files, if ``mm_vision_tower`` is a hub id.
BESIDE = "vision_tower"
#: Architectures (LLaDA-V, LaViDa) that, as LLaVA-OneVision, were trained on several images as one padded tile each.
_PAD_SEVERAL = ("llava_llada", "llava_dream")


@dataclass(frozen=True)
class TowerKind:
    """A kind of tower, and LLaVA's settings for it."""

    config: TowerConfig  # defaults of the configuration
    processor: str  # its class in transformers
    defaults: dict[str, Any]  # defaults of that class's settings
    has_cls: bool
    fixed_layer: int | None  # LLaVA's tower classes use `mm_vision_select_layer` for CLIP only
    overrides: dict[str, Any]  # of processor settings


_DEFAULTS = {
    "crop_size": None,
    "do_center_crop": False,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
_CLIP = TowerKind(
    CLIP,
    "CLIPImageProcessorPil",
    {
        **_DEFAULTS,
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
    },
    True,
    None,
    {},
)
_SIGLIP = TowerKind(
    SIGLIP,
    "SiglipImageProcessorPil",
    {
        **_DEFAULTS,
        "size": {"height": 224, "width": 224},
        "image_mean": IMAGENET_STANDARD_MEAN,
        "image_std": IMAGENET_STANDARD_STD,
    },
    False,
    -2,
    {"resample": Image.Resampling.BICUBIC, "do_resize": True, "do_convert_rgb": True},
)
KINDS = {"clip_vision_model": _CLIP, "clip": _CLIP, "siglip_vision_model": _SIGLIP, "siglip": _SIGLIP}


class PaddedProcessor:
    """LLaVA's ``image_aspect_ratio = "pad"``: pad the image to a square with the mean colour, then process it."""

    pads = True

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.fill = tuple(int(mean * 255) for mean in processor.image_mean)

    def __call__(self, image: Image.Image, **options: Any) -> Any:
        width, height = image.size
        side = max(width, height)
        if width != height:
            square = Image.new("RGB", (side, side), self.fill)
            square.paste(image, ((side - width) // 2, (side - height) // 2))
            image = square
        return self.processor(image, **options)


def load_vision(
    checkpoint: Checkpoint, hidden_size: int, target: Target, *, pool: tuple[int, str] | None = None
) -> LlavaVision:
    """Tower and projector of a LLaVA-style checkpoint whose decoder has ``hidden_size``.

    The tower's configuration and processor come from the directory in ``mm_vision_tower``, or from the subfolder
    ``vision_tower``; its weights from the checkpoint or, if it has none, from that directory. As in LLaVA
    (``llava/model/multimodal_encoder``), SigLIP features are always those of the second last layer and its images are
    resized bicubically, whatever the files state. ``mm_video_frames``, a key of this project, is the number of frames
    sampled from a video; without it, videos are not supported. ``pool``: stride and mode of image pooling, for which
    there is no key. With tiles, images of a request with several are padded to one tile each (``_PAD_SEVERAL``), as in
    the training and evaluation code of these models. Raises ``ConfigError``.
    """
    keys = Keys(checkpoint.config, checkpoint.folder / "config.json")
    _check_merging(keys)
    own = any(name.startswith(TOWER) for name in checkpoint.weights.names)
    folder = _tower_folder(checkpoint, target, weights=not own)
    kind, config = _tower_config(folder)
    weights = checkpoint.weights if own else _tower_weights(folder)
    layer = keys.values.get("mm_vision_select_layer", -2)
    select = kind.fixed_layer or keys.layer("mm_vision_select_layer", layer, config.num_hidden_layers)
    tower, later, cut = load_tower(kind, config, weights, TOWER if own else "", select, target)
    feature = keys.choice("mm_vision_select_feature", ("patch", "cls_patch"), "patch")
    projector: nn.Module = _load_projector(checkpoint, keys, config.hidden_size, hidden_size, target)
    if pool is not None:
        projector = PooledProjector(projector, *pool)
    video = _video(keys, int(config.image_size) // int(config.patch_size), feature if kind.has_cls else "patch")
    extra = 0
    if kind.has_cls and feature == "cls_patch":
        extra += 1
    if "unpad" in str(keys.values.get("mm_patch_merge_type", "flat")):
        newline = checkpoint.weights.tensor(NEWLINE, torch.Size([hidden_size]), target.dtype, target.device)
        projector, extra = NewlineProjector(projector, newline), extra + 1
    elif NEWLINE in checkpoint.weights:
        _log.warning("%s: not used: %s, because of mm_patch_merge_type", checkpoint.weights.source, NEWLINE)
        checkpoint.weights.ignore(NEWLINE)
    processor, anyres = _processor(kind, folder, keys, int(config.image_size)), anyres_of(keys, int(config.image_size))
    if anyres is not None and kind.has_cls and feature == "cls_patch":
        raise ConfigError(f"{keys.path}: tiles need mm_vision_select_feature = 'patch', not 'cls_patch'")
    pads = checkpoint.architecture in _PAD_SEVERAL
    vision = LlavaVision(
        tower,
        projector,
        processor if anyres is None else LlavaTiles(processor, anyres),
        select_layer=select + cut,
        has_cls=kind.has_cls and feature == "patch",
        video=video,
        anyres=anyres,
        frames=processor,
        several=PaddedProcessor(processor) if anyres is not None and pads else None,
        pool=pool,
        later=later,
    )
    if anyres is None:
        vision.tokens_per_image += extra
    return vision


def _check_merging(keys: Keys) -> None:
    keys.choice("mm_patch_merge_type", ("flat", "spatial", "spatial_unpad"), "flat")
    keys.check({"mm_resampler_type": (None,), "mm_use_im_start_end": (False, None), "s2": (False, None)})


def _video(keys: Keys, side: int, feature: str) -> VideoSettings | None:
    """The settings for videos, whose frames have ``side`` × ``side`` patches; None = no videos."""
    if not keys.values.get("mm_video_frames"):
        return None
    if feature != "patch":
        raise ConfigError(
            f"{keys.path}: videos need mm_vision_select_feature = 'patch', not {feature!r}: see get_2dPool"
        )
    keys.check({"add_faster_video": (False, None)})
    settings = VideoSettings(
        frames=keys.integer("mm_video_frames"),
        stride=keys.integer("mm_spatial_pool_stride", default=2),
        mode=keys.choice("mm_spatial_pool_mode", ("average", "max", "bilinear"), "bilinear"),
        newline=keys.choice("mm_newline_position", ("grid", "frame", "one_token", "no_token"), "one_token"),
        time=_time_format(keys),
    )
    if not pooled_side(side, settings.stride, settings.mode):
        raise ConfigError(f"{keys.path}: mm_spatial_pool_stride = {settings.stride} leaves nothing of {side} patches")
    merging = str(keys.values.get("mm_patch_merge_type", "flat"))
    if settings.newline in ("grid", "frame") and merging == "spatial":
        raise ConfigError(
            f"{keys.path}: mm_newline_position = {settings.newline!r} needs a separator, which "
            "mm_patch_merge_type = 'spatial' has none of; it can be 'spatial_unpad'"
        )
    return settings


def _time_format(keys: Keys) -> str:
    value = keys.values.get("mm_video_time") or ""
    try:
        first, second = value.format(seconds=0), value.format(seconds=61)
    except (AttributeError, LookupError, ValueError, TypeError) as error:
        raise ConfigError(f"{keys.path}: mm_video_time = {value!r} is no format string of seconds: {error}") from error
    if value and first == second:
        raise ConfigError(f"{keys.path}: mm_video_time = {value!r} does not name {{seconds}}")
    return str(value)


def _tower_folder(checkpoint: Checkpoint, target: Target, *, weights: bool) -> Path:
    """The directory with the tower's ``config.json``; the hub is used only if the model itself came from it."""
    named = checkpoint.config.get("mm_vision_tower") or BESIDE
    if not isinstance(named, str):
        raise ConfigError(f"{checkpoint.folder / 'config.json'}: mm_vision_tower must be a string, not {named!r}")
    for folder in (checkpoint.folder / named, checkpoint.folder / BESIDE):
        if (folder / "config.json").is_file():
            return folder
    if target.hub:
        return download(named, weights=weights)
    raise ConfigError(
        f"mm_vision_tower = {named!r} is no directory with a config.json: put a copy of the tower's config.json "
        f"and {IMAGES}{' and its safetensors' if weights else ''} into {checkpoint.folder / BESIDE}"
    )


def download(repository: str, *, weights: bool = True) -> Path:
    """Download a hub repository's settings and, if ``weights``, its weights. Returns the local folder; raises
    ``ConfigError``."""
    patterns = ["*.json", "*.jinja", "merges.txt", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"cannot fetch {repository!r} from the Hugging Face hub: {error}") from error


def _tower_config(folder: Path) -> tuple[TowerKind, TowerConfig]:
    values = read_json(folder / "config.json")
    architecture = values.get("model_type")
    if architecture not in KINDS:
        raise ConfigError(
            f"{folder / 'config.json'}: unknown vision tower model_type {architecture!r}; known are {sorted(KINDS)}"
        )
    kind = KINDS[architecture]
    values = values.get("vision_config", values)
    if not isinstance(values, dict):
        raise ConfigError(f"{folder / 'config.json'}: vision_config must be an object, not {values!r}")
    return kind, read_tower(Keys(values, folder / "config.json"), kind.config)


def _tower_weights(folder: Path) -> Weights:
    if not Weights.has(folder):
        raise ConfigError(f"neither the checkpoint nor {folder} has the vision tower's safetensors")
    return Weights(folder)


def load_tower(
    kind: TowerKind, config: Any, weights: Weights, prefix: str, select: int, target: Target
) -> tuple[nn.Module, nn.ModuleList | None, int]:
    """The tower without the layers after ``select``, those layers, and their number.

    The layers are kept, for pruners, if the tower has a class token; otherwise, or if the checkpoint lacks them, None:
    LLaVA drops SigLIP's last layer and pooling head before training. Versions of transformers up to 4 prefix all names
    with ``vision_model.``, later ones do not: both are read.
    """
    check_counts({"num_hidden_layers": config.num_hidden_layers}, weights.source, len(list(weights.names)))
    if any(name.startswith(f"{prefix}vision_model.") for name in weights.names):
        prefix += "vision_model."
    cut = max(0, min(-1 - select, config.num_hidden_layers - 1))  # one is kept to show attention, if of embeddings only
    run = config.num_hidden_layers - cut
    rest = [f"{prefix}encoder.layers.{run + layer}." for layer in range(cut)]
    kept = kind.has_cls and all(any(name.startswith(one) for name in weights.names) for one in rest)
    if not kept:
        config.num_hidden_layers = run
        for one in rest:
            weights.ignore(f"{one}*")
    with unfilled():
        tower = ClipTower(config, has_cls=kind.has_cls)
    weights.fill(tower, {name: prefix + name for name, _ in tower.named_parameters()}, target.dtype, target.device)
    weights.ignore(f"{prefix}head.*", f"{prefix}embeddings.position_ids")
    if not kept:
        return tower.eval(), None, cut
    layers: Any = tower.eval().get_submodule("encoder.layers")
    tower.get_submodule("encoder").layers, later = layers[:run], layers[run:]
    config.num_hidden_layers = run
    return tower, later, cut


def _load_projector(
    checkpoint: Checkpoint, keys: Keys, vision_size: int, hidden_size: int, target: Target
) -> nn.Module:
    kind = keys.values.get("mm_projector_type", "linear")
    depth = str(kind).removeprefix("mlp").removesuffix("x_gelu")
    if kind != "linear" and not (str(kind) == f"mlp{depth}x_gelu" and depth.isdecimal() and 0 < int(depth) <= 8):
        raise ConfigError(
            f"{keys.path}: mm_projector_type = {kind!r} is not supported; it can be 'linear' or 'mlpNx_gelu'"
        )
    with unfilled():
        projector = mlp_projector(str(kind), vision_size, hidden_size)
    alone = kind == "linear" and f"{PROJECTOR}weight" in checkpoint.weights
    names = {name: projector_tensor(name, alone=alone) for name, _ in projector.named_parameters()}
    checkpoint.weights.fill(projector, names, target.dtype, target.device)
    return projector.eval()


def _processor(kind: TowerKind, folder: Path, keys: Keys, side: int) -> Callable[..., Any]:
    path, given = image_settings(folder)
    if given is not None:
        settings = given
    elif kind is _SIGLIP:
        settings = {"size": {"height": side, "width": side}}
    else:
        raise ConfigError(f"{folder} has no {IMAGES}: the vision tower's image processor is unknown")
    settings = {k: v for k, v in settings.items() if k not in ("image_processor_type", "processor_class")}
    try:
        processor: Callable[..., Any] = _of_settings(kind, settings | kind.overrides)
        if keys.values.get("image_aspect_ratio") == "pad":
            processor = PaddedProcessor(processor)
        shape = processor(Image.new("RGB", (side + 3, side)), return_tensors="np")["pixel_values"].shape
    except (TypeError, ValueError, AttributeError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if shape != (1, 3, side, side):
        raise ConfigError(f"{path} makes images of {shape[2:]}, but the tower takes {side} x {side}")
    return processor


def _of_settings(kind: TowerKind, settings: dict[str, Any]) -> Callable[..., Any]:
    """This project's processor if it supports all of ``settings``, otherwise transformers'."""
    ours = TowerPixels.of(settings, kind.defaults)
    if ours is not None:
        return ours
    import transformers  # its attributes are imported lazily

    made: Callable[..., Any] = getattr(transformers, kind.processor)(**settings)
    return made
