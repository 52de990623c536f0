"""A first image for a vision encoder when its model is loaded: otherwise requests find what settings do not work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from mmserve.errors import ConfigError
from mmserve.models.picture import VisionEncoder

_SIZE = (96, 64)


def try_image(vision: VisionEncoder, folder: Path) -> None:
    """Raises ``ConfigError`` if ``vision`` makes numbers of an image that are not finite, and an error of its processor
    if it makes nothing; the same of a clip, if it takes videos."""
    image = Image.new("RGB", _SIZE, "grey")
    with np.errstate(all="ignore"):
        made = [vision.prepare(image)]
        if vision.frames_per_video:
            made.append(vision.prepare_clip([image] * 2, [0.0, 1.0]))
    if not all(bool(one["pixels"].isfinite().all()) for one in made):
        raise ConfigError(f"{folder}: image_std of an image or video processor makes pixels that are not finite")
