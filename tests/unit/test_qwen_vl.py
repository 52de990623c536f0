"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL against transformers' own classes with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from clips import clip
from helpers import ask, picture
from qwen_vl_checkpoints import KINDS, Qwen, served_rows

from mmserve.config import MediaConfig
from mmserve.core.request import ImagePart, Message, Part, Request, TextPart, VideoPart
from mmserve.decode.state import Encoded
from mmserve.encode.encoder import Encoder
from mmserve.models.base import Attention, LoadedModel

FILE = clip(frames=20, rate=4)
WIDE, TALL, SMALL = (picture(i, size) for i, size in enumerate(((40, 30), (20, 48), (9, 11))))
ASKED: dict[str, Sequence[Part]] = {
    "none": (),
    "one": (ImagePart(WIDE),),
    "several": (ImagePart(WIDE), TextPart("and"), ImagePart(TALL), ImagePart(SMALL)),
    "video": (VideoPart(FILE),),
    "all": (TextPart("see"), ImagePart(TALL), VideoPart(FILE), TextPart("then"), ImagePart(SMALL)),
}


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen, LoadedModel]:
    made = Qwen(tmp_path_factory.mktemp(request.param), request.param)
    return made, made.load()


def show(*parts: Part, new: int = 6) -> Request:
    return replace(ask("r", max_new_tokens=new), messages=(Message("user", (*parts, TextPart("what?"))),))


def encoded(model: LoadedModel, request: Request) -> Encoded:
    [one] = Encoder(model, MediaConfig(), max_tokens=400).encode([request])
    return one


@pytest.mark.parametrize("what", ASKED)
def test_logits_are_those_of_transformers(both: tuple[Qwen, LoadedModel], what: str) -> None:
    made, model = both
    request = show(*ASKED[what])
    one, inputs = encoded(model, request), made.inputs(request, model.tokenizer)
    assert one.ids.tolist() == inputs["input_ids"][0].tolist()
    difference = served_rows(model, request, one) - made.logits(inputs)
    assert difference.abs().max() < 1e-4
    if one.places is not None:
        renumbered = served_rows(model, request, replace(one, places=None))
        assert (renumbered - made.logits(inputs)).abs().max() > 1e-2, "rows and columns do matter"


def test_what_they_are(both: tuple[Qwen, LoadedModel]) -> None:
    made, model = both
    spec = model.spec
    assert (spec.architecture, spec.attention, spec.logit_shift) == (made.kind, Attention.CAUSAL, 1)
    assert spec.banned_ids == tuple(sorted(i for i in (spec.image_id, spec.video_id) if i is not None))
    assert made.oracle.config.text_config.eos_token_id in spec.end_ids
    assert model.position_axes == 3
    assert model.width == 32 * (3 if made.kind == "qwen3_vl" else 1)
