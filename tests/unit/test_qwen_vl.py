"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL against transformers' own classes with the same weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clips import clip
from foreseen import check_foreseen
from helpers import ask, picture
from llama_checkpoints import edit
from qwen_vl_checkpoints import FRAMES, KINDS, THIRD, Qwen, served_rows, transpose_experts

from mmserve.config import EncoderCacheConfig, MediaConfig, ModelConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import ImagePart, Message, Part, Request, TextPart, VideoPart
from mmserve.encode.encoder import Encoder
from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.checkpoint import read_json, write_json
from mmserve.models.registry import load_model
from mmserve.tiers.caches import Caches

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


def test_positions_are_as_configured(tmp_path: Path) -> None:
    where = {"path": str(Qwen(tmp_path, "qwen2_vl").folder), "device": "cpu"}
    assert load_model(ModelConfig(**where, positions=100)).spec.max_tokens == 100
    with pytest.raises(ConfigError, match="positions of several axes"):
        load_model(ModelConfig(**where, positions=16_384, rope_scaling="yarn"))


def test_what_they_are(both: tuple[Qwen, LoadedModel]) -> None:
    made, model = both
    spec = model.spec
    assert (spec.architecture, spec.attention, spec.logit_shift) == (made.kind, Attention.CAUSAL, 1)
    assert spec.banned_ids == tuple(sorted(i for i in (spec.image_id, spec.video_id) if i is not None))
    assert made.oracle.config.text_config.eos_token_id in spec.end_ids
    assert model.position_axes == 3
    assert model.width == 32 * (3 if made.kind in THIRD else 1)
    check_foreseen(model)


def test_keys_as_transformers_5_writes_them(both: tuple[Qwen, LoadedModel], tmp_path: Path) -> None:
    made, model = both
    shutil.copytree(made.folder, tmp_path / "new")
    made.oracle.config.save_pretrained(tmp_path / "new")
    edit(tmp_path / "new" / "config.json", mm_video_frames=FRAMES)
    again = load_model(ModelConfig(path=str(tmp_path / "new"), dtype="float32", device="cpu"))
    assert again.decoder.config == model.decoder.config
    assert replace(again.spec, name="") == replace(model.spec, name="")


def test_experts_as_transformers_5_saves_them(tmp_path: Path) -> None:
    made = Qwen(tmp_path, "qwen3_vl_moe")
    published = made.load().decoder.state_dict()
    transpose_experts(tmp_path)
    saved = made.load().decoder.state_dict()
    assert published.keys() == saved.keys() and any(".experts." in name for name in saved)
    assert all(torch.equal(saved[name], tensor) for name, tensor in published.items())
    text = read_json(tmp_path / "config.json")["text_config"]
    edit(tmp_path / "config.json", text_config={**text, "moe_intermediate_size": 24})
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj has shape \[6, 40, 32\], expected \[6, 32, 48\]"):
        made.load()


def test_the_processor_s_chat_template_goes_first(both: tuple[Qwen, LoadedModel], tmp_path: Path) -> None:
    made, model = both
    shutil.copytree(made.folder, tmp_path / "old")
    template = tmp_path / "old" / "chat_template.jinja"
    write_json(tmp_path / "old" / "chat_template.json", {"chat_template": template.read_text()})
    template.unlink()
    text_only = "{% for message in messages %}{{ message.content }}{% endfor %}"
    edit(tmp_path / "old" / "tokenizer_config.json", chat_template=text_only)
    loaded = load_model(ModelConfig(path=str(tmp_path / "old"), dtype="float32", device="cpu"))
    request = show(ImagePart(SMALL))
    assert encoded(loaded, request).ids.tolist() == encoded(model, request).ids.tolist()


def test_in_bfloat16(both: tuple[Qwen, LoadedModel]) -> None:
    made, model = both
    half = made.load(dtype="bfloat16")
    assert half.vision is not None
    assert {p.dtype for p in (*half.vision.parameters(), *half.decoder.parameters())} == {torch.bfloat16}
    request = show(ImagePart(WIDE))
    rough, fine = (encoded(m, request).features for m in (half, model))
    assert rough is not None and fine is not None and rough.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(rough.float(), fine, dim=1).min() > 0.99


@pytest.mark.parametrize(
    "poison",
    [
        lambda e: {**e, "where": e["where"][:, :-1]},
        lambda e: {**e, "where": e["where"][:2]},
        lambda e: {**e, "where": e["where"] - 1},
        lambda e: {**e, "where": e["where"].float()},
        lambda e: {name: value for name, value in e.items() if name != "where"},
    ],
)
def test_entries_without_their_places_are_made_anew(
    both: tuple[Qwen, LoadedModel], tmp_path: Path, poison: Callable[[Any], Any]
) -> None:
    _made, model = both
    request, cache = show(ImagePart(WIDE)), Caches.of(EncoderCacheConfig(disk_folder=str(tmp_path)))
    encoder = Encoder(model, MediaConfig(), max_tokens=400, cache=cache)
    [first] = encoder.encode([request])
    [kept] = cache.tokens._kept.values()
    kept.entry = poison(kept.entry)
    [again] = encoder.encode([request])
    restarted = Encoder(
        model, MediaConfig(), max_tokens=400, cache=Caches.of(EncoderCacheConfig(disk_folder=str(tmp_path)))
    )
    [after] = restarted.encode([request])
    assert first.places is not None and again.places is not None and after.places is not None
    assert first.places.tolist() == again.places.tolist() == after.places.tolist()
    assert restarted.cache.tokens.stats().disk_hits == 1


ROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen2_vl", {"rope_scaling": None}, "rope_scaling has no mrope_section"),
        (
            "qwen2_vl",
            {"rope_scaling": {**ROPE, "mrope_section": [2, 3]}},
            "mrope_section must be three positive numbers",
        ),
        (
            "qwen2_vl",
            {"rope_scaling": {**ROPE, "mrope_section": [10**30, 3, 3]}},
            "mrope_section must be three positive numbers, together at most 4096",
        ),
        (
            "qwen2_vl",
            {"rope_scaling": {**ROPE, "mrope_section": [2, 3, 4]}},
            "axes of 9 frequencies do not fit heads of 16",
        ),
        ("qwen2_vl", {"rope_scaling": {**ROPE, "type": "yarn"}}, "rope_type = 'yarn' is not supported"),
        ("qwen2_vl", {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ("qwen2_vl", {"vision_config": ...}, "has no vision_config"),
        ("qwen2_vl", {"vision_config": {"depth": "three"}}, "vision_config: "),
        ("qwen2_vl", {"image_token_id": ...}, "has no image_token_id"),
        ("qwen2_vl", {"vision_start_token_id": 5_000_000}, "the tokenizer has no token 5000000"),
        ("qwen2_vl", {"num_hidden_layers": 4}, r"no tensor model\.layers\.3\.input_layernorm\.weight"),
        ("qwen3_vl", {"text_config": 3}, "text_config must be an object, not 3"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, kind: str, changes: dict[str, Any], message: str) -> None:
    made = Qwen(tmp_path, kind, **changes)
    with pytest.raises(ConfigError, match=message):
        made.load()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen2_vl", {"depth": 4}, r"no tensor visual\.blocks\.3\."),
        ("qwen2_5_vl", {"out_hidden_size": 48}, "vision_config.out_hidden_size = 48, but embeddings are 32 wide"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 1, 2, 3]}, "for 4 layers, but there are only 3"),
        ("qwen3_vl", {"num_position_embeddings": 25}, "expected \\[25, 24\\]"),
        ("qwen3_vl", {"hidden_act": "relu9"}, "a value in its files may be wrong: KeyError: 'relu9'"),
        ("qwen3_vl", {"hidden_size": -1}, "a value in its files may be wrong: RuntimeError: .*negative dimension"),
        ("qwen3_vl", {"intermediate_size": 10**30}, "a value in its files may be wrong: TypeError: "),
    ],
)
def test_towers_that_cannot_be_served(tmp_path: Path, kind: str, changes: dict[str, Any], message: str) -> None:
    made = Qwen(tmp_path, kind)
    tower = read_json(tmp_path / "config.json")["vision_config"]
    edit(tmp_path / "config.json", vision_config={**tower, **changes})
    with pytest.raises(ConfigError, match=message):
        made.load()
