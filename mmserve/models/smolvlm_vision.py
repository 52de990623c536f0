"""Images and clips for SmolVLM and Idefics3: tiles with their row and column, then the whole picture; frames with their
times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_VIDEO_INTRO, FRAME_TIMESTAMP_MESSAGE

from mmserve.core.own_frames import OwnFrames
from mmserve.errors import ConfigError
from mmserve.models.checkpoint import Checkpoint, Target
from mmserve.models.evidence import layers_of
from mmserve.models.nested import load_part, read_processor
from mmserve.models.picture import CannotPrepare, Picture, Prepared, Text, Tile, joined
from mmserve.models.processors import image_settings, of_frames, pixels_of, video_settings
from mmserve.models.shuffle import ShuffledTower, ShuffledVision, with_parts

#: A clip's text in the chat template, and the text before its first frame.
CLIP_BEGIN, _INTRO = DEFAULT_VIDEO_INTRO.split(" {frame_count}")
_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"
_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
#: Maximum number of frames of a clip, which the text has in words.
MOST_FRAMES = 999


class SmolVision(ShuffledVision):
    """An image processor, followed by ``tower``; ``own``: frame sampling of videos."""

    def __init__(self, tower: ShuffledTower, processor: Any, frames: Any | None, own: OwnFrames | None) -> None:
        super().__init__(tower, processor, frames)
        self.own_frames = own
        self.frames_per_video, self.frames_per_second = (0, 0.0) if own is None else (own.frames, own.rate)

    def prepare(self, image: Image.Image) -> Prepared:
        """``pixels [tiles, 3, side, side]``, the whole image last; ``grid``: rows and columns, 0 for a single tile."""
        made = self._processor([image], return_tensors="np", return_row_col_info=True)
        return {"pixels": pixels_of(made)[0], "grid": torch.tensor([made["rows"][0][0], made["cols"][0][0]])}

    def prepare_clip(
        self, frames: Sequence[Image.Image], seconds: Sequence[float], *, length: float | None = None
    ) -> Prepared:
        """``pixels [frames, 3, side, side]``, the frames' ``seconds`` and the clip's ``length``."""
        assert self._frames is not None
        pixels = pixels_of(self._frames([list(frames)], return_tensors="np"))[0]
        whole = seconds[-1] if length is None else length
        return {
            "pixels": pixels,
            "seconds": torch.tensor(seconds, dtype=torch.float64),
            "length": torch.tensor(whole, dtype=torch.float64),
        }

    def clip_of(self, tiles: Sequence[Tile], seconds: Tensor, length: float) -> Picture:
        return joined(_clip(tiles, seconds, length))

    def row(self, tiles: Sequence[Tile], one: Prepared, *, clip: bool) -> Sequence[Tile | Text]:
        if clip:
            return _clip(tiles, one["seconds"], float(one["length"]))
        return _image(tiles, *one["grid"].tolist())


def load_smol_vision(checkpoint: Checkpoint, target: Target, config: Any, kind: type[Any]) -> SmolVision:
    """Tower (a transformers class ``kind``), connector and processors of a checkpoint; raises ``ConfigError``."""
    folder, vision = checkpoint.folder, config.vision_config
    processor = read_processor(SmolVLMImageProcessorPil, folder)
    side, factor = int(processor.max_image_size["longest_edge"]), int(config.scale_factor)
    if not processor.do_resize or side % (int(vision.patch_size) * factor):
        raise ConfigError(
            f"{folder}: tiles of {side} pixels (max_image_size of the image processor, with do_resize) are not whole "
            f"squares of {factor} x {factor} patches of {vision.patch_size}"
        )
    tower = load_part(lambda: kind._from_config(vision), "model.vision_model.", checkpoint, target)
    widths = int(vision.hidden_size) * factor**2, int(config.text_config.hidden_size)
    prefix = "model.connector.modality_projection.proj."
    linear = load_part(lambda: nn.Linear(*widths, bias=False), prefix, checkpoint, target)
    path, video = _video_settings(folder)
    vision_tower = ShuffledTower(tower, linear, layers_of(tower), factor=factor)
    if video is None:
        return SmolVision(vision_tower, processor, None, None)
    frames = read_processor(SmolVLMImageProcessorPil, folder, do_image_splitting=False, **of_frames(video))
    if frames.max_image_size["longest_edge"] != side or not frames.do_resize:
        raise ConfigError(
            f"{path}: frames of {frames.max_image_size['longest_edge']} pixels (max_image_size of the video processor, "
            f"with do_resize) are not the tiles of {side} that the tower takes"
        )
    return SmolVision(vision_tower, processor, frames, _own_frames(video, path))


def _video_settings(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    """The video processor's settings: from its own file, or ``video_sampling`` in the image processor's, as published
    with SmolVLM2. ``video_sampling`` has priority, except for the size, as in transformers' class."""
    path, video = video_settings(folder)
    if video is None:
        path, images = image_settings(folder)
        found = (images or {}).get("video_sampling")
        video = None if found is None else {"video_sampling": found}
    sampling = None if video is None else video.get("video_sampling")
    if video is None or sampling is None:
        return path, video
    try:
        size = video.get("size") or {"longest_edge": int(sampling["video_size"]["longest_edge"])}
        number, rate = int(sampling["max_frames"]), float(sampling["fps"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: video_sampling = {sampling!r} names no video_size, max_frames and fps") from error
    return path, {**video, "size": size, "num_frames": number, "fps": rate}


def _own_frames(video: Mapping[str, Any], path: Path) -> OwnFrames:
    frames, rate = video.get("num_frames", 0), video.get("fps", 0)
    if type(frames) is not int or not 0 < frames <= MOST_FRAMES or not isinstance(rate, int | float) or rate <= 0:
        raise ConfigError(
            f"{path}: the video processor has {frames} frames at most, {rate} a second; "
            f"there can be 1 to {MOST_FRAMES} frames, more than 0 a second"
        )
    return OwnFrames("skip_ends", rate=float(rate), frames=frames)


def _image(tiles: Sequence[Tile], rows: int, columns: int) -> list[Tile | Text]:
    """An image's row, as in transformers' ``get_image_prompt_string``."""
    parts: list[Tile | Text] = []
    for i, tile in enumerate(with_parts(tiles[:-1], rows, columns)):
        row, column = divmod(i, columns)
        gap = "\n" if row and not column else ""
        parts += [f"{gap}{_FAKE}<row_{row + 1}_col_{column + 1}>", tile]
    gap = "\n\n" if parts else ""
    return [*parts, f"{gap}{_FAKE}{_GLOBAL}", tiles[-1], _FAKE]


def _clip(frames: Sequence[Tile], seconds: Tensor, whole: float) -> list[Tile | Text]:
    """A clip's row after ``CLIP_BEGIN``, as in ``SmolVLMProcessor``; ``whole``: duration of the video (seconds)."""
    if len(frames) > MOST_FRAMES:
        raise CannotPrepare(f"has {len(frames)} frames after sampling; this model takes up to {MOST_FRAMES}")
    length = timedelta(seconds=int(whole))
    text = f" {in_words(len(frames))}{_INTRO.format(video_duration=str(length))}"
    parts: list[Tile | Text] = []
    for frame, second in zip(frames, seconds.tolist(), strict=True):
        stamp = f"{int(second // 60):02d}:{int(second % 60):02d}"
        parts += [f"{text}{FRAME_TIMESTAMP_MESSAGE.format(timestamp=stamp)}{_FAKE}{_GLOBAL}", frame]
        text = _FAKE
    return [*parts, _FAKE]


def in_words(number: int) -> str:
    """A number from 0 to ``MOST_FRAMES`` in English words, as in the package num2words."""
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        return f"{_ONES[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
    if number < len(_ONES):
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
