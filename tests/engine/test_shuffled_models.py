"""SmolVLM, Idefics3, InternVL, Mistral 3 and Pixtral: prompts, logits and answers are those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Bench
from helpers import ask, picture
from llama_checkpoints import load, our_logits
from pixtral_checkpoints import mistral3, pixtral
from shuffled_checkpoints import ROWS, Checkpoint, internvl, internvl_chat, smolvlm

from mmserve.config import MediaConfig
from mmserve.core.request import Policy, Request
from mmserve.encode.encoder import Encoder
from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]
KINDS: dict[str, Callable[[Path], Checkpoint]] = {
    "smolvlm": smolvlm,
    "idefics3": lambda folder: smolvlm(folder, "idefics3"),
    "internvl with qwen2": internvl,
    "internvl with qwen3": lambda folder: internvl(folder, "qwen3"),
    "internvl with llama": lambda folder: internvl(folder, "llama"),
    "internvl_chat": internvl_chat,
    "mistral3": mistral3,
    "mistral3 with ministral3": lambda folder: mistral3(folder, "ministral3"),
    "mistral3, an inner layer": lambda folder: mistral3(folder, vision_feature_layer=-2),
    "pixtral": pixtral,
}
#: None, one and several; wide, tall, small and square; a wide one has more tiles.
PICTURES = ((), (picture(1),), (picture(2, (60, 20)), picture(3, (17, 50)), picture(4, (24, 24))))
NEW = 8


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, LoadedModel]:
    made = KINDS[request.param](tmp_path_factory.mktemp("model"))
    return made, load(made.folder)


def requests() -> list[Request]:
    last = Policy(name="last")
    return [
        ask(f"r{i}", "what is it?", images=files, recompute=last, max_new_tokens=NEW)
        for i, files in enumerate(PICTURES)
    ]


def rendered(model: LoadedModel, files: Sequence[bytes]) -> str:
    content: list[dict[str, str]] = [*({"type": "image"} for _ in files), {"type": "text", "text": "what is it?"}]
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


@torch.inference_mode()
def logits(model: LoadedModel, request: Request) -> tuple[list[int], torch.Tensor]:
    """The prompt's ids and logits ``[T, V]``."""
    [encoded] = Encoder(model, MediaConfig(), max_tokens=2000).encode([request])
    x = model.decoder.embed(torch.from_numpy(encoded.ids).clamp(max=ROWS - 1))
    if encoded.features is not None:
        x[torch.from_numpy(encoded.image_rows)] = encoded.features
    return encoded.ids.tolist(), our_logits(model, x[None])[0]


def test_prompts_and_logits_equal_transformers(pair: tuple[Checkpoint, LoadedModel]) -> None:
    oracle, model = pair
    last = []
    for request, files in zip(requests(), PICTURES, strict=True):
        theirs = oracle.inputs(rendered(model, files), files)
        ids, ours = logits(model, request)
        assert ids == theirs["input_ids"][0].tolist()
        assert (ours - oracle.logits(theirs)).abs().max() < 1e-4
        last.append(ours[-1])
    other = ask("other", "what is it?", images=(picture(9),))
    assert (logits(model, other)[1][-1] - last[1]).abs().max() > 1e-2, "what is in a picture does matter"


def test_answers_equal_transformers_in_one_batch(pair: tuple[Checkpoint, LoadedModel], bench: Make) -> None:
    oracle, model = pair
    running = bench(model, max_tokens=400)
    for call, files in zip(running.submit(*requests()), PICTURES, strict=True):
        done = call.finished()
        tokens, committed = running.canvases[call.request.id]
        ours = tokens[(committed < 1 << 30) & (np.arange(len(tokens)) >= done.usage.prompt_tokens)].tolist()
        theirs = oracle.greedy(oracle.inputs(rendered(model, files), files), NEW, model.spec.banned_ids)
        ends = [i for i, token in enumerate(theirs) if token in model.spec.end_ids]
        assert ours == theirs[: ends[0] + 1 if ends else NEW]
        assert len(ours) > 1


def test_spec_of_each(pair: tuple[Checkpoint, LoadedModel]) -> None:
    oracle, model = pair
    spec, tokenizer = model.spec, oracle.processor.tokenizer
    assert spec.causal and spec.image_id == oracle.oracle.config.image_token_id
    assert tokenizer.eos_token_id in spec.end_ids and spec.image_id in spec.banned_ids
    assert spec.max_tokens == oracle.oracle.config.text_config.max_position_embeddings
    assert (spec.video_id is not None) == (spec.architecture in ("smolvlm", "internvl_chat"))
