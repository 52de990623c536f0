"""Reuse of images' K/V by masked diffusion models: what a policy runs, and what comes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import Bench
from helpers import tiny_model
from plain_reuse import denoised, kv_of_images_alone, with_three_layers
from reusing import ONE, PARTS, requests, rule, say, told

from mmserve.config import EncoderCacheConfig, MediaConfig
from mmserve.core.canvas import Canvas
from mmserve.core.constraint import ConstraintSpec, Regex
from mmserve.core.request import Message, Policy, TextPart
from mmserve.decode import loop
from mmserve.decode.embedding import embedded
from mmserve.decode.recompute import FULL_ATTENTION
from mmserve.encode.cache import EncoderCache
from mmserve.encode.encoder import Encoder
from mmserve.models.base import Attention, LoadedModel

Make = Callable[..., Bench]

POLICIES = [Policy(name=name) for name in FULL_ATTENTION]


@pytest.fixture(scope="module", params=[Attention.FULL, Attention.PREFIX])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return with_three_layers(tiny_model(vision=True), request.param)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Rows of each pass, of one request at a time, its first one included."""
    passes: list[np.ndarray] = []
    for name in ("first", "next"):
        real = getattr(loop.Passes, name)

        def made(self: loop.Passes, *given: Any, real: Any = real) -> loop.Pass:
            found: loop.Pass = real(self, *given)
            passes.append(found.rows)
            return found

        monkeypatch.setattr(loop.Passes, name, made)
    return passes


def test_answers_do_not_depend_on_what_is_kept_nor_on_company(bench: Make, model: LoadedModel) -> None:
    """Under every recompute policy: cold and warm, without room to keep anything, in chunks, alone and together."""
    nothing = EncoderCache.of(EncoderCacheConfig(kv_bytes=0))
    asked = requests(*POLICIES)
    cold = bench(model, cache=nothing, stages="inline")
    expected = {r.id: told(cold.ask(r)) for r in asked}
    assert len({e[-1] for e in expected.values()}) > 10, "rules differ"
    together = bench(model)
    for _round in range(2):
        assert {call.request.id: told(call.finished()) for call in together.submit(*asked)} == expected
    assert max(map(len, together.batches)) > 4
    assert together.engine.stats().kv_cache.made == 3, "each image once"
    chunked = bench(model, prefill_tokens=8, stages="inline")
    assert {r.id: told(chunked.ask(r)) for r in reversed(asked)} == expected
    for b in (cold, together, chunked):
        b.await_nothing_left()


@pytest.mark.parametrize("policy", FULL_ATTENTION)
def test_running_everything_again_is_plain_to_the_last_bit(bench: Make, model: LoadedModel, policy: str) -> None:
    b = bench(model, stages="inline")
    for i, by in enumerate(("blend", "kv_share", "lego_link", "random_reuse")):
        told_by = [
            told(b.ask(say(f"{i} {one}", PARTS[i], one, recompute=Policy(name=policy), max_new_tokens=12)))
            for one in (None, rule(by, 1.0))
        ]
        assert told_by[0] == told_by[1]


@pytest.mark.parametrize("policy", FULL_ATTENTION)
def test_no_policy_runs_what_was_taken_and_each_runs_all_else_as_ever(
    bench: Make, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    passes = watched(monkeypatch)
    b = bench(model, stages="inline")
    for i, parts in enumerate(PARTS):
        plain, reusing = (
            say(f"{i} {by}", parts, by, recompute=Policy(name=policy), max_new_tokens=8)
            for by in (None, rule("lego_link", 0.5))
        )
        b.ask(plain)
        ever, without = list(passes), []
        passes.clear()
        done = b.ask(reusing)
        [found] = Encoder(model, MediaConfig(), max_tokens=500).encode([reusing])
        held = [row for span in found.spans for row in range(span.start + 2, min(span.stop, len(found.ids) - 1))]
        assert held and done.usage.reused_tokens == len(held)
        assert all(not np.isin(rows, held).any() for rows in passes) and len(passes) == done.forwards
        if policy not in (
            "dkv_decode",
            "dkv_greedy",
            "adaptive",
        ):  # those go by what was committed, or how values moved
            without = [rows[~np.isin(rows, held)].tolist() for rows in ever]
            assert [rows.tolist() for rows in passes] == without
        passes.clear()
        assert done.recomputed_tokens == b.ask(reusing_again(reusing)).recomputed_tokens
        passes.clear()


def reusing_again(request: Any) -> Any:
    return dataclasses.replace(request, id=f"{request.id} again")


@pytest.mark.parametrize(("share", "each_step"), [(0.25, 1), (0.0, 3), (0.5, 0)])
@torch.inference_mode()
def test_the_answer_is_that_of_the_rule_written_out(
    bench: Make, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, share: float, each_step: int
) -> None:
    """KVShare; what a pass runs beside its own rows is the prompt's from then on, and is run as the policy says."""
    passes = watched(monkeypatch)
    by = Policy(name="kv_share", options={"recompute": share, "each_step": each_step})
    request = say("r", PARTS[1], by, recompute=Policy(name="none"), max_new_tokens=6)
    done = bench(model).ask(request)
    encoder = Encoder(model, MediaConfig(), max_tokens=500)
    [found] = encoder.encode([request])
    [begun] = encoder.encode([dataclasses.replace(request, messages=(Message("user", (ONE, TextPart("?"))),))])
    canvas = Canvas.create(found.ids, new_tokens=6, block_length=6, mask_id=model.spec.mask_id, places=found.places)
    x, _deep = embedded(model, canvas.tokens, found)
    images = [slice(s.start, s.stop) for s in found.spans]
    at = torch.cat([torch.arange(s.start, s.stop) for s in images])
    alone = kv_of_images_alone(model, x, images, begun.spans[0].start)
    tokens, expected = denoised(model, x, len(found.ids), at, alone, round(share * len(at)), each_step)
    assert [rows.tolist() for rows in passes] == expected
    assert [t.id for t in done.tokens] == tokens
    assert len({len(rows) for rows in expected}) == (1 if not each_step else len(expected) if each_step == 1 else 4)


def test_constraints_templates_of_steps_and_samples(bench: Make, model: LoadedModel) -> None:
    ends = tiny_model(vision=False).spec.end_ids
    ending = dataclasses.replace(model, spec=dataclasses.replace(model.spec, end_ids=ends))
    b = bench(ending, max_samples=4)
    for i, name in enumerate(FULL_ATTENTION):
        options: dict[str, Any] = {"recompute": Policy(name=name), "max_new_tokens": 16}
        request = say(name, PARTS[i % 4], rule("blend", 0.3), **options)
        done = b.ask(dataclasses.replace(request, constraint=ConstraintSpec(kind=Regex("[0-9]{3}"))))
        assert done.text.isdigit() and done.usage.reused_tokens
    b.await_nothing_left()
