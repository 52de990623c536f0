"""Settings of a checkpoint's image and video processors, in the files that transformers reads and writes.

transformers 5 writes one ``processor_config.json`` with ``image_processor`` and ``video_processor`` in it; before it
there were ``preprocessor_config.json`` and ``video_preprocessor_config.json``. Where both forms are there, the first is
read, as in transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmserve.core.own_frames import OwnFrames
from mmserve.errors import ConfigError
from mmserve.models.checkpoint import read_json
from mmserve.models.keys import Keys

IMAGES, VIDEOS, BOTH = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
#: Settings of a frame's pixels that may differ between video and image processors.
_OF_FRAMES = (
    "do_convert_rgb",
    "do_normalize",
    "do_rescale",
    "do_resize",
    "image_mean",
    "image_std",
    "max_image_size",
    "resample",
    "rescale_factor",
    "size",
)
#: Defaults of ``min_frames`` and ``max_frames`` of Qwen's video processors.
_LEAST_FRAMES, _MOST_FRAMES = 4, 768
#: Default of ``fps`` of Qwen3-VL's video processor: the published files do not have the key.
_RATE = 2


def pixels_of(made: Mapping[str, Any]) -> Tensor:
    """The ``pixel_values`` of a transformers image processor's result (NumPy arrays), fp32."""
    return torch.from_numpy(np.ascontiguousarray(made["pixel_values"], dtype=np.float32))


def check_resizes(processor: Any, folder: Path) -> None:
    """Raises ``ConfigError`` if an image processor does not resize: towers need certain sizes, and pixel limits apply
    to resized images."""
    if not processor.do_resize:
        raise ConfigError(f"{folder}: do_resize = {processor.do_resize!r} of the image processor is not supported")


def image_settings(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    """The file with the image processor's settings, and these settings; None if there are none."""
    return _settings(folder, IMAGES, "image_processor")


def video_settings(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    """The same for the video processor."""
    return _settings(folder, VIDEOS, "video_processor")


def of_frames(settings: Mapping[str, Any] | None, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings of a frame's pixels in a video processor's ``settings``, except for the keys ``without``."""
    given = settings or {}
    return {name: given[name] for name in _OF_FRAMES if given.get(name) is not None and name not in without}


def own_frames(rule: str, settings: Mapping[str, Any] | None, path: Path) -> OwnFrames | None:
    """The frame sampling of a video processor; None if it has neither number nor rate.

    ``rule``: ``starts`` or ``ends`` of ``OwnFrames``, for Qwen2-VL's and Qwen3-VL's, or ``plain``, for other classes
    (``default_sample_indices_fn`` of transformers). With ``ends`` the number is ignored, and the rate has a default.
    Raises ``ConfigError`` naming the key.
    """
    defaults = {"fps": _RATE} if rule == "ends" else {}
    keys = Keys({**defaults, **(settings or {})}, path)
    read = ("fps",) if rule == "ends" else ("num_frames", "fps")
    given = [name for name in read if keys.values.get(name) is not None]
    if not given:
        return None
    rate = keys.number("fps") if "fps" in given else 0.0
    frames = keys.integer("num_frames") if "num_frames" in given else 0
    if rule == "plain":
        return OwnFrames("starts", rate=rate, frames=frames)
    try:
        return OwnFrames(
            rule,
            rate=rate,
            frames=frames,
            least=keys.integer("min_frames", default=_LEAST_FRAMES),
            most=keys.integer("max_frames", default=_MOST_FRAMES),
            multiple=keys.integer("temporal_patch_size", default=2) if rule == "starts" else 1,
        )
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{path}: {error}") from error


def _settings(folder: Path, file: str, part: str) -> tuple[Path, dict[str, Any] | None]:
    both = folder / BOTH
    nested = read_json(both).get(part) if both.is_file() else None
    if isinstance(nested, dict):
        return both, nested
    return folder / file, read_json(folder / file) if (folder / file).is_file() else None
