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
#: Settings of a frame's pixels in which a video processor may differ from the image processor.
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
#: ``min_frames`` and ``max_frames`` where the settings of a video processor of Qwen's lack them.
_LEAST_FRAMES, _MOST_FRAMES = 4, 768


def pixels_of(made: Mapping[str, Any]) -> Tensor:
    """The ``pixel_values`` that an image processor of transformers made (numpy arrays), fp32."""
    return torch.from_numpy(np.ascontiguousarray(made["pixel_values"], dtype=np.float32))


def check_resizes(processor: Any, folder: Path) -> None:
    """Raise ``ConfigError`` where an image processor leaves pictures as large as they are: a tower takes sizes of its
    own, and limits of pixels hold for resized ones."""
    if not processor.do_resize:
        raise ConfigError(f"{folder}: do_resize = {processor.do_resize!r} of the image processor is not supported")


def image_settings(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    """The image processor's settings and the file that they are in; None where there are none."""
    return _settings(folder, IMAGES, "image_processor")


def video_settings(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    """The same of the video processor."""
    return _settings(folder, VIDEOS, "video_processor")


def of_frames(settings: Mapping[str, Any] | None, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings of a frame's pixels among a video processor's ``settings``, except the keys ``without``."""
    given = settings or {}
    return {name: given[name] for name in _OF_FRAMES if given.get(name) is not None and name not in without}


def own_frames(rule: str, settings: Mapping[str, Any] | None, path: Path) -> OwnFrames | None:
    """The frames that a video processor takes by itself; None where its ``settings`` name neither number nor rate.

    ``rule``: ``starts`` or ``ends`` of ``OwnFrames``; the processor with ``ends`` does not read the number. Raises
    ``ConfigError`` naming the key.
    """
    keys = Keys(settings or {}, path)
    read = ("fps",) if rule == "ends" else ("num_frames", "fps")
    given = [name for name in read if keys.values.get(name) is not None]
    if not given:
        return None
    try:
        return OwnFrames(
            rule,
            rate=keys.number("fps") if "fps" in given else 0.0,
            frames=keys.integer("num_frames") if "num_frames" in given else 0,
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
