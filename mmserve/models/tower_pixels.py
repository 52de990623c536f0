"""Pixels for CLIP's and SigLIP's towers, by the settings of their image processors.

The operations are transformers' own (``image_transforms``), in the order of ``CLIPImageProcessorPil`` and
``SiglipImageProcessorPil``, with identical bits. Importing those classes takes 2.5 s, so they are used only for
settings that are not supported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from PIL import Image
from transformers.image_transforms import (
    center_crop,
    get_resize_output_image_size,
    normalize,
    rescale,
    resize,
)
from transformers.image_utils import ChannelDimension

from mmserve.models.picture import Resize

_FIRST = ChannelDimension.FIRST
#: Settings without effect on pixels.
_UNREAD = {"image_processor_type", "processor_class", "feature_extractor_type"}
_MOST_RESAMPLE = max(Image.Resampling)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size in pixels that an image is resized or cropped to: both sides, or only the shorter one."""

    height: int | None = None
    width: int | None = None
    shortest_edge: int | None = None


@dataclass(frozen=True, kw_only=True)
class TowerPixels:
    """A transformers image processor with these settings, with its setting names."""

    size: Size
    crop_size: Size | None
    resample: int
    rescale_factor: float
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    do_resize: bool = True
    do_center_crop: bool = False
    do_rescale: bool = True
    do_normalize: bool = True

    @classmethod
    def of(cls, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> Self | None:
        """From a file's ``settings``, with ``defaults``; None for unsupported settings."""
        values = {**defaults, **{k: v for k, v in settings.items() if v is not None and k not in _UNREAD}}
        if values.pop("do_convert_rgb", None) is not True or set(values) != set(cls.__dataclass_fields__):
            return None
        size, crop = _size(values["size"], "shortest_edge"), _size(values["crop_size"], "height", "width")
        numbers = (values["rescale_factor"], *_listed(values["image_mean"]), *_listed(values["image_std"]))
        resample, switches = values["resample"], [values[name] for name in values if name.startswith("do_")]
        if size is None or len(numbers) != 7 or not all(isinstance(n, int | float) for n in numbers):
            return None
        if not isinstance(resample, int) or not 0 <= resample <= _MOST_RESAMPLE:
            return None
        if not all(isinstance(switch, bool) for switch in switches):
            return None
        if values["do_center_crop"] and (crop is None or crop.shortest_edge):
            return None
        mean, std = tuple(values["image_mean"]), tuple(values["image_std"])
        return cls(**{**values, "size": size, "crop_size": crop, "image_mean": mean, "image_std": std})

    def __call__(self, image: Image.Image, **_options: Any) -> dict[str, np.ndarray]:
        """``pixel_values [1, 3, height, width]`` of an opaque image; transformers' options are ignored."""
        pixels = np.moveaxis(np.array(image.convert("RGB")), -1, 0)
        formats: dict[str, Any] = {"data_format": _FIRST, "input_data_format": _FIRST}
        if self.do_resize:
            pixels = resize(pixels, size=self._sides(pixels), resample=Image.Resampling(self.resample), **formats)
        if self.do_center_crop and self.crop_size is not None:
            pixels = center_crop(pixels, size=(self.crop_size.height, self.crop_size.width), **formats)
        if self.do_rescale:
            pixels = rescale(pixels, scale=self.rescale_factor, **formats)
        if self.do_normalize:
            pixels = normalize(pixels, mean=self.image_mean, std=self.image_std, **formats)
        return {"pixel_values": pixels[None]}

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        return asdict(self)

    def first_resize(self) -> Resize | None:
        """See ``VisionEncoder.first_resize``."""
        if not self.do_resize or self.size.width is None or self.size.height is None:
            return None
        return self.size.width, self.size.height, self.resample

    def _sides(self, pixels: np.ndarray) -> tuple[int | None, int | None]:
        if self.size.shortest_edge is None:
            return self.size.height, self.size.width
        found: tuple[int, int] = get_resize_output_image_size(
            pixels, size=self.size.shortest_edge, default_to_square=False, input_data_format=_FIRST
        )
        return found


def _size(value: Any, *sides: str) -> Size | None:
    """A size setting; a single number is the size of ``sides``. None for unsupported values."""
    if type(value) is int:
        value = dict.fromkeys(sides, value)
    if not isinstance(value, Mapping) or set(value) not in ({"height", "width"}, {"shortest_edge"}):
        return None
    return Size(**value) if all(type(n) is int and n > 0 for n in value.values()) else None


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else ()
