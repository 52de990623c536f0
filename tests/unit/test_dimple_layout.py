"""Dimple against transformers' Qwen2.5-VL with an open mask and a projector between: logits, pruning, refusals."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dimple_checkpoints import MASK_ID, Dimple
from foreseen import check_foreseen
from helpers import picture
from llada_checkpoints import load
from PIL import Image
from test_pruned_prompts import encoder, pruned, served_logits, show

from mmserve.core.request import Amount, ImagePart
from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.dimple import DimpleVision
from mmserve.prune import pruners_for

SIZES = ((40, 30), (20, 48), (64, 24))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dimple, LoadedModel]:
    made = Dimple(tmp_path_factory.mktemp("dimple"))
    return made, load(made.folder)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def prompt_ids(model: LoadedModel, images: int) -> list[int]:
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"<|im_start|>user\n{image * images}what?<|im_end|>\n<|im_start|>assistant\n"
    return model.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("images", [0, 1, 3])
def test_logits_of_a_prompt(both: tuple[Dimple, LoadedModel], images: int) -> None:
    made, model = both
    files = [picture(i, size) for i, size in enumerate(SIZES[:images])]
    request = show(*(ImagePart(data) for data in files))
    [encoded] = encoder(model).encode([request])
    prompt, places = made.prompt(prompt_ids(model, images), [opened(data) for data in files])
    assert len(encoded.ids) == len(prompt)
    x, where = made.canvas(prompt, places, torch.full((request.sampling.max_new_tokens,), MASK_ID))
    theirs = made.logits(x, where)[len(prompt) - 1 : -1]
    ours, _rows = served_logits(model, request, encoded)
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-4


def test_what_it_is(both: tuple[Dimple, LoadedModel]) -> None:
    made, model = both
    spec = model.spec
    assert (spec.attention, spec.logit_shift, spec.mask_id) == (Attention.FULL, 1, MASK_ID)
    assert spec.image_id == made.special.image_token_id and spec.video_id is None
    assert isinstance(model.vision, DimpleVision) and not model.vision.frames_per_video
    assert set(spec.banned_ids) == {MASK_ID, spec.image_id}
    check_foreseen(model)


def test_pruning_is_full_attention_with_the_dropped_keys_masked(both: tuple[Dimple, LoadedModel]) -> None:
    made, model = both
    assert model.vision is not None
    files = [picture(i, size) for i, size in enumerate(SIZES[:2])]
    request, encode = show(*(ImagePart(data) for data in files)), encoder(model).encode
    [full] = encode([request])
    prompt, places = made.prompt(prompt_ids(model, 2), [opened(data) for data in files])
    answer = torch.full((request.sampling.max_new_tokens,), MASK_ID)
    names = pruners_for(model.vision.evidence)[1:]
    assert {"random", "resize", "column_attention", "tome"} <= set(names)
    for name in names:
        [left] = encode([pruned(request, name)])
        assert left.places is not None and left.features is not None and len(left.ids) < len(full.ids), name
        where = {tuple(place): row for row, place in enumerate(places.T.tolist())}
        rows = np.array([where[tuple(place)] for place in left.places.T[:-1].tolist()])
        seen_prompt = prompt.clone()
        seen_prompt[torch.from_numpy(rows[left.image_rows])] = left.features  # averages, where some are
        x, whole = made.canvas(seen_prompt, places, answer)
        seen = torch.ones(len(x), len(x), dtype=torch.bool)
        seen[:, np.setdiff1d(np.arange(len(prompt)), rows)] = False
        seen |= torch.eye(len(x), dtype=torch.bool)  # a row that sees nothing is no row; nobody sees it
        theirs = made.logits(x, whole, seen)[len(prompt) - 1 : -1]
        ours, _rows = served_logits(model, request, left)
        assert (ours - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max())), name
        [all_of_it] = encode([pruned(request, name, Amount("keep_ratio", 1))])
        assert np.array_equal(all_of_it.ids, full.ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"full_attn_mask": False}, "full_attn_mask = False is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"mrope_section": ...}, "has no mrope_section"),
        ({"mrope_section": [2, 3]}, "mrope_section must be three positive numbers"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"image_token_id": ...}, "has no image_token_id"),
        ({"vision_config": ...}, "has no vision_config"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    Dimple(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
