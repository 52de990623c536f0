"""Pixels of towers have the bits of transformers' image processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil

from mmserve.models.tower_pixels import TowerPixels
from mmserve.models.towers import KINDS

CLASSES: dict[str, Any] = {"clip": CLIPImageProcessorPil, "siglip": SiglipImageProcessorPil}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "as OpenAI's": {"size": 28, "crop_size": 24, "resample": 3, "feature_extractor_type": "CLIPFeatureExtractor"},
    "square": {"size": {"height": 20, "width": 24}, "do_center_crop": False, "resample": 2, "image_mean": [0.5] * 3},
    "cropped beyond": {"size": {"shortest_edge": 16}, "crop_size": {"height": 20, "width": 40}, "do_center_crop": True},
    "other scale": {"size": {"height": 9, "width": 9}, "rescale_factor": 1 / 127, "image_std": [0.1, 0.2, 0.3]},
    "as they are": {"do_resize": False, "do_center_crop": False, "do_normalize": False, "do_rescale": False},
}
MODES = ("RGB", "L", "1")


def drawn(mode: str, width: int, height: int) -> Image.Image:
    bits = np.random.default_rng(3).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(bits).convert(mode)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("kind", CLASSES)
def test_pixels_are_those_of_transformers(kind: str, settings: dict[str, Any]) -> None:
    ours, theirs = TowerPixels.of(settings, KINDS[kind].defaults), CLASSES[kind](**settings)
    assert ours is not None
    for mode in MODES:
        for size in ((31, 17), (17, 31), (24, 24)):
            image = drawn(mode, *size)
            expected = theirs(image, return_tensors="np")["pixel_values"]
            made = ours(image, return_tensors="np")["pixel_values"]
            assert made.dtype == expected.dtype and np.array_equal(made, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_convert_rgb": False},
        {"do_pad": True},
        {"size": {"longest_edge": 20}},
        {"size": {"height": 20.0, "width": 20}},
        {"size": [20, 20]},
        {"crop_size": {"shortest_edge": 20}, "do_center_crop": True},
        {"resample": "bicubic"},
        {"resample": 99},
        {"image_mean": 0.5},
        {"image_std": [1, 2]},
        {"do_resize": "yes"},
        {"use_square_size": True},
    ],
)
def test_other_settings_are_left_to_transformers(settings: dict[str, Any]) -> None:
    assert TowerPixels.of(settings, KINDS["clip"].defaults) is None
