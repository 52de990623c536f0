"""The whole engine: what comes out does not depend on company, and every way to end leaves nothing behind."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import MAX_TOKENS, PATIENCE, Bench, Call, eventually
from helpers import ask, dkv, picture, threshold
from torch import Tensor

import mmserve.capabilities
import mmserve.decode.propose
import mmserve.decode.runner
import mmserve.encode.encoder
import mmserve.engine.engine
import mmserve.engine.shutdown
from mmserve.config import EngineConfig, MediaConfig
from mmserve.core.canvas import MASKED, Canvas
from mmserve.core.constraint import ConstraintSpec, Regex
from mmserve.core.encoded import Encoded
from mmserve.core.events import Admitted, Finished
from mmserve.core.request import ImagePart, Message, Policy, Request, Stage, TextPart
from mmserve.decode.commit import COMMIT, DIFFUSION_COMMIT, Candidates
from mmserve.decode.commit.low_confidence import LowConfidence
from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.decode.logits import Logits
from mmserve.decode.recompute import FULL_ATTENTION, RECOMPUTE
from mmserve.decode.recompute.none import NoCache
from mmserve.engine.engine import Engine
from mmserve.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MMServeError,
    ResourceExhausted,
    Unavailable,
)
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel
from mmserve.models.decoder import dense_attention

Make = Callable[..., Bench]
Outcome = tuple[str, str, int, int, int, int, list[int], list[int]]


def mixed(count: int = 24) -> list[Request]:
    """Requests that differ in prompt, images, length, policies, seed, temperature and filters."""
    words = ["red", "circle", "two shapes", "left of", "JSON, please", "what colour is it?", "über", "?"]
    requests = []
    for i in range(count):
        requests.append(
            ask(
                f"r{i}",
                " ".join(words[(i * k) % len(words)] for k in range(1, 2 + i % 5)) + f" {i}",
                images=tuple(picture(10 * i + j) for j in range(i % 3)),
                max_new_tokens=[1, 5, 9, 12, 16, 24][i % 6],
                block=[0, 4, 7, 32][i % 4],
                steps=[0, 3, 8][i % 3],
                recompute=[None, dkv(), dkv(3), dkv(1)][i % 4],
                commit=[None, threshold(0.3), None, threshold(0.05)][(i // 2) % 4],
                temperature=[0.0, 0.7, 1.3][(i // 3) % 3],
                top_p=[1.0, 0.9][i % 2],
                top_k=[0, 0, 40][i % 3],
                seed=i % 7,
                stop=("e", "as")[: i % 3] if i % 8 == 5 else (),
            )
        )
    return requests


def outcome(bench: Bench, call: Call) -> Outcome:
    """All of a request's result that must not depend on company, its canvas included."""
    f = call.finished()
    tokens, committed = bench.canvases[call.request.id]
    return (
        f.text,
        f.reason,
        f.usage.prompt_tokens,
        f.usage.completion_tokens,
        f.forwards,
        f.recomputed_tokens,
        tokens.tolist(),
        committed.tolist(),
    )


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> dict[str, Outcome]:
    """Outcomes of ``mixed()``, one request at a time on one thread."""
    bench = Bench(model, stages="inline")
    results = {}
    for request in mixed():
        [call] = bench.submit(request)
        results[request.id] = outcome(bench, call)
    bench.close()
    assert max(map(len, bench.batches)) == 1
    return results


def test_the_mixed_requests_are_worth_comparing(alone: dict[str, Outcome]) -> None:
    texts = [o[0] for o in alone.values() if o[3] > 1]
    assert len(set(texts)) == len(texts) >= 15
    long = [o[6][o[2] :] for o in alone.values() if o[3] >= 12]
    assert sum(len(set(tokens)) >= 6 for tokens in long) >= len(long) - 2, "the model says more than one token"
    assert {o[1] for o in alone.values()} >= {"length", "stop"}
    assert any(o[4] < o[3] for o in alone.values()), "some commit several tokens a step"


# --- a request's tokens do not depend on company ---


def await_prefilled(b: Bench, calls: list[Call]) -> None:
    """Wait, while decode is held, until all are there: text is sooner than media."""
    there = (Stage.PREFILLED, Stage.STEPPING)
    eventually(lambda: all(b.stage(call.request.id) in there for call in calls), "all to be prefilled")


@pytest.mark.parametrize(
    "config",
    [
        {"max_pending_per_stage": 24},
        {"page_size": 16, "decode_tokens": 150},
        {"page_size": 1, "prefill_tokens": 100, "encode_batch": 2, "max_pending_per_stage": 3},
        {"max_running": 5, "stages": "inline"},
        {"prefill_tokens": 40, "decode_tokens": 40},
    ],
    ids=["all together", "small decode batches", "pages of one", "few at once, inline", "most within long passes"],
)
def test_a_request_gives_the_same_tokens_alone_and_in_a_batch(
    bench: Make, alone: dict[str, Outcome], config: dict[str, Any]
) -> None:
    b, together = bench(**config), "max_pending_per_stage" in config and len(config) == 1
    gate = b.gate("decode" if together else "encode") if config.get("stages") != "inline" else None
    calls = b.submit(*mixed())
    if together:
        await_prefilled(b, calls)
    if gate:
        gate.open()
    for call in calls:
        assert outcome(b, call) == alone[call.request.id]
    if together:
        assert max(map(len, b.batches)) >= 12, "they did share batches"
    b.await_nothing_left()


def test_neither_the_order_nor_identical_neighbours_matter(bench: Make, alone: dict[str, Outcome]) -> None:
    b = bench()
    gate = b.gate("encode")
    twins = [dataclasses.replace(r, id=f"{r.id}-twin") for r in mixed()]
    calls = b.submit(*(r for pair in zip(reversed(mixed()), twins, strict=True) for r in pair))
    gate.open()
    for call in calls:
        assert outcome(b, call) == alone[call.request.id.removesuffix("-twin")]


def test_requests_that_join_while_others_decode_change_nothing(bench: Make, alone: dict[str, Outcome]) -> None:
    b = bench(decode_tokens=400)
    calls = []
    for index, request in enumerate(mixed()):
        calls += b.submit(request)
        eventually(lambda n=index: len(b.batches) > n, "another decode step")
    for call in calls:
        assert outcome(b, call) == alone[call.request.id]


def test_confidences_are_bitwise_the_same_alone_and_in_a_batch(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[bytes, list[bytes]] = {}

    class Recording(LowConfidence):
        def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
            prompt = canvas.tokens[: canvas.prompt_length].tobytes()
            seen.setdefault(prompt, []).append(candidates.confidence.tobytes())
            return super().choose(canvas, candidates)

    monkeypatch.setitem(COMMIT, "recording", Recording)
    monkeypatch.setattr(mmserve.capabilities, "DIFFUSION_COMMIT", (*DIFFUSION_COMMIT, "recording"))
    requests = [
        ask(f"r{i}", f"shape {i}", max_new_tokens=12, block=12, recompute=dkv(), commit=Policy(name="recording"))
        for i in range(10)
    ]
    single = bench(stages="inline")
    for request in requests:
        single.ask(request)
    alone_seen, seen = seen, {}
    together = bench()
    gate = together.gate("encode")
    calls = together.submit(*requests)
    gate.open()
    assert all(call.finished() for call in calls)
    assert len(seen) == 10
    assert seen == alone_seen


@torch.inference_mode()
def test_logits_are_bitwise_the_same_alone_and_in_a_batch(model: LoadedModel) -> None:
    """Tokens forgive a last bit, a threshold may not: also for the few rows that a cached step runs."""
    sizes, counts = [20, 33, 64, 100, 21, 48], [1, 2, 64, 3, 1, 17]
    pages = np.split(np.arange(60), np.cumsum([-(-size // 8) for size in sizes]))[:-1]
    generator = np.random.default_rng(0)
    embeddings = [model.decoder.embed(torch.from_numpy(generator.integers(0, 400, size))) for size in sizes]
    rows = [np.sort(generator.choice(size, count, replace=False)) for size, count in zip(sizes, counts, strict=True)]

    def run(batch: list[int]) -> list[Tensor]:
        store = KVStore(model.decoder.config, pages=60, page_size=8, dtype=model.dtype, device=model.device)
        for which in ([np.arange(size) for size in sizes], rows):
            passes = [
                Pass(
                    Canvas.create(np.arange(sizes[i]), new_tokens=0, block_length=1, mask_id=3),
                    pages[i],
                    embeddings[i],
                    which[i],
                    which[i],
                    which[i],
                    sizes[i],
                )
                for i in batch
            ]
            logits = forward(model, store, passes, row_floor(model))
        return [torch.cat(list(of.slices())) for of in logits]

    for index, logits in enumerate(run([0, 1, 2, 3, 4, 5])):
        assert logits.shape[0] == counts[index]
        assert torch.equal(logits, run([index])[0])
    for index, logits in zip([4, 0], run([4, 0]), strict=True):
        assert torch.equal(logits, run([index])[0])


@pytest.mark.parametrize("block", [0, 5, 32])
@pytest.mark.parametrize("commit", [None, threshold(0.2)], ids=["low_confidence", "threshold"])
def test_dkv_decode_that_refreshes_every_step_is_no_cache(bench: Make, block: int, commit: Policy | None) -> None:
    b = bench(stages="inline")
    options: dict[str, Any] = {"block": block, "commit": commit, "max_new_tokens": 32}
    results = []
    for name, policy in (("none", None), ("dkv", dkv(1))):
        [call] = b.submit(ask(name, "a red circle", recompute=policy, images=(picture(1),), **options))
        results.append(outcome(b, call))
    assert results[0] == results[1]


def test_dkv_decode_runs_fewer_positions_through_the_model(bench: Make) -> None:
    b = bench(stages="inline")
    full = b.ask(ask("full", max_new_tokens=32, block=32))
    cached = b.ask(ask("cached", max_new_tokens=32, block=32, recompute=dkv()))
    size = full.usage.prompt_tokens + 32
    assert full.recomputed_tokens == full.forwards * size
    # Steps 0, 1, 8, 16, 24 run everything; step i else the 32 - i masks and the one decoded last.
    assert cached.recomputed_tokens == 5 * size + sum(33 - i for i in range(32) if i not in (0, 1, 8, 16, 24))


def llada(model: LoadedModel, prompt: Encoded, *, new: int, steps: int, block: int) -> list[int]:
    """LLaDA's ``generate``: dense attention over the whole row at every step, no store, no cache, no batch."""
    mask_id = model.spec.mask_id
    x = torch.cat([torch.from_numpy(prompt.ids), torch.full((new,), mask_id)])
    is_mask = torch.arange(len(x)) >= len(prompt.ids)
    blocks = new // block
    for b in range(blocks):
        end = len(prompt.ids) + (b + 1) * block
        per_block = steps // blocks
        for i in range(per_block):
            h = model.decoder.embed(x)
            if prompt.features is not None:
                h[torch.from_numpy(prompt.image_rows)] = prompt.features
            hidden = model.decoder(h[None], torch.arange(len(x))[None], dense_attention())[0]
            logits = model.decoder.logits(hidden).double()
            masks = logits[:, model.spec.mask_id].clone()  # never chosen, but in the softmax
            logits[:, list(model.spec.banned_ids)] = -torch.inf
            x0 = logits.argmax(-1)
            logits[:, model.spec.mask_id] = masks
            confidence = logits.softmax(-1).gather(-1, x0[:, None])[:, 0]
            confidence[~is_mask] = -torch.inf
            confidence[end:] = -torch.inf
            k = block // per_block + (i < block % per_block)
            chosen = confidence.topk(k).indices
            x[chosen], is_mask[chosen] = x0[chosen], False
    assert not is_mask.any()
    return x[len(prompt.ids) :].tolist()


@pytest.mark.parametrize(
    ("new", "steps", "block", "images"),
    [(32, 32, 32, 0), (32, 32, 8, 2), (32, 8, 8, 0), (32, 12, 16, 2), (16, 1, 16, 2)],
)
def test_no_cache_with_low_confidence_is_lladas_own_loop(
    bench: Make, model: LoadedModel, new: int, steps: int, block: int, images: int
) -> None:
    b = bench()
    request = ask(
        "r", "the green square", images=tuple(map(picture, range(images))), max_new_tokens=new, steps=steps, block=block
    )
    done = b.ask(request)
    [encoded] = b.engine.stages.encoder.encode([request])
    assert len(encoded.image_rows) == done.usage.visual_tokens == 4 * images
    expected = llada(model, encoded, new=new, steps=steps, block=block)
    tokens, committed = (a[len(encoded.ids) :] for a in b.canvases["r"])
    assert len(set(expected)) > 4
    final = committed != MASKED
    assert tokens[final].tolist() == np.array(expected)[final].tolist()
    ends = [i for i, t in enumerate(expected) if t in model.spec.end_ids]
    if not ends:
        assert done.forwards == steps
        assert final.all()
    assert done.text == model.tokenizer.decode(expected[: ends[0] if ends else new], skip_special_tokens=True)


def test_an_image_changes_the_answer_and_counts_as_visual_tokens(bench: Make) -> None:
    b = bench(stages="inline")
    answers = [b.ask(ask(f"r{i}", images=(picture(i),))) for i in range(3)]
    assert len({a.text for a in answers}) == 3
    assert {a.usage.visual_tokens for a in answers} == {4}


# --- events ---


def test_deltas_join_to_the_text(bench: Make, alone: dict[str, Outcome]) -> None:
    b = bench()
    calls = b.submit(*mixed())
    for call in calls:
        done = call.finished()
        assert "".join(call.deltas) == done.text
        assert all(call.deltas), "no empty delta"
    assert max(len(call.deltas) for call in calls) > 3


def test_a_client_that_wants_no_deltas_gets_none(bench: Make) -> None:
    b = bench()
    with_deltas, plain = ask("with"), ask("without")
    plain = dataclasses.replace(plain, streaming=dataclasses.replace(plain.streaming, deltas=False))
    [quiet] = b.submit(plain)
    assert quiet.finished().text == b.ask(with_deltas).text
    assert [type(e) for e in quiet.events] == [Admitted, Finished]


def test_snapshots_arrive_at_every_step_and_their_committed_count_never_falls(bench: Make, model: LoadedModel) -> None:
    b = bench()
    calls = b.submit(*(dataclasses.replace(r, streaming=ask("x", snapshots=True).streaming) for r in mixed()))
    for call in calls:
        done, snapshots = call.finished(), call.snapshots
        assert [s.forwards for s in snapshots] == list(range(1, done.forwards + 1))
        committed = [s.committed for s in snapshots]
        assert all(a < b for a, b in zip([0, *committed], committed, strict=False)), "each step commits something"
        assert {s.total for s in snapshots} == {call.request.sampling.max_new_tokens}
        tokens, _committed = b.canvases[call.request.id]
        if not model.spec.end_ids & set(tokens[done.usage.prompt_tokens :].tolist()):
            assert [s.text.count("▒") for s in snapshots] == [s.total - s.committed for s in snapshots]
        if done.reason == "length":
            assert snapshots[-1].text == done.text


def test_a_committed_token_never_changes_across_snapshots(bench: Make) -> None:
    b = bench()  # every step is compared with the one before: see Bench
    [call] = b.submit(ask("r", max_new_tokens=32, block=16, snapshots=True))
    done = call.finished()
    glyphless = [s.text.split("▒")[0] for s in call.snapshots]
    assert all(done.text.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}")) for text in glyphless)
    assert len(set(glyphless)) > 3
    assert len(b.batches) == done.forwards


def test_the_answer_ends_before_the_first_end_token(bench: Make, model: LoadedModel) -> None:
    whole = bench(stages="inline")
    request = ask("r", "an end", max_new_tokens=32, block=8)
    length = whole.ask(request)
    tokens = whole.canvases["r"][0][length.usage.prompt_tokens :].tolist()
    end = next(t for i, t in enumerate(tokens) if 5 < i < 14 and t not in tokens[:i])
    spec = dataclasses.replace(model.spec, end_ids=frozenset({end}))
    done = bench(dataclasses.replace(model, spec=spec), stages="inline").ask(request)
    at = tokens.index(end)
    assert (length.reason, done.reason) == ("length", "end")
    assert done.text == model.tokenizer.decode(tokens[:at], skip_special_tokens=True)
    assert done.usage.completion_tokens == at
    assert done.forwards <= 16 < length.forwards == 32, "blocks right of the end are never run"


def test_the_answer_ends_before_a_stop_string(bench: Make) -> None:
    b = bench(stages="inline")
    free = b.ask(ask("free", "stop here", max_new_tokens=32, block=4))
    pairs = (free.text[at : at + 2] for at in range(6, len(free.text)))
    stop = next(p for p in pairs if "\N{REPLACEMENT CHARACTER}" not in p)
    [call] = b.submit(ask("stopped", "stop here", max_new_tokens=32, block=4, stop=(stop, "never said")))
    done = call.finished()
    assert done.reason == "stop"
    assert done.text == free.text[: free.text.find(stop)] == "".join(call.deltas)
    assert done.forwards < free.forwards


def test_the_times_of_a_request_add_up(bench: Make) -> None:
    times = bench().ask(ask("r")).times
    assert abs(times.queue + times.encode + times.prefill + times.decode - times.total) < 0.01
    assert min(times.queue, times.encode, times.prefill, times.decode, times.first_token) > 0
    assert times.first_token <= times.total


# --- ending early ---


def hold(b: Bench, stage: Stage, victim: Request) -> Call:
    """Bring ``victim`` to ``stage`` and keep it there; another request blocks the worker where it must wait."""
    stages = {
        Stage.QUEUED: "encode",
        Stage.CONSTRAINING: "constrain",
        Stage.CONSTRAINED: "encode",
        Stage.LOADING: "load",
        Stage.LOADED: "encode",
        Stage.ENCODING: "encode",
        Stage.ENCODED: "prefill",
        Stage.PREFILLING: "prefill",
        Stage.PREFILLED: "decode",
        Stage.STEPPING: "decode",
        Stage.READY: "decode",
    }
    waits = stage in (Stage.QUEUED, Stage.CONSTRAINED, Stage.LOADED, Stage.ENCODED, Stage.PREFILLED, Stage.READY)
    if stage in (Stage.CONSTRAINING, Stage.CONSTRAINED):
        victim = dataclasses.replace(victim, constraint=ConstraintSpec(Regex("[a-z]*")))
    media = (ImagePart(picture(0)),) if stage in (Stage.LOADING, Stage.LOADED) else ()
    if media or stage in (Stage.QUEUED, Stage.CONSTRAINED):  # there text waits for text
        victim = dataclasses.replace(victim, messages=(Message("user", (*media, TextPart("what is it?"))),))

    def when(ids: set[str]) -> bool:
        if stage is Stage.READY:
            return "blocker" in ids and b.stage(victim.id) is Stage.READY
        return ("blocker" if waits else victim.id) in ids

    gate = b.gate(stages[stage], when)
    if waits:
        images = (picture(1),) if stage is Stage.LOADED else ()
        if stage is Stage.READY and any(isinstance(part, ImagePart) for part in victim.messages[0].parts):
            images = (picture(0),)  # text would be done before the victim's picture is decoded
        blocker = ask("blocker", "in the way", images=images, max_new_tokens=64 if stage is Stage.READY else 16)
        [b.blocker] = b.submit(blocker)  # type: ignore[attr-defined]
        if stage is not Stage.READY:
            gate.wait()
    [call] = b.submit(victim)
    if not waits or stage is Stage.READY:
        gate.wait()
    b.await_stage(victim.id, stage)
    return call


def assert_others_go_on(b: Bench) -> None:
    """After an early end: the gates open, what blocked finishes, nothing is left, and the engine still works."""
    for gate in b.gates:
        gate.open()
    if hasattr(b, "blocker"):
        assert b.blocker.finished().usage.completion_tokens > 0
    b.await_nothing_left()
    assert b.ask(ask("next")).forwards == 16
    b.await_nothing_left()


#: Those that an engine with every role comes to; ``test_migration.py`` has the others.
LIVE = [s for s in Stage if s not in (Stage.FINISHED, Stage.FAILED, Stage.EXPECTED, Stage.ARRIVED, Stage.LEFT)]


@pytest.mark.parametrize("stage", LIVE, ids=lambda s: s.name)
def test_a_request_can_be_cancelled_at_every_stage(bench: Make, stage: Stage) -> None:
    b = bench(decode_tokens=1, encode_batch=1)
    call = hold(b, stage, ask("victim", images=(picture(0),), max_new_tokens=32))
    b.engine.cancel("victim")
    b.engine.cancel("victim")
    assert isinstance(call.error(), Cancelled)
    assert_others_go_on(b)
    assert [type(e).__name__ for e in call.events].count("Failed") == 1
    assert call.events[-1] is call.wait(), "nothing follows the end, also not once the worker has reported"


@pytest.mark.parametrize("stage", LIVE, ids=lambda s: s.name)
def test_a_deadline_ends_a_request_at_every_stage(bench: Make, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(mmserve.engine.engine, "time", clock)
    b = bench(decode_tokens=1, encode_batch=1)
    call = hold(b, stage, ask("victim", max_new_tokens=32, deadline=time.monotonic() + 500))
    ahead[0] = 1000.0
    b.engine.cancel("nobody")  # wakes the engine, which sleeps on the real clock
    error = call.error()
    assert isinstance(error, DeadlineExceeded)
    assert stage.name in error.message
    assert_others_go_on(b)
    assert call.events[-1] is call.wait()


def test_a_deadline_is_kept_while_nothing_else_happens(bench: Make) -> None:
    b = bench()
    b.gate("encode")
    [call] = b.submit(ask("late", deadline=time.monotonic() + 0.05))
    assert isinstance(call.error(), DeadlineExceeded)
    assert_others_go_on(b)


def test_a_deadline_that_is_met_changes_nothing(bench: Make) -> None:
    b = bench()
    assert b.ask(ask("r", deadline=time.monotonic() + 1000)).text == b.ask(ask("s")).text


def test_a_cancel_may_carry_its_own_reason_and_an_unknown_one_is_ignored(bench: Make) -> None:
    b = bench()
    b.engine.cancel("nobody")
    call = hold(b, Stage.STEPPING, ask("victim"))
    b.engine.cancel("victim", DeadlineExceeded("the deadline passed on the way"))
    assert call.error().message == "the deadline passed on the way"
    assert_others_go_on(b)
    b.engine.cancel("victim")
    assert b.ask(ask("again")).forwards == 16


def test_a_cancel_that_follows_admission_at_once_is_not_lost(bench: Make) -> None:
    """A client may leave as soon as it hears that it was admitted."""
    b = bench()
    b.gate("encode")
    call = Call(ask("hasty"))

    def sink(event: Any) -> None:
        call.sink(event)
        if isinstance(event, Admitted):
            b.engine.cancel("hasty")

    b.engine.submit(call.request, sink)
    for gate in b.gates:
        gate.open()
    assert isinstance(call.error(), Cancelled)
    b.await_nothing_left()


def test_cancelling_one_of_a_batch_leaves_the_others_tokens_alone(bench: Make, alone: dict[str, Outcome]) -> None:
    b = bench(max_pending_per_stage=24)
    gate = b.gate("decode", lambda ids: len(ids) > 8)
    first = b.gate("decode")
    calls = b.submit(*mixed())
    await_prefilled(b, calls)
    first.open()
    gate.wait()
    victims = set(b.engine._live.by_id) & {f"r{i}" for i in range(0, 24, 3)}
    assert victims
    for name in victims:
        b.engine.cancel(name)
    gate.open()
    for call in calls:
        if call.request.id in victims:
            assert isinstance(call.error(), Cancelled)
        else:
            assert outcome(b, call) == alone[call.request.id]
    b.await_nothing_left()


# --- refusals ---


def test_a_full_queue_refuses_with_a_time_to_retry_and_loses_nothing(bench: Make) -> None:
    b = bench(max_queued=3)
    gate = b.gate("encode")
    accepted = b.submit(ask("running"))
    gate.wait()
    accepted += b.submit(*(ask(f"queued{i}") for i in range(3)))
    for i in range(5):
        late = Call(ask(f"late{i}"))
        with pytest.raises(ResourceExhausted) as refused:
            b.engine.submit(late.request, late.sink)
        assert refused.value.retry_after is not None
        assert refused.value.retry_after > 0
        assert late.events == []
    assert b.engine.stats().live == 4
    assert b.engine.stats().queued == 3
    gate.open()
    assert [c.finished().reason for c in accepted] == ["length"] * 4
    assert [c.events[0].queued_ahead for c in accepted] == [0, 0, 1, 2]  # type: ignore[union-attr]
    assert b.ask(ask("later")).reason == "length"


def test_a_place_in_the_queue_is_free_again_when_a_queued_request_is_cancelled(bench: Make) -> None:
    b = bench(max_queued=1)
    gate = b.gate("encode")
    b.submit(ask("running"))
    gate.wait()
    [queued] = b.submit(ask("queued"))
    b.engine.cancel("queued")
    assert isinstance(queued.error(), Cancelled)
    [other] = b.submit(ask("other"))
    gate.open()
    assert other.finished().reason == "length"


def test_a_prompt_too_long_is_an_invalid_argument(bench: Make) -> None:
    b = bench()
    long_prompt, long_answer = ask("p", "red circle " * MAX_TOKENS), ask("a", max_new_tokens=MAX_TOKENS)
    calls = b.submit(ask("ok"), long_prompt, long_answer)
    assert calls[0].finished().reason == "length"
    for call, field in zip(calls[1:], ("messages", "sampling.max_new_tokens"), strict=True):
        error = call.error()
        assert isinstance(error, InvalidArgument)
        assert [v.field for v in error.violations] == [field]
        assert str(MAX_TOKENS) in error.message
    b.await_nothing_left()


def test_a_request_of_exactly_the_limit_is_served(bench: Make) -> None:
    b = bench()
    prompt = b.ask(ask("probe")).usage.prompt_tokens
    fits, over = b.submit(
        ask("fits", max_new_tokens=MAX_TOKENS - prompt, steps=2, block=MAX_TOKENS),
        ask("over", max_new_tokens=MAX_TOKENS - prompt + 1),
    )
    assert fits.finished().reason == "length"
    assert isinstance(over.error(), InvalidArgument)


def test_an_image_for_a_text_only_model_is_a_failed_precondition(bench: Make, text_model: LoadedModel) -> None:
    b = bench(text_model)
    picky, plain = b.submit(ask("picky", images=(picture(0),)), ask("plain"))
    error = picky.error()
    assert isinstance(error, FailedPrecondition)
    assert "'tiny'" in error.message
    assert plain.finished().reason == "length"


def test_a_broken_image_fails_its_own_request_only(bench: Make, alone: dict[str, Outcome]) -> None:
    b = bench()
    gate = b.gate("encode", lambda ids: "broken" not in ids or len(ids) == 1)
    requests = mixed(8)
    calls = b.submit(*requests[:1])
    gate.wait()
    [broken] = b.submit(ask("broken", images=(picture(1), b"no image at all")))
    calls += b.submit(*requests[1:])
    gate.open()
    error = broken.error()
    assert isinstance(error, InvalidArgument)
    assert error.violations[0].field.startswith("messages[0].parts[1].image")
    for call in calls:
        assert outcome(b, call) == alone[call.request.id]
    b.await_nothing_left()


def test_an_image_placeholder_typed_as_text_is_text(bench: Make) -> None:
    b = bench()
    forged, honest = b.submit(ask("forged", "look: <image>"), ask("honest", images=(picture(0),)))
    assert forged.finished().usage.visual_tokens == 0
    assert honest.finished().usage.visual_tokens == 4


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"recompute": Policy(name="magic")}, "diffusion.recompute"),
        ({"commit": Policy(name="magic")}, "diffusion.commit"),
        ({"recompute": dkv(0)}, "diffusion.dkv_decode"),
        ({"commit": threshold(0.0)}, "diffusion.threshold"),
        ({"commit": threshold(-1.0)}, "diffusion.threshold"),
        ({"recompute": Policy(name="none", options={"refresh": 1})}, "diffusion.none"),
        ({"recompute": Policy(name="dkv_greedy", options={"refresh": 0})}, "diffusion.dkv_greedy"),
        ({"commit": Policy(name="early_commit", options={"late": float("nan")})}, "diffusion.early_commit"),
        ({"commit": Policy(name="early_commit", base=threshold(0.0))}, "diffusion.early_commit.threshold"),
        ({"commit": Policy(name="confident", options={"bound": 1.0})}, "diffusion.confident"),
    ],
)
def test_an_unknown_policy_or_option_is_refused_at_once(bench: Make, change: dict[str, Any], field: str) -> None:
    b = bench()
    call = Call(ask("r", **change))
    with pytest.raises(InvalidArgument) as refused:
        b.engine.submit(call.request, call.sink)
    assert [v.field for v in refused.value.violations] == [field]
    assert call.events == []
    assert b.engine.stats().live == 0


def test_a_pool_too_small_for_one_request_is_a_config_error(model: LoadedModel) -> None:
    config = EngineConfig(pages=7, page_size=8, max_tokens=64, torch_threads=1)
    with pytest.raises(ConfigError, match="pages × page_size is 56"):
        Engine(model, config, MediaConfig())


# --- a failure stays with its request ---

#: Only the victim's answer is this long; how the broken parts below know it.
VICTIM_TOKENS = 13


def victim(**options: Any) -> Request:
    return ask("victim", "a shape", **{"max_new_tokens": VICTIM_TOKENS, "block": 16, **options})


def is_victim(canvas: Canvas, step: int) -> bool:
    return canvas.new_tokens == VICTIM_TOKENS and canvas.step == step


def run_with_victim(
    b: Bench, request: Request, alone: dict[str, Outcome], caplog: pytest.LogCaptureFixture
) -> MMServeError:
    """Put ``request`` in the middle of a batch; the others must come out as they do alone."""
    gate = b.gate("encode")
    company = mixed(10)
    calls = b.submit(*company[:5], request, *company[5:])
    gate.open()
    with caplog.at_level(logging.ERROR, logger="mmserve"):
        error = calls[5].error()
        for call in [*calls[:5], *calls[6:]]:
            assert outcome(b, call) == alone[call.request.id]
    assert isinstance(error, Internal)
    logged = [r for r in caplog.records if error.error_id in r.getMessage()]
    assert len(logged) == 1, "the id is in the log, once"
    assert logged[0].exc_info is not None
    assert "broken on purpose" in str(logged[0].exc_info[1])
    assert "broken on purpose" not in error.message, "no inner detail reaches the client"
    assert len(caplog.records) == 1
    b.await_nothing_left()
    assert b.ask(ask("next")).reason == "length"
    return error


@pytest.mark.parametrize("step", [0, 1, 4], ids=["prefill", "first decode step", "later decode step"])
@pytest.mark.parametrize("part", ["forward", "candidates"])
def test_a_model_that_breaks_on_one_request_fails_that_one_only(
    bench: Make,
    alone: dict[str, Outcome],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    step: int,
) -> None:
    """``forward`` breaks after the K/V of the whole batch was written, ``candidates`` after some have theirs."""
    forward, candidates = mmserve.decode.runner.forward, mmserve.decode.propose.candidates
    sizes: list[int] = []

    def broken_forward(model: Any, store: Any, batch: list[Any], floor: int, **options: Any) -> list[Logits]:
        results = forward(model, store, batch, floor, **options)
        if any(is_victim(p.canvas, step) for p in batch):
            sizes.append(len(batch))
            raise RuntimeError("broken on purpose")
        return results

    def broken_candidates(rows: Logits, wanted: Any, canvas: Canvas, *rest: Any, **named: Any) -> Candidates:
        if is_victim(canvas, step):
            sizes.append(len(b.batches[-1]) if step else 2)
            raise RuntimeError("broken on purpose")
        return candidates(rows, wanted, canvas, *rest, **named)

    if part == "forward":
        monkeypatch.setattr(mmserve.decode.runner, "forward", broken_forward)
    else:
        monkeypatch.setattr(mmserve.decode.propose, "candidates", broken_candidates)
    b = bench()
    run_with_victim(b, victim(), alone, caplog)
    assert max(sizes) > 1, "it did break in company"


class BrokenCommit(LowConfidence):
    """Fails at the fourth step."""

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        if canvas.step == 4:
            raise RuntimeError("broken on purpose")
        return most_confident_one(candidates)


def most_confident_one(candidates: Candidates) -> np.ndarray:
    return np.arange(len(candidates.positions)) == candidates.confidence.argmax()


class BrokenRecompute(NoCache):
    """Fails at the fourth step."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        if canvas.step == 4:
            raise RuntimeError("broken on purpose")
        return super().rows(canvas)


def test_a_bug_in_a_commit_policy_fails_its_request_only(
    bench: Make, alone: dict[str, Outcome], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMIT, "broken", BrokenCommit)
    monkeypatch.setattr(mmserve.capabilities, "DIFFUSION_COMMIT", (*DIFFUSION_COMMIT, "broken"))
    run_with_victim(bench(), victim(commit=Policy(name="broken")), alone, caplog)


def test_a_bug_in_a_recompute_policy_fails_its_request_only(
    bench: Make, alone: dict[str, Outcome], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECOMPUTE, "broken", BrokenRecompute)
    monkeypatch.setattr(mmserve.capabilities, "FULL_ATTENTION", (*FULL_ATTENTION, "broken"))
    run_with_victim(bench(), victim(recompute=Policy(name="broken")), alone, caplog)


def test_a_bug_while_a_decode_opens_fails_its_request_only(
    bench: Make, alone: dict[str, Outcome], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    opened = b.engine.stages.decoder.open

    def broken(request: Request, prefilled: Any) -> Any:
        if request.id == "victim":
            raise RuntimeError("broken on purpose")
        return opened(request, prefilled)

    monkeypatch.setattr(b.engine.stages.decoder, "open", broken)
    run_with_victim(b, victim(), alone, caplog)


def test_a_bug_in_encode_fails_its_request_only(
    bench: Make, alone: dict[str, Outcome], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    prompt = mmserve.encode.encoder.prompt_of

    def broken(model: Any, request: Request) -> Any:
        if request.id == "victim":
            raise RuntimeError("broken on purpose")
        return prompt(model, request)

    monkeypatch.setattr(mmserve.encode.encoder, "prompt_of", broken)
    run_with_victim(b, victim(), alone, caplog)


def test_a_whole_stage_that_breaks_fails_its_batch_and_the_engine_goes_on(
    bench: Make, caplog: pytest.LogCaptureFixture
) -> None:
    b = bench()
    prefill = b.engine.stages.prefilling.prefill

    def broken(_batch: list[Any]) -> list[Any]:
        b.engine.stages.prefilling.prefill = prefill  # type: ignore[method-assign]
        raise RuntimeError("broken on purpose")

    b.engine.stages.prefilling.prefill = broken  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.ERROR, logger="mmserve"):
        [call] = b.submit(ask("unlucky"))
        error = call.error()
    assert isinstance(error, Internal)
    assert error.error_id in caplog.text
    b.await_nothing_left()
    assert b.ask(ask("next")).reason == "length"


def test_a_bug_at_the_end_of_a_request_fails_it_and_leaves_the_engine_running(
    bench: Make, caplog: pytest.LogCaptureFixture
) -> None:
    b = bench()
    finished = b.engine.stages.decoding.finished

    def broken(request: str) -> Any:
        if request == "victim":
            raise RuntimeError("broken on purpose")
        return finished(request)

    b.engine.stages.decoding.finished = broken  # type: ignore[method-assign]
    gate = b.gate("decode")
    with caplog.at_level(logging.ERROR, logger="mmserve"):
        first, middle, last = b.submit(ask("first"), ask("victim"), ask("last"))
        gate.wait()
        gate.open()
        error = middle.error()
        assert isinstance(error, Internal)
        assert error.error_id in caplog.text
        assert [c.finished().reason for c in (first, last)] == ["length"] * 2
    b.await_nothing_left()
    assert b.ask(ask("next")).reason == "length"


@pytest.mark.parametrize("how", ["finished", "cancelled"])
def test_a_resource_that_cannot_be_freed_keeps_no_other_and_leaves_the_engine_running(
    bench: Make, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    b = bench()
    release = b.engine.stages.encoding.release

    def broken(request: str) -> None:
        release(request)
        if request == "victim":
            raise OSError("broken on purpose")

    b.engine.stages.encoding.release = broken  # type: ignore[method-assign]
    gate = b.gate("decode")
    with caplog.at_level(logging.ERROR, logger="mmserve"):
        first, victim, last = b.submit(ask("first"), ask("victim"), ask("last"))
        gate.wait()
        if how == "cancelled":
            b.engine.cancel("victim")
        gate.open()
        assert isinstance(victim.error(), Cancelled if how == "cancelled" else Internal)
        assert [call.finished().reason for call in (first, last)] == ["length"] * 2
    b.await_nothing_left()
    assert "broken on purpose" in caplog.text and b.ask(ask("next")).reason == "length"


# --- pages and fairness ---


@pytest.mark.parametrize("stages", ["threads", "inline"])
def test_a_pool_with_pages_for_one_request_serves_them_all(bench: Make, alone: dict[str, Outcome], stages: str) -> None:
    b = bench(page_size=8, pages=MAX_TOKENS // 8, stages=stages)
    calls = b.submit(*mixed())
    for call in calls:
        assert outcome(b, call) == alone[call.request.id]
    assert 0 < b.most_pages <= MAX_TOKENS // 8
    b.await_nothing_left()


@pytest.mark.parametrize("stages", ["threads", "inline"])
def test_what_lies_in_a_page_from_before_is_never_read(bench: Make, alone: dict[str, Outcome], stages: str) -> None:
    b = bench(page_size=16, pages=24, stages=stages)
    for tensor in (*b.engine.stages.store.keys, *b.engine.stages.store.values):
        tensor.fill_(torch.nan)
    for call in b.submit(*mixed(), *(dataclasses.replace(r, id=f"{r.id}-again") for r in mixed())):
        assert outcome(b, call) == alone[call.request.id.removesuffix("-again")]
    assert b.most_pages > 12


@pytest.mark.parametrize(
    "config", [{"max_pending_per_stage": 1}, {"max_running": 1}, {"prefill_tokens": 1, "decode_tokens": 1}]
)
def test_the_tightest_budgets_still_serve_everyone(
    bench: Make, alone: dict[str, Outcome], config: dict[str, int]
) -> None:
    b = bench(**config)
    for call in b.submit(*mixed()):
        assert outcome(b, call) == alone[call.request.id]


def test_a_long_answer_is_not_starved_by_a_stream_of_short_ones(bench: Make) -> None:
    """Whoever waited longest decodes next, also when a newcomer always waits beside it."""
    shorts = 40
    b = bench(decode_tokens=1, prefill_tokens=1, encode_batch=1, max_pending_per_stage=4)
    decode, prefill = b.engine.stages.decoding.decode, b.engine.stages.prefilling.prefill
    prefilled: list[str] = []

    def counted(batch: list[Any]) -> list[Any]:
        prefilled.extend(request.id for request, _pages in batch)
        return prefill(batch)

    def slow(batch: list[Request]) -> list[Any]:
        waiting = b.engine.stages.to_decode
        eventually(lambda: waiting.waiting >= 2 or len(prefilled) == shorts + 1, "newcomers wait for decode")
        return decode(batch)

    b.engine.stages.prefilling.prefill, b.engine.stages.decoding.decode = counted, slow  # type: ignore[method-assign]
    gate = b.gate("encode")
    calls = b.submit(ask("long", max_new_tokens=8), *(ask(f"short{i}", max_new_tokens=1) for i in range(shorts)))
    gate.open()
    assert [call.finished().reason for call in calls] == ["length"] * (shorts + 1)
    turns = [i for i, batch in enumerate(b.batches) if "long" in batch]
    assert len(turns) == 8
    assert np.diff(turns).max() <= 6, f"its steps came at batches {turns}"


# --- starting and stopping ---


def test_an_engine_that_is_not_started_is_unavailable(bench: Make) -> None:
    b = bench(started=False)
    with pytest.raises(Unavailable, match="not started"):
        b.submit(ask("early"))


def test_a_drain_in_time_lets_everyone_finish_and_refuses_newcomers(bench: Make) -> None:
    b = bench()
    gate = b.gate("decode")
    calls = b.submit(*mixed(6))
    gate.wait()
    results: list[bool] = []
    drain = threading.Thread(target=lambda: results.append(b.engine.drain(PATIENCE)))
    drain.start()
    eventually(lambda: b.engine._queue.refusal, "newcomers are refused")
    with pytest.raises(Unavailable, match="shutting down"):
        b.submit(ask("newcomer"))
    gate.open()
    drain.join(PATIENCE)
    assert results == [True]
    assert all(call.finished() for call in calls)
    b.await_nothing_left()


def test_a_drain_out_of_time_fails_what_is_left_at_once_and_waits_for_the_workers(bench: Make) -> None:
    b = bench()
    gate = b.gate("decode")
    calls = b.submit(*mixed(6))
    gate.wait()
    results: list[bool] = []
    drain = threading.Thread(target=lambda: results.append(b.engine.drain(0.01)))
    drain.start()
    for call in calls:
        assert isinstance(call.error(), Unavailable), "told before the worker is done"
    assert results == []
    assert b.engine.stats().live > 0
    gate.open()
    drain.join(PATIENCE)
    assert results == [False]
    b.await_nothing_left()


def test_a_drain_ends_though_a_request_does_not(
    bench: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mmserve.engine.shutdown, "ENDING_SECONDS", 0.05)
    b = bench()
    gate = b.gate("decode")
    [call] = b.submit(ask("stuck"))
    gate.wait()
    assert not b.engine.drain(0.0) and not b.engine.drain(0.0), "nor is it waited for again"
    assert isinstance(call.error(), Unavailable)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "did not end within 0.05 s" in line and line.endswith("(1 samples): stuck (STEPPING, in a pass)")
    gate.open()
    b.await_nothing_left()


def test_a_second_shorter_drain_overrules_the_first(bench: Make) -> None:
    b = bench()
    gate = b.gate("decode")
    [call] = b.submit(ask("r"))
    gate.wait()
    results: list[bool] = []
    first = threading.Thread(target=lambda: results.append(b.engine.drain(PATIENCE)))
    first.start()
    second = threading.Thread(target=lambda: b.engine.drain(0.0))
    second.start()
    assert isinstance(call.error(), Unavailable)
    gate.open()
    first.join(PATIENCE)
    second.join(PATIENCE)
    assert len(results) == 1
    b.await_nothing_left()


def test_a_drain_out_of_time_reaches_a_request_that_is_being_admitted(bench: Make) -> None:
    b = bench()
    gate = b.gate("encode")
    failed_all = threading.Event()
    fail_all = b.engine._live.fail_all

    def watched(error: MMServeError) -> None:
        fail_all(error)
        failed_all.set()

    b.engine._live.fail_all = watched  # type: ignore[method-assign]
    call = Call(ask("between"))
    drain = threading.Thread(target=lambda: b.engine.drain(0.0))

    def sink(event: Any) -> None:
        call.sink(event)
        if isinstance(event, Admitted):
            drain.start()
            failed_all.wait(0.2)  # long enough for a drain that does not wait for this admission

    b.engine.submit(call.request, sink)
    assert isinstance(call.error(), Unavailable), "its drain came too early to find it"
    gate.open()
    drain.join(PATIENCE)


@pytest.mark.parametrize("stages", ["threads", "inline"])
def test_stop_ends_every_live_request_and_every_thread(bench: Make, stages: str) -> None:
    before = set(threading.enumerate())
    b = bench(stages=stages, decode_tokens=200)
    calls = b.submit(*mixed())
    calls[0].wait()
    b.engine.stop()
    for call in calls:
        last = call.wait()
        assert isinstance(last, Finished) or isinstance(last.error, Unavailable)
    assert set(threading.enumerate()) == before
    b.await_nothing_left()
    with pytest.raises(Unavailable):
        b.submit(ask("late"))
    b.engine.stop()


@pytest.mark.parametrize(("stages", "thread"), [("threads", "decode"), ("inline", "engine")])
def test_stop_returns_though_a_pass_does_not(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stages: str, thread: str
) -> None:
    for name in ("ENDING_SECONDS", "_SECOND_WAIT_SECONDS"):
        monkeypatch.setattr(mmserve.engine.shutdown, name, 0.05)
    b = Bench(model, stages=stages)
    gate = b.gate("decode")
    [call] = b.submit(ask("stuck"))
    gate.wait()
    b.engine.stop()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 2 and f"a pass of tiny did not return (threads: {thread})" in lines[1]
    gate.open()
    if stages == "inline":
        assert isinstance(call.error(), Unavailable), "once its pass has returned"


def test_stop_while_idle_and_before_start_returns(bench: Make) -> None:
    idle, unstarted = bench(), bench(started=False)
    idle.engine.stop()
    unstarted.engine.stop()
    assert not idle.engine._thread.is_alive()


def test_two_engines_of_one_model_do_not_disturb_each_other(bench: Make, alone: dict[str, Outcome]) -> None:
    benches = [bench(), bench()]
    calls = [(b, call) for request in mixed(8) for b in benches for call in b.submit(request)]
    for b, call in calls:
        assert outcome(b, call) == alone[call.request.id]


def test_many_clients_at_once_each_get_their_own_answer(bench: Make, alone: dict[str, Outcome]) -> None:
    b = bench()
    results: dict[str, Outcome] = {}

    def client(share: list[Request]) -> None:
        for request in share:
            [call] = b.submit(request)
            results[request.id] = outcome(b, call)

    clients = [threading.Thread(target=client, args=(mixed()[i::6],)) for i in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(PATIENCE)
    assert results == alone


def test_the_engine_tells_what_its_model_can_do(bench: Make, model: LoadedModel, text_model: LoadedModel) -> None:
    info, plain = bench().engine.info, bench(text_model).engine.info
    assert (info.name, info.images, info.visual_tokens_per_image) == ("tiny", True, 4)
    assert (plain.images, plain.max_images, plain.visual_tokens_per_image) == (False, 0, 0)
    for still in (info, plain):
        assert (still.videos, still.max_videos, still.frames_per_video, still.max_video_seconds) == (False, 0, 0, 0.0)
    assert info.max_tokens == MAX_TOKENS
    assert {"none", "dkv_decode"} <= set(info.recompute_policies)
    assert {"low_confidence", "threshold"} <= set(info.commit_policies)
    assert info.parameters > plain.parameters == sum(p.numel() for p in model.decoder.parameters())


def test_the_model_s_own_limit_bounds_the_engine_s(bench: Make, model: LoadedModel) -> None:
    spec = dataclasses.replace(model.spec, max_tokens=40)
    b = bench(dataclasses.replace(model, spec=spec))
    assert b.engine.info.max_tokens == 40
    [call] = b.submit(ask("r", max_new_tokens=40))
    assert isinstance(call.error(), InvalidArgument)


def test_a_conversation_of_several_messages_is_read_as_one_prompt(bench: Make) -> None:
    b = bench(stages="inline")
    short = b.ask(ask("short"))
    request = ask("long")
    before = dataclasses.replace(request.messages[0], parts=(TextPart("earlier"),))
    answer = dataclasses.replace(before, role="assistant")
    long = b.ask(dataclasses.replace(request, messages=(before, answer, *request.messages)))
    assert long.usage.prompt_tokens > short.usage.prompt_tokens
    assert long.text != short.text
