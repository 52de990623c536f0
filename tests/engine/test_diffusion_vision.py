"""Diffusion models that see, in the one loop, token for token against plain loops over transformers."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from dimple_checkpoints import Dimple
from harness import Bench, Call
from helpers import ask, dkv, picture
from lavida_checkpoints import Lavida
from llada_checkpoints import load
from mmada_checkpoints import Mmada
from PIL import Image
from transformers import PreTrainedModel

from mmserve.core.request import Amount, Policy, Request, Vision
from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]


def endless(model: LoadedModel) -> LoadedModel:
    """The model with an end of text that no test's answer meets: answers run to their full length."""
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, end_ids=frozenset({-1})))


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def answer(bench: Bench, call: Call) -> list[int]:
    prompt = call.finished().usage.prompt_tokens
    return bench.canvases[call.request.id][0][prompt:].tolist()


def outcome(bench: Bench, call: Call) -> tuple[object, ...]:
    done = call.finished()
    return done.text, done.forwards, answer(bench, call)


@torch.no_grad()
def plain_loop(
    logits_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    embed: torch.nn.Module,
    prompt_PD: torch.Tensor,
    new: int,
    mask_id: int,
    banned: set[int],
    *,
    at_once: int = 1,
    shift: int = 0,
    prefix: bool = False,
) -> list[int]:
    """LLaDA's ``generate`` as these models have it: one block, the surest ``at_once`` tokens of each step become final.

    Every step runs the whole row, the prompt's embeddings in front: ``logits_of`` embeddings ``[T, D]`` where each sees
    what a bool ``[T, T]`` says. ``prefix``: the prompt does not see the answer; ``shift``: how far left of a position
    its logits stand.
    """
    row = torch.full((new,), mask_id)
    length = len(prompt_PD) + new
    seen = torch.ones(length, length, dtype=torch.bool)
    seen[: len(prompt_PD), len(prompt_PD) :] = not prefix
    while (row == mask_id).any():
        logits = logits_of(torch.cat([prompt_PD, embed(row)]), seen)[len(prompt_PD) - shift : length - shift]
        logits[:, list(banned)] = -torch.inf
        sure, token = logits.double().softmax(-1).max(-1)
        best = sure.masked_fill(row != mask_id, -1.0).topk(min(at_once, int((row == mask_id).sum()))).indices
        row[best] = token[best]
    return row.tolist()


def masked(oracle: PreTrainedModel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """``logits_of`` a text model of transformers."""

    def logits_of(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        logits: torch.Tensor = oracle(inputs_embeds=x[None], attention_mask=mask[None, None]).logits[0]
        return logits

    return logits_of


# --- MMaDA ---


@pytest.fixture(scope="module")
def mmada(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mmada, LoadedModel]:
    made = Mmada(tmp_path_factory.mktemp("mmada"))
    return made, endless(load(made.folder))


@pytest.mark.parametrize("images", [0, 1])
@pytest.mark.parametrize("at_once", [1, 2])
def test_mmada_gives_the_tokens_of_mmu_generate(
    bench: Make, mmada: tuple[Mmada, LoadedModel], images: int, at_once: int
) -> None:
    made, model = mmada
    b = bench(model, stages="inline")
    kinds: set[int] = set()
    for seed in (1, 2):
        media = (picture(seed),) * images
        text = model.tokenizer.encode(
            "<|startoftext|><|start_header_id|>user<|end_header_id|>\nwhat is it?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n",
            add_special_tokens=False,
        )
        prompt = [*(made.picture_ids(opened(media[0])) if images else []), *text]
        embedded = made.oracle.model.embed_tokens(torch.tensor(prompt))
        banned = {model.spec.mask_id, *range(made.first, made.first + 32)}
        expected = plain_loop(
            masked(made.oracle),
            made.oracle.model.embed_tokens,
            embedded,
            12,
            model.spec.mask_id,
            banned,
            at_once=at_once,
        )
        options = {"max_new_tokens": 12, "block": 12, "steps": 12 // at_once}
        for policy in (Policy(name="none"), dkv(1)):
            [call] = b.submit(ask(f"{policy.name} {seed}", "what is it?", images=media, recompute=policy, **options))
            assert answer(b, call) == expected
        kinds |= set(expected)
    assert len(kinds) > 4


# --- LaViDa ---


@pytest.fixture(scope="module")
def lavida_llada(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lavida, LoadedModel]:
    made = Lavida(tmp_path_factory.mktemp("lavida"), "llada")
    return made, endless(load(made.folder))


@pytest.fixture(scope="module")
def lavida_dream(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lavida, LoadedModel]:
    made = Lavida(tmp_path_factory.mktemp("lavida"), "dream")
    return made, endless(load(made.folder))


@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize("family", ["lavida_llada", "lavida_dream"])
def test_lavida_gives_the_tokens_of_its_plain_loop(
    bench: Make, family: str, images: int, request: pytest.FixtureRequest
) -> None:
    made, model = request.getfixturevalue(family)
    b = bench(model, stages="inline", max_tokens=400)
    media = tuple(picture(seed, (30 + 9 * seed, 40)) for seed in range(images))
    [encoded] = b.engine.stages.encoder.encode([ask("x", "what is it?", images=media)])
    prompt = made.oracle.get_input_embeddings()(torch.from_numpy(np.where(encoded.ids < 640, encoded.ids, 0))).detach()
    if images:
        see = made.visual_tokens if images == 1 else made.padded_tokens
        prompt[torch.from_numpy(encoded.image_rows)] = torch.cat([see(opened(data)) for data in media])
    shift = model.spec.logit_shift
    expected = plain_loop(
        masked(made.oracle),
        made.oracle.get_input_embeddings(),
        prompt,
        12,
        model.spec.mask_id,
        {model.spec.mask_id},
        shift=shift,
        prefix=True,
    )
    for policy in (Policy(name="none"), dkv(1), Policy(name="prefix")):  # the last computes the prompt's K/V once
        options = {"max_new_tokens": 12, "block": 12, "recompute": policy}
        [call] = b.submit(ask(policy.name, "what is it?", images=media, **options))
        assert answer(b, call) == expected, policy.name
    assert len(set(expected)) > 1


# --- Dimple ---


@pytest.fixture(scope="module")
def dimple(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dimple, LoadedModel]:
    made = Dimple(tmp_path_factory.mktemp("dimple"))
    return made, endless(load(made.folder))


@pytest.mark.parametrize("images", [0, 1, 2])
def test_dimple_gives_the_tokens_of_its_plain_loop(
    bench: Make, dimple: tuple[Dimple, LoadedModel], images: int
) -> None:
    made, model = dimple
    b = bench(model, stages="inline", max_tokens=400)
    media = tuple(picture(seed, (20 + 9 * seed, 40)) for seed in range(images))
    text = f"<|im_start|>user\n{'<|vision_start|><|image_pad|><|vision_end|>' * images}what is it?<|im_end|>\n"
    ids = model.tokenizer.encode(f"{text}<|im_start|>assistant\n", add_special_tokens=False)
    prompt, places = made.prompt(ids, [opened(data) for data in media])
    _x, where = made.canvas(prompt, places, torch.zeros(12, dtype=torch.int64))
    banned, embed = set(model.spec.banned_ids), made.oracle.get_input_embeddings()
    expected = plain_loop(
        lambda x, seen: made.logits(x, where, seen), embed, prompt, 12, model.spec.mask_id, banned, shift=1
    )
    for policy in (Policy(name="none"), dkv(1)):
        options = {"max_new_tokens": 12, "block": 12, "recompute": policy}
        [call] = b.submit(ask(policy.name, "what is it?", images=media, **options))
        assert answer(b, call) == expected, policy.name
    assert len(set(expected)) > 1


# --- all of them ---


def mixed(pictures: int) -> list[Request]:
    """Requests that differ in pictures, pruning, policy and temperature; none has more than ``pictures``."""
    requests = [
        ask(
            f"r{i}",
            "a circle " * (i % 3) + "?",
            images=tuple(picture(10 + i + n) for n in range(i % (pictures + 1))),
            max_new_tokens=[3, 9, 12][i % 3],
            recompute=[Policy(name="none"), dkv(2), Policy(name="dual")][i % 3],
            temperature=[0.0, 0.9][i % 2],
            seed=i,
        )
        for i in range(8)
    ]
    half = Vision(pruner="random", amount=Amount("keep_ratio", 0.5))
    return [dataclasses.replace(r, vision=half) if i % 4 == 3 else r for i, r in enumerate(requests)]


@pytest.mark.parametrize("family", ["mmada", "lavida_llada", "lavida_dream", "dimple"])
def test_a_batch_gives_what_each_request_gives_alone(bench: Make, family: str, request: pytest.FixtureRequest) -> None:
    _made, model = request.getfixturevalue(family)
    requests = mixed(1 if family == "mmada" else 2)
    alone, together = bench(model, stages="inline", max_tokens=400), bench(model, max_tokens=400)
    expected = [outcome(alone, alone.submit(r)[0]) for r in requests]
    calls = together.submit(*requests)
    assert [outcome(together, call) for call in calls] == expected
    assert len({tuple(np.ravel(tokens)) for _text, _forwards, tokens in expected}) > 4  # type: ignore[arg-type]
