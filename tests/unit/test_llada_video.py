"""What a checkpoint says of videos: keys read, wrong ones refused, the placeholder added and never generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clips import frame_tokens
from llada_checkpoints import Sighted, edit, image, load

from mmserve.errors import ConfigError
from mmserve.models.vision import LlavaVision, VideoSettings

KEYS = {"mm_video_frames": 3, "mm_spatial_pool_stride": 2, "mm_spatial_pool_mode": "average"}


def test_without_our_key_a_checkpoint_takes_no_videos(tmp_path: Path) -> None:
    Sighted(tmp_path, "clip", mm_spatial_pool_stride=2, mm_spatial_pool_mode="bilinear", mm_newline_position="grid")
    model = load(tmp_path)
    assert model.vision is not None and model.vision.frames_per_video == 0
    assert model.spec.video_id is None


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_videos_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    made = Sighted(tmp_path, kind, **KEYS, mm_video_time="{seconds}s:")
    model = load(tmp_path)
    assert isinstance(model.vision, LlavaVision)
    assert model.vision.frames_per_video == 3
    assert [model.vision.frame_text(s) for s in (0.0, 1.99, 61.0)] == ["0s:", "1s:", "61s:"]
    video = model.tokenizer.convert_tokens_to_ids("<video>")
    assert model.spec.video_id == video and video in model.spec.banned_ids and model.spec.image_id != video
    assert model.tokenizer.encode("<video>", add_special_tokens=False) == [video]
    chat = [{"role": "user", "content": [{"type": "video"}, {"type": "image"}, {"type": "text", "text": "x"}]}]
    assert "<video>\n<image>\nx" in model.tokenizer.apply_chat_template(chat, tokenize=False)

    pixels = torch.cat([model.vision.prepare(image(30 + i, 40))["pixels"] for i in range(3)])
    with torch.no_grad():
        tokens = frame_tokens(model.vision, pixels)
        plain = made.visual_tokens(pixels, first=1 if kind == "clip" else 0)
    squares = plain.view(3, 2, 2, 2, 2, 32).mean((2, 4))  # frame, row, in row, column, in column
    assert torch.stack(tokens).shape == (3, 4, 32)
    assert (torch.stack(tokens) - squares.flatten(1, 2)).abs().max() < 1e-5


def test_defaults_are_those_of_llava_next(tmp_path: Path) -> None:
    made = Sighted(tmp_path, "clip", mm_video_frames=2, mm_patch_merge_type="spatial_unpad")
    model = load(tmp_path)
    assert isinstance(model.vision, LlavaVision)
    assert model.vision.video == VideoSettings(frames=2, stride=2, mode="bilinear", newline="one_token", time="")
    assert model.vision.frame_text(3.0) == ""
    pixels = torch.cat([model.vision.prepare(image())["pixels"]] * 2)
    with torch.no_grad():
        tokens = frame_tokens(model.vision, pixels)
    assert [len(t) for t in tokens] == [4, 5] and torch.equal(tokens[1][4], made.newline)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mm_video_frames": -1}, "mm_video_frames must be a positive number"),
        ({"mm_video_frames": "8"}, "mm_video_frames must be a positive number"),
        ({"mm_spatial_pool_stride": 0}, "mm_spatial_pool_stride must be a positive number"),
        ({"mm_spatial_pool_stride": 5}, "mm_spatial_pool_stride = 5 leaves nothing of 4 patches"),
        ({"mm_spatial_pool_mode": "mean"}, "mm_spatial_pool_mode = 'mean' is not supported"),
        ({"mm_newline_position": "row"}, "mm_newline_position = 'row' is not supported"),
        ({"mm_newline_position": "grid", "mm_patch_merge_type": "spatial"}, "needs a separator"),
        ({"mm_vision_select_feature": "cls_patch"}, "videos need mm_vision_select_feature = 'patch'"),
        ({"add_faster_video": True}, "add_faster_video = True is not supported"),
        ({"mm_video_time": 3}, "mm_video_time = 3 is no format string"),
        ({"mm_video_time": "{minutes}:"}, "mm_video_time = '{minutes}:' is no format string"),
        ({"mm_video_time": "{seconds"}, "is no format string"),
        ({"mm_video_time": "{}"}, "is no format string"),
        ({"mm_video_time": "now:"}, "does not name {seconds}"),
        ({"mm_video_time": "<image>{seconds}"}, "holds the special token '<image>'"),
    ],
)
def test_keys_that_cannot_be(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    Sighted(tmp_path, "clip", **KEYS)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=why):
        load(tmp_path)
