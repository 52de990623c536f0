"""The tower of CLIP and SigLIP has the bits of transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel

from mmserve.errors import ConfigError
from mmserve.models.clip_tower import CLIP, SIGLIP, ClipTower, read_tower
from mmserve.models.keys import Keys

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 20,
    "patch_size": 4,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_hidden_states_are_those_of_transformers(kind: str, activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    theirs: Any
    if kind == "clip":
        theirs = CLIPVisionModel(CLIPVisionConfig(**SIZES, hidden_act=activation))
    else:
        theirs = SiglipVisionModel(SiglipVisionConfig(**SIZES, hidden_act=activation, vision_use_head=False))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs = theirs.eval().to(dtype)
    ours = ClipTower(theirs.config, has_cls=kind == "clip").eval().to(dtype)
    assert ours.load_state_dict(theirs.state_dict(), strict=False).missing_keys == []
    pixels = torch.randn(3, 3, 20, 20)
    with torch.no_grad():
        made, expected = ours(pixels), theirs(pixels, output_hidden_states=True)
        alone = ours(pixels, output_hidden_states=False)
    assert len(made.hidden_states) == len(expected.hidden_states) == 4 and alone.hidden_states == ()
    for one, other in zip(made.hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(made.last_hidden_state, expected.last_hidden_state)
    assert torch.equal(alone.last_hidden_state, expected.last_hidden_state)


@pytest.mark.parametrize(("base", "published"), [(CLIP, CLIPVisionConfig), (SIGLIP, SiglipVisionConfig)])
def test_what_a_configuration_leaves_out_is_as_published(base: Any, published: Any) -> None:
    for given in ({}, SIZES, {"hidden_act": "gelu", "layer_norm_eps": 0.25, "num_channels": 1}):
        theirs = published(**given).to_dict()
        ours = read_tower(Keys(given, Path("config.json")), base).to_dict()
        assert ours == {name: theirs[name] for name in ours}


@pytest.mark.parametrize("wrong", [{"hidden_size": "wide"}, {"patch_size": 0}, {"image_size": [20, 20]}])
def test_a_wrong_configuration_is_reported_by_its_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {next(iter(wrong))} must be a positive number"):
        read_tower(Keys(wrong, Path("config.json")), CLIP)


def test_heads_divide_the_width() -> None:
    with pytest.raises(ConfigError, match="hidden_size = 770 is not a multiple of num_attention_heads = 12"):
        read_tower(Keys({"hidden_size": 770}, Path("config.json")), CLIP)
