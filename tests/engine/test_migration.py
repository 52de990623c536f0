"""Requests that go from engine to engine, at stage boundaries and between decode steps: answers as of one engine."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from apart import ENGINE, ENGINES, cases, load
from gemma_checkpoints import save_gemma
from harness import Bench, eventually
from helpers import ask, picture

from mmserve.core.constraint import ConstraintSampling
from mmserve.core.events import Delta, Event, Failed, Finished, Prefilled
from mmserve.core.handover import HandedOver, Handover, Saved
from mmserve.core.progress import Progress
from mmserve.core.request import Request, Stage
from mmserve.core.samples import samples
from mmserve.errors import ConfigError
from mmserve.transfer.payloads import PAYLOADS

CASES = cases()
KINDS = ("masked", "blocks", "causal", "guided", "drafted", "uniform")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma(tmp_path_factory.mktemp("gemma"), 12, images=True)


class Trip:
    """A request that is taken in by one engine after the other, and what came of it; each handover goes as bytes."""

    def __init__(self, route: Callable[[Handover], Bench]) -> None:
        self._route = route
        self.handovers: list[Handover] = []
        self.saved: list[Handover] = []
        self.finished: dict[str, Finished] = {}
        self.text: dict[str, str] = {}
        self.prompts: list[Prefilled] = []
        self.failed: Failed | None = None
        self._lock = threading.Lock()

    def sink(self, name: str, sample: int = 0) -> Callable[[Event | Progress | HandedOver | Saved], None]:
        def take(event: Event | Progress | HandedOver | Saved) -> None:
            with self._lock:
                match event:
                    case HandedOver(handover):
                        self.handovers.append(handover)
                        self._next(handover, name)
                    case Saved(handover):
                        self.saved.append(over_the_wire(handover))
                    case Delta(text):
                        key = each(name, event.sample)
                        self.text[key] = self.text.get(key, "") + text
                    case Prefilled():
                        self.prompts.append(event)
                    case Finished():
                        self.finished[each(name, event.sample)] = event
                    case Failed():
                        self.failed = event

        return take

    def _next(self, handover: Handover, name: str) -> None:
        sent = over_the_wire(handover)
        self._route(handover).engine.adopt(sent, self.sink(handover.request.id))

    def over(self, count: int) -> bool:
        return len(self.finished) == count or self.failed is not None

    def wait(self, count: int = 1) -> None:
        eventually(lambda: self.over(count), "the answer")
        assert self.failed is None, self.failed


def each(name: str, sample: int) -> str:
    return name if sample == 0 else f"{name}.{sample}"


def over_the_wire(handover: Handover) -> Handover:
    if handover.payload is None:
        return handover
    return dataclasses.replace(handover, payload=PAYLOADS.decode(PAYLOADS.encode(handover.payload)))


def decodes(bench: Bench) -> bool:
    """Whether an answer is in its middle there."""
    return any(state.stage in (Stage.READY, Stage.STEPPING) for state in bench.engine._live)


class Fleet:
    """Engines of one kind of model by role, and one that does everything."""

    def __init__(self, name: str, folder: Path) -> None:
        config = {**ENGINE, "prefix_cache": False, **ENGINES.get(name, {})}
        self.whole, self.encode, self.prefill, self.decode, self.other = (
            Bench(load(name, str(folder)), watch=False, **config) for _ in range(5)
        )
        self.encode.engine.serve_roles(["encode"])
        self.prefill.engine.serve_roles(["prefill"])
        self.decode.engine.serve_roles(["decode"])
        self.other.engine.serve_roles(["decode"])
        self._answers: dict[str, Finished] = {}

    def answer(self, request: Request) -> Finished:
        """The answer of one engine."""
        if request.id not in self._answers:
            self._answers[request.id] = self.whole.ask(request)
        return self._answers[request.id]

    @property
    def all(self) -> list[Bench]:
        return [self.whole, self.encode, self.prefill, self.decode, self.other]

    def route(self, handover: Handover) -> Bench:
        return self.prefill if handover.stage is Stage.ENCODED else self.decode


@pytest.fixture(scope="module")
def fleets(folder: Path) -> Iterator[Callable[[str], Fleet]]:
    made: dict[str, Fleet] = {}

    def fleet(name: str) -> Fleet:
        if name not in made:
            made[name] = Fleet(name, folder)
        return made[name]

    yield fleet
    for one in made.values():
        for bench in one.all:
            bench.await_nothing_left()
            bench.close()


def same(done: Finished, other: Finished) -> None:
    for name in (
        "text",
        "tokens",
        "forwards",
        "recomputed_tokens",
        "edits",
        "holes",
        "log_weight",
        "warnings",
        "usage",
    ):
        assert getattr(other, name) == getattr(done, name), name
    assert other.reason == done.reason


@pytest.mark.parametrize("name", KINDS)
def test_three_engines_answer_as_one(fleets: Callable[[str], Fleet], name: str) -> None:
    fleet = fleets(name)
    for request in CASES[name]:
        done = fleet.answer(request)
        trip, streaming = Trip(fleet.route), dataclasses.replace(request.streaming, prompt=True)
        streaming = dataclasses.replace(streaming, prompt_tokens=name == "causal", prompt_alternatives=2)
        fleet.encode.engine.submit(dataclasses.replace(request, streaming=streaming), trip.sink(request.id))
        trip.wait()
        assert [each.stage for each in trip.handovers] == [Stage.ENCODED, Stage.PREFILLED]
        [prompt] = trip.prompts
        assert len(prompt.prompt_ids) == prompt.usage.prompt_tokens > 0 and prompt.prompt_text
        scored = prompt.prompt_ids if name == "causal" else ()
        assert tuple(token.id for token in prompt.prompt_tokens) == scored
        same(done, trip.finished[request.id])
        assert trip.text.get(request.id, "") == ("" if request.decisions else done.text)


@pytest.mark.parametrize("name", KINDS)
def test_a_canvas_goes_on_elsewhere_from_every_saved_state(fleets: Callable[[str], Fleet], name: str) -> None:
    fleet = fleets(name)
    fleet.whole.engine.serve_roles(["encode", "prefill", "decode"], save_every=3)
    request = CASES[name][0]
    trip = Trip(fleet.route)
    fleet.whole.engine.submit(request, trip.sink(request.id))
    trip.wait()
    done = trip.finished[request.id]
    assert trip.saved and all(saved.stage is Stage.READY for saved in trip.saved)
    for saved in trip.saved:
        later = Trip(fleet.route)
        fleet.decode.engine.adopt(saved, later.sink(request.id))
        later.wait()
        same(done, later.finished[request.id])
        assert done.text[: saved.sent] + later.text.get(request.id, "") == done.text
    fleet.whole.engine.serve_roles(["encode", "prefill", "decode"])


@pytest.mark.parametrize("name", KINDS)
def test_roles_may_change_in_the_middle_of_answers(fleets: Callable[[str], Fleet], name: str) -> None:
    """Two engines that take turns at decode: what waits and what runs goes to the other each time."""
    fleet = fleets(name)
    requests = CASES[name]
    done = {request.id: fleet.answer(request) for request in requests}
    fleet.decode.engine.serve_roles(["encode", "prefill", "decode"])
    there = [fleet.other]
    trip = Trip(lambda _handover: there[0])
    for request in requests:
        fleet.decode.engine.submit(request, trip.sink(request.id))
    turns = 0
    while not trip.over(len(requests)):
        here, there[0] = (fleet.decode, fleet.other) if turns % 2 == 0 else (fleet.other, fleet.decode)
        eventually(lambda here=here: decodes(here) or trip.over(len(requests)), "a canvas in the middle")
        there[0].engine.serve_roles(["encode", "prefill", "decode"])
        here.engine.serve_roles(["encode"])
        eventually(lambda here=here: not decodes(here), "all canvases to move, or to end")
        turns += 1
    assert trip.failed is None, trip.failed
    assert any(handover.stage is Stage.READY for handover in trip.handovers)
    for request in requests:
        same(done[request.id], trip.finished[request.id])
        assert trip.text.get(request.id, "") == ("" if request.decisions else done[request.id].text)
    fleet.decode.engine.serve_roles(["decode"])
    fleet.other.engine.serve_roles(["decode"])


def test_each_sample_goes_its_own_way(fleets: Callable[[str], Fleet]) -> None:
    fleet = fleets("masked")
    request = ask("many", images=(picture(3),), n=3, temperature=0.8, seed=5)
    trip, whole = Trip(fleet.route), Trip(fleet.route)
    fleet.whole.engine.submit(request, whole.sink(request.id))
    fleet.encode.engine.submit(request, trip.sink(request.id))
    whole.wait(3)
    trip.wait(3)
    names = [each.id for each in samples(request)]
    assert sorted(trip.finished) == sorted(names)
    for name in names:
        same(whole.finished[name], dataclasses.replace(trip.finished[name], sample=whole.finished[name].sample))


def test_samples_that_learn_from_each_other_end_where_they_began(fleets: Callable[[str], Fleet]) -> None:
    fleet = fleets("causal")
    request = next(request for request in CASES["causal"] if request.id == "causal.awrs")
    assert request.constraint is not None
    asap = dataclasses.replace(request.constraint, sampling=ConstraintSampling.ASAP)
    asks = dataclasses.replace(request, constraint=asap, sampling=dataclasses.replace(request.sampling, n=2))
    trip, whole = Trip(fleet.route), Trip(fleet.route)
    fleet.whole.engine.submit(asks, whole.sink(asks.id))
    fleet.encode.engine.submit(asks, trip.sink(asks.id))
    whole.wait(2)
    trip.wait(2)
    assert trip.handovers == []
    assert {name: each.text for name, each in trip.finished.items()} == {
        name: each.text for name, each in whole.finished.items()
    }


def test_a_request_that_does_not_fit_waits_for_pages_and_is_not_overtaken(
    bench: Callable[..., Bench], fleets: Callable[[str], Fleet]
) -> None:
    fleet = fleets("masked")
    requests = [dataclasses.replace(each, id=f"{each.id}.{i}") for i, each in enumerate([CASES["masked"][0]] * 6)]
    done = fleet.whole.ask(requests[0])
    small = bench(load("masked", ""), **{**ENGINE, "max_running": 1, "prefix_cache": False})
    trip = Trip(lambda each: fleet.prefill if each.stage is Stage.ENCODED else small)
    for request in requests:
        fleet.encode.engine.submit(request, trip.sink(request.id))
    trip.wait(len(requests))
    assert {each.text for each in trip.finished.values()} == {done.text}


def test_unknown_roles_are_refused(fleets: Callable[[str], Fleet]) -> None:
    for wrong in (["draw"], ["encode", "draw"]):
        with pytest.raises(ConfigError, match="the roles of an engine are some of encode, prefill, decode"):
            fleets("masked").whole.engine.serve_roles(wrong)


def test_a_cancelled_request_leaves_nothing_while_it_waits_for_pages(
    bench: Callable[..., Bench], fleets: Callable[[str], Fleet]
) -> None:
    fleet = fleets("masked")
    small = bench(load("masked", ""), **{**ENGINE, "max_running": 1, "prefix_cache": False})
    gate = small.gate("decode")
    trip = Trip(lambda each: fleet.prefill if each.stage is Stage.ENCODED else small)
    requests = [dataclasses.replace(CASES["masked"][0], id=f"queue{i}") for i in range(2)]
    sinks: list[Trip] = []
    for request in requests:
        trip = Trip(lambda each: fleet.prefill if each.stage is Stage.ENCODED else small)
        fleet.encode.engine.submit(request, trip.sink(request.id))
        sinks.append(trip)
        eventually(lambda request=request: small.stage(request.id) is not None, "it to arrive")
    small.await_stage("queue1", Stage.ARRIVED)
    small.engine.cancel("queue1")
    eventually(lambda: sinks[1].failed is not None, "its end")
    gate.open()
    sinks[0].wait()
