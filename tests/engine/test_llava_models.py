"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: prompts, logits and answers are transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import clip, decode_video
from harness import Bench
from helpers import ask, picture
from llama_checkpoints import edit, load, our_logits
from llava_checkpoints import CLIP, PINPOINTS, SIDE, Llava, llava, llava_next, llava_next_video, llava_onevision
from safetensors.torch import load_file, save_file
from shuffled_checkpoints import ROWS, text_settings
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil

from mmserve.config import MediaConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import Amount, ImagePart, Message, Policy, Request, TextPart, VideoPart, Vision
from mmserve.encode.encoder import Encoder
from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]
KINDS: dict[str, Callable[[Path], Llava]] = {
    "1.5": llava,
    "next": llava_next,
    "onevision": llava_onevision,
    "next video": llava_next_video,
}
#: None, one and several; wide, tall, small and square; the last is scaled down where anything is.
PICTURES = ((), (picture(1),), (picture(2, (60, 20)), picture(3, (17, 50)), picture(4, (24, 24)), picture(5, (70, 70))))
NEW = 8


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Llava, LoadedModel]:
    made = KINDS[request.param](tmp_path_factory.mktemp("model"))
    return made, load(made.folder)


def requests() -> list[Request]:
    options: dict[str, Any] = {"recompute": Policy(name="last"), "max_new_tokens": NEW}
    return [ask(f"r{i}", "what is it?", images=files, **options) for i, files in enumerate(PICTURES)]


def rendered(model: LoadedModel, files: Sequence[bytes]) -> str:
    content: list[dict[str, str]] = [*({"type": "image"} for _ in files), {"type": "text", "text": "what is it?"}]
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


def encoded(model: LoadedModel, request: Request) -> Encoded:
    [found] = Encoder(model, MediaConfig(), max_tokens=2000).encode([request])
    return found


@torch.inference_mode()
def logits(model: LoadedModel, prompt: Encoded) -> torch.Tensor:
    """``[T, V]`` of a prompt."""
    x = model.decoder.embed(torch.from_numpy(prompt.ids).clamp(max=ROWS - 1))
    if prompt.features is not None:
        x[torch.from_numpy(prompt.image_rows)] = prompt.features
    return our_logits(model, x[None])[0]


def test_prompts_and_logits_equal_transformers(pair: tuple[Llava, LoadedModel]) -> None:
    oracle, model = pair
    last = []
    for request, files in zip(requests(), PICTURES, strict=True):
        theirs, ours = oracle.inputs(rendered(model, files), files), encoded(model, request)
        assert ours.ids.tolist() == theirs["input_ids"][0].tolist()
        last.append(logits(model, ours))
        assert (last[-1] - oracle.logits(theirs)).abs().max() < 1e-4
    other = encoded(model, ask("other", "what is it?", images=(picture(9),)))
    assert (logits(model, other)[-1] - last[1][-1]).abs().max() > 1e-2, "what is in a picture does matter"


def test_answers_equal_transformers_in_one_batch(pair: tuple[Llava, LoadedModel], bench: Make) -> None:
    oracle, model = pair
    endless = replace(model, spec=replace(model.spec, end_ids=frozenset({-1})))
    running = bench(endless, max_tokens=800)
    for call, files in zip(running.submit(*requests()), PICTURES, strict=True):
        done = call.finished()
        tokens, committed = running.canvases[call.request.id]
        ours = tokens[(committed < 1 << 30) & (np.arange(len(tokens)) >= done.usage.prompt_tokens)].tolist()
        theirs = oracle.greedy(oracle.inputs(rendered(model, files), files), NEW, model.spec.banned_ids)
        assert ours == theirs and len(ours) == NEW


@pytest.mark.parametrize("kind", ["next", "onevision"])
def test_pruned_answers_are_the_same_alone_and_together(tmp_path: Path, kind: str, bench: Make) -> None:
    model = load(KINDS[kind](tmp_path).folder)
    endless = replace(model, spec=replace(model.spec, end_ids=frozenset({-1})))
    names = ("resize", "column_attention" if kind == "onevision" else "hired", "tome")
    asked = [
        replace(r, id=f"{name} {r.id}", vision=Vision(pruner=name, amount=Amount("keep_ratio", 0.25)))
        for name in names
        for r in requests()[1:]
    ]
    alone = bench(endless, max_tokens=800, encode_batch=1, max_running=1, prefix_cache=False)
    expected = [alone.ask(r) for r in asked]
    together = [call.finished() for call in bench(endless, max_tokens=800).submit(*asked)]
    assert [d.text for d in together] == [d.text for d in expected]
    for done in together:
        assert 0.2 * done.usage.visual_tokens_before < done.usage.visual_tokens < 0.5 * done.usage.visual_tokens_before
    assert len({d.text for d in together}) > 2, "what is pruned does matter"


def test_an_image_among_others_is_not_taken_for_one_alone(tmp_path: Path) -> None:
    """Nor the other way round, whichever the cache has seen before; a clip beside it makes no difference."""
    model = load(llava_onevision(tmp_path).folder)
    one, other, video = ImagePart(picture(2, (60, 20))), ImagePart(picture(3)), VideoPart(clip(frames=12, rate=4))
    asked = [
        replace(ask(f"r{i}"), messages=(Message("user", (*parts, TextPart("what?"))),))
        for i, parts in enumerate(((one,), (one, other), (one, video), (one,)))
    ]
    shared = Encoder(model, MediaConfig(), max_tokens=2000)
    found = [shared.encode([request])[0] for request in asked]
    for request, mine in zip(asked, found, strict=True):
        alone = encoded(model, request)
        assert mine.ids.tolist() == alone.ids.tolist()
        assert mine.features is not None and alone.features is not None and torch.equal(mine.features, alone.features)
    tokens = [int((one.ids == model.spec.image_id).sum()) for one in found]
    assert tokens[1] == 2 * 37 and tokens[0] == tokens[2] == tokens[3] > 37


def test_a_sliding_window_shorter_than_a_picture(tmp_path: Path, bench: Make) -> None:
    made = llava_next(tmp_path, text_config=text_settings("mistral", sliding_window=50))
    model = load(made.folder)
    request, files = requests()[1], PICTURES[1]
    ours, theirs = encoded(model, request), made.inputs(rendered(model, files), files)
    assert len(ours.ids) > 150 and made.oracle.config.text_config.sliding_window == 50
    assert (logits(model, ours) - made.logits(theirs)).abs().max() < 1e-4
    running = bench(replace(model, spec=replace(model.spec, end_ids=frozenset({-1}))), max_tokens=800)
    done = running.ask(request)
    tokens, _committed = running.canvases[request.id]
    assert tokens[done.usage.prompt_tokens :].tolist() == made.greedy(theirs, NEW, model.spec.banned_ids)


def test_spec_of_each(pair: tuple[Llava, LoadedModel]) -> None:
    oracle, model = pair
    spec, config = model.spec, oracle.oracle.config
    assert spec.causal and spec.image_id == config.image_token_id and spec.image_id in spec.banned_ids
    assert oracle.processor.tokenizer.eos_token_id in spec.end_ids
    assert spec.max_tokens == config.text_config.max_position_embeddings
    assert (spec.video_id is not None) == (spec.architecture in ("llava_onevision", "llava_next_video"))
    assert model.vision is not None
    assert model.vision.tokens_per_image == (36 if spec.architecture == "llava" else 0)


def test_a_start_of_text_that_a_template_has_is_not_put_there_twice(tmp_path: Path) -> None:
    made = llava(tmp_path)
    model = load(made.folder)
    [plain, *_] = requests()
    expected = encoded(model, plain).ids.tolist()
    assert expected.count(model.tokenizer.bos_token_id) == 1 and expected[0] == model.tokenizer.bos_token_id
    model.tokenizer.chat_template = "{{ bos_token }}" + str(model.tokenizer.chat_template)
    assert encoded(model, plain).ids.tolist() == expected


@pytest.mark.parametrize("kind", ["1.5", "onevision"])
@pytest.mark.parametrize("within", [False, True], ids=["as published", "as within transformers"])
def test_names_of_tensors(tmp_path: Path, kind: str, within: bool) -> None:
    """Published towers have ``vision_model.`` in their names; SigLIP's come without a head there."""
    made = KINDS[kind](tmp_path)
    first = encoded(load(made.folder), requests()[1])
    tensors = load_file(tmp_path / "model.safetensors")
    if within:
        named = {name.replace("language_model.model.", "language_model."): t for name, t in tensors.items()}
        named = {name: t for name, t in named.items() if "lm_head" not in name}
        head = tensors["language_model.lm_head.weight"]
        named = {f"model.{name}": t for name, t in named.items()} | {"lm_head.weight": head}
    else:
        named = {name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in tensors.items()}
        named = {name: t for name, t in named.items() if ".head." not in name}
    save_file(named, tmp_path / "model.safetensors")
    model = load(made.folder)
    again = encoded(model, requests()[1])
    assert first.features is not None and again.features is not None and torch.equal(first.features, again.features)
    expected = made.oracle(**made.inputs(rendered(model, PICTURES[1]), PICTURES[1])).logits[0]
    assert (logits(model, again) - expected).abs().max() < 1e-4


def test_a_video_is_pooled_as_transformers_pools_it(tmp_path: Path) -> None:
    made = llava_onevision(tmp_path)
    edit(tmp_path / "config.json", mm_video_frames=3)
    model = load(made.folder)
    file = clip(frames=12, rate=4)
    request = replace(ask("v"), messages=(Message("user", (VideoPart(file), TextPart("when?"))),))
    ours = encoded(model, request)
    settings = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    frames = list(decode_video(file, MediaConfig(), frames=3).frames)
    pixels = SiglipImageProcessorPil(**settings)(frames, return_tensors="pt")["pixel_values"]
    theirs = made.logits({"input_ids": torch.from_numpy(ours.ids)[None], "pixel_values_videos": pixels[None]})
    assert (logits(model, ours) - theirs).abs().max() < 1e-4
    video = made.oracle.config.video_token_id
    assert (ours.ids == video).sum() == 3 * 9 + 1 and model.spec.video_id == video


@pytest.mark.parametrize("mode", ["average", "max"])
def test_a_clip_is_pooled_before_the_projector(tmp_path: Path, mode: str, bench: Make) -> None:
    """Of LLaVA-NeXT-Video, alone and beside an image: logits, and greedy tokens."""
    made = llava_next_video(tmp_path, spatial_pool_mode=mode)
    edit(tmp_path / "config.json", mm_video_frames=3)
    model = load(made.folder)
    file, image = clip(frames=12, rate=4), picture(2, (60, 20))
    frames = list(decode_video(file, MediaConfig(), frames=3).frames)
    pixels = CLIPImageProcessorPil(**CLIP)(frames, return_tensors="pt")["pixel_values"][None]
    endless = replace(model, spec=replace(model.spec, end_ids=frozenset({-1})))
    running = bench(endless, max_tokens=800)
    for parts in ((VideoPart(file),), (ImagePart(image), VideoPart(file))):
        asked = ask("v", recompute=Policy(name="last"), max_new_tokens=NEW)
        request = replace(asked, id=f"v{len(parts)}", messages=(Message("user", (*parts, TextPart("when?"))),))
        ours = encoded(model, request)
        beside = made.inputs(rendered(model, (image,)), (image,)) if len(parts) > 1 else {}
        more = {name: beside[name] for name in ("pixel_values", "image_sizes") if name in beside}
        inputs = {"input_ids": torch.from_numpy(ours.ids)[None], "pixel_values_videos": pixels, **more}
        assert (logits(model, ours) - made.logits(inputs)).abs().max() < 1e-4
        assert (ours.ids == made.oracle.config.video_token_id).sum() == 3 * 9
        [call] = running.submit(request)
        done = call.finished()
        tokens, committed = running.canvases[request.id]
        answer = tokens[(committed < 1 << 30) & (np.arange(len(tokens)) >= done.usage.prompt_tokens)].tolist()
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        assert answer == made.greedy(inputs, NEW, model.spec.banned_ids)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "next video",
            {"spatial_pool_mode": "conv"},
            "spatial_pool_mode = 'conv' is not supported",
        ),
        ("next video", {"spatial_pool_stride": 3}, "spatial_pool_stride = 3 is not supported; it can be 2"),
        ("1.5", {"vision_feature_layer": [-2, -5]}, r"vision_feature_layer = \[-2, -5\] is not one of the tower's 3"),
        ("1.5", {"vision_feature_layer": -9}, "vision_feature_layer = -9 is not one of the tower's 3 layers"),
        ("1.5", {"projector_hidden_act": "relu"}, "projector_hidden_act = 'relu' is not supported"),
        ("1.5", {"multimodal_projector_bias": False}, "multimodal_projector_bias = False is not supported"),
        ("1.5", {"image_token_index": "many"}, "image_token_index"),
        ("next", {"image_grid_pinpoints": PINPOINTS[:2]}, "are not those of the image processor"),
        ("next", {"image_grid_pinpoints": [[24, 25]]}, "must be a list of pairs of multiples of 24"),
        ("next", {"vision_feature_select_strategy": "full"}, "tiles need vision_feature_select_strategy"),
        ("onevision", {"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio = 'anyres' is no 'anyres_max_N'"),
        ("onevision", {"vision_feature_select_strategy": "default"}, "would drop a patch"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, kind: str, changes: dict[str, Any], message: str) -> None:
    made = KINDS[kind](tmp_path)
    edit(made.folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(made.folder)
