"""Processors as transformers 5 saves them, and the frames that video processors take by themselves."""

from __future__ import annotations

import copy
import json
import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from clips import clip
from llama_checkpoints import Sighted, edit, load
from llava_checkpoints import llava_onevision
from PIL import Image
from qwen_vl_checkpoints import PROCESSOR, TOGETHER, installed
from shuffled_checkpoints import SIDE, internvl, saved_by_transformers_5, smolvlm
from transformers.models.smolvlm import processing_smolvlm
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from mmserve.config import MediaConfig
from mmserve.core.own_frames import OwnFrames
from mmserve.encode.sampling import ProcessorFrames, packed, unpacked
from mmserve.encode.video import sample_video
from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel
from mmserve.models.checkpoint import read_json, write_json
from mmserve.models.picture import Prepared
from mmserve.models.processors import own_frames, video_settings
from mmserve.models.qwen_pixels import load_pixels
from mmserve.models.smolvlm_vision import SmolVision

MEAN, STD = [0.1, 0.2, 0.3], [0.6, 0.7, 0.8]
#: As ``SmolVLMVideoProcessor`` writes them.
SMOL_VIDEO: dict[str, Any] = {
    "fps": 1,
    "num_frames": 4,
    "image_mean": MEAN,
    "image_std": STD,
    "max_image_size": {"longest_edge": SIDE},
    "resample": 1,
    "size": {"longest_edge": 2 * SIDE},
    "video_processor_type": "SmolVLMVideoProcessor",
}
INTERN_VIDEO: dict[str, Any] = {
    "image_mean": MEAN,
    "image_std": STD,
    "initial_shift": True,
    "num_frames": 3,
    "resample": 3,
    "size": {"height": SIDE, "width": SIDE},
    "video_processor_type": "InternVLVideoProcessor",
}
#: Frames of a video, frames a second: lengths of 0.1 to 150 seconds.
VIDEOS = [(count, rate) for count in (1, 2, 3, 12, 40, 77, 300, 901) for rate in (4, 6, 10, 25, 30)]


def theirs(rule: str, own: OwnFrames, frames: int, rate: float) -> list[int] | None:
    """What ``sample_frames`` of transformers takes; None where it refuses the video."""
    file = {
        "skip_ends": "smolvlm/video_processing_smolvlm.py",
        "starts": "qwen2_vl/video_processing_qwen2_vl.py",
        "ends": "qwen3_vl/video_processing_qwen3_vl.py",
    }[rule]

    class Metadata(SimpleNamespace):
        def __getitem__(self, name: str) -> Any:
            return getattr(self, name)

    metadata = Metadata(total_num_frames=frames, fps=rate, duration=frames / rate)
    processor = SimpleNamespace(
        num_frames=own.frames or None,
        fps=own.rate or None,
        min_frames=own.least,
        max_frames=own.most,
        temporal_patch_size=own.multiple,
    )
    try:
        return [int(i) for i in installed(file, "sample_frames")(processor, metadata)]
    except (ValueError, ZeroDivisionError, RuntimeError):
        return None


@pytest.mark.parametrize(
    "own",
    [
        OwnFrames("skip_ends", rate=1, frames=4),
        OwnFrames("skip_ends", rate=1, frames=64),
        OwnFrames("skip_ends", rate=0.5, frames=8),
        OwnFrames("ends", rate=2, least=4, most=768),
        OwnFrames("ends", rate=2, least=4, most=10),
        OwnFrames("starts", rate=2, least=4, most=768, multiple=2),
        OwnFrames("starts", frames=8, multiple=2),
    ],
    ids=str,
)
def test_frames_are_those_of_transformers(own: OwnFrames) -> None:
    """Where transformers takes the video; one with fewer frames than are asked for it may refuse."""
    compared = 0
    for frames, rate in VIDEOS:
        times = [i / rate for i in range(frames)]
        ours = unpacked(json.loads(json.dumps(packed(ProcessorFrames(**vars(own)))))).select(times, frames / rate)
        expected = theirs(own.rule, own, frames, rate)
        if expected is not None:
            assert ours == sorted(set(expected)), (frames, rate)
            compared += 1
        assert ours and ours == sorted(set(ours)) and ours[-1] < frames
    assert compared > 20


@pytest.mark.parametrize("settings", [{"num_frames": 7}, {"fps": 2, "num_frames": None}, {"fps": 0.5}])
def test_frames_of_classes_without_a_rule_of_their_own(tmp_path: Path, settings: dict[str, Any]) -> None:
    own = own_frames("plain", settings, tmp_path)
    assert own is not None
    for frames, rate in VIDEOS:
        metadata = VideoMetadata(total_num_frames=frames, fps=rate)
        if frames >= own.frames:
            theirs_ = default_sample_indices_fn(metadata, settings.get("num_frames"), settings.get("fps"))
            assert own.chosen(frames, frames / rate) == theirs_.tolist(), (frames, rate)


def test_the_frames_of_a_file_are_chosen_by_their_times() -> None:
    own = ProcessorFrames("skip_ends", rate=1, frames=64)
    found = list(sample_video(clip(frames=12, rate=4), MediaConfig(), own))
    assert [frame.seconds for frame in found] == [0.0, 1.25, 2.75]


# --- SmolVLM ---


def prepared(model: LoadedModel, frames: list[Image.Image], seconds: list[float], length: float | None) -> Prepared:
    assert model.vision is not None
    return model.vision.prepare_clip(frames, seconds, length=length)


def noise(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(5)
    return [Image.fromarray(rng.integers(0, 255, (30, 40, 3), np.uint8)) for _ in range(count)]


def test_smolvlm_as_transformers_5_saves_it(tmp_path: Path) -> None:
    """Images are as before, videos are taken, with the video processor's own mean and standard deviation."""
    made = smolvlm(tmp_path)
    [picture] = noise(1)
    before = load(tmp_path)
    assert before.vision is not None
    expected = before.vision.prepare(picture)["pixels"]
    saved_by_transformers_5(made, **SMOL_VIDEO)
    assert not (tmp_path / "preprocessor_config.json").exists()
    model = load(tmp_path)
    assert model.vision is not None and model.spec.video_id is not None
    assert torch.equal(model.vision.prepare(picture)["pixels"], expected)
    assert (model.vision.frames_per_video, model.vision.frames_per_second) == (4, 1.0)
    assert model.vision.own_frames == OwnFrames("skip_ends", rate=1, frames=4)
    images = copy.deepcopy(made.processor.image_processor)
    images.do_image_splitting, images.image_mean, images.image_std = False, tuple(MEAN), tuple(STD)
    frames = noise(3)
    pixels = images([frames], return_tensors="pt")["pixel_values"][0]
    assert torch.equal(prepared(model, frames, [0, 1, 2], None)["pixels"], pixels)


@pytest.mark.parametrize("length", [None, 3.0, 63.9])
def test_smolvlm_states_the_length_of_the_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: float | None
) -> None:
    """The row is that of ``replace_video_token``, whose length is the whole video's where it is known."""
    made = smolvlm(tmp_path)
    model = load(tmp_path)
    assert model.vision is not None
    seconds = [0.0, 1.25, 2.75]
    one = prepared(model, noise(3), seconds, length)
    monkeypatch.setattr(processing_smolvlm, "num2words", {3: "three"}.__getitem__)
    metadata = SimpleNamespace(fps=4, timestamps=seconds, duration=length)
    row = made.processor.replace_video_token({"pixel_values": one["pixels"][None], "video_metadata": [metadata]}, 0)
    pieces = model.vision.pieces(one, clip=True)
    ours = "".join("<image>" * piece if isinstance(piece, int) else str(piece) for piece in pieces)
    intro = processing_smolvlm.DEFAULT_VIDEO_INTRO.split(" {frame_count}")[0]
    assert intro + ours + processing_smolvlm.DEFAULT_MEDIA_OUTTRO == row
    assert f"from a {timedelta(seconds=int(2 if length is None else length))} [H:MM:SS] video" in row


def test_sampling_of_smolvlm_in_the_video_processor_s_settings(tmp_path: Path) -> None:
    """As transformers writes it for SmolVLM2: it has priority, except for the size."""
    sampling = {"fps": 2, "max_frames": 6, "video_size": {"longest_edge": 999}}
    saved_by_transformers_5(smolvlm(tmp_path), **SMOL_VIDEO, video_sampling=sampling)
    vision = load(tmp_path).vision
    assert isinstance(vision, SmolVision) and vision.own_frames == OwnFrames("skip_ends", rate=2, frames=6)
    assert vision._frames is not None and vision._frames.size["longest_edge"] == 2 * SIDE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_image_size": {"longest_edge": 48}}, "frames of 48 pixels .* are not the tiles of 24"),
        ({"num_frames": None}, "the video processor has None frames at most, 1 a second; there can be 1 to 999"),
        ({"fps": 0}, "4 frames at most, 0 a second"),
    ],
)
def test_video_processors_of_smolvlm_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    saved_by_transformers_5(smolvlm(tmp_path), **{**SMOL_VIDEO, **changes})
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_tower_beside_a_checkpoint_as_transformers_5_saves_it(tmp_path: Path) -> None:
    """The settings of CLIP's image processor, within ``processor_config.json``."""
    Sighted(tmp_path)
    tower, [picture] = tmp_path / "vision_tower", noise(1)
    before = load(tmp_path)
    settings = read_json(tower / "preprocessor_config.json")
    (tower / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        load(tmp_path)
    write_json(tower / "processor_config.json", {"image_processor": settings, "processor_class": "CLIPProcessor"})
    after = load(tmp_path)
    assert before.vision is not None and after.vision is not None
    assert torch.equal(before.vision.prepare(picture)["pixels"], after.vision.prepare(picture)["pixels"])


# --- InternVL, LLaVA-OneVision, Qwen-VL ---


def test_internvl_as_transformers_5_saves_it(tmp_path: Path) -> None:
    made = internvl(tmp_path)
    saved_by_transformers_5(made, **INTERN_VIDEO)
    model = load(tmp_path)
    assert model.vision is not None and model.spec.video_id is not None
    assert model.vision.frames_per_video == 3
    images = copy.deepcopy(made.processor.image_processor)
    images.image_mean, images.image_std = tuple(MEAN), tuple(STD)
    frames = noise(2)
    pixels = images(frames, return_tensors="pt", crop_to_patches=False)["pixel_values"]
    assert torch.equal(prepared(model, frames, [0, 1], None)["pixels"], pixels)
    plain = images.__class__.from_pretrained(tmp_path)([frames[0]], return_tensors="pt", crop_to_patches=False)
    assert not torch.equal(plain["pixel_values"][0], pixels[0]), "images have the image processor's mean"


def test_frames_of_internvl_must_be_the_tower_s_tiles(tmp_path: Path) -> None:
    saved_by_transformers_5(internvl(tmp_path), **{**INTERN_VIDEO, "size": {"height": 48, "width": 48}})
    with pytest.raises(ConfigError, match=r"video processor makes frames of \(48, 48\), the tower takes"):
        load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"initial_shift": False}, {"fps": 2, "num_frames": None}, {"do_center_crop": True}, {"do_resize": False}],
)
def test_frames_of_internvl_that_are_not_implemented_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    saved_by_transformers_5(internvl(tmp_path), **{**INTERN_VIDEO, **changes})
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} = "):
        load(tmp_path)


@pytest.mark.parametrize("nested", [True, False])
def test_frames_of_llava_onevision_have_the_video_processor_s_mean(tmp_path: Path, nested: bool) -> None:
    made = llava_onevision(tmp_path)
    video = {"image_mean": MEAN, "image_std": STD, "size": {"height": SIDE, "width": SIDE}, "num_frames": 5}
    if nested:
        write_json(tmp_path / "processor_config.json", {"video_processor": video})
    else:
        write_json(tmp_path / "video_preprocessor_config.json", video)
    [frame] = noise(1)
    images = made.processor.image_processor
    scaled = np.asarray(frame.resize((SIDE, SIDE), images.resample), np.float32) / 255
    expected = torch.from_numpy((scaled - np.float32(MEAN)) / np.float32(STD)).permute(2, 0, 1)
    model = load(tmp_path)
    assert (prepared(model, [frame], [0], None)["pixels"][0] - expected).abs().max() < 1e-5
    assert model.vision is not None and model.vision.own_frames == OwnFrames("starts", frames=5)


def test_frames_of_qwen_have_the_video_processor_s_mean(tmp_path: Path) -> None:
    tower = SimpleNamespace(patch_size=4, temporal_patch_size=2, spatial_merge_size=2, in_channels=3)
    plain = {"image_processor": PROCESSOR, "video_processor": TOGETHER}
    write_json(tmp_path / "processor_config.json", plain)
    before = load_pixels(tmp_path, tower, together=True)
    own = {**TOGETHER, "image_mean": MEAN, "image_std": STD}
    write_json(tmp_path / "processor_config.json", {**plain, "video_processor": own})
    after = load_pixels(tmp_path, tower, together=True)
    frames = noise(2)
    assert torch.equal(before.image(frames[0])["pixels"], after.image(frames[0])["pixels"])
    ours, theirs_ = (made.clip(frames, [0.0, 1.0])["pixels"].view(-1, 3, 32) for made in (after, before))
    old_mean, old_std = (torch.tensor(before.processor.to_dict()[name]) for name in ("image_mean", "image_std"))
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    expected = (theirs_ * old_std[:, None] + (old_mean - mean)[:, None]) / std[:, None]
    assert (ours - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, OwnFrames("ends", rate=2, least=4, most=768)),
        ({"size": {"shortest_edge": 4096}, "max_frames": 9}, OwnFrames("ends", rate=2, least=4, most=9)),
        ({"fps": 2, "min_frames": 4, "max_frames": 768}, OwnFrames("ends", rate=2, least=4, most=768)),
        ({"fps": 2, "num_frames": 8}, OwnFrames("ends", rate=2, least=4, most=768)),
        ({"fps": 2, "min_frames": 1, "temporal_patch_size": 2}, OwnFrames("ends", rate=2, least=1, most=768)),
        ({"num_frames": 8, "fps": None}, None),
    ],
)
def test_what_settings_of_qwen3_vl_say_of_frames(
    tmp_path: Path, settings: dict[str, Any] | None, expected: OwnFrames | None
) -> None:
    """Its processor does not read ``num_frames`` of its settings."""
    assert own_frames("ends", settings, tmp_path) == expected


def test_what_settings_of_qwen2_vl_say_of_frames(tmp_path: Path) -> None:
    found = own_frames("starts", {"num_frames": 8, "fps": None, "temporal_patch_size": 2}, tmp_path)
    assert found == OwnFrames("starts", frames=8, least=4, most=768, multiple=2)
    assert own_frames("starts", {"fps": 2}, tmp_path) == OwnFrames("starts", rate=2, least=4, most=768, multiple=2)


@pytest.mark.parametrize(("rule", "file"), [("starts", "qwen2_vl"), ("ends", "qwen3_vl")])
def test_bounds_that_settings_leave_out_are_those_of_the_class(tmp_path: Path, rule: str, file: str) -> None:
    source = Path(transformers.__file__).parent / "models" / file / f"video_processing_{file}.py"
    names = "min_frames|max_frames|temporal_patch_size|fps"
    named = {name: int(value) for name, value in re.findall(rf"^    ({names}) = (\d+)$", source.read_text(), re.M)}
    assert own_frames(rule, {"fps": 2}, tmp_path) == own_frames(rule, {"fps": 2, **named}, tmp_path)
    assert own_frames(rule, {}, tmp_path) == (own_frames(rule, named, tmp_path) if "fps" in named else None)


def test_one_file_for_all_comes_first(tmp_path: Path) -> None:
    """As in transformers 5; without a video processor in it the file of its own is read."""
    write_json(tmp_path / "video_preprocessor_config.json", {"num_frames": 5})
    write_json(tmp_path / "processor_config.json", {"image_seq_len": 9})
    assert video_settings(tmp_path) == (tmp_path / "video_preprocessor_config.json", {"num_frames": 5})
    edit(tmp_path / "processor_config.json", video_processor={"num_frames": 7})
    assert video_settings(tmp_path) == (tmp_path / "processor_config.json", {"num_frames": 7})


def test_a_video_processor_without_a_sound_rate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fps must be a positive number, not 'fast'"):
        own_frames("ends", {"fps": "fast"}, tmp_path / "processor_config.json")
