"""A long prompt is prefilled in chunks: the same answer, and running decodes wait for one chunk at most."""

from __future__ import annotations

import dataclasses

import pytest
from harness import Bench
from helpers import ask
from llama_checkpoints import Sighted, load

from mmserve.core.request import Policy, Stage
from mmserve.decode.passes import Passes
from mmserve.errors import Cancelled
from mmserve.models.base import LoadedModel

LAST = Policy(name="last")
LONG = "what is left of the red circle, and what is right of it? " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    loaded = load(Sighted(tmp_path_factory.mktemp("llava"), image_aspect_ratio="square").folder)
    return dataclasses.replace(loaded, spec=dataclasses.replace(loaded.spec, end_ids=frozenset({-1})))


def turns(b: Bench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What ran, in order: ("prefill", rows) of each pass and ("decode", requests) of each batch."""
    ran: list[tuple[str, int]] = []
    first, decode = Passes.first, b.engine.stages.decoding.decode

    def watched(passes, begun):
        made = first(passes, begun)
        ran.append(("prefill", len(made.rows)))
        return made

    def watched_decode(batch):
        ran.append(("decode", len(batch)))
        return decode(batch)

    monkeypatch.setattr(Passes, "first", watched)
    monkeypatch.setattr(b.engine.stages.decoding, "decode", watched_decode)
    return ran


@pytest.mark.parametrize("chunk", [1, 7, 16, 10_000])
def test_the_answer_does_not_depend_on_the_chunk(model: LoadedModel, bench, monkeypatch, chunk: int) -> None:
    whole: Bench = bench(model, stages="inline")
    expected = whole.ask(ask("x", LONG, max_new_tokens=9, recompute=LAST))
    b: Bench = bench(model, stages="inline", prefill_tokens=chunk)
    ran = turns(b, monkeypatch)
    found = b.ask(ask("x", LONG, max_new_tokens=9, recompute=LAST))
    assert (found.text, found.usage, found.forwards) == (expected.text, expected.usage, expected.forwards)
    assert found.recomputed_tokens == expected.recomputed_tokens
    assert b.canvases["x"][0].tolist() == whole.canvases["x"][0].tolist()
    chunks = [rows for name, rows in ran if name == "prefill"]
    prompt = expected.usage.prompt_tokens
    assert sum(chunks) == prompt and max(chunks) <= chunk and len(chunks) == -(-prompt // chunk)
    b.await_nothing_left()


@pytest.mark.parametrize("chunk", range(24, 31))
def test_a_draft_begins_where_the_chunks_end(model: LoadedModel, bench, chunk: int) -> None:
    b: Bench = bench(model, stages="inline", prefill_tokens=chunk)
    for i, prompt in enumerate(("a b c d a b c d a b", "red circle, red circle, red")):
        given = {"max_new_tokens": 20, "recompute": LAST}
        plain = b.ask(ask(f"p{i}", prompt, **given))
        drafted = b.ask(ask(f"d{i}", prompt, commit=Policy(name="ngram"), **given))
        assert b.canvases[f"d{i}"][0].tolist() == b.canvases[f"p{i}"][0].tolist()
        assert drafted.text == plain.text and drafted.forwards <= plain.forwards


def test_running_decodes_wait_for_one_chunk_at_most(model: LoadedModel, bench, monkeypatch) -> None:
    b: Bench = bench(model, stages="inline", prefill_tokens=8)
    ran = turns(b, monkeypatch)
    calls = b.submit(
        ask("short", "?", max_new_tokens=40, recompute=LAST), ask("long", LONG, max_new_tokens=3, recompute=LAST)
    )
    assert [call.finished().usage.completion_tokens for call in calls] == [40, 3]
    begun = next(i for i, (name, _n) in enumerate(ran) if name == "decode")
    between, longest = 0, 0
    for name, rows in ran[begun:]:
        between = between + rows if name == "prefill" else 0
        longest = max(longest, between)
    assert 0 < longest <= 8
    assert sum(name == "prefill" for name, _n in ran[begun:]) > 3, "the long prompt came while the short answer ran"


def test_a_prompt_that_is_begun_goes_before_new_ones(model: LoadedModel, bench, monkeypatch) -> None:
    b: Bench = bench(model, stages="inline", prefill_tokens=16)
    order: list[str] = []
    begin, prefill = b.engine.stages.decoder.begin, b.engine.stages.decoder.prefill

    def begun(request, *rest):
        order.append(f"begin {request.id}")
        return begin(request, *rest)

    def prefilled(batch):
        outcomes = prefill(batch)
        order.extend(f"done {r.id}" for (r, _p), o in zip(batch, outcomes, strict=True) if o is not None)
        return outcomes

    monkeypatch.setattr(b.engine.stages.decoder, "begin", begun)
    monkeypatch.setattr(b.engine.stages.decoder, "prefill", prefilled)
    calls = b.submit(*(ask(f"r{i}", LONG, max_new_tokens=2, recompute=LAST) for i in range(3)))
    assert all(call.finished() for call in calls)
    assert order == [f"{what} r{i}" for i in range(3) for what in ("begin", "done")]


def test_a_request_cancelled_between_chunks_leaves_nothing(model: LoadedModel, bench) -> None:
    b: Bench = bench(model, prefill_tokens=4)
    seen: list[int] = []
    gate = b.gate("prefill", lambda _ids: len(seen) >= 2)
    prefill = b.engine.stages.prefilling.prefill

    def counted(batch):
        seen.append(len(batch))
        return prefill(batch)

    b.engine.stages.prefilling.prefill = counted
    call = b.submit(ask("x", LONG, max_new_tokens=4, recompute=LAST))[0]
    gate.wait()
    assert b.stage("x") is Stage.PREFILLING and b.engine.stats().pages_in_use > 0
    b.engine.cancel("x")
    gate.open()
    assert isinstance(call.error(), Cancelled)
    b.await_nothing_left()
    assert b.ask(ask("y", LONG, max_new_tokens=4, recompute=LAST)).forwards == 4


def test_a_pass_that_failed_is_repeated_from_where_it_was(model: LoadedModel, bench, monkeypatch) -> None:
    """One of two in a batch is poisoned at its second chunk: the other one's answer is the one it gets alone."""
    b: Bench = bench(model, stages="inline", prefill_tokens=64)
    texts = ("a red circle", "two squares are left of it")
    expected = [b.ask(ask(f"e{i}", t, max_new_tokens=6, recompute=LAST)).text for i, t in enumerate(texts)]
    from mmserve.decode import runner

    real = runner.forward

    def poisoned(model, store, batch, floor, **options):
        if len(batch) > 1:
            raise RuntimeError("only alone")
        return real(model, store, batch, floor, **options)

    monkeypatch.setattr(runner, "forward", poisoned)
    calls = b.submit(*(ask(f"p{i}", t, max_new_tokens=6, recompute=LAST) for i, t in enumerate(texts)))
    assert [call.finished().text for call in calls] == expected
