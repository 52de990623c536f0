"""Reuse of images' K/V by masked diffusion models: what a policy runs, and what comes of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import Bench, eventually
from helpers import tiny_model
from plain_reuse import denoised, kv_of_images_alone, with_three_layers
from reusing import ONE, PARTS, requests, rule, say, told

from mmserve.config import EncoderCacheConfig, MediaConfig
from mmserve.core.canvas import Canvas
from mmserve.core.constraint import ConstraintSpec, Hole, Regex, Template
from mmserve.core.events import Finished
from mmserve.core.request import Message, Policy, Request, TextPart
from mmserve.core.samples import sample_seed
from mmserve.decode import runner
from mmserve.decode.extensions.image_reuse.selective import PredictingRows, SelectiveRecompute
from mmserve.decode.forward import Pass
from mmserve.decode.passes import Passes
from mmserve.decode.propose import Proposer
from mmserve.decode.recompute import FULL_ATTENTION
from mmserve.encode.embedding import embedded
from mmserve.encode.encoder import Encoder
from mmserve.models.base import Attention, LoadedModel
from mmserve.tiers.caches import Caches

Make = Callable[..., Bench]

POLICIES = [Policy(name=name) for name in FULL_ATTENTION]


@pytest.fixture(scope="module", params=[(Attention.FULL, 0), (Attention.PREFIX, 1)], ids=["full", "prefix, shifted"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return with_three_layers(tiny_model(vision=True), *request.param)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Rows of each pass, of one request at a time, its first one included."""
    passes: list[np.ndarray] = []
    for name in ("first", "next"):
        real = getattr(Passes, name)

        def made(self: Passes, *given: Any, real: Any = real) -> Pass:
            found: Pass = real(self, *given)
            passes.append(found.rows)
            return found

        monkeypatch.setattr(Passes, name, made)
    return passes


def test_answers_do_not_depend_on_what_is_kept_nor_on_company(bench: Make, model: LoadedModel) -> None:
    """Under every recompute policy: cold and warm, without room to keep anything, in chunks, alone and together."""
    nothing = Caches.of(EncoderCacheConfig(kv_bytes=0))
    asked = requests(*POLICIES)
    cold = bench(model, cache=nothing, stages="inline")
    expected = {r.id: told(cold.ask(r)) for r in asked}
    assert len({e[-1] for e in expected.values()}) > 10, "rules differ"
    together = bench(model)
    for _round in range(2):
        assert {call.request.id: told(call.finished()) for call in together.submit_together(*asked)} == expected
    assert max(map(len, together.batches)) > 4
    assert together.engine.stats().kv_cache.made == 3, "each image once"
    chunked = bench(model, prefill_tokens=8, stages="inline")
    assert {r.id: told(chunked.ask(r)) for r in reversed(asked)} == expected
    for b in (cold, together, chunked):
        b.await_nothing_left()


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", FULL_ATTENTION)
def test_running_everything_again_is_plain_to_the_last_bit(
    bench: Make, model: LoadedModel, policy: str, every: int
) -> None:
    b = bench(model, stages="inline")
    for i, by in enumerate(("blend", "kv_share", "lego_link", "random_reuse")):
        if (i + FULL_ATTENTION.index(policy)) % every:
            continue
        told_by = [
            told(b.ask(say(f"{i} {one}", PARTS[i], one, recompute=Policy(name=policy), max_new_tokens=12)))
            for one in (None, rule(by, 1.0))
        ]
        assert told_by[0] == told_by[1]


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", FULL_ATTENTION)
def test_no_policy_runs_what_was_taken_and_each_runs_all_else_as_ever(
    bench: Make, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, policy: str, every: int
) -> None:
    passes = watched(monkeypatch)
    b = bench(model, stages="inline")
    first = FULL_ATTENTION.index(policy) + model.spec.logit_shift
    for i, parts in enumerate(PARTS):
        if (i + first) % every:
            continue
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
        if policy not in ("dkv_decode", "dkv_greedy", "adaptive"):  # which go by what was committed, or what moved
            asked = [*held, len(found.ids) - 1]  # where logits are shifted, the last tells of what may be committed
            without = [rows[~np.isin(rows, asked)].tolist() for rows in ever]
            assert [rows[~np.isin(rows, asked)].tolist() for rows in passes] == without
        passes.clear()
        assert done.recomputed_tokens == b.ask(reusing_again(reusing)).recomputed_tokens
        passes.clear()


def reusing_again(request: Request) -> Request:
    return dataclasses.replace(request, id=f"{request.id} again")


@pytest.mark.parametrize(("share", "each_step"), [(0.25, 1), (0.0, 3), (0.5, 0)])
@torch.inference_mode()
def test_the_answer_is_that_of_the_rule_written_out(
    bench: Make, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, share: float, each_step: int
) -> None:
    """KVShare; what a pass runs beside its own rows is the prompt's from then on, and is run as the policy says."""
    passes, attended = watched(monkeypatch), []
    absorb = SelectiveRecompute.absorb

    def noted(self: SelectiveRecompute, seen: PredictingRows) -> None:
        assert seen.attention_L is not None
        attended.append(seen.attention_L)
        absorb(self, seen)

    monkeypatch.setattr(SelectiveRecompute, "absorb", noted)
    by = Policy(name="kv_share", options={"recompute": share, "each_step": each_step})
    request = say("r", PARTS[3], by, recompute=Policy(name="none"), max_new_tokens=6)
    done = bench(model).ask(request)
    encoder = Encoder(model, MediaConfig(), max_tokens=500)
    [found] = encoder.encode([request])
    [begun] = encoder.encode([dataclasses.replace(request, messages=(Message("user", (ONE, TextPart("?"))),))])
    canvas = Canvas.create(found.ids, new_tokens=6, block_length=6, mask_id=model.spec.mask_id, places=found.places)
    x, _deep = embedded(model, canvas.tokens, found)
    images = [slice(s.start, s.stop) for s in found.spans]
    at = torch.cat([torch.arange(s.start, s.stop) for s in images])
    alone = kv_of_images_alone(model, x, images, begun.spans[0].start)
    tokens, expected, asked = denoised(model, x, len(found.ids), at, alone, round(share * len(at)), each_step)
    assert [rows.tolist() for rows in passes] == expected
    assert [t.id for t in done.tokens] == tokens
    assert bool(attended) == bool(each_step) and done.tokens[0].step > 2, "the prompt's last row asks, where it tells"
    for mine, plain in zip(attended, asked, strict=False):
        torch.testing.assert_close(mine[at], plain, rtol=1e-4, atol=1e-5)
    assert len({len(rows) for rows in expected}) == (1 if not each_step else len(expected) if each_step == 1 else 4)


@pytest.mark.parametrize("behind", [False, True])
def test_a_pass_that_failed_leaves_no_trace(
    bench: Make, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """Neither one that fails itself, nor one behind which candidates cannot be made."""
    policies = ("none", "dual", "dkv_decode", "adaptive")
    asked = [
        say(f"{name} {n}", PARTS[1], kv_share(0.2, n), recompute=Policy(name=name), max_new_tokens=8, block=4)
        for name in policies
        for n in (1, 3)
    ]
    b = bench(model, stages="inline")
    expected = [told(b.ask(r)) for r in asked]
    forward, candidates = runner.forward, Proposer.propose
    together: list[int] = []

    def ran(model: LoadedModel, store: Any, batch: list[Any], floor: int, **options: Any) -> Any:
        found = forward(model, store, batch, floor, **options)
        together.append(len(batch))
        if len(batch) > 1 and not behind:
            raise RuntimeError("only alone")
        return found

    def judged(self: Proposer, *given: Any) -> Any:
        if together[-1] > 1 and behind:
            raise RuntimeError("only alone")
        return candidates(self, *given)

    monkeypatch.setattr(runner, "forward", ran)
    monkeypatch.setattr(Proposer, "propose", judged)
    assert [told(call.finished()) for call in b.submit(*asked)] == expected and max(together) > 4
    b.await_nothing_left()


def kv_share(share: float, each_step: int) -> Policy:
    return Policy(name="kv_share", options={"recompute": share, "each_step": each_step})


def test_commits_of_every_kind_alone_and_together(bench: Make, model: LoadedModel) -> None:
    """Those that look at the whole canvas, or replace what they committed; with snapshots."""
    commits = [
        Policy(name="random"),
        Policy(name="threshold", options={"confidence": 0.3}),
        Policy(name="factor"),
        Policy(name="early_commit", options={"answer_length": 4, "answer_start": 2, "mistakes": 1.0}),
        Policy(name="entropy_bound"),
        Policy(name="edit"),
    ]
    asked = []
    for i, commit in enumerate(commits):
        by = (kv_share(0.2, 1), kv_share(0.0, 2), rule("lego_link", 0.3))[i % 3]
        options: dict[str, Any] = {"recompute": POLICIES[i], "max_new_tokens": 8, "block": 4, "commit": commit}
        asked.append(say(commit.name, PARTS[i % 4], by, seed=i, temperature=0.7 * (i % 2), snapshots=True, **options))
    alone, together = bench(model, stages="inline", watch=False), bench(model, watch=False)  # `edit` looks once more
    expected = [told(alone.ask(r)) for r in asked]
    assert [told(call.finished()) for call in together.submit(*asked)] == expected
    together.await_nothing_left()


def test_constraints_templates_and_samples(bench: Make, model: LoadedModel) -> None:
    ends = tiny_model(vision=False).spec.end_ids
    b = bench(dataclasses.replace(model, spec=dataclasses.replace(model.spec, end_ids=ends)), max_samples=4)
    for i, name in enumerate(FULL_ATTENTION):
        options: dict[str, Any] = {"recompute": Policy(name=name), "max_new_tokens": 16}
        request = say(name, PARTS[i % 4], kv_share(0.3, i % 3), **options)
        done = b.ask(dataclasses.replace(request, constraint=ConstraintSpec(kind=Regex("[0-9]{3}"))))
        assert done.text.isdigit() and done.usage.reused_tokens
        form = Template(("it is ", Hole(2, Regex("[0-9]")), " of ", Hole(4, Regex("[a-z]{1,3}"))))
        done = b.ask(dataclasses.replace(request, id=f"{name} form", constraint=ConstraintSpec(kind=form)))
        assert re.fullmatch("it is [0-9] of [a-z]{1,3}", done.text) and done.usage.reused_tokens
    drawn: dict[str, Any] = {"recompute": Policy(name="none"), "temperature": 1.0}
    ended = finished(b, say("n", PARTS[1], kv_share(0.0, 1), n=3, seed=4, **drawn))
    seeds = [sample_seed(4, i) for i in range(3)]
    alone = [finished(b, say(f"{seed}", PARTS[1], kv_share(0.0, 1), seed=seed, **drawn)) for seed in seeds]
    assert [told(done)[0] for done in ended] == [told(done)[0] for [done] in alone]
    assert len({done.text for done in ended}) > 1
    b.await_nothing_left()


def finished(b: Bench, request: Request) -> list[Finished]:
    """The ends of all its samples, in their order."""
    [call] = b.submit(request)
    eventually(lambda: len([e for e in call.events if isinstance(e, Finished)]) == request.sampling.n, "all samples")
    return sorted((e for e in call.events if isinstance(e, Finished)), key=lambda e: e.sample)
