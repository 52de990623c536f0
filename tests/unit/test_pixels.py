"""Pixels that a request asks for, against transformers' image processor; and what a model's prompts leave out."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ask, picture
from llama_checkpoints import edit, llama, load, save
from llava_checkpoints import llava
from PIL import Image
from qwen_vl_checkpoints import PROCESSOR, Qwen, installed
from shuffled_checkpoints import internvl
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmserve.config import MediaConfig, ModelConfig
from mmserve.core.request import ImagePart, Message, PixelRange, Request, TextPart, Vision
from mmserve.encode.encoder import Encoder
from mmserve.errors import ConfigError, InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.models.checkpoint import write_json
from mmserve.models.registry import sketch_model

#: A token's pixels: squares of 2 x 2 patches of 4 x 4.
TOKEN = 64
FILE = picture(1, (60, 40))
OWN = PixelRange()


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return Qwen(tmp_path_factory.mktemp("model"), request.param).load()


def asked(images: PixelRange = OWN, videos: PixelRange = OWN) -> Request:
    return replace(ask("r", images=(FILE,)), vision=Vision(images=images, videos=videos))


@pytest.mark.parametrize(
    ("least", "most"), [(None, 4 * TOKEN), (None, 1), (11 * TOKEN, None), (2 * TOKEN, 3 * TOKEN), (None, 12 * TOKEN)]
)
def test_pixels_of_images_are_those_of_transformers(model: LoadedModel, least: int | None, most: int | None) -> None:
    """As its processor with other limits; where only one is given the other is the checkpoint's, but never above it."""
    assert model.vision is not None
    top = PROCESSOR["max_pixels"] if most is None else most
    bottom = min(PROCESSOR["min_pixels"] if least is None else least, top)
    theirs = Qwen2VLImageProcessorPil(**{**PROCESSOR, "min_pixels": bottom, "max_pixels": top})
    image = Image.open(io.BytesIO(FILE)).convert("RGB")
    made = theirs(image, return_tensors="np")
    ours = model.vision.within(PixelRange(least, most), PixelRange()).prepare(image)
    assert ours["grid"].tolist() == made["image_grid_thw"].tolist()
    assert np.array_equal(ours["pixels"].numpy(), made["pixel_values"])
    [encoded] = Encoder(model, MediaConfig(), max_tokens=2000).encode([asked(PixelRange(least, most))])
    assert len(encoded.image_rows) == made["image_grid_thw"].prod() // 4


def test_pixels_of_videos_are_those_of_transformers(model: LoadedModel) -> None:
    assert model.vision is not None
    frames = [Image.new("RGB", (60, 40))] * 4
    own = model.vision.prepare_clip(frames, [0.0, 1.0, 2.0, 3.0])["grid"][0].tolist()
    less = model.vision.within(PixelRange(), PixelRange(None, 4 * TOKEN))
    grid = less.prepare_clip(frames, [0.0, 1.0, 2.0, 3.0])["grid"][0].tolist()
    sizes = {"height": 40, "width": 60, "factor": 8, "min_pixels": TOKEN, "max_pixels": 4 * TOKEN}
    if model.spec.architecture == "qwen3_vl":
        rows, columns = installed("qwen3_vl/video_processing_qwen3_vl.py", "smart_resize")(num_frames=4, **sizes)
    else:
        rows, columns = installed("qwen2_vl/video_processing_qwen2_vl.py", "smart_resize")(**sizes)
    assert grid == [2, rows // 4, columns // 4] and grid != own


def test_one_file_at_two_sizes_is_two_values_of_the_cache(model: LoadedModel) -> None:
    encoder = Encoder(model, MediaConfig(), max_tokens=2000)
    sizes = [len(encoder.encode([asked(PixelRange(None, most))])[0].image_rows) for most in (None, TOKEN, 4 * TOKEN)]
    assert sizes == [len(encoder.encode([asked()])[0].image_rows), 1, sizes[2]] and len(set(sizes)) == 3
    assert model.vision is not None and model.vision.pixel_limits is not None
    assert model.vision.pixel_limits[0] == PixelRange(PROCESSOR["min_pixels"], PROCESSOR["max_pixels"])


@pytest.mark.parametrize("name", ["min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels"])
def test_more_than_the_checkpoint_s_own_is_refused(model: LoadedModel, name: str) -> None:
    """So no request makes a picture that costs more than others may."""
    wanted = PixelRange(10**9, None) if "min" in name else PixelRange(None, 10**9)
    request = asked(videos=wanted) if name.startswith("video") else asked(wanted)
    with pytest.raises(InvalidArgument, match=r"must be at most .*, the checkpoint's own") as caught:
        Encoder(model, MediaConfig(), max_tokens=2000).load(request)
    assert caught.value.violations[0].field == f"vision.{name}"


# --- messages ---


def without_images_of_the_system(folder: Path) -> LoadedModel:
    llava(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['role'] + ': ' }}{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif message['role'] != 'system' %}{{ '<image>\n' }}{% endif %}{% endfor %}{% endfor %}"
    )
    return load(folder)


def test_an_image_in_a_system_message_that_the_template_leaves_out(tmp_path: Path) -> None:
    model = without_images_of_the_system(tmp_path)
    chat = (Message("system", (TextPart("Look."), ImagePart(FILE))), Message("user", (TextPart("what?"),)))
    encoder, request = Encoder(model, MediaConfig(), max_tokens=2000), replace(ask("r"), messages=chat)
    with pytest.raises(
        InvalidArgument, match=r"role 'system', .* leaves out an image: put it into a .* user"
    ) as caught:
        encoder.encode([request])
    assert caught.value.violations[0].field == "messages[0].parts[1].image"
    with pytest.raises(InvalidArgument) as caught:
        encoder.encode([replace(request, vision=Vision(images=PixelRange(None, 100)))])
    assert caught.value.violations[0].field == "vision.max_pixels"
    assert "resizes pictures to a fixed size" in str(caught.value)


def test_a_template_that_cannot_join_a_system_message_s_parts(tmp_path: Path) -> None:
    llava(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message['role'] == 'system' %}{{ 'system: ' + message['content'] }}"
        "{% else %}{% for part in message['content'] %}{{ part['text'] if 'text' in part else '<image>' }}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    chat = (Message("system", (TextPart("Look."), ImagePart(FILE))), Message("user", (TextPart("what?"),)))
    with pytest.raises(InvalidArgument, match="the model's chat template refuses them: can only concatenate str"):
        Encoder(load(tmp_path), MediaConfig(), max_tokens=2000).encode([replace(ask("r"), messages=chat)])


@pytest.mark.parametrize("make", [llava, internvl])
def test_several_layers_of_a_tower_are_refused_by_what_they_are(tmp_path: Path, make: Any) -> None:
    make(tmp_path)
    edit(tmp_path / "config.json", vision_feature_layer=[-2, -1])
    message = r"vision_feature_layer = \[-2, -1\] .*: features of several layers \(2 here\) .* are not implemented"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("with_config", [False, True])
def test_a_folder_with_an_adapter_only(tmp_path: Path, with_config: bool) -> None:
    if with_config:
        save(llama(num_hidden_layers=1), tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "owner/base", "peft_type": "LORA"})
    with pytest.raises(ConfigError, match=r"holds only an adapter .* of 'owner/base', .* merge_and_unload"):
        sketch_model(ModelConfig(path=str(tmp_path), device="cpu"))


def test_an_adapter_beside_a_model_is_no_matter(tmp_path: Path) -> None:
    save(llama(num_hidden_layers=1), tmp_path)
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "owner/base"})
    sketch_model(ModelConfig(path=str(tmp_path), device="cpu"))
