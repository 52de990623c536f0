"""K/V that go ahead of their requests, chunk by chunk: answers as of one engine, and nothing kept of those that end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from apart import ENGINE, ENGINES, LAST, cases, load
from harness import Bench, Gate, eventually
from helpers import ask
from test_migration import Trip, over_the_wire

from mmserve.cluster.messages import Order, Refused
from mmserve.cluster.worker import Worker
from mmserve.config import EncoderCacheConfig, KVCacheConfig
from mmserve.core.events import Event, Failed, Finished
from mmserve.core.handover import ROLES, Ahead, HandedOver, Handover, Saved
from mmserve.core.payloads import KVChunk, PrefilledPayload
from mmserve.core.progress import Progress
from mmserve.core.request import Request, Stage
from mmserve.errors import Cancelled, TransferError
from mmserve.kv.pool import pages_for
from mmserve.tiers.caches import Caches
from mmserve.transfer.shared_memory import Ticket

#: Their K/V do not depend on constraints, whose search takes its time.
CASES = {name: [each for each in requests if each.constraint is None] for name, requests in cases().items()}
KINDS = ("masked", "blocks", "causal", "guided", "drafted", "quantized")
#: Bytes of a chunk: a page or two of a layer of the tiny models.
CHUNK = 3000


class Fleet:
    """Engines of one kind of model: one that does everything, one that prefills, one that decodes."""

    def __init__(self, name: str) -> None:
        config = {**ENGINE, "prefix_cache": False, **ENGINES.get(name, {})}
        self.whole, self.prefill, self.decode = (Bench(load(name, ""), watch=False, **config) for _ in range(3))
        self.prefill.engine.serve_roles(["encode", "prefill"], ahead_bytes=CHUNK)
        self.decode.engine.serve_roles(["decode"])

    @property
    def all(self) -> list[Bench]:
        return [self.whole, self.prefill, self.decode]


@pytest.fixture(scope="module")
def fleets() -> Iterator[Callable[[str], Fleet]]:
    made: dict[str, Fleet] = {}

    def fleet(name: str) -> Fleet:
        if name not in made:
            made[name] = Fleet(name)
        return made[name]

    yield fleet
    for one in made.values():
        for bench in one.all:
            bench.await_nothing_left()
            bench.close()


class Led(Trip):
    """A request whose K/V go ahead of it to ``there``, by ``hold`` if the test has one, and what came of it."""

    def __init__(self, there: Bench, hold: Callable[[int], None] = lambda _number: None) -> None:
        super().__init__(lambda _handover: there)
        self._there, self._hold = there, hold
        self.numbers: list[int] = []
        self.chunks: list[Handover] = []

    def sink(self, name: str, sample: int = 0) -> Callable[[Event | Progress | HandedOver | Saved | Ahead], None]:
        take = super().sink(name, sample)

        def also(event: Event | Progress | HandedOver | Saved | Ahead) -> None:
            if not isinstance(event, Ahead):
                take(event)
                return
            self._hold(event.number)
            sent = over_the_wire(event.handover)
            self.numbers.append(event.number)
            self.chunks.append(sent)
            self._there.engine.expect(sent, event.number, self.sink(event.handover.request.id))

        return also


def same(done: Finished, other: Finished) -> None:
    for name in ("text", "tokens", "forwards", "recomputed_tokens", "edits", "holes", "usage", "reason"):
        assert getattr(other, name) == getattr(done, name), name


def leads(request: Request) -> bool:
    """Whether its K/V are final once they are written: no reduction, no reuse, no guidance."""
    guided = request.diffusion.cfg_scale
    return not guided and request.kv_reduction is None and request.image_reuse is None


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_one_engine(fleets: Callable[[str], Fleet], name: str) -> None:
    fleet = fleets(name)
    for request in CASES[name]:
        done = fleet.whole.ask(request)
        led = Led(fleet.decode)
        fleet.prefill.engine.submit(request, led.sink(request.id))
        led.wait()
        same(done, led.finished[request.id])
        assert led.numbers == list(range(len(led.numbers)))
        assert bool(led.numbers) == leads(request), request.id
        [left] = led.handovers
        assert isinstance(left.payload, PrefilledPayload) and left.payload.kv.ahead == len(led.numbers)
        assert bool(left.payload.kv.tensors) != bool(led.numbers), "what went ahead does not go again"


def long(name: str) -> Request:
    request = next(each for each in CASES["causal"] if each.id.endswith("plain"))
    return dataclasses.replace(request, id=name)


def test_few_chunks_go_with_their_request(fleets: Callable[[str], Fleet]) -> None:
    """K/V that are three chunks do not go ahead; in chunks of a third of that size they do."""
    fleet = fleets("causal")
    store = fleet.prefill.engine.stages.store
    request = long("few")
    pages = pages_for(
        len(fleet.whole.ask(request).tokens) + fleet.whole.ask(request).usage.prompt_tokens, store.page_size
    )
    size = sum(each.nbytes for each in store.read_pages(np.arange(pages)).values())
    try:
        for chunk, went in ((size // 3, False), (size // 9, True)):
            fleet.prefill.engine.serve_roles(["encode", "prefill"], ahead_bytes=chunk)
            led = Led(fleet.decode)
            fleet.prefill.engine.submit(dataclasses.replace(request, id=f"few.{went}"), led.sink(f"few.{went}"))
            led.wait()
            assert bool(led.numbers) == went
    finally:
        fleet.prefill.engine.serve_roles(["encode", "prefill"], ahead_bytes=CHUNK)


def test_chunks_go_while_the_prompt_is_prefilled(fleets: Callable[[str], Fleet]) -> None:
    """The first ones are there before the last pass of prefill has begun, and are in the request's pages."""
    fleet = fleets("causal")
    request = long("early")
    done = fleet.whole.ask(request)
    came, go_on = threading.Event(), threading.Event()
    passes: list[int] = []
    prefill = fleet.prefill.engine.stages.prefilling.prefill

    def held(batch: list[object]) -> list[object]:
        passes.append(len(led.numbers))
        if len(passes) == 3:
            came.set()
            assert go_on.wait(60)
        return prefill(batch)  # type: ignore[arg-type]

    led = Led(fleet.decode)
    fleet.prefill.engine.stages.prefilling.prefill = held  # type: ignore[method-assign, assignment]
    try:
        fleet.prefill.engine.submit(request, led.sink(request.id))
        assert came.wait(60)
        fleet.decode.await_stage(request.id, Stage.EXPECTED)
        state = fleet.decode.engine._live.by_id[request.id]
        eventually(lambda: bool(state.pages.ids), "pages for what comes")
        eventually(lambda: len(led.numbers) > 0, "chunks before the prompt is whole")
        go_on.set()
        led.wait()
    finally:
        fleet.prefill.engine.stages.prefilling.prefill = prefill  # type: ignore[method-assign]
    same(done, led.finished[request.id])
    assert passes == sorted(passes) and passes[-1] > 0, "the last pass begins with some of them there"


def test_a_request_that_is_cancelled_between_two_chunks_leaves_nothing(fleets: Callable[[str], Fleet]) -> None:
    fleet = fleets("causal")
    entered, go_on = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        if number == 2:
            entered.set()
            assert go_on.wait(60)

    led = Led(fleet.decode, hold)
    fleet.prefill.engine.submit(long("cancelled"), led.sink("cancelled"))
    assert entered.wait(60)
    fleet.decode.await_stage("cancelled", Stage.EXPECTED)
    fleet.decode.engine.cancel("cancelled")
    fleet.prefill.engine.cancel("cancelled")
    fleet.decode.await_nothing_left()
    eventually(lambda: led.failed is not None, "the end of the request")
    assert isinstance(led.failed, Failed) and isinstance(led.failed.error, Cancelled)
    with pytest.raises(TransferError, match="is not expected"):  # one that was under way
        fleet.decode.engine.expect(led.chunks[-1], 2, led.sink("cancelled"))
    go_on.set()
    fleet.prefill.await_nothing_left()
    fleet.decode.await_nothing_left()


def test_a_sender_that_dies_between_two_chunks_is_replaced_by_another(fleets: Callable[[str], Fleet]) -> None:
    """The receiver forgets the first sender's chunks, and takes the second one's into the same pages or others."""
    fleet = fleets("causal")
    request = long("again")
    done = fleet.whole.ask(request)
    first = Led(fleet.decode)
    fleet.prefill.engine.submit(request, first.sink(request.id))
    first.wait()
    for number, chunk in enumerate(first.chunks[:3]):
        fleet.decode.engine.expect(chunk, number, first.sink(request.id))
    fleet.decode.engine.withdraw(request.id)  # as the fleet does once the sender is dead
    second = Led(fleet.decode)
    for number, chunk in enumerate(first.chunks):
        fleet.decode.engine.expect(chunk, number, second.sink(request.id))
    fleet.decode.engine.adopt(over_the_wire(first.handovers[0]), second.sink(request.id))
    second.wait()
    same(done, second.finished[request.id])
    assert first.failed is None, "what is withdrawn has no event: the request goes on"


def test_chunks_out_of_order_and_missing_ones_are_refused(fleets: Callable[[str], Fleet]) -> None:
    fleet = fleets("causal")
    request = long("order")
    led = Led(fleet.decode)
    fleet.prefill.engine.submit(request, led.sink(request.id))
    led.wait()
    there, chunks = fleet.decode.engine, led.chunks
    there.expect(chunks[0], 0, led.sink(request.id))
    with pytest.raises(TransferError, match="chunk 2 of a request's K/V was received after 1"):
        there.expect(chunks[2], 2, led.sink(request.id))
    fleet.decode.await_nothing_left()
    there.expect(chunks[0], 0, led.sink(request.id))
    with pytest.raises(TransferError, match=f"1 of {len(chunks)} chunks of K/V that were sent ahead"):
        there.adopt(over_the_wire(led.handovers[0]), led.sink(request.id))
    fleet.decode.await_nothing_left()
    with pytest.raises(TransferError, match="without the K/V sent ahead"):
        there.adopt(over_the_wire(led.handovers[0]), led.sink(request.id))
    wrong = chunks[0].payload
    assert isinstance(wrong, KVChunk)
    other = dataclasses.replace(chunks[0], payload=dataclasses.replace(wrong, page_size=4))
    with pytest.raises(TransferError, match="pages of 4 positions"):
        there.expect(other, 0, led.sink(request.id))
    fleet.decode.await_nothing_left()
    assert led.failed is None, "who sent it begins anew, and must not get the end of what was refused"


def test_a_request_whose_last_part_cannot_be_read_leaves_nothing_of_what_came_ahead(
    fleets: Callable[[str], Fleet],
) -> None:
    """The worker that wrote it has ended: the request begins anew, on another worker or here."""
    fleet = fleets("causal")
    led = Led(fleet.decode)
    fleet.prefill.engine.submit(long("refused"), led.sink("refused"))
    led.wait()
    worker = Worker()
    worker._engines = {"m": fleet.decode.engine}
    chunk, whole = (dataclasses.replace(each, payload=None) for each in (led.chunks[0], led.handovers[0]))
    came = worker.parcels.write(led.chunks[0].payload)
    worker.take([Order("m", "refused", None, chunk, ahead=((0, came),), expects=True)])
    fleet.decode.await_stage("refused", Stage.EXPECTED)
    worker.take([Order("m", "refused", None, whole, Ticket("here", "gone", 1, 64))])
    fleet.decode.await_nothing_left()
    [refused] = worker._next(0.0)
    assert isinstance(refused, Refused) and isinstance(refused.error, TransferError)
    worker.take([Order("m", "refused", None, chunk, ahead=((1, came),), expects=True)])
    assert not worker._next(0.0), "it is reported once, when the request itself comes"
    worker.take([Order("m", "refused", None, whole, worker.parcels.write(led.handovers[0].payload))])
    [refused] = worker._next(0.0)
    assert isinstance(refused, Refused)
    worker.parcels.close()


def test_a_request_that_leaves_before_its_first_step_brings_what_came_ahead(fleets: Callable[[str], Fleet]) -> None:
    """The receiver changes its role while the request waits for the step of another one to end."""
    fleet = fleets("causal")
    request, other = long("leaves"), ask("steps", recompute=LAST)
    done = fleet.whole.ask(request)
    gate = Gate(fleet.decode.engine, "decode")
    stepping, led = Led(fleet.decode), Led(fleet.decode)
    fleet.prefill.engine.submit(other, stepping.sink(other.id))
    gate.wait()
    fleet.prefill.engine.submit(request, led.sink(request.id))
    fleet.decode.await_stage(request.id, Stage.PREFILLED)
    assert led.numbers
    for each in (stepping, led):
        each._route = lambda _handover: fleet.whole
    fleet.decode.engine.serve_roles(["encode"])
    try:
        led.wait()
        gate.open()
        stepping.wait()
    finally:
        gate.open()
        fleet.decode.engine.serve_roles(["decode"])
    same(done, led.finished[request.id])


def test_pages_are_given_to_others_only_after_a_write_under_way(fleets: Callable[[str], Fleet]) -> None:
    """A request is cancelled while one of its chunks is being written."""
    fleet = fleets("causal")
    led = Led(fleet.decode)
    fleet.prefill.engine.submit(long("writes"), led.sink("writes"))
    led.wait()
    there, store = fleet.decode.engine, fleet.decode.engine.stages.store
    writing, go_on, order = threading.Event(), threading.Event(), list[str]()
    write, release = store.write_pages, there._pool.release

    def slow(pages: np.ndarray, held: object, *, some: bool = False) -> None:
        writing.set()
        assert go_on.wait(60)
        write(pages, held, some=some)  # type: ignore[arg-type]
        order.append("written")

    def released(pages: object) -> None:
        order.append("released")
        release(pages)  # type: ignore[arg-type]

    there.expect(led.chunks[0], 0, led.sink("writes"))
    fleet.decode.await_stage("writes", Stage.EXPECTED)
    state = there._live.by_id["writes"]
    eventually(lambda: bool(state.pages.ids), "pages")
    store.write_pages, there._pool.release = slow, released  # type: ignore[method-assign, assignment]
    try:
        adding = threading.Thread(target=there.expect, args=(led.chunks[1], 1, led.sink("writes")))
        adding.start()
        assert writing.wait(60)
        there.cancel("writes")
        go_on.set()
        adding.join(60)
        fleet.decode.await_nothing_left()
    finally:
        store.write_pages, there._pool.release = write, release  # type: ignore[method-assign]
    assert order.index("released") > order.index("written")


def test_the_receiver_waits_for_pages_with_chunks_in_hand(fleets: Callable[[str], Fleet]) -> None:
    """Pages are all taken when the chunks come: they are written once there are some, and the answer is the same."""
    fleet = fleets("causal")
    request = long("waits")
    done = fleet.whole.ask(request)
    gate = Gate(fleet.decode.engine, "decode")
    led = Led(fleet.decode)
    most = fleet.decode.engine.config.max_running
    others = [Led(fleet.decode) for _ in range(most)]
    for i, other in enumerate(others):
        one = dataclasses.replace(ask(f"other{i}", recompute=request.diffusion.recompute))
        fleet.prefill.engine.submit(one, other.sink(one.id))
    eventually(lambda: sum(bool(s.pages.ids) for s in fleet.decode.engine._live) == most, "all places to be taken")
    fleet.prefill.engine.submit(request, led.sink(request.id))
    eventually(lambda: bool(led.handovers), "the whole request")
    assert not fleet.decode.engine._live.by_id[request.id].pages.ids
    gate.open()
    led.wait()
    for other in others:
        other.wait()
    same(done, led.finished[request.id])


def test_what_pages_held_is_kept_before_chunks_are_written_there() -> None:
    """Pages of a prompt that the pool gives up for a request whose chunks are coming go to the memory beyond it."""
    config = {**ENGINE, **ENGINES["causal"], "pages": 20}
    kept = Caches.of(EncoderCacheConfig(), KVCacheConfig(host_bytes=64 << 20))
    there = Bench(load("causal", ""), watch=False, cache=kept, **config)
    sender = Bench(load("causal", ""), watch=False, **config)
    sender.engine.serve_roles(["encode", "prefill"], ahead_bytes=CHUNK)
    first, second = (ask(name, name * 36, max_new_tokens=8, recompute=LAST) for name in ("come", "dome"))
    done, elsewhere = there.ask(first), sender.engine
    there.engine.serve_roles(["decode"])
    tier, copying, go_on = there.engine.stages.tier, threading.Event(), threading.Event()
    assert tier is not None
    save = tier.save

    def hold(number: int) -> None:
        assert number < 1 or copying.wait(60), "pages are given up for it"

    led = Led(there, hold)

    def slow(pages: object) -> None:
        copying.set()
        assert go_on.wait(60)
        save(pages)  # type: ignore[arg-type]

    tier.save = slow  # type: ignore[method-assign, assignment]
    elsewhere.submit(second, led.sink(second.id))
    eventually(lambda: bool(led.handovers), "all chunks")
    go_on.set()
    led.wait()
    there.engine.serve_roles(ROLES)
    again = there.ask(dataclasses.replace(first, id="again"))
    assert again.usage.cached_tokens > 0 and (again.text, again.tokens) == (done.text, done.tokens)
    for bench in (there, sender):
        bench.await_nothing_left()
        bench.close()
