"""K/V that go ahead of their request over a cluster: to one decode worker at once, and to another if that one ends."""

from __future__ import annotations

from dataclasses import replace

from fake_workers import MODEL, PayloadStore, Worker, coordinator, finish, submit
from harness import Call
from helpers import ask

from mmserve.cluster.coordinator import Coordinator
from mmserve.cluster.messages import Chunk, Moved, Order, Refused
from mmserve.core.events import Failed
from mmserve.core.request import Request, Stage
from mmserve.core.samples import samples
from mmserve.errors import Cancelled, TransferError

ONE = ask("one")


class Cluster:
    """An encoding and prefilling worker, two that decode, and a request in prefill."""

    def __init__(self, request: Request = ONE) -> None:
        self.payloads = PayloadStore()
        self.first = Worker("p", frozenset({"encode", "prefill"}))
        self.workers = [Worker("d", frozenset({"decode"})), Worker("e", frozenset({"decode"}))]
        self.made: Coordinator = coordinator(self.first, *self.workers, payloads=self.payloads)
        self.request = request
        self.call: Call = submit(self.made, request)

    def chunk(self, number: int, sample: int | None = None) -> None:
        handover = replace(self.first.orders[-1].handover, stage=Stage.PREFILLED)
        if sample is not None:
            one = replace(self.request, id=f"{self.request.id}.{sample}", sampling=replace(ONE.sampling, n=1))
            handover = replace(handover, request=one)
        self.made.take("p", [Chunk(MODEL, "one", sample, handover, f"chunk {number}", number)])

    def moved(self) -> None:
        handover = replace(self.first.orders[-1].handover, stage=Stage.PREFILLED)
        self.made.take("p", [Moved(MODEL, "one", None, handover, "rest", stays=False)])

    @property
    def reserved(self) -> Worker:
        """The one that got the first chunk."""
        [worker] = [each for each in self.workers if each.orders]
        return worker

    @property
    def other(self) -> Worker:
        [worker] = [each for each in self.workers if each is not self.reserved]
        return worker


def ahead(order: Order) -> list[tuple[int, str]]:
    return list(order.ahead)


def test_chunks_go_to_the_worker_that_then_gets_the_request() -> None:
    cluster = Cluster()
    cluster.chunk(0)
    cluster.chunk(1)
    worker = cluster.reserved
    assert [(order.expects, ahead(order)) for order in worker.orders] == [
        (True, [(0, "chunk 0")]),
        (True, [(1, "chunk 1")]),
    ]
    cluster.moved()
    last = worker.orders[-1]
    assert (last.expects, last.parcel, ahead(last)) == (False, "rest", [])
    assert cluster.payloads.held == ["chunk 0", "chunk 1", "rest"], "until the next saved state"
    finish(cluster.made, worker, "one")
    assert cluster.call.ended and not cluster.payloads.held and not worker.cancelled


def test_another_decode_worker_gets_all_of_it_where_the_first_one_ends_before_the_request_came() -> None:
    cluster = Cluster()
    cluster.chunk(0)
    lost, other = cluster.reserved, cluster.other
    cluster.made.worker_exited(lost.name)
    cluster.chunk(1)
    [order] = other.orders
    assert (order.expects, ahead(order)) == (True, [(0, "chunk 0"), (1, "chunk 1")])
    cluster.moved()
    assert ahead(other.orders[-1]) == []
    finish(cluster.made, other, "one")
    assert not cluster.payloads.held


def test_another_decode_worker_gets_all_of_it_where_the_first_one_ends_with_the_request() -> None:
    cluster = Cluster()
    cluster.chunk(0)
    cluster.chunk(1)
    cluster.moved()
    lost, other = cluster.reserved, cluster.other
    cluster.made.worker_exited(lost.name)
    [order] = other.orders
    assert (order.expects, order.parcel, ahead(order)) == (False, "rest", [(0, "chunk 0"), (1, "chunk 1")])
    finish(cluster.made, other, "one")
    assert not cluster.payloads.held


def test_a_request_begins_anew_where_its_prefill_worker_ends_and_its_chunks_are_forgotten() -> None:
    cluster = Cluster()
    cluster.chunk(0)
    again = Worker("q", frozenset({"encode", "prefill"}))
    cluster.made.worker_exited("p")
    assert cluster.reserved.cancelled == ["one"] and not cluster.payloads.held
    cluster.made.load_adapters(again)
    cluster.made.worker_ready(again)
    [order] = again.orders
    assert order.handover.stage is Stage.QUEUED and not order.ahead


def test_what_a_worker_makes_of_a_prompt_again_replaces_what_it_made_before() -> None:
    cluster = Cluster()
    cluster.chunk(0)
    cluster.chunk(1)
    before = cluster.reserved
    cluster.chunk(0)
    assert before.cancelled == ["one"] and cluster.payloads.held == ["chunk 0"]


def test_a_request_that_is_cancelled_between_chunks_ends_on_both_workers() -> None:
    cluster = Cluster()
    cluster.chunk(0)
    cluster.made.cancel("one")
    assert cluster.first.cancelled == cluster.reserved.cancelled == ["one"]
    assert isinstance(cluster.call.error(), Cancelled) and not cluster.payloads.held
    cluster.chunk(1)  # it was under way
    assert not cluster.payloads.held and len(cluster.reserved.orders) == 1


def test_no_worker_is_reserved_where_none_has_room_and_the_request_brings_its_chunks() -> None:
    cluster = Cluster()
    for worker in cluster.workers:
        worker.roles = frozenset()
    cluster.chunk(0)
    assert not any(worker.orders for worker in cluster.workers)
    cluster.workers[1].roles = frozenset({"decode"})
    cluster.moved()
    [order] = cluster.reserved.orders
    assert (order.expects, ahead(order)) == (False, [(0, "chunk 0")])


def test_a_worker_is_not_reserved_for_what_it_has_itself() -> None:
    """Roles change: the worker that prefills may decode by now, and goes on with the request."""
    cluster = Cluster()
    for worker in cluster.workers:
        worker.roles = frozenset()
    cluster.first.roles = frozenset({"encode", "prefill", "decode"})
    cluster.chunk(0)
    assert len(cluster.first.orders) == 1
    finish(cluster.made, cluster.first, "one")
    assert not cluster.payloads.held and not cluster.first.cancelled


def test_a_state_in_the_middle_of_the_answer_needs_no_chunks_any_more() -> None:
    cluster = Cluster()
    cluster.chunk(0)
    cluster.moved()
    worker, other = cluster.reserved, cluster.other
    handover = replace(worker.orders[-1].handover, stage=Stage.READY)
    cluster.made.take(worker.name, [Moved(MODEL, "one", None, handover, "saved", stays=True)])
    assert cluster.payloads.held == ["saved"] and not worker.cancelled
    cluster.made.worker_exited(worker.name)
    [order] = other.orders
    assert (order.parcel, ahead(order)) == ("saved", [])


def test_a_refused_request_begins_anew_without_its_chunks() -> None:
    cluster = Cluster()
    cluster.chunk(0)
    cluster.moved()
    worker = cluster.reserved
    cluster.made.take(worker.name, [Refused(MODEL, "one", None, TransferError("a chunk is missing"))])
    assert cluster.first.orders[-1].handover.stage is Stage.QUEUED and not cluster.first.orders[-1].ahead
    assert not cluster.payloads.held


def test_each_sample_has_chunks_of_its_own() -> None:
    cluster = Cluster(replace(ONE, sampling=replace(ONE.sampling, n=2)))
    cluster.chunk(0, sample=0)
    cluster.chunk(0, sample=1)
    found = sorted((order.sample, ahead(order)) for worker in cluster.workers for order in worker.orders)
    assert found == [(0, [(0, "chunk 0")]), (1, [(0, "chunk 0")])]
    cluster.made.cancel("one")
    assert not cluster.payloads.held


def test_samples_that_are_still_where_all_began_are_cancelled_there() -> None:
    """A worker knows samples that it has itself taken apart by their request."""
    request = replace(ONE, sampling=replace(ONE.sampling, n=3))
    payloads, worker = PayloadStore(), Worker("0")
    made = coordinator(worker, payloads=payloads)
    call = submit(made, request)
    [order] = worker.orders
    for i, one in enumerate(samples(request)):
        handover = replace(order.handover, request=one, stage=Stage.READY)
        made.take("0", [Moved(MODEL, "one", i, handover, f"saved {i}", stays=True)])
    finish(made, worker, "one", sample=0)
    made.cancel("one")
    assert set(worker.cancelled) == {"one"} and isinstance(call.events[-1], Failed) and not payloads.held
