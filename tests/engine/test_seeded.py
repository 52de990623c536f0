"""Canvases that begin with tokens of the request, and bounds on the steps of a block, under every policy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from harness import Bench
from helpers import ask, tiny_model
from test_companion import causal
from test_constrained import like
from test_policies import BASES, RECOMPUTES, policy
from test_scheduled import schedulers

from mmserve.core.events import Finished
from mmserve.core.request import Policy, Request, SeedCanvas
from mmserve.errors import InvalidArgument
from mmserve.models.base import Attention, LoadedModel

Make = Callable[..., Bench]

#: Position to token, over three blocks of five.
PINS = {0: 40, 1: 41, 6: 42, 9: 43, 12: 44}
NEW, BLOCK = 13, 5


def seeded(
    request: Request, model: LoadedModel, pins: dict[int, int] = PINS, bias: dict[int, float] | None = None
) -> Request:
    """``request`` with ``pins`` on its canvas, returning all its tokens; ``bias``: by default against an end token."""
    tokens = tuple(pins.get(position, model.spec.mask_id) for position in range(NEW))
    diffusion = dataclasses.replace(request.diffusion, seed_canvas=SeedCanvas(tokens, tuple(pins)))
    streaming = dataclasses.replace(request.streaming, tokens=True)
    bias = dict.fromkeys(model.spec.end_ids, -10000.0) if bias is None else bias
    sampling = dataclasses.replace(request.sampling, logit_bias=bias)
    return dataclasses.replace(request, diffusion=diffusion, streaming=streaming, sampling=sampling)


def ids(finished: Finished) -> list[int]:
    return [token.id for token in finished.tokens]


def test_pinned_tokens_stay_under_every_policy_alone_and_in_a_batch(bench: Make, model: LoadedModel) -> None:
    b = bench(max_running=16)
    asked = [
        seeded(
            ask(f"r{i}", max_new_tokens=NEW, block=BLOCK, recompute=recompute, commit=commit, temperature=0.5, seed=i),
            model,
        )
        for i, (recompute, commit) in enumerate(itertools.product(RECOMPUTES, BASES))
    ]
    together = [call.finished() for call in b.submit(*asked)]
    for request, finished in zip(asked, together, strict=True):
        found = ids(finished)
        assert len(found) == NEW, request
        assert {position: found[position] for position in PINS} == PINS, request
        assert model.spec.mask_id not in found
    for i in range(0, len(asked), 7):
        alone = b.ask(dataclasses.replace(asked[i], id=f"alone{i}"))
        assert (ids(alone), alone.forwards) == (ids(together[i]), together[i].forwards)


def test_no_policy_replaces_pinned_tokens(bench: Make) -> None:
    """Neither those that edit, nor a verifier, whose own token is for the position after a draft."""
    model = dataclasses.replace(causal(4, vision=False), companion=causal(3, vision=False))
    spec = dataclasses.replace(model.spec, attention=Attention.FULL, logit_shift=0)
    model = dataclasses.replace(model, spec=spec)
    edits = schedulers(edits={"threshold": 0.05, "editing_threshold": 0.05})
    b = bench(model, watch=False, schedulers=edits)
    policies = [
        policy("edit", confidence=0.05, edit_confidence=0.05),
        Policy(name="scheduler", options={"name": "edits"}),
        policy("guided"),
        policy("guided", top_k=10_000, ratio=0.0),
    ]
    asked = [
        seeded(ask(f"r{i}", max_new_tokens=NEW, block=BLOCK, commit=commit), model, bias={})
        for i, commit in enumerate(policies)
    ]
    found = {call.request.id: ids(call.finished()) for call in b.submit(*asked)}
    assert {name: {p: tokens[p] for p in PINS} for name, tokens in found.items()} == dict.fromkeys(found, PINS)


def test_blocks_of_attention_have_them_too(bench: Make) -> None:
    model = like(tiny_model(vision=False, seed=5), Attention.BLOCK_CAUSAL)
    b = bench(model)
    for recompute in ("none", "block"):
        found = ids(b.ask(seeded(ask(recompute, max_new_tokens=NEW, recompute=policy(recompute)), model)))
        assert len(found) == NEW and {position: found[position] for position in PINS} == PINS


def test_a_whole_block_that_is_pinned_is_passed_over(bench: Make, model: LoadedModel) -> None:
    pins = {position: 40 + position for position in range(BLOCK)}
    request = seeded(ask("r", max_new_tokens=NEW, block=BLOCK), model, pins)
    finished = bench().ask(request)
    assert ids(finished)[:BLOCK] == list(pins.values())
    assert finished.forwards == NEW - BLOCK


@pytest.mark.parametrize("commit", ["low_confidence", "random", "confident"])
@pytest.mark.parametrize(("new", "block", "most"), [(13, 5, 2), (16, 8, 3), (4, 8, 2), (16, 4, 1), (6, 4, 9)])
def test_a_block_takes_no_more_steps_than_its_bound(
    bench: Make, model: LoadedModel, commit: str, new: int, block: int, most: int
) -> None:
    request = ask("r", max_new_tokens=new, block=block, commit=policy(commit))
    request = dataclasses.replace(request, diffusion=dataclasses.replace(request.diffusion, max_steps=most))
    bias = dict.fromkeys(model.spec.end_ids, -10000.0)
    request = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, logit_bias=bias))
    finished = bench().ask(request)
    blocks = -(-new // block)
    assert blocks <= finished.forwards <= min(most * blocks, new)


def test_what_is_no_canvas_is_refused(bench: Make, model: LoadedModel) -> None:
    b = bench()
    for seed, why in (
        (SeedCanvas((), ()), "tokens: must not be empty"),
        (SeedCanvas((40,), (1,)), "pinned: must be below 1"),
        (SeedCanvas((40, 41), (0,)), "tokens: must be the mask token"),
        (SeedCanvas((model.spec.mask_id, 41), (0, 1)), "tokens: must not be the mask token 3 at position 0"),
        (SeedCanvas((1 << 40,), (0,)), "tokens: must be below"),
    ):
        request = ask("r", max_new_tokens=NEW)
        request = dataclasses.replace(request, diffusion=dataclasses.replace(request.diffusion, seed_canvas=seed))
        with pytest.raises(InvalidArgument, match=f"diffusion.seed_canvas.{why}"):
            b.submit(request)
