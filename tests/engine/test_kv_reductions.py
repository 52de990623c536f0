"""Requests with reduced K/V through the engine: the same answer in any company, pages that come back, and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from harness import Bench, eventually
from helpers import ask, picture, tiny_model

from mmserve.core.constraint import ConstraintSpec, Regex
from mmserve.core.events import Finished
from mmserve.core.request import Policy, Request, Stage
from mmserve.decode import runner
from mmserve.errors import Cancelled, InvalidArgument, Unimplemented
from mmserve.kv.pool import pages_for
from mmserve.kv.reduction import REDUCTIONS
from mmserve.models.base import Attention, LoadedModel

Make = Callable[..., Bench]

LONG = "what is left of the red circle, and what is right of it? "
BUDGETS = {"heavy_hitters": 20, "expected_attention": 25, "sink_window": 30, "visual_cache": 2}


@pytest.fixture(scope="module")
def causal() -> LoadedModel:
    made = tiny_model(vision=True)
    return dataclasses.replace(
        made, spec=dataclasses.replace(made.spec, attention=Attention.CAUSAL, logit_shift=1, end_ids=frozenset({-1}))
    )


def reduced(name: str, by: str, text: str = LONG, **changes: Any) -> Request:
    options = {"images": (picture(1), picture(2)), "recompute": Policy(name="last"), "max_new_tokens": 20, **changes}
    return dataclasses.replace(
        ask(name, text, **options), kv_reduction=Policy(name=by, options={"budget": BUDGETS[by]})
    )


def told(done: Finished) -> tuple[object, ...]:
    return done.text, done.reason, done.usage, done.forwards, done.recomputed_tokens


def test_answers_are_the_same_alone_and_together(bench: Make, causal: LoadedModel) -> None:
    requests = [
        reduced(f"{by} {i}", by, LONG * (i + 1), seed=i, temperature=0.8 * i) for by in REDUCTIONS for i in range(2)
    ]
    plain = [dataclasses.replace(r, id=f"plain {r.id}", kv_reduction=None) for r in requests]
    alone = bench(causal, max_running=1, max_tokens=256, prefix_cache=False)
    expected = {r.id: told(alone.ask(r)) for r in (*plain, *requests)}
    assert sum(expected[p.id][0] != expected[r.id][0] for p, r in zip(plain, requests, strict=True)) > 4
    together = bench(causal, max_tokens=256, prefix_cache=False)
    calls = together.submit_together(*[r for pair in zip(requests, plain, strict=True) for r in pair])
    assert {call.request.id: told(call.finished()) for call in calls} == expected
    assert max(map(len, together.batches)) > 4
    together.await_nothing_left()


def test_a_pass_that_failed_leaves_no_trace(bench: Make, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it showed is noted once, when it is repeated."""
    requests = [reduced(by, by) for by in REDUCTIONS]
    b = bench(causal, max_tokens=256, prefix_cache=False, stages="inline", prefill_tokens=32)
    expected = [told(b.ask(r)) for r in requests]
    real, failed = runner.forward, []

    def poisoned(model: LoadedModel, store: Any, batch: list[Any], floor: int, **options: Any) -> Any:
        found = real(model, store, batch, floor, **options)
        if len(batch) > 1:
            failed.append(len(batch))
            raise RuntimeError("only alone")
        return found

    monkeypatch.setattr(runner, "forward", poisoned)
    calls = b.submit(*(dataclasses.replace(r, id=f"again {r.id}") for r in requests))
    assert [told(call.finished()) for call in calls] == expected
    assert len(failed) > 5


@pytest.mark.parametrize("by", ["heavy_hitters", "expected_attention", "sink_window"])
def test_pages_come_back_while_it_decodes(bench: Make, causal: LoadedModel, by: str) -> None:
    b = bench(causal, max_tokens=256, stages="inline")
    pages: list[int] = []
    decode = b.engine.stages.decoding.decode

    def watched(batch: list[Request]) -> list[Any]:
        pages.append(b.engine.stats().pages_in_use)
        return decode(batch)

    b.engine.stages.decoding.decode = watched  # type: ignore[method-assign]
    done = b.ask(reduced("r", by, LONG * 2))
    assert pages[0] == pages_for(done.usage.prompt_tokens + 20, 8)
    assert pages[1] == pages_for(BUDGETS[by] + 8, 8), "from its first step on"
    assert pages[1:] == sorted(pages[1:], reverse=True) and pages[-1] == pages_for(done.usage.kv_positions, 8)
    assert BUDGETS[by] <= done.usage.kv_positions <= BUDGETS[by] + 8
    whole = b.ask(dataclasses.replace(reduced("w", by, LONG * 2), kv_reduction=None))
    assert whole.usage.kv_positions == whole.usage.prompt_tokens + 19
    b.await_nothing_left()


def test_text_is_left_where_visual_tokens_are_dropped(bench: Make, causal: LoadedModel) -> None:
    done = bench(causal, max_tokens=256).ask(reduced("r", "visual_cache"))
    assert done.usage.kv_positions == done.usage.prompt_tokens + 19 - 6


def test_more_requests_fit_than_without(bench: Make, causal: LoadedModel) -> None:
    b = bench(causal, max_tokens=80, pages=18, stages="inline")
    calls = b.submit(*(reduced(f"r{i}", "sink_window", LONG * 2, max_new_tokens=16) for i in range(4)))
    usages = [call.finished().usage for call in calls]
    assert max(map(len, b.batches)) > 1, "side by side, where two whole ones would not fit"
    assert 2 * pages_for(usages[0].prompt_tokens + 16, 8) > 18


@pytest.mark.parametrize("by", REDUCTIONS)
def test_pages_of_others_stay_whole(bench: Make, causal: LoadedModel, by: str) -> None:
    """Requests with the same prompt share its pages; one whose K/V are reduced neither takes nor leaves any."""
    b = bench(causal, max_tokens=256)
    plain = dataclasses.replace(reduced("first", by), kv_reduction=None)
    first = b.ask(plain)
    alone = bench(causal, max_tokens=256, prefix_cache=False).ask(reduced("alone", by))
    for i in range(2):
        own = b.ask(reduced(f"own {i}", by))
        assert own.usage.cached_tokens == 0 and own.text == alone.text
        again = b.ask(dataclasses.replace(plain, id=f"again {i}"))
        assert again.text == first.text and again.usage.cached_tokens > 20


@pytest.mark.parametrize("by", ["heavy_hitters", "visual_cache"])
def test_samples_and_constraints(bench: Make, causal: LoadedModel, by: str) -> None:
    b = bench(causal, max_tokens=256)
    call = b.submit(reduced("n", by, temperature=1.0, n=3))[0]
    eventually(lambda: sum(isinstance(e, Finished) for e in call.events) == 3, "three samples")
    ended = [e for e in call.events if isinstance(e, Finished)]
    assert len({done.text for done in ended}) == 3 and len({done.usage.kv_positions for done in ended}) == 1
    numbers = ConstraintSpec(kind=Regex("[0-9]{4}( is a number)?"))
    ending = dataclasses.replace(
        causal, spec=dataclasses.replace(causal.spec, end_ids=tiny_model(vision=False).spec.end_ids)
    )
    done = bench(ending, max_tokens=256).ask(dataclasses.replace(reduced("c", by), constraint=numbers))
    assert done.text[:4].isdigit() and done.reason == "end"
    assert done.usage.kv_positions < done.usage.prompt_tokens + done.forwards


def test_a_cancelled_request_leaves_nothing(bench: Make, causal: LoadedModel) -> None:
    b = bench(causal, max_tokens=256)
    gate = b.gate("decode", lambda _ids: len(b.batches) >= 3)
    call = b.submit(reduced("x", "sink_window", LONG * 2))[0]
    gate.wait()
    assert b.stage("x") is Stage.STEPPING
    b.engine.cancel("x")
    gate.open()
    assert isinstance(call.error(), Cancelled)
    b.await_nothing_left()


def test_what_cannot_be_is_refused_at_once(bench: Make, causal: LoadedModel) -> None:
    b = bench(causal)
    with pytest.raises(InvalidArgument, match="must be 'last' with kv_reduction"):
        b.submit(reduced("r", "sink_window", recompute=Policy(name="none")))
    with pytest.raises(InvalidArgument, match="must not be a policy that drafts"):
        b.submit(reduced("r", "sink_window", commit=Policy(name="ngram")))
    assert b.engine.info.kv_reductions == tuple(REDUCTIONS)
    diffusion = bench()
    with pytest.raises(Unimplemented, match="only autoregressive models"):
        diffusion.submit(reduced("r", "sink_window", recompute=Policy(name="none")))
    assert diffusion.engine.info.kv_reductions == ()
