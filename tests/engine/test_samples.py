"""Several samples of one request: each is a request of its own seed, and all of them are one request to its client."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from harness import PATIENCE, Bench, eventually
from helpers import ask, dkv, picture, sure_above, threshold, tiny_model

import mmserve.decode.propose
import mmserve.engine.engine
from mmserve.core.canvas import Canvas
from mmserve.core.events import Admitted, Delta, Event, Failed, Finished, Snapshot
from mmserve.core.request import Policy, Request
from mmserve.core.samples import sample_seed, samples
from mmserve.decode.commit import CAUSAL_COMMIT, DIFFUSION_COMMIT
from mmserve.decode.policies import Offered, commit_policy
from mmserve.encode.child import Child
from mmserve.encode.wire import MediaFile
from mmserve.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    MMServeError,
    ResourceExhausted,
    Unavailable,
)
from mmserve.models.base import Attention, LoadedModel

Make = Callable[..., Bench]


class Samples:
    """One submitted request for several samples, and its events."""

    def __init__(self, bench: Bench, request: Request) -> None:
        self.request = request
        self.events: list[Event] = []
        self._ended = threading.Event()
        bench.engine.submit(request, self.sink)

    def sink(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Failed) or len(self._finished()) == self.request.sampling.n:
            self._ended.set()

    def _finished(self) -> list[Finished]:
        return [e for e in self.events if isinstance(e, Finished)]

    def wait(self) -> Event:
        """The last event, checked to be last, with ``Admitted`` first and nothing twice."""
        assert self._ended.wait(PATIENCE), self.events
        assert [i for i, e in enumerate(self.events) if isinstance(e, Admitted)] == [0]
        assert sum(isinstance(e, Failed) for e in self.events) == isinstance(self.events[-1], Failed)
        numbers = [e.sample for e in self._finished()]
        assert len(numbers) == len(set(numbers))
        return self.events[-1]

    def finished(self) -> list[Finished]:
        """Each sample's last event, in order; its deltas must add up to its text."""
        assert isinstance(self.wait(), Finished), self.events[-1]
        done = sorted(self._finished(), key=lambda e: e.sample)
        for one in done:
            assert "".join(e.text for e in self.events if isinstance(e, Delta) and e.sample == one.sample) == one.text
        return done

    def error(self) -> MMServeError:
        last = self.wait()
        assert isinstance(last, Failed)
        return last.error


def several(request: Request, n: int, name: str | None = None) -> Request:
    sampling = dataclasses.replace(request.sampling, n=n)
    return dataclasses.replace(request, id=name or request.id, sampling=sampling)


def told(done: Finished) -> tuple[Any, ...]:
    """What of a sample depends on its request alone; with shared pages, what was run for it depends on others too."""
    run = done.recomputed_tokens + done.usage.cached_tokens
    return done.reason, done.text, dataclasses.replace(done.usage, cached_tokens=0), done.forwards, run, done.edits


def causal(vision: bool = False) -> LoadedModel:
    """A next-token model beside another one, which drafts for it."""
    made = tiny_model(vision=vision)
    made = dataclasses.replace(made, spec=dataclasses.replace(made.spec, attention=Attention.CAUSAL, logit_shift=1))
    return dataclasses.replace(made, companion=made)


def drawn(name: str, **options: Any) -> Request:
    return ask(name, **{"max_new_tokens": 12, "block": 6, "temperature": 0.9, "seed": 4, "steps": 8, **options})


# --- which request a sample is ---


def test_samples_are_the_request_with_ids_and_seeds_of_their_own() -> None:
    request = several(ask("r", seed=7), 5)
    first, *others = samples(request)
    assert first == ask("r", seed=7)
    for index, other in enumerate(others, 1):
        seed = sample_seed(7, index)
        assert other == dataclasses.replace(ask("r", seed=seed), id=f"r.{index}") and 0 <= seed < 2**64
    assert samples(several(request, 3)) == samples(request)[:3]


def test_seeds_near_one_another_have_no_sample_in_common() -> None:
    seeds = [sample_seed(seed, i) for seed in (*range(64), *range(2**64 - 64, 2**64)) for i in range(64)]
    assert len(set(seeds)) == len(seeds)


COMMITS = [Policy(name=name) for name in DIFFUSION_COMMIT]


@pytest.mark.parametrize("commit", COMMITS, ids=lambda p: p.name)
def test_a_sample_is_the_answer_to_a_request_with_its_seed(bench: Make, commit: Policy) -> None:
    """Whatever the commit policy, alone and beside others, and however many there are."""
    model = dataclasses.replace(tiny_model(vision=True), companion=causal(vision=True), commit_filter=sure_above(0.3))
    b = bench(model, watch=False)
    request = drawn("r", commit=commit, recompute=dkv(3), images=(picture(2),))
    expected = [told(b.ask(dataclasses.replace(one, id=f"a{i}"))) for i, one in enumerate(samples(several(request, 3)))]
    assert [told(e) for e in Samples(b, several(request, 3)).finished()] == expected
    together = [Samples(b, several(drawn(f"o{k}", seed=k, commit=threshold(0.3)), 2)) for k in range(2)]
    two = Samples(b, several(request, 2))
    assert [told(e) for e in two.finished()] == expected[:2]
    assert all(len(other.finished()) == 2 for other in together)
    assert len({e[1] for e in expected}) == 3, "each draws for itself"
    b.await_nothing_left()


@pytest.mark.parametrize("commit", CAUSAL_COMMIT)
def test_samples_of_a_next_token_model(bench: Make, commit: str) -> None:
    b = bench(causal(), watch=False, prefill_tokens=16)
    request = drawn("r", recompute=Policy(name="last"), commit=Policy(name=commit), block=0)
    expected = [told(b.ask(dataclasses.replace(one, id=f"a{i}"))) for i, one in enumerate(samples(several(request, 3)))]
    assert [told(e) for e in Samples(b, several(request, 3)).finished()] == expected
    assert len({e[1] for e in expected}) == 3


def test_greedy_samples_are_one_answer_but_for_the_order_of_random(bench: Make) -> None:
    b = bench()
    greedy = {told(e)[1] for e in Samples(b, several(drawn("g", temperature=0.0), 3)).finished()}
    assert len(greedy) == 1
    random = drawn("x", temperature=0.0, commit=Policy(name="random"), block=12, steps=12)
    assert len({told(e)[1] for e in Samples(b, several(random, 3)).finished()}) > 1


def test_events_say_which_sample_they_are_of(bench: Make) -> None:
    call = Samples(bench(), several(drawn("r", snapshots=True), 3))
    done = call.finished()
    for one in done:
        shots = [e for e in call.events if isinstance(e, Snapshot) and e.sample == one.sample]
        assert [s.forwards for s in shots] == list(range(1, one.forwards + 1))
    assert len({e.usage.prompt_tokens for e in done}) == 1, "each counts the prompt"
    assert all(e.times.encode > 0 and e.times.total >= e.times.decode > 0 for e in done)


def test_media_are_decoded_and_encoded_once(bench: Make, model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    real = Child.decode

    def counted(child: Child, file: MediaFile, *rest: Any) -> Any:
        decoded.append(file.data)
        return real(child, file, *rest)

    monkeypatch.setattr(Child, "decode", counted)
    encoded: list[int] = []
    assert model.vision is not None
    tower = model.vision.get_submodule("tower")
    hook = tower.register_forward_hook(lambda _m, args, _out: encoded.append(len(args[0])))
    try:
        Samples(bench(), several(drawn("r", images=(picture(1), picture(2))), 5)).finished()
    finally:
        hook.remove()
    assert sorted(decoded) == sorted([picture(1), picture(2)]), "side by side, in either order"
    assert sum(encoded) == 2


def test_samples_stand_where_their_request_arrived(bench: Make) -> None:
    """Those who came later do not go first because the samples are told apart later."""
    b = bench(max_running=1)
    gate = b.gate("encode")
    calls = [Samples(b, several(drawn(f"r{k}", max_new_tokens=2), 2)) for k in range(3)]
    gate.open()
    for call in calls:
        call.finished()
    order = [i for batch in b.batches for i in batch]
    assert order == sorted(order, key=lambda i: i[:2])


# --- admission: all or none ---


def test_a_queue_without_a_place_for_each_sample_refuses_all_of_them(bench: Make) -> None:
    b = bench(max_queued=5)
    gate = b.gate("encode")
    held = Samples(b, several(drawn("held"), 2))
    gate.wait()
    first = Samples(b, several(drawn("first"), 4))
    assert b.engine.stats().queued == 4
    with pytest.raises(ResourceExhausted) as refused:
        Samples(b, several(drawn("second"), 2))
    assert refused.value.retry_after is not None
    assert (b.engine.stats().queued, b.engine.stats().live) == (4, 6), "nothing of it was taken in"
    last = Samples(b, drawn("last"))
    gate.open()
    assert [len(call.finished()) for call in (held, first, last)] == [2, 4, 1]
    assert len(Samples(b, several(drawn("second"), 2)).finished()) == 2
    b.await_nothing_left()


@pytest.mark.parametrize(("n", "config", "most"), [(17, {}, 16), (4, {"max_queued": 3}, 3), (2, {"max_samples": 1}, 1)])
def test_more_samples_than_could_ever_be_taken_are_a_wrong_request(
    bench: Make, n: int, config: dict[str, int], most: int
) -> None:
    b = bench(**config)
    with pytest.raises(InvalidArgument) as caught:
        Samples(b, several(drawn("r"), n))
    assert [v.field for v in caught.value.violations] == ["sampling.n"]
    assert str(most) in str(caught.value)
    assert len(Samples(b, several(drawn("r"), most)).finished()) == most


# --- every way to end ends all ---


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "drain"])
def test_a_request_ends_with_all_of_its_samples(
    bench: Make, stage: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a worker holds some of them and others wait; nothing of any stays, and one error is told."""
    ahead = [0.0]
    monkeypatch.setattr(mmserve.engine.engine, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    b = bench(max_pending_per_stage=2, max_running=2)
    gate = b.gate(stage)
    request = several(drawn("r", deadline=time.monotonic() + 500 if how == "deadline" else None), 4)
    call = Samples(b, request)
    gate.wait()
    if how == "cancel":
        b.engine.cancel("r")
    if how == "deadline":
        ahead[0] = 1000.0
        b.engine.cancel("nobody")  # wakes the engine, which sleeps on the real clock
    if how == "drain":
        threading.Thread(target=b.engine.drain, args=(0.05,)).start()
    error = call.error()
    assert isinstance(error, {"cancel": Cancelled, "deadline": DeadlineExceeded, "drain": Unavailable}[how])
    gate.open()
    b.await_nothing_left()
    assert isinstance(call.wait(), Failed)
    if how != "drain":
        assert len(Samples(b, several(drawn("next"), 3)).finished()) == 3


def test_a_request_that_waits_is_cancelled_whole(bench: Make) -> None:
    b = bench()
    gate = b.gate("encode")
    other = Samples(b, drawn("other"))
    gate.wait()
    call = Samples(b, several(drawn("r"), 3))
    b.engine.cancel("r")
    assert isinstance(call.error(), Cancelled)
    eventually(lambda: b.engine.stats().queued == 0, "its places in the queue are free")
    gate.open()
    other.finished()


def test_cancelling_after_the_first_sample_finished_ends_the_others(bench: Make) -> None:
    """The first has the request's own id, and is gone from the engine's table by then."""
    b = bench(watch=False)
    long = drawn("r", max_new_tokens=24, steps=0)
    texts = [e.text for e in Samples(b, several(long, 3)).finished()]
    stop = texts[0][:4]
    assert len(stop) == 4 and all(stop not in other for other in texts[1:])
    stopping = dataclasses.replace(long, sampling=dataclasses.replace(long.sampling, stop=(stop,)))
    gate = b.gate("decode", lambda ids: "r" not in ids)
    call = Samples(b, several(stopping, 3))
    gate.wait()
    b.engine.cancel("r")
    assert isinstance(call.error(), Cancelled)
    assert [e.sample for e in call.events if isinstance(e, Finished)] == [0]
    gate.open()
    b.await_nothing_left()


@pytest.mark.parametrize("part", ["candidates", "choose"])
def test_a_sample_that_breaks_ends_its_request_with_one_error(
    bench: Make, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """And no other request: the broken one's neighbours in the batch are repeated without it."""
    b = bench(watch=False)
    request = several(drawn("r"), 4)
    seed = sample_seed(4, 2)
    beside = drawn("beside", seed=11)
    expected = told(b.ask(beside))
    if part == "candidates":
        real = mmserve.decode.propose.candidates

        def broken(rows: Any, wanted: Any, canvas: Canvas, sampling: Any, *rest: Any, **named: Any) -> Any:
            if sampling.seed == seed and canvas.step >= 3:
                raise RuntimeError("broken on purpose")
            return real(rows, wanted, canvas, sampling, *rest, **named)

        monkeypatch.setattr(mmserve.decode.propose, "candidates", broken)
    else:
        commit = b.engine.stages.decoder.commit

        def failing(d: Any) -> Any:
            if d.request.sampling.seed == seed and d.canvas.step >= 3:
                raise RuntimeError("broken on purpose")
            return commit(d)

        monkeypatch.setattr(b.engine.stages.decoder, "commit", failing)
    gate = b.gate("encode")
    call, other = Samples(b, request), Samples(b, beside)
    gate.open()
    error = call.error()
    assert isinstance(error, Internal) and error.error_id
    assert [told(e) for e in other.finished()] == [expected]
    b.await_nothing_left()


def test_a_bug_in_the_engines_loop_tells_each_client_once(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench()
    gate = b.gate("decode")
    call = Samples(b, several(drawn("r"), 4))
    gate.wait()
    broken = [True]
    real = b.engine._budgets

    def budgets(free_pages: int) -> Any:
        if broken.pop() if broken else False:
            raise RuntimeError("broken on purpose")
        return real(free_pages)

    monkeypatch.setattr(b.engine, "_budgets", budgets)
    b.engine.cancel("nobody")  # wakes the loop
    assert isinstance(call.error(), Internal)
    gate.open()
    b.await_nothing_left()
    assert b.stage("r") is None
    assert len(Samples(b, several(drawn("next"), 2)).finished()) == 2


def test_samples_wait_for_pages_like_any_request(bench: Make) -> None:
    """More samples than the pages hold at once: one after another, none is lost."""
    b = bench(pages=16, page_size=8)
    call = Samples(b, several(drawn("r", max_new_tokens=40, steps=4), 6))
    assert len(call.finished()) == 6
    assert b.most_pages <= 16
    assert max(len(batch) for batch in b.batches) < 6


def test_the_policy_of_each_sample_has_its_seed() -> None:
    """``random`` and ``dkv_greedy`` take the order from the request's seed: from that of the sample."""
    one, other = samples(several(drawn("r", commit=Policy(name="random")), 2))
    made = [commit_policy(r, Offered()) for r in (one, other)]
    assert [m.seed for m in made] == [4, sample_seed(4, 1)]  # type: ignore[attr-defined]
