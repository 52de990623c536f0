"""DiffusionGemma with images: pixels, visual tokens, logits and answers are those of transformers' own classes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreseen import check_foreseen
from gemma_checkpoints import (
    BEGIN_IMAGE,
    END_IMAGE,
    LENGTH,
    expected,
    gemma,
    load_gemma,
    row_of,
    save_gemma,
    transformers_own,
    watched,
)
from harness import Bench
from helpers import picture
from PIL import Image
from transformers import Gemma4ImageProcessorPil

from mmserve.config import ModelConfig
from mmserve.errors import ConfigError
from mmserve.models.base import CanvasModel, OpenCanvas
from mmserve.models.registry import load_model

Make = Callable[..., Bench]
PICTURES = (picture(1), picture(2, (90, 20)), picture(3, (24, 70)), picture(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma(tmp_path_factory.mktemp("gemma"), 12, images=True)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return transformers_own(folder)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> CanvasModel:
    return load_gemma(folder)


def decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def oracle_inputs(folder: Path, ids: list[int], pictures: tuple[bytes, ...], image_id: int) -> dict[str, torch.Tensor]:
    """What transformers takes for a prompt of ``ids``, in which each picture is one placeholder."""
    if not pictures:
        return {"input_ids": torch.tensor([ids])}
    made = Gemma4ImageProcessorPil.from_pretrained(folder)([decoded(p) for p in pictures], return_tensors="pt")
    sizes, row = iter(made.pop("num_soft_tokens_per_image").tolist()), list[int]()
    for token in ids:
        row += [BEGIN_IMAGE, *[image_id] * next(sizes), END_IMAGE] if token == image_id else [token]
    types = torch.tensor([[int(token == image_id) for token in row]])
    return {"input_ids": torch.tensor([row]), "mm_token_type_ids": types, **made}


def plain_prompt(bench: Bench, model: CanvasModel, text: str, count: int) -> list[int]:
    """The ids of a prompt whose pictures are one placeholder each."""
    content = [*[{"type": "image"}] * count, {"type": "text", "text": text}]
    rendered = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return model.tokenizer.encode(rendered, add_special_tokens=False)


def test_visual_tokens_are_those_of_transformers(oracle: Any, loaded: CanvasModel, folder: Path) -> None:
    vision = loaded.vision
    assert vision is not None
    processor, seen = Gemma4ImageProcessorPil.from_pretrained(folder), set[int]()
    for data in PICTURES:
        made = processor([decoded(data)], return_tensors="pt")
        with torch.no_grad():
            theirs = oracle.model.encoder.get_image_features(made["pixel_values"], made["image_position_ids"])
            [mine] = vision(vision.prepare(decoded(data))["pixels"])
        assert len(mine) == int(made["num_soft_tokens_per_image"][0])
        assert (mine - theirs.pooler_output).abs().max() < 1e-4 * theirs.pooler_output.abs().max()
        seen.add(len(mine))
    assert len(seen) == 3, "the pictures' shapes make different numbers of tokens"
    check_foreseen(loaded)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_logits_are_those_of_transformers(
    bench: Make, oracle: Any, loaded: CanvasModel, folder: Path, count: int
) -> None:
    b: Bench = bench(loaded, started=False, watch=False, max_tokens=512)
    [encoded] = b.engine.stages.encoder.encode([gemma("x", "what is left of it?", images=PICTURES[:count])])
    inputs = oracle_inputs(
        folder, plain_prompt(b, loaded, "what is left of it?", count), PICTURES[:count], loaded.spec.image_id or 0
    )
    assert encoded.ids.tolist() == inputs["input_ids"][0].tolist()
    noise = torch.randint(600, (LENGTH,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        past = loaded.network.read(torch.from_numpy(encoded.ids), None, encoded.features)
        [mine] = loaded.network.predict([OpenCanvas(noise, past, None)])
        masks = oracle.model.encoder.create_masks_for_generate(
            oracle.config,
            torch.empty(1, len(encoded.ids), 0),
            torch.ones(1, len(encoded.ids), dtype=torch.long),
            None,
            torch.arange(len(encoded.ids))[None],
            inputs.get("mm_token_type_ids"),
        )
        theirs = oracle(decoder_input_ids=noise[None], attention_mask=masks, **inputs).logits[0]
        assert (mine - theirs).abs().max() < 1e-4
        if count:  # else the masks above would say nothing
            causal = oracle(decoder_input_ids=noise[None], **inputs).logits[0]
            assert (mine - causal).abs().max() > 1e-3


@pytest.fixture(scope="module")
def nudged(folder: Path) -> list[Any]:
    """The oracle twice more, each weight moved by some units in its last place: where rounding decides, they differ."""
    models = []
    for seed in range(2):
        model, generator = transformers_own(folder), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 1 + 2e-7 * torch.randn(weight.shape, generator=generator)
        models.append(model)
    return models


@pytest.mark.parametrize("count", [0, 2])
def test_tokens_are_those_of_transformers(
    bench: Make, oracle: Any, nudged: list[Any], loaded: CanvasModel, folder: Path, count: int, monkeypatch: Any
) -> None:
    b = watched(bench(load_gemma(folder, same_bits=True), stages="inline", watch=False, max_tokens=512))
    prompt = plain_prompt(b, loaded, "what is it?", count)
    inputs = oracle_inputs(folder, prompt, PICTURES[:count], loaded.spec.image_id or 0)
    row = inputs.pop("input_ids")[0].tolist()

    def of(model: Any, seed: int) -> tuple[list, int]:
        return expected(model, row, 2 * LENGTH, seed, monkeypatch, eos_token_id=-1, **inputs)

    found = ((seed, of(oracle, seed)) for seed in range(30))
    seed, (tokens, passes) = next((s, own) for s, own in found if all(of(model, s) == own for model in nudged))
    request = gemma("r", "what is it?", images=PICTURES[:count], max_new_tokens=2 * LENGTH, seed=seed)
    call = b.submit(request)[0]
    assert row_of(b, call) == tokens
    done = call.finished()
    assert (done.forwards, done.usage.prompt_tokens) == (passes, len(row))
    assert done.usage.visual_tokens == row.count(loaded.spec.image_id)


def test_an_answer_is_the_same_alone_and_among_pictures_of_other_shapes(bench: Make, loaded: CanvasModel) -> None:
    requests = [gemma(f"r{i}", "what?", images=PICTURES[i : i + 1 + i % 2], seed=1) for i in range(4)]
    alone: Bench = bench(loaded, stages="inline", watch=False, max_tokens=512)
    texts = {r.id: alone.ask(r).text for r in requests}
    assert len(set(texts.values())) == 3 and texts["r0"] == texts["r3"], "what is seen makes the answer"
    together: Bench = bench(loaded, watch=False, max_tokens=512)
    assert {c.request.id: c.finished().text for c in together.submit(*reversed(requests))} == texts
    together.await_nothing_left()


def test_it_says_that_it_takes_images(bench: Make, loaded: CanvasModel) -> None:
    info = bench(loaded, watch=False).engine.info
    assert info.images and not info.videos and info.max_images > 0 and info.visual_tokens_per_image == 0


def test_settings_that_do_not_fit_the_tower_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    path.unlink()
    for changes, message in (
        ({"patch_size": 14}, "patch_size must be the tower's 16"),
        ({"do_resize": False}, "do_resize = False of the image processor is not supported"),
        ({"max_soft_tokens": 3}, "the image processor's settings cannot be read"),
    ):
        path.write_text(json.dumps({**settings, **changes}))
        with pytest.raises(ConfigError, match=message):
            load_model(ModelConfig(path=str(tmp_path), device="cpu"))
