"""Gemma 3 with images: prompts, logits and answers are transformers' own, however a prompt is cut or shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gemma3_checkpoints import TOKENS, Gemma3, gemma3
from harness import Bench
from helpers import ask, picture
from llama_checkpoints import edit, load
from safetensors.torch import load_file, save_file

from mmserve.config import MediaConfig
from mmserve.core.attention_span import image_spans
from mmserve.core.canvas import Canvas
from mmserve.core.encoded import Encoded
from mmserve.core.request import Policy, Request
from mmserve.decode.forward import Pass, forward
from mmserve.encode.encoder import Encoder
from mmserve.errors import ConfigError
from mmserve.kv.prefix import page_keys
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]
#: None, one and several.
PICTURES = ((), (picture(1),), (picture(2, (60, 20)), picture(3, (17, 50)), picture(4, (24, 24)), picture(5, (70, 70))))
NEW = 8


@pytest.fixture(scope="module", params=[40, 16, 500], ids=["window", "window of a picture", "wide window"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Gemma3, LoadedModel]:
    made = gemma3(tmp_path_factory.mktemp("model"), window=request.param)
    model = load(made.folder)
    return made, replace(model, spec=replace(model.spec, end_ids=frozenset({-1})))


def requests(name: str = "r") -> list[Request]:
    options: dict[str, Any] = {"recompute": Policy(name="last"), "max_new_tokens": NEW}
    return [ask(f"{name}{i}", "what is it?", images=files, **options) for i, files in enumerate(PICTURES)]


def inputs(made: Gemma3, files: Sequence[bytes]) -> dict[str, torch.Tensor]:
    content: list[dict[str, str]] = [*({"type": "image"} for _ in files), {"type": "text", "text": "what is it?"}]
    text = made.processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    values = made.inputs(str(text).removeprefix(str(made.processor.tokenizer.bos_token)), files)
    begins = int(values["input_ids"][0, 0]) == made.processor.tokenizer.bos_token_id
    return values if begins else made.inputs(str(text), files)


def encoded(model: LoadedModel, request: Request) -> Encoded:
    [found] = Encoder(model, MediaConfig(), max_tokens=2000).encode([request])
    return found


@torch.inference_mode()
def logits(model: LoadedModel, prompt: Encoded, cuts: Sequence[int] = ()) -> torch.Tensor:
    """``[T, V]`` of a prompt, run in one pass over pages or in several that end at ``cuts``."""
    length = len(prompt.ids)
    store = KVStore(model.decoder.config, pages=length, page_size=4, dtype=model.dtype, device=model.device)
    for tensor in (*store.keys, *store.values):
        tensor.fill_(torch.nan)
    x = model.decoder.embed(torch.from_numpy(prompt.ids))
    if prompt.features is not None:
        x[torch.from_numpy(prompt.image_rows)] = prompt.features
    canvas = Canvas.create(prompt.ids, new_tokens=1, block_length=1, mask_id=0, logit_shift=1)
    found: list[torch.Tensor] = []
    for start, end in zip((0, *cuts), (*cuts, length), strict=True):
        rows = np.arange(start, end)
        p = Pass(canvas, np.arange(length), x, rows, rows, rows, end)
        found += forward(model, store, [p], 8)[0].slices()
    return torch.cat(found)


def test_prompts_and_logits_equal_transformers(pair: tuple[Gemma3, LoadedModel]) -> None:
    made, model = pair
    last = []
    for request, files in zip(requests(), PICTURES, strict=True):
        theirs, ours = inputs(made, files), encoded(model, request)
        assert ours.ids.tolist() == theirs["input_ids"][0].tolist()
        last.append(logits(model, ours))
        with torch.no_grad():
            expected = made.oracle(**theirs).logits[0]
            assert (last[-1] - expected).abs().max() < 1e-4
            if files:
                causal = made.oracle(**{**theirs, "token_type_ids": torch.zeros_like(theirs["input_ids"])}).logits[0]
                assert (causal - expected).abs().max() > 1e-2, "that a picture's tokens see each other does matter"
    other = encoded(model, ask("other", "what is it?", images=(picture(9),)))
    assert (logits(model, other)[-1] - last[1][-1]).abs().max() > 1e-2, "what is in a picture does matter"


def test_answers_equal_transformers_in_one_batch(pair: tuple[Gemma3, LoadedModel], bench: Make) -> None:
    made, model = pair
    for config in ({}, {"page_size": 4, "prefill_tokens": 8}):
        running = bench(model, max_tokens=800, **config)
        for call, files in zip(running.submit(*requests()), PICTURES, strict=True):
            done = call.finished()
            tokens, committed = running.canvases[call.request.id]
            ours = tokens[(committed < 1 << 30) & (np.arange(len(tokens)) >= done.usage.prompt_tokens)].tolist()
            theirs = made.greedy(inputs(made, files), NEW, model.spec.banned_ids)
            assert ours == theirs and len(ours) == NEW


def test_a_prompt_run_in_parts_has_the_bits_of_one_run_whole(pair: tuple[Gemma3, LoadedModel]) -> None:
    """Parts end with pages that cut no picture."""
    _made, model = pair
    prompt = encoded(model, requests()[2])
    span = model.spec.attention_spans(prompt.ids)
    assert span is not None
    cuts = [at for at in range(4, len(span) - 1, 4) if span[at - 1] <= at]
    assert len(cuts) > 3 and (span > np.arange(1, len(span) + 1)).sum() == 4 * (TOKENS - 1)
    whole = logits(model, prompt)
    for chosen in (cuts, cuts[1::2], cuts[-1:]):
        assert torch.equal(logits(model, prompt, chosen), whole)


def test_shared_pages_change_nothing_and_are_taken_within_pictures(
    pair: tuple[Gemma3, LoadedModel], bench: Make
) -> None:
    _made, model = pair
    alone = bench(model, max_tokens=800, page_size=4, prefix_cache=False)
    running = bench(model, max_tokens=800, page_size=4)
    first = requests("first")[2]
    longer = [replace(r, id=f"longer {r.id}") for r in requests()]
    texts = [alone.ask(r).text for r in (first, *longer)]
    assert running.ask(first).text == texts[0]
    for request, text in zip(longer, texts[1:], strict=True):
        done = running.ask(request)
        assert done.text == text
    assert done.usage.cached_tokens > 4 * TOKENS, "the pages of its pictures"


def test_the_key_of_a_page_covers_the_pictures_that_it_begins() -> None:
    ids = np.array([1, 9, 9, 9, 9, 2, 3, 4])
    rows, features = np.arange(1, 5), np.arange(4, dtype=np.uint8)[:, None]
    numbers: dict[str, Any] = {"page_size": 2, "block": 1, "logit_shift": 1, "span": image_spans(ids, 9)}
    other = features.copy()
    other[3] = 77
    keys, changed = (page_keys(ids, rows, f, **numbers) for f in (features, other))
    assert len(keys) == 3 and not set(keys) & set(changed), "the first page sees the whole picture"
    numbers["span"] = None
    assert page_keys(ids, rows, features, **numbers)[0] == page_keys(ids, rows, other, **numbers)[0]


def test_how_far_the_positions_of_a_prompt_see() -> None:
    assert image_spans(np.array([9, 9, 1, 9, 2, 9, 9, 9]), 9).tolist() == [2, 2, 3, 4, 5, 8, 8, 8]
    assert image_spans(np.array([1, 2]), 9).tolist() == [1, 2]
    assert image_spans(np.array([], np.int64), 9).tolist() == []


def test_names_of_tensors_within_transformers(tmp_path: Path) -> None:
    made = gemma3(tmp_path)
    expected = logits(load(made.folder), encoded(load(made.folder), requests()[1]))
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in tensors), "the published names"
    named = {name.replace("language_model.model.", "language_model."): t for name, t in tensors.items()}
    named = {f"model.{name}": t for name, t in named.items() if "lm_head" not in name}  # which is tied
    save_file(named, tmp_path / "model.safetensors")
    model = load(made.folder)
    assert torch.equal(logits(model, encoded(model, requests()[1])), expected)


def test_spec_and_what_is_refused(tmp_path: Path) -> None:
    made = gemma3(tmp_path)
    spec, tok = load(made.folder).spec, made.processor.tokenizer
    assert spec.causal and spec.whole_images and spec.video_id is None
    assert spec.image_id == tok.convert_tokens_to_ids("<image_soft_token>") and spec.image_id in spec.banned_ids
    for file, changes, message in (
        ("config.json", {"mm_tokens_per_image": 9}, "mm_tokens_per_image = 9 must be a square that divides"),
        (
            "config.json",
            {"text_config": {**made.config["text_config"], "sliding_window": 8}},
            "must hold a picture's 16",
        ),
        ("preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan of the image processor"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize = False of the image processor"),
        ("preprocessor_config.json", {"size": {"height": 8, "width": 8}}, "the image processor makes"),
    ):
        gemma3(tmp_path)
        edit(tmp_path / file, **changes)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)
