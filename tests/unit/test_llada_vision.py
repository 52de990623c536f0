"""LLaDA-V's towers and projectors against transformers' own towers with the same weights."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from llada_checkpoints import SIDE, Sighted, edit, ids, image, load, open_logits, our_logits, processor_json
from PIL import Image
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil

from mmserve.errors import ConfigError
from mmserve.models.checkpoint import write_checkpoint
from mmserve.models.towers import PaddedProcessor


@pytest.mark.parametrize("old_names", [True, False])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_multimodal_path(tmp_path: Path, kind: str, old_names: bool) -> None:
    made = Sighted(tmp_path, kind, old_names=old_names)
    model = load(tmp_path)
    assert model.vision is not None and model.vision.tokens_per_image == 16
    pixels = model.vision.prepare(image())["pixels"][0]
    settings = processor_json(kind)
    if kind == "siglip":
        settings["resample"] = 3  # as LLaVA resizes for SigLIP
    processor = (CLIPImageProcessorPil if kind == "clip" else SiglipImageProcessorPil)(**settings)
    assert pixels.shape == (3, SIDE, SIDE) and pixels.dtype == torch.float32
    assert torch.equal(pixels, torch.from_numpy(processor(image(), return_tensors="np")["pixel_values"][0]))
    with torch.no_grad():
        visual = model.vision(torch.stack([pixels, pixels.flip(2)]))
    expected = made.visual_tokens(torch.stack([pixels, pixels.flip(2)]), first=1 if kind == "clip" else 0)
    assert visual.shape == (2, 16, 32)
    assert (visual - expected).abs().max() < 1e-5

    rows = ids(9)
    ours, theirs = model.decoder.embed(rows), made.oracle.model.embed_tokens(rows)
    ours = torch.cat([ours[:, :4], visual, ours[:, 5:]], dim=1)
    theirs = torch.cat([theirs[:, :4], expected, theirs[:, 5:]], dim=1)
    assert (our_logits(model, ours) - open_logits(made.oracle, theirs)).abs().max() < 1e-4


def test_tower_in_bfloat16(tmp_path: Path) -> None:
    Sighted(tmp_path, "siglip")
    model = load(tmp_path, dtype="bfloat16")
    assert model.vision is not None
    assert {p.dtype for p in model.vision.parameters()} == {torch.bfloat16}
    assert model.vision(model.vision.prepare(image())["pixels"].bfloat16()).dtype == torch.bfloat16


def test_siglip_as_llava_stores_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LLaVA drops the last layer and the head before training; the features stay those of the last layer but one."""
    made = Sighted(tmp_path, "siglip")
    made.tensors = {n: t for n, t in made.tensors.items() if "encoder.layers.2." not in n and ".head." not in n}
    made.rewrite()
    (tmp_path / "vision_tower" / "preprocessor_config.json").unlink()
    edit(tmp_path / "config.json", mm_vision_select_layer=-1)  # LLaVA's SigLIP tower does not read it
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    assert "not used: model.image_newline" in caplog.text
    assert model.vision is not None
    pixels = model.vision.prepare(image())["pixels"]
    with torch.no_grad():
        assert (model.vision(pixels) - made.visual_tokens(pixels)).abs().max() < 1e-5


@pytest.mark.parametrize("select", [-1, -2, -3, 0, 2])
def test_selected_layer(tmp_path: Path, select: int) -> None:
    made = Sighted(tmp_path, "clip", mm_vision_select_layer=select)
    model = load(tmp_path)
    assert model.vision is not None
    pixels = model.vision.prepare(image())["pixels"]
    with torch.no_grad():
        assert (model.vision(pixels) - made.visual_tokens(pixels, select, 1)).abs().max() < 1e-5


def test_class_token_newline_and_padding(tmp_path: Path) -> None:
    changes = {"mm_vision_select_feature": "cls_patch", "mm_patch_merge_type": "spatial_unpad"}
    made = Sighted(tmp_path, "clip", image_aspect_ratio="pad", **changes)
    model = load(tmp_path)
    assert model.vision is not None and model.vision.tokens_per_image == 18
    pixels = model.vision.prepare(image())["pixels"]
    square = Image.new("RGB", (45, 45), (122, 117, 104))
    square.paste(image(), (7, 0))
    plain = CLIPImageProcessorPil(**processor_json("clip"))(square, return_tensors="pt")["pixel_values"]
    assert torch.equal(pixels, plain)
    with torch.no_grad():
        visual = model.vision(pixels)
    assert visual.shape == (1, 18, 32)
    assert (visual[:, :17] - made.visual_tokens(pixels)).abs().max() < 1e-5
    assert torch.equal(visual[0, 17], made.newline)


def test_padding_of_both_directions() -> None:
    padded = PaddedProcessor(CLIPImageProcessorPil(**processor_json("clip")))
    plain = padded.processor(image(20, 20), return_tensors="np")["pixel_values"]
    assert np.array_equal(padded(image(20, 20), return_tensors="np")["pixel_values"], plain)
    tall, wide = (padded(i, return_tensors="np")["pixel_values"][0] for i in (image(20, 40), image(40, 20)))
    assert np.allclose(tall[:, 12, 0], wide[:, 0, 12]) and np.abs(tall[:, 12, 0]).max() < 0.02


def test_linear_projector(tmp_path: Path) -> None:
    made = Sighted(tmp_path, "clip", mm_projector_type="linear")
    made.projector = torch.nn.Sequential(torch.nn.Linear(24, 32))
    made.tensors = {name: t for name, t in made.tensors.items() if "mm_projector" not in name}
    made.tensors |= {f"model.mm_projector.{n.removeprefix('0.')}": t for n, t in made.projector.state_dict().items()}
    made.rewrite()
    model = load(tmp_path)
    assert model.vision is not None
    pixels = model.vision.prepare(image())["pixels"]
    with torch.no_grad():
        assert (model.vision(pixels) - made.visual_tokens(pixels, first=1)).abs().max() < 1e-5


def test_tower_weights_beside_the_checkpoint(tmp_path: Path) -> None:
    made = Sighted(tmp_path, "clip")
    made.rewrite(without="vision_tower")
    with pytest.raises(
        ConfigError, match=r"neither the checkpoint nor .*vision_tower has the vision tower's safetensors"
    ):
        load(tmp_path)
    whole = {"model_type": "clip", "vision_config": made.tower.config.to_dict(), "text_config": {}}
    tensors = {f"vision_model.{name}": t for name, t in made.tower.state_dict().items()}
    write_checkpoint(tmp_path / "vision_tower", whole, {**tensors, "text_model.x": torch.ones(1)})
    model = load(tmp_path)
    assert model.vision is not None
    pixels = model.vision.prepare(image())["pixels"]
    with torch.no_grad():
        assert (model.vision(pixels) - made.visual_tokens(pixels, first=1)).abs().max() < 1e-5


def test_hub_id_of_a_tower(tmp_path: Path) -> None:
    Sighted(tmp_path, "siglip", mm_vision_tower="google/siglip2-so400m-patch14-384")
    assert load(tmp_path).vision is not None  # a copy lies in vision_tower
    (tmp_path / "vision_tower").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"'google/siglip2-so400m-patch14-384' is no directory .* put a copy"):
        load(tmp_path)
    edit(tmp_path / "config.json", mm_vision_tower=str(tmp_path / "elsewhere"))
    assert load(tmp_path).vision is not None
