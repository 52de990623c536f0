"""The coordinator of a cluster with workers that are objects of the test: adapters, caches, routing, and waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_workers import MODEL, PATIENCE, PayloadStore, Worker, coordinator, finish, join, submit
from helpers import ask, picture

from mmserve.cluster.asking import WorkerEnded
from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.messages import Heartbeat, Moved, RequestEvent, StreamSaved
from mmserve.cluster.metrics import FleetMetrics
from mmserve.config import Config
from mmserve.core.cached import Block, Label
from mmserve.core.events import Finished, Prefilled, StageTimes, Usage
from mmserve.core.handover import Handover
from mmserve.core.info import AdapterInfo
from mmserve.core.request import Request, Stage, Streaming
from mmserve.core.stats import CacheStats, Stats
from mmserve.errors import (
    FailedPrecondition,
    InvalidArgument,
    MMServeError,
    NotFound,
    ResourceExhausted,
    TransferError,
    Unavailable,
    Unimplemented,
)
from mmserve.video.support import SessionSupport


def reads(digest: str) -> Callable[[str], AdapterInfo]:
    return lambda name: AdapterInfo(name=name, digest=digest, rank=4, bytes=100)


def with_adapter(name: str, adapter: str) -> Request:
    return replace(ask(name), adapter=adapter)


# --- waiting ---


def test_a_worker_that_hands_on_no_memory_keeps_nobody_else_waiting() -> None:
    payloads, slow, other = PayloadStore(), Worker("0", frozenset({"encode"})), Worker("1")
    made = coordinator(slow, payloads=payloads)
    call = submit(made, ask("one"))
    [order] = slow.orders
    handover = replace(order.handover, stage=Stage.ENCODED)
    moved = Moved(MODEL, "one", None, handover, "slow", stays=False)
    taking = threading.Thread(target=made.take, args=("0", [moved]))
    taking.start()
    assert payloads.entered.wait(PATIENCE)

    def everything_else() -> None:
        join(made, other)
        submit(made, ask("two"))
        made.tick(0.0)
        made.stats()
        finish(made, other, "two")

    beside = threading.Thread(target=everything_else, daemon=True)
    beside.start()
    beside.join(PATIENCE)
    waited = beside.is_alive()
    payloads.go_on.set()
    taking.join(PATIENCE)
    assert not waited
    assert [each.key for each in other.orders] == ["two", "one"]
    finish(made, other, "one")
    assert call.ended and made.stats().live == 0


def test_a_state_that_comes_after_its_worker_was_given_up_is_dropped() -> None:
    payloads, slow = PayloadStore(), Worker("0", frozenset({"encode"}))
    made = coordinator(slow, payloads=payloads)
    submit(made, ask("one"))
    moved = Moved(MODEL, "one", None, replace(slow.orders[0].handover, stage=Stage.ENCODED), "slow", stays=False)
    taking = threading.Thread(target=made.take, args=("0", [moved]))
    taking.start()
    assert payloads.entered.wait(PATIENCE)
    made.worker_exited("0")
    payloads.go_on.set()
    taking.join(PATIENCE)
    other = Worker("1")
    join(made, other)
    assert [each.handover.stage for each in other.orders] == [Stage.QUEUED]


@pytest.mark.parametrize("error", [TransferError("it is not there any more"), RuntimeError("Ray's store is full")])
def test_a_request_whose_state_cannot_be_sent_begins_anew_and_the_others_are_sent(error: Exception) -> None:
    class Store(PayloadStore):
        def sent(self, parcel: Any, worker: str) -> Any:
            if parcel == "lost":
                raise error
            return parcel

    payloads = Store()
    encode, rest = Worker("e", frozenset({"encode"})), Worker("0", frozenset({"prefill", "decode"}))
    made = coordinator(encode, rest, payloads=payloads, settings=ClusterSettings(max_losses=1))
    calls = {name: submit(made, ask(name)) for name in ("one", "two")}

    def encoded(name: str, parcel: str) -> Moved:
        order = next(each for each in encode.orders[::-1] if each.key == name)
        return Moved(MODEL, name, None, replace(order.handover, stage=Stage.ENCODED), parcel, stays=False)

    made.take("e", [encoded("one", "lost"), encoded("two", "fine")])
    assert [each.key for each in rest.orders] == ["two"]
    assert [(each.key, each.handover.stage) for each in encode.orders[2:]] == [("one", Stage.QUEUED)]
    assert payloads.held == ["fine"]
    made.take("e", [encoded("one", "lost")])
    assert isinstance(calls["one"].error(), Unavailable), "not again and again"
    finish(made, rest, "two")
    assert calls["two"].ended and made.stats().live == 0 and not payloads.held


def test_a_client_learns_once_what_the_prompt_took() -> None:
    """Also where the worker ends that has run it, and another one runs it again."""
    first, second = Worker("0"), Worker("1")
    made = coordinator(first)
    call = submit(made, replace(ask("one"), streaming=Streaming(prefilled=True)))
    made.take("0", [RequestEvent(MODEL, "one", None, Prefilled(Usage(7, 0, 0)))])
    made.worker_exited("0")
    join(made, second)
    made.take("1", [RequestEvent(MODEL, "one", None, Prefilled(Usage(7, 0, 0, 4)))])
    finish(made, second, "one")
    assert [event for event in call.events if isinstance(event, Prefilled)] == [Prefilled(Usage(7, 0, 0))]
    assert call.ended


def test_memory_of_a_state_that_cannot_be_kept_is_given_back() -> None:
    """Its worker, which goes on, may write there again."""
    dropped: list[Any] = []

    class Store(PayloadStore):
        def persist(self, parcel: Any) -> Any:
            raise RuntimeError("it does not come")

        def drop(self, parcel: Any) -> None:
            dropped.append(parcel)

    worker = Worker("0", frozenset({"encode"}))
    made = coordinator(worker, payloads=Store(), settings=ClusterSettings(max_losses=1), support=SessionSupport())
    call = submit(made, ask("one"))
    streams = made.session_parts(Config()).streams
    moved = Moved(MODEL, "one", None, replace(worker.orders[0].handover, stage=Stage.ENCODED), "state", stays=False)
    made.take("0", [moved, StreamSaved(MODEL, "gone", 1, "of a stream")])
    assert [each for each in dropped if each is not None] == ["state", "of a stream"]
    assert [each.handover.stage for each in worker.orders] == [Stage.QUEUED] * 2 and not call.ended
    finish(made, worker, "one")
    streams.stop()


def test_a_bug_in_the_end_of_one_request_loses_nothing_of_the_others() -> None:
    worker = Worker("0")
    made = coordinator(worker)

    def breaks(event: Any) -> None:
        if isinstance(event, Finished):
            raise ValueError("a bug")

    made.submit(ask("one"), breaks)
    call = submit(made, ask("two"))
    times = StageTimes(0.0, 0.0, 0.0, 0.0, 0.0)
    done = Finished(reason="stop", text="", usage=Usage(1, 0, 1), times=times, forwards=1, recomputed_tokens=0)
    made.take("0", [RequestEvent(MODEL, name, None, done) for name in ("one", "two")])
    assert call.ended and made.stats().live == 0


def test_a_constraint_without_a_request_is_not_judged() -> None:
    assert coordinator(Worker("0")).check_constraint(ask("one"), None) is None


# --- adapters ---


def test_an_adapter_is_loaded_on_every_worker_and_on_those_that_come_later() -> None:
    workers = [Worker(str(i), answers={"hold": reads("1")}) for i in range(3)]
    made = coordinator(*workers[:2])
    assert made.adapters.load("red") == reads("1")("red") and made.adapters.listed() == [reads("1")("red")]
    join(made, workers[2])
    assert [worker.asked for worker in workers] == [[("hold", ("red",))]] * 3
    submit(made, with_adapter("one", "red"))
    [order] = [order for worker in workers for order in worker.orders]
    assert order.handover.request.adapter == "red:1"
    with pytest.raises(NotFound, match="model 'm' has no adapter 'blue'; there is: red"):
        submit(made, with_adapter("two", "blue"))
    with pytest.raises(NotFound, match="has no adapter 'blue'"):
        made.adapters.drop("blue")
    assert made.stats().live == 1


def test_unlike_files_are_refused_and_the_worker_is_named() -> None:
    workers = [Worker(str(i), answers={"hold": reads("1")}) for i in range(3)]
    made = coordinator(*workers)
    made.adapters.load("red")
    for worker in workers:
        worker.answers["hold"] = reads("3" if worker.name == "1" else "2")
    with pytest.raises(FailedPrecondition, match="the adapter 'red' differ: worker 1 has 3, and the other workers 2"):
        made.adapters.load("red")
    assert [each.digest for each in made.adapters.listed()] == ["1"], "what was there before stays"
    assert [worker.discarded() for worker in workers] == [["red:2"], ["red:3"], ["red:2"]]
    submit(made, with_adapter("one", "red"))


@pytest.mark.parametrize(
    "error",
    [
        NotFound("no folder"),
        InvalidArgument.of("adapter", "no tensors"),
        ResourceExhausted("no room"),
        Unimplemented("takes none"),
    ],
)
def test_what_one_worker_cannot_read_is_an_error_with_its_name(error: MMServeError) -> None:
    one, other = Worker("0", answers={"hold": reads("1")}), Worker("1", answers={"hold": error})
    made = coordinator(one, other)
    with pytest.raises(type(error), match=r"\(worker 1\)") as raised:
        made.adapters.load("red")
    assert error.message in raised.value.message.replace(" (worker 1)", "")
    assert made.adapters.listed() == [] and one.discarded() == ["red:1"]
    one.answers["hold"] = error
    with pytest.raises(type(error)) as raised:
        made.adapters.load("red")
    assert raised.value.message == error.message, "all of them have it"


def test_requests_under_way_keep_their_adapter_until_they_end() -> None:
    worker = Worker("0", answers={"hold": reads("1")})
    made = coordinator(worker)
    made.adapters.load("red")
    call = submit(made, with_adapter("one", "red"))
    worker.answers["hold"] = reads("2")
    made.adapters.load("red")
    made.adapters.drop("red")
    made.tick(0.0)
    assert worker.discarded() == ["red:2"]
    with pytest.raises(NotFound, match="none is loaded"):
        submit(made, with_adapter("two", "red"))
    finish(made, worker, "one")
    assert call.ended
    made.tick(0.0)
    assert worker.discarded() == ["red:2", "red:1"]


def test_a_worker_without_the_adapter_gets_no_request_for_it() -> None:
    good, bad = Worker("0", answers={"hold": reads("1")}), Worker("1", answers={"hold": reads("2")})
    made = coordinator(good)
    made.adapters.load("red")
    join(made, bad)
    for i in range(6):
        submit(made, with_adapter(f"red{i}", "red"))
        submit(made, ask(f"plain{i}"))
    assert {order.key for order in bad.orders} & {f"plain{i}" for i in range(6)}
    assert all(not order.handover.request.adapter for order in bad.orders)
    call = submit(made, with_adapter("last", "red"))
    made.worker_exited("0")
    error = call.error()
    assert isinstance(error, NotFound) and "has the adapter 'red' any more: load it again" in error.message


def test_a_worker_that_ends_meanwhile_is_left_out() -> None:
    one, ended = Worker("0", answers={"hold": reads("1")}), Worker("1", answers={"hold": WorkerEnded("gone")})
    made = coordinator(one, ended)
    made.adapters.load("red")
    assert [each.name for each in made.adapters.listed()] == ["red"]
    made.worker_exited("0")
    with pytest.raises(Unavailable, match="no worker of 'm' answers"):
        made.adapters.load("blue")
    later = Worker("2", answers={"hold": WorkerEnded("gone")})
    made.load_adapters(later)
    assert not made.adapters.holds("2", "red:1")


def test_without_a_folder_there_are_no_adapters() -> None:
    made = coordinator(Worker("0"), adapter_folder="")
    with pytest.raises(Unimplemented, match=r"it has no \[engine\] adapter_folder"):
        submit(made, with_adapter("one", "red"))
    assert made.stats().live == 0


# --- caches ---


def page(name: str, parent: str = "", tier: str = "pages") -> Block:
    return Block(Label("prefix", MODEL, "", 16, name, parent), tier, 1000)  # type: ignore[arg-type]


A, B, C = "aa", "bb", "cc"


def test_what_workers_keep_is_listed_with_them_and_managed_as_one() -> None:
    visual = Block(Label("visual", MODEL, "", 9, "dd"), "host", 50)
    both = {"pin": 1, "drop": 1}
    one = Worker("0", answers={"blocks": [page(A), page(B, A), visual], "prefix_of": "", **both})
    other = Worker("1", answers={"blocks": [page(A), page(C, A)], "prefix_of": C, **both})
    made = coordinator(one, other)
    assert {(block.worker, block.label.name) for block in made.caches.blocks()} == {
        ("0", A), ("0", B), ("0", "dd"), ("1", A), ("1", C)
    }  # fmt: skip
    assert made.caches.prefix_of("request") == C
    assert made.caches.pin([B, "dd", "ee"], True) == 3, "each block counts once"
    assert ("pin", (["dd", B], True)) in one.asked and ("pin", (["dd", B], True)) in other.asked
    assert made.caches.drop([B, "dd"]) == 2, "the other worker has a prefix that begins with the first page"
    assert ("drop", (["dd"], [B])) in one.asked and ("drop", (["dd"], [B])) in other.asked
    assert made.caches.drop([B, C]) == 3
    assert made.caches.drop(["ee"]) == made.caches.pin(["ee"], True) == 0


def test_what_is_left_of_models_that_are_not_served_is_managed_on_every_worker() -> None:
    left = replace(page(A, tier="disk"), stale="ff")
    answers = {"others.blocks": [left], "others.pin": 1}
    one, other = (Worker(str(i), answers={**answers, "others.drop": 1 - i}) for i in range(2))
    found = coordinator(one, other).caches.others([MODEL], "old")
    assert [(block.worker, block.stale) for block in found.blocks()] == [("0", "ff"), ("1", "ff")]
    assert found.pin([A], False) == found.drop([A]) == 1, "a file is there once"
    served = (MODEL,), "old"
    for worker in (one, other):
        assert worker.asked[-3:] == [
            ("others.blocks", served), ("others.pin", (*served, [A], False)), ("others.drop", (*served, [A]))
        ]  # fmt: skip


def test_an_error_of_one_worker_s_caches_names_it() -> None:
    full = ResourceExhausted("too much is pinned")
    one, other = (Worker(str(i), answers={"blocks": [page(A)], "pin": 1}) for i in range(2))
    other.answers["pin"] = full
    made = coordinator(one, other)
    with pytest.raises(ResourceExhausted, match=r"too much is pinned \(worker 1\)"):
        made.caches.pin([A], True)


def test_statistics_are_summed_and_counters_outlive_their_worker() -> None:
    one, other = Worker("0"), Worker("1")
    made = coordinator(one, other)
    cache = CacheStats(lookups=5, hits=2, made=3, entries=3, used_bytes=300, disk_bytes=700)
    stats = Stats(0, 0, 1, 0, pages=8, prefix_lookups=4, token_cache=cache, prefix_cache=cache)
    for worker in (one, other):
        made.take(worker.name, [Heartbeat({MODEL: stats})])
    both = made.stats()
    assert (both.pages, both.pages_in_use, both.prefix_lookups) == (16, 2, 8)
    for found in (both.token_cache, both.prefix_cache):
        assert found == CacheStats(lookups=10, hits=4, made=6, entries=6, used_bytes=600, disk_bytes=700)
    assert set(made.stats_of_workers()) == {"0", "1"}
    fleet = SimpleNamespace(members=[], coordinators={MODEL: made}, spares_ready=0, head_lost=False, lost=0)
    samples = {
        (sample.name, sample.labels.get("worker"), sample.labels.get("cache")): sample.value
        for family in FleetMetrics(fleet).collect()  # type: ignore[arg-type]
        for sample in family.samples
    }
    for worker in ("0", "1"):
        assert samples["mmserve:cluster_worker_cache_queries_total", worker, "token"] == 5
        assert samples["mmserve:cluster_worker_cache_hits_total", worker, "prefix"] == 2
        assert samples["mmserve:cluster_worker_cache_bytes", worker, "prefix"] == 300
    made.worker_exited("1")
    made.take("1", [Heartbeat({MODEL: stats})])  # one that was still under way
    left = made.stats()
    assert (left.pages, left.pages_in_use, left.prefix_lookups) == (8, 1, 8)
    assert left.token_cache == CacheStats(lookups=10, hits=4, made=6, entries=3, used_bytes=300, disk_bytes=700)
    assert set(made.stats_of_workers()) == {"0"}


# --- routing ---


def test_requests_go_where_their_media_and_the_beginning_of_their_prompt_are() -> None:
    one, other = Worker("0"), Worker("1")
    made = coordinator(one, other)
    long = "be kind and exact. " * 40
    submit(made, ask("first", long))
    submit(made, ask("second", "what is it?", images=(picture(1, (200, 200)),)))
    assert [order.key for order in one.orders] == ["first"] and [order.key for order in other.orders] == ["second"]
    finish(made, one, "first")
    finish(made, other, "second")
    submit(made, ask("of the second", "and now?", images=(picture(1, (200, 200)),)))
    assert other.orders[-1].key == "of the second"
    finish(made, other, "of the second")
    submit(made, ask("of the first", long + "what is blue?"))
    assert one.orders[-1].key == "of the first"


def test_a_prompt_is_prefilled_where_most_of_it_is_and_not_after_it_was_dropped() -> None:
    encoder = Worker("e", frozenset({"encode"}))
    one, other = (Worker(name, frozenset({"prefill", "decode"})) for name in ("0", "1"))
    made = coordinator(encoder, one, other)
    names = {"one": (A, B), "other": (C,), "again": (C, A), "more": (C,)}
    for worker in (encoder, one, other):
        worker.answers |= {"blocks": [page(A), page(B, A), page(C)], "drop": 0}

    def encoded(name: str) -> Worker:
        submit(made, ask(name))
        keys = tuple(map(bytes.fromhex, names[name]))
        handover = Handover(encoder.orders[-1].handover.request, Stage.ENCODED, None, keys=keys)
        made.take("e", [Moved(MODEL, name, None, handover, "state", stays=False)])
        [found] = [worker for worker in (one, other) if any(order.key == name for order in worker.orders)]
        return found

    assert encoded("one") is one and encoded("other") is other
    finish(made, one, "one")
    finish(made, other, "other")
    assert encoded("again") is other, "it has the first page; the other one has only what comes after it"
    finish(made, other, "again")
    made.caches.drop([C])
    assert encoded("more") is one, "no worker has it: the first of those with as little to do"
