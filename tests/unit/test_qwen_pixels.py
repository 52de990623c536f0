"""Rows of patches for Qwen's towers: sizes, limits and shapes as transformers' processors have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clips import Clip
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from qwen_vl_checkpoints import PROCESSOR, TOGETHER, VIDEOS, clip_rows, installed

from mmserve.errors import ConfigError
from mmserve.models.checkpoint import write_json
from mmserve.models.picture import CannotPrepare
from mmserve.models.qwen_pixels import Limits, QwenPixels, fitted, load_pixels

TOWER = SimpleNamespace(patch_size=4, temporal_patch_size=2, spatial_merge_size=2, in_channels=3)


def pixels(folder: Path, *, together: bool = False, tower: Any = TOWER, **files: dict[str, Any]) -> QwenPixels:
    given = files or {"preprocessor_config": PROCESSOR, "video_preprocessor_config": TOGETHER if together else VIDEOS}
    for name, values in given.items():
        write_json(folder / f"{name}.json", values)
    return load_pixels(folder, tower, together=together)


def noise(width: int, height: int) -> Image.Image:
    return Image.effect_noise((width, height), 80).convert("RGB")


@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    frames=st.integers(2, 40),
    least=st.integers(1, 2_000_000),
    spread=st.integers(0, 20_000_000),
)
def test_sizes_are_those_of_transformers(height: int, width: int, frames: int, least: int, spread: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    most = max(least + spread, 40 * 32 * 32)
    sizes = {"height": height, "width": width, "min_pixels": least, "max_pixels": most}
    theirs = installed("qwen2_vl/video_processing_qwen2_vl.py", "smart_resize")(**sizes, factor=28)
    limits = Limits(least=least, most=most, together=False)
    assert fitted(height, width, frames, factor=28, depth=2, limits=limits) == theirs
    sizes |= {"num_frames": frames, "temporal_factor": 2}
    theirs = installed("qwen3_vl/video_processing_qwen3_vl.py", "smart_resize")(**sizes, factor=32)
    limits = Limits(least=least, most=most, together=True)
    assert fitted(height, width, frames, factor=32, depth=2, limits=limits) == theirs


@given(
    height=st.integers(16, 2000),
    width=st.integers(16, 2000),
    frames=st.integers(2, 40),
    least=st.integers(1, 400_000),
    spread=st.integers(0, 20_000_000),
    tokens=st.integers(16, 4000),
)
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_a_cap_a_frame_is_that_of_transformers(
    kind: str, height: int, width: int, frames: int, least: int, spread: int, tokens: int
) -> None:
    file, most = f"{kind}/video_processing_{kind}.py", max(least + spread, frames * 28 * 28)
    resize = installed(file, "resize")
    resize.__globals__.update(
        smart_resize=installed(file, "smart_resize"),
        SizeDict=SimpleNamespace,
        super=lambda: SimpleNamespace(resize=lambda image, size, resample: (size.height, size.width)),
    )
    size = SimpleNamespace(shortest_edge=least, longest_edge=most)
    rules: dict[str, Any] = {"size": size, "resample": 3, "factor": 28, "temporal_factor": 2}
    made = torch.empty(1, frames, 3, height, width, device="meta")
    theirs = resize(SimpleNamespace(max_video_tokens=tokens), made, cap_pixels_per_frame=True, **rules)
    limits = Limits(least=least, most=most, together=kind == "qwen3_vl", capped=tokens)
    assert fitted(height, width, frames, factor=28, depth=2, limits=limits) == theirs


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("frames", [2, 3, 8])
def test_clips_become_the_rows_of_transformers(tmp_path: Path, kind: str, frames: int) -> None:
    made = pixels(tmp_path, together=kind == "qwen3_vl")
    shown = Clip(tuple(noise(44, 31) for _ in range(frames)), tuple(0.5 + i for i in range(frames)))
    found = made.clip(shown.frames, shown.seconds)
    rows, grid = clip_rows(shown, kind)
    assert found["grid"].tolist() == [grid] and (found["pixels"] - rows).abs().max() < 1e-5
    last = frames - 0.5
    assert found["seconds"].tolist() == [[t + 0.5, min(t + 1.5, last)] for t in range(0, frames, 2)]


def test_one_frame_is_a_clip(tmp_path: Path) -> None:
    for together in (False, True):
        found = pixels(tmp_path, together=together).clip([noise(44, 31)], [0.0])
        assert found["grid"][0, 0] == 1 and found["seconds"].tolist() == [[0.0, 0.0]]
        halves = found["pixels"].view(-1, 3, 2, 16)
        assert torch.equal(halves[:, :, 0], halves[:, :, 1])


@pytest.mark.parametrize(("size", "tokens"), [((8, 8), 4), ((16, 16), 4), ((40, 16), 10), ((400, 300), 12)])
def test_pixels_stay_within_the_checkpoint_s_limits(tmp_path: Path, size: tuple[int, int], tokens: int) -> None:
    found = pixels(tmp_path).image(noise(*size))
    assert len(found["pixels"]) == 4 * tokens == int(found["grid"].prod())


def test_extreme_shapes_are_refused(tmp_path: Path) -> None:
    made = pixels(tmp_path)
    assert len(made.image(noise(400, 2))["pixels"]) and len(made.image(noise(1, 200))["pixels"])
    for size in ((402, 2), (1, 201)):
        with pytest.raises(CannotPrepare, match=rf"is {size[0]} x {size[1]} pixels; .* crop it"):
            made.image(noise(*size))
        with pytest.raises(CannotPrepare, match="at most 200 times"):
            made.clip([noise(*size)] * 2, [0.0, 1.0])


def test_settings_come_from_the_checkpoint_s_files(tmp_path: Path) -> None:
    alone = pixels(tmp_path, preprocessor_config=PROCESSOR)
    assert vars(alone.clips) == {"least": 128 * 64, "most": 768 * 64, "together": False, "capped": 0}
    (tmp_path / "preprocessor_config.json").unlink()
    both = {"image_processor": PROCESSOR, "video_processor": TOGETHER}
    made = pixels(tmp_path, together=True, processor_config=both)
    assert (made.clips.least, made.clips.most) == (64, 5 * 6 * 64)
    assert made.processor.size["longest_edge"] == PROCESSOR["max_pixels"]
    assert made.settings() != alone.settings()
    both["video_processor"] = {**TOGETHER, "min_pixels": 9, "max_pixels": 99}  # of Qwen2-VL's class
    assert pixels(tmp_path, together=True, processor_config=both).clips == made.clips
    both["video_processor"] = {"size": 3}
    with pytest.raises(ConfigError, match=r"processor_config\.json: size must be an object, not 3"):
        pixels(tmp_path, together=True, processor_config=both)


def test_a_cap_a_frame_comes_from_the_video_processor_s_settings(tmp_path: Path) -> None:
    capped = {**TOGETHER, "cap_pixels_per_frame": True}
    for together, settings, tokens in (
        (True, capped, 768),
        (False, capped, 128_000),
        (True, {**capped, "max_video_tokens": 5}, 5),
        (True, {**capped, "cap_pixels_per_frame": False}, 0),
    ):
        files = {"preprocessor_config": PROCESSOR, "video_preprocessor_config": settings}
        assert pixels(tmp_path, together=together, **files).clips.capped == tokens


@pytest.mark.parametrize(
    "changes", [{"patch_size": 8}, {"merge_size": 1}, {"temporal_patch_size": 1}, {"do_resize": False}]
)
def test_video_processors_that_do_not_fit(tmp_path: Path, changes: dict[str, Any]) -> None:
    files = {"preprocessor_config": PROCESSOR, "video_preprocessor_config": {**VIDEOS, **changes}}
    with pytest.raises(ConfigError, match=f"video_preprocessor_config.json: {next(iter(changes))} = "):
        pixels(tmp_path, **files)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 8}, "patch_size must be the tower's 4"),
        ({"merge_size": 1}, "merge_size must be the tower's 2"),
        ({"temporal_patch_size": 1}, "temporal_patch_size must be the tower's 2"),
        ({"do_resize": False}, "do_resize = False of the image processor"),
        ({"max_pixels": "many"}, "preprocessor_config.json: "),
    ],
)
def test_processors_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pixels(tmp_path, preprocessor_config={**PROCESSOR, **changes})
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        load_pixels(tmp_path, TOWER, together=False)
