"""Prompts of block diffusion are prefilled in chunks: the same bits as whole, and decode runs between two chunks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench
from helpers import ask, picture, threshold, tiny_model

from mmserve.core.request import Policy, Request
from mmserve.decode import runner
from mmserve.models.base import Attention, LoadedModel

Make = Callable[..., Bench]
BLOCK = Policy(name="block")
LONG = "what is left of the red circle, and what is right of it? " * 4
PAGE = 8


def blocks(length: int, *, end: bool = False, shift: int = 0) -> LoadedModel:
    """A block-diffusion model of blocks of ``length``; without an ``end`` its answers are as long as is asked for.

    With a ``shift`` of 1 a block's first token is predicted by the block before it, as in Fast-dLLM v2."""
    made = tiny_model(vision=True, seed=5)
    spec = dataclasses.replace(
        made.spec, attention=Attention.BLOCK_CAUSAL, default_block_length=length, logit_shift=shift
    )
    return dataclasses.replace(made, spec=spec if end else dataclasses.replace(spec, end_ids=frozenset({-1})))


class Watched:
    """An engine, the rows of its passes in order, and of each request its tokens and K/V, bit for bit."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench, self.engine = bench, bench.engine
        self.ran: list[tuple[str, int]] = []  # ("prefill" or "decode", rows) of each forward pass
        self.ended: dict[str, tuple[Any, ...]] = {}
        stages = self.engine.stages
        run, finished, store = stages.decoder.parts.runner.run, stages.decoding.finished, stages.store

        def ran(stage: Any, batch: Any, *rest: Any) -> Any:
            given = runner.with_unconditional(batch)
            self.ran.append((stage, sum(len(p.rows) for p in given)))
            return run(stage, batch, *rest)

        def ended(name: str) -> Any:
            d = stages.decoding.live[name]
            sequences = [d.prefilled.pages] + ([d.prefilled.guidance.pages] if d.prefilled.guidance else [])
            held = [
                t[list(pages)].flatten(0, 1)[: d.canvas.prompt_length].clone()
                for pages in sequences
                for t in (*store.keys, *store.values)
            ]
            self.ended[name] = (d.canvas.tokens.tolist(), d.log_probabilities.tobytes(), held)
            return finished(name)

        monkeypatch.setattr(stages.decoder.parts.runner, "run", ran)
        monkeypatch.setattr(stages.decoding, "finished", ended)

    def ask(self, request: Request) -> Any:
        return self.bench.ask(request)

    @property
    def chunks(self) -> list[int]:
        return [rows for stage, rows in self.ran if stage == "prefill"]


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether tokens, log-probabilities and K/V of two answers are the same bits."""
    return one[:2] == other[:2] and all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))


@pytest.mark.parametrize(("block", "shift"), [(4, 0), (12, 0), (32, 0), (1, 1), (4, 1), (32, 1)])
def test_chunks_give_the_same_bits(bench: Make, monkeypatch: pytest.MonkeyPatch, block: int, shift: int) -> None:
    model, requests = blocks(block, shift=shift), []
    for i, (text, images) in enumerate(((LONG, ()), ("?", (picture(1),)), (LONG + "why?", (picture(2), picture(3))))):
        commit = threshold(0.5) if i == 2 else None
        requests.append(ask(f"{i}", text, images=images, max_new_tokens=13, recompute=BLOCK, commit=commit))
    whole = Watched(bench(model, stages="inline", max_tokens=512), monkeypatch)
    answers = [whole.ask(request) for request in requests]
    for chunk in (1, 16, 40, 10_000):
        parts = Watched(bench(model, stages="inline", max_tokens=512, prefill_tokens=chunk), monkeypatch)
        for request, expected in zip(requests, answers, strict=True):
            parts.ran.clear()
            found = parts.ask(request)
            assert (found.text, found.usage, found.forwards) == (expected.text, expected.usage, expected.forwards)
            assert found.recomputed_tokens == expected.recomputed_tokens
            assert same(parts.ended[request.id], whole.ended[request.id])
            prompt = expected.usage.prompt_tokens
            most = max(chunk, math.lcm(PAGE, block))  # a chunk is whole pages and blocks
            assert max(parts.chunks) <= most
            run = min(-(-(prompt + 1 - shift) // block) * block, prompt + 13)  # a shifted block's first needs no mask
            assert sum(parts.chunks) == run
            assert len(parts.chunks) >= prompt // most
        parts.bench.await_nothing_left()


def test_decode_runs_between_two_chunks(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream waits for no more rows of somebody's long prompt than a budget's."""
    w = Watched(bench(blocks(4), stages="inline", max_tokens=512, prefill_tokens=16), monkeypatch)
    calls = w.bench.submit(
        ask("short", "?", max_new_tokens=60, recompute=BLOCK), ask("long", LONG, max_new_tokens=4, recompute=BLOCK)
    )
    assert [call.finished().usage.completion_tokens for call in calls] == [60, 4]
    begun = next(i for i, (stage, _rows) in enumerate(w.ran) if stage == "decode")
    between = longest = 0
    for stage, rows in w.ran[begun:]:
        between = between + rows if stage == "prefill" else 0
        longest = max(longest, between)
    assert 0 < longest <= 16
    assert sum(stage == "prefill" for stage, _rows in w.ran[begun:]) > 3, "the long prompt came while it decoded"


@pytest.mark.parametrize("chunk", [8, 24, 48])
@pytest.mark.parametrize("block", [4, 12])
def test_a_guided_prompt_runs_its_masks_in_chunks_too(
    bench: Make, monkeypatch: pytest.MonkeyPatch, block: int, chunk: int
) -> None:
    """With and without pages from the prefix cache, in which its masks have no part."""
    model = blocks(block)
    config = {"stages": "inline", "max_tokens": 512, "pages": 400}
    whole = Watched(bench(model, **config), monkeypatch)
    parts = Watched(bench(model, prefill_tokens=chunk, **config), monkeypatch)
    request = ask("first", LONG, max_new_tokens=10, recompute=BLOCK)
    request = dataclasses.replace(request, diffusion=dataclasses.replace(request.diffusion, cfg_scale=1.0))
    expected = whole.ask(request)
    for name in ("first", "again"):
        found = parts.ask(dataclasses.replace(request, id=name))
        assert same(parts.ended[name], whole.ended["first"]) and found.text == expected.text
        shared = found.usage.cached_tokens
        assert found.recomputed_tokens == expected.recomputed_tokens - shared
        assert (shared > 0) == (name == "again")
    assert max(parts.chunks) <= max(chunk, 2 * math.lcm(PAGE, block))
    parts.bench.await_nothing_left()


def test_chunks_are_shared(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that its first chunks have filled; another prompt that begins alike gives the same bits."""
    for block, chunk in ((4, 16), (12, 24), (12, 16), (4, 4)):
        w = Watched(bench(blocks(block), stages="inline", max_tokens=512, prefill_tokens=chunk), monkeypatch)
        first = w.ask(ask("a", LONG, max_new_tokens=5, recompute=BLOCK))
        again = w.ask(ask("b", LONG, max_new_tokens=5, recompute=BLOCK))
        assert same(w.ended["a"], w.ended["b"]) and first.text == again.text
        assert again.usage.cached_tokens > 0


def test_full_attention_is_prefilled_whole(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that sees its answer's masks is one pass, whatever the budget."""
    w = Watched(bench(stages="inline", max_tokens=512, prefill_tokens=16), monkeypatch)
    done = w.ask(ask("x", LONG, max_new_tokens=8))
    assert w.chunks == [done.usage.prompt_tokens + 8]
