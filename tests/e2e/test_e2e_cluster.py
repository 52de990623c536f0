"""Stages on the actors of a real Ray cluster: answers as of one process, whatever happens to the workers."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from fleets import RECOMPUTE, Fleet, finished, fleet, kill, requests, same, settings, start_ray, submit, text, until
from harness import Call
from helpers import ask, picture

from mmserve.assembly import build_engines
from mmserve.cluster import ray_actors
from mmserve.cluster.config import cluster_config
from mmserve.cluster.coordinator import Coordinator
from mmserve.cluster.ray_actors import Placement
from mmserve.config import Config, KVCacheConfig
from mmserve.core.cached import listing
from mmserve.core.decisions import CHOICE, INSTRUCTION, YES_NO, Decision
from mmserve.core.events import Failed, Finished
from mmserve.core.request import Policy, Request, Stage
from mmserve.engine.engine import Engine
from mmserve.errors import Cancelled, ConfigError, DeadlineExceeded, InvalidArgument, NotFound

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return settings(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def together(config: Config) -> dict[str, Finished]:
    """Answers of one process."""
    found: dict[str, Finished] = {}
    engines = build_engines(config)
    for name, engine in engines.items():
        engine.start()
        calls = submit(engine, *requests(name), typed(name))
        found |= {call.request.id: finished(call) for call in calls}
        engine.stop()
    return found


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    start_ray()
    yield
    ray_actors.end()


@pytest.fixture(scope="module")
def three(ray: None, config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    kept = tmp_path_factory.mktemp("kept")
    tiers = replace(config, kv_cache=KVCacheConfig(host_bytes=1 << 22, disk_folder=str(kept)))
    with fleet(tiers, "e p d", save_every=2, ahead_kb=64, silent_seconds=20.0, spares=1) as made:
        yield made
        for file in kept.iterdir():
            file.unlink()
    assert list(kept.glob("*.kv.safetensors")), "workers that end in order write what their pools hold"


def fresh(requests: list[Request], mark: str) -> list[Request]:
    return [replace(request, id=f"{request.id}.{mark}") for request in requests]


def typed(model: str) -> Request:
    """Typed questions, about a picture where the model takes any."""
    images = () if "sdar" in model else (picture(5),)
    one = ask(f"{model}.typed", f"Look. {INSTRUCTION}", images=images, recompute=Policy(name=RECOMPUTE[model]))
    questions = (
        Decision(kind=YES_NO, text="Is there a red circle?"),
        Decision(kind=CHOICE, text="What color is it?", options=("red", "green", "blue")),
    )
    return replace(one, model=model, decisions=questions)


def long(name: str, model: str = "bundled-causal", tokens: int = 200) -> Request:
    """A request that takes a second or so."""
    spells = ask(name, "Say it.", images=(picture(7),), max_new_tokens=tokens, temperature=1.0, seed=3)
    recompute = replace(spells.diffusion.recompute, name=RECOMPUTE[model])
    return replace(
        spells,
        model=model,
        diffusion=replace(spells.diffusion, recompute=recompute),
        sampling=replace(spells.sampling, logit_bias=dict.fromkeys(range(4), -100.0)),
    )


@pytest.mark.parametrize("name", RECOMPUTE)
def test_three_workers_answer_as_one_process(three: Fleet, together: dict[str, Finished], name: str) -> None:
    calls = submit(three.coordinators[name], *requests(name))
    for call in calls:
        same(together[call.request.id], finished(call))
        assert text(call) == together[call.request.id].text


@pytest.mark.parametrize("name", RECOMPUTE)
def test_typed_questions_are_answered_as_by_one_process(three: Fleet, together: dict[str, Finished], name: str) -> None:
    [call] = submit(three.coordinators[name], typed(name))
    found, own = finished(call), together[call.request.id]
    assert len(found.decisions) == 2 and found.decisions == own.decisions
    same(own, found)


@pytest.mark.parametrize("name", RECOMPUTE)
def test_roles_change_in_the_middle_of_answers(three: Fleet, together: dict[str, Finished], name: str) -> None:
    calls = submit(three.coordinators[name], *fresh(requests(name), "moved"))
    turns = 0
    while not all(call.ended for call in calls):
        turns += 1
        for member, roles in zip(three.members, (("decode",), ("encode", "prefill")) * 2, strict=False):
            member.serve(roles if turns % 2 else ("encode", "prefill", "decode"))
        time.sleep(0.1)
        for coordinator in three.coordinators.values():
            coordinator.worker_ready(three.members[0])  # looks again for who can go on with what
    for member in three.members:
        member.serve(member.settings.stages)
    for call in calls:
        original = call.request.id.removesuffix(".moved")
        same(together[original], finished(call))
        assert text(call) == together[original].text
    assert turns > 0


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(0, id="encode", marks=pytest.mark.slow),
        pytest.param(1, id="prefill", marks=pytest.mark.slow),
        pytest.param(2, id="decode"),
    ],
)
def test_requests_outlive_a_worker(three: Fleet, together: dict[str, Finished], index: int) -> None:
    names = list(RECOMPUTE)
    calls = [
        call for name in names for call in submit(three.coordinators[name], *fresh(requests(name), f"lost{index}"))
    ]
    time.sleep(0.05 * (1 + index))
    kill(three, index)
    for call in calls:
        original = call.request.id.removesuffix(f".lost{index}")
        same(together[original], finished(call))
        assert text(call) == together[original].text
    until(lambda: three.members[index].described, "the worker's successor")


def test_a_worker_killed_between_two_chunks_of_kv_loses_nothing(three: Fleet) -> None:
    """The decode worker has some of the prompt's K/V, and gets all of them from the successor of who sent them."""
    name = "bundled-causal"
    coordinator = three.coordinators[name]
    for attempt in range(40):
        prompt = f"Picture {attempt}, what is it? " * 12  # another each time: nothing of it is cached
        asked = ask(f"between{attempt}", prompt, recompute=Policy(name=RECOMPUTE[name]), max_new_tokens=8)
        asked = replace(asked, model=name, streaming=replace(asked.streaming, tokens=True))
        [call] = submit(coordinator, asked)
        while not (call.ended or some_ahead(coordinator, call)):
            time.sleep(0.0005)
        kill(three, 1, signal.SIGSTOP)
        between = some_ahead(coordinator, call)
        kill(three, 1, signal.SIGKILL if between else signal.SIGCONT)
        done = finished(call)
        assert text(call) == done.text
        [again] = submit(coordinator, replace(asked, id=f"after{attempt}"))
        same(finished(again), done)
        if between:
            break
    else:
        pytest.fail("the worker was never stopped between two chunks")
    until(lambda: three.members[1].described, "the worker's successor")


def some_ahead(coordinator: Coordinator, call: Call) -> bool:
    """Whether K/V of the request went ahead of it, and it is not whole yet."""
    group = coordinator._in_flight.groups.get(call.request.id)
    parts = () if group is None else group.parts.values()
    return any(part.ahead and part.worker and part.point.stage is Stage.ENCODED for part in list(parts))


def test_an_answer_goes_on_from_where_it_was_saved(three: Fleet, config: Config) -> None:
    engine = build_engines(config)["bundled-causal"]
    engine.start()
    [alone] = submit(engine, long("alone"))
    done = finished(alone)
    engine.stop()
    [call] = submit(three.coordinators["bundled-causal"], long("goes on"))
    until(lambda: len(text(call)) > 40, "some of the answer")
    kill(three, 2)
    again = finished(call)
    same(done, again)
    assert text(call) == done.text
    until(lambda: three.members[2].described, "the worker's successor")


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_given_up(three: Fleet) -> None:
    coordinator = three.coordinators["bundled-causal"]
    [call] = submit(coordinator, long("stopped"))
    until(lambda: len(text(call)) > 20, "some of the answer")
    begun, losses = three.members[2].begun, coordinator.losses
    kill(three, 2, signal.SIGSTOP)
    until(lambda: coordinator.losses > losses, "it to be noticed")
    assert finished(call).text == text(call)
    until(lambda: three.members[2].begun > begun and three.members[2].described, "its successor")


def test_cancelled_requests_leave_nothing(three: Fleet) -> None:
    coordinator = three.coordinators["bundled-causal"]
    calls = submit(coordinator, *(long(f"cancelled{i}") for i in range(24)))
    until(lambda: any(text(call) for call in calls), "some answer to begin")
    for call in calls:
        coordinator.cancel(call.request.id)
    for call in calls:
        last = call.wait()
        assert isinstance(last, Finished) or (isinstance(last, Failed) and isinstance(last.error, Cancelled))
    assert any(isinstance(call.events[-1], Failed) for call in calls)


def test_what_is_wrong_with_a_request_is_told_as_by_one_process(three: Fleet) -> None:
    coordinator = three.coordinators["bundled"]
    wrong = replace(ask("wrong", max_new_tokens=100_000), model="bundled")
    late = replace(long("late", "bundled"), deadline=time.monotonic() + 0.05)
    one, other = submit(coordinator, wrong, late)
    error = one.error()
    assert isinstance(error, InvalidArgument) and "max_new_tokens" in error.message
    assert isinstance(other.error(), DeadlineExceeded)


@pytest.mark.slow
def test_each_sample_of_a_request_outlives_its_worker(three: Fleet, config: Config) -> None:
    request = replace(long("samples", tokens=60), sampling=replace(long("x", tokens=60).sampling, n=3))
    engine = build_engines(config)["bundled-causal"]
    engine.start()
    [alone] = submit(engine, request)
    until(lambda: sum(isinstance(e, Finished) for e in alone.events) == 3, "three samples")
    engine.stop()
    [call] = submit(three.coordinators["bundled-causal"], replace(request, id="samples again"))
    until(lambda: len(text(call)) > 10, "some of the answers")
    kill(three, 2)
    until(lambda: sum(isinstance(e, Finished) for e in call.events) == 3, "three samples")
    answers = [{e.sample: e.text for e in each.events if isinstance(e, Finished)} for each in (alone, call)]
    assert answers[0] == answers[1]
    until(lambda: three.members[2].described, "the worker's successor")


@pytest.mark.slow
def test_kv_in_eight_bits_give_answers_of_the_same_form(ray: None, config: Config) -> None:
    """They are not the same K/V: what the constraint asks for holds, and every request ends."""
    with fleet(config, "ep d", kv_bits=8, spares=0) as made:
        for name in RECOMPUTE:
            for call in submit(made.coordinators[name], *requests(name)):
                done = finished(call)
                assert done.text == text(call)
                if call.request.constraint is not None:
                    assert isinstance(json.loads(done.text)["a"], int)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["object_store", "nixl"])
def test_states_may_travel_by_other_transports(
    ray: None, config: Config, together: dict[str, Finished], transport: str
) -> None:
    with fleet(config, "ep d", transport=transport, spares=1) as made:
        for name in RECOMPUTE:
            for call in submit(made.coordinators[name], *requests(name, 2)):
                same(together[call.request.id], finished(call))
        begun = made.members[1].begun
        [call] = submit(made.coordinators["bundled-causal"], long("elsewhere"))
        until(lambda: len(text(call)) > 20, "some of the answer")
        kill(made, 1)
        finished(call)
        assert made.members[1].begun == begun + 1


@pytest.mark.slow
def test_workers_that_are_killed_at_random_lose_nothing(ray: None, config: Config) -> None:
    asked = [replace(requests("bundled-causal", 1)[0], id=f"q{i}") for i in range(60)]
    asked = [
        replace(each, messages=ask("", f"What is number {i}?", images=(picture(i), picture(100 + i))).messages)
        for i, each in enumerate(asked)
    ]
    engine = build_engines(config)["bundled-causal"]
    engine.start()
    right = {call.request.id: finished(call).text for call in submit(engine, *asked)}
    engine.stop()
    with fleet(config, "e e p d d", save_every=4, spares=1, max_losses=100) as made:
        calls = submit(made.coordinators["bundled-causal"], *asked)
        over = threading.Event()
        drawn = random.Random(1)
        killed: list[float] = []

        def reap() -> None:
            while not over.wait(3.0 if killed else 0.2):
                serving = [member.described for member in made.members if member.described is not None]
                if len(serving) == len(made.members):  # else the machine is slower than this
                    with suppress(ProcessLookupError):
                        os.kill(drawn.choice(serving).pid, signal.SIGKILL)
                        killed.append(time.monotonic())

        reaper = threading.Thread(target=reap)
        reaper.start()
        answers = {call.request.id: finished(call).text for call in calls}
        over.set()
        reaper.join()
        until(lambda: all(member.described for member in made.members), "all workers")
        assert answers == right
        assert killed


@contextmanager
def stopped_most_of_the_time(made: Fleet, index: int) -> Iterator[None]:
    """The worker's process runs for 50 ms, is stopped for 1.2 s, and so on: it is slow, and never silent for long."""
    described, over = made.members[index].described, threading.Event()
    assert described is not None

    def bursts() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(described.pid, signal.SIGSTOP)
                over.wait(1.2)
                os.kill(described.pid, signal.SIGCONT)
                over.wait(0.05)

    thread = threading.Thread(target=bursts)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("recovers", [True, False])
def test_a_slow_worker_gets_no_work_and_is_replaced_unless_it_recovers(
    ray: None, config: Config, recovers: bool
) -> None:
    with fleet(config, "e p d d", slow_factor=3.0, silent_seconds=60.0, save_every=4, spares=1) as made:
        coordinator, member = made.coordinators["bundled-causal"], made.members[2]
        [right] = submit(coordinator, long("alone"))
        text_of_one = finished(right).text
        begun, over = member.begun, threading.Event()
        calls: list[Call] = []

        def load() -> None:
            while not over.is_set():
                more = submit(coordinator, *(long(f"loaded{len(calls) + i}") for i in range(6)))
                calls.extend(more)
                for call in more:
                    finished(call)

        thread = threading.Thread(target=load)
        thread.start()
        try:
            with stopped_most_of_the_time(made, 2):
                until(lambda: member.drained, "it to be noticed")
                assert not member.roles
                if not recovers:
                    until(lambda: member.begun > begun and member.described, "its successor")
            until(lambda: not member.drained and member.roles == {"decode"}, "it to have its role again")
        finally:
            over.set()
            thread.join()
        assert (member.begun == begun) is recovers
        assert {finished(call).text for call in calls} == {text_of_one}


def of_model(engine: Engine, *asked: Request, adapters: tuple[str, ...] = ()) -> list[Finished]:
    """The answers of one process, which ends."""
    engine.start()
    for name in adapters:
        engine.adapters.load(name)
    found = [finished(call) for call in submit(engine, *asked)]
    engine.stop()
    return found


def test_adapters_are_on_every_worker_and_on_the_successor_of_one_that_ends(three: Fleet, config: Config) -> None:
    coordinator = three.coordinators["sdar"]
    asked = [
        replace(long(f"{adapter or 'none'}{i}", "sdar", 60 + 60 * i), messages=ask("").messages, adapter=adapter)
        for adapter in ("", "red", "blue")
        for i in range(2)
    ]
    engine = build_engines(replace(config, models=config.models[2:]))["sdar"]
    right = of_model(engine, *asked, adapters=("red", "blue"))
    assert len({answer.text for answer in right}) == len(asked)
    with pytest.raises(NotFound, match="has no adapter 'red'; there is: none is loaded"):
        coordinator.submit(asked[2], lambda _event: None)
    with pytest.raises(NotFound, match="adapter_folder has no folder 'green'"):
        coordinator.adapters.load("green")
    for name in ("red", "blue"):
        assert coordinator.adapters.load(name).digest
    calls = submit(coordinator, *asked)
    until(lambda: text(calls[3]), "some of an answer")
    kill(three, 2)
    coordinator.adapters.drop("red")
    for call, expected in zip(calls, right, strict=True):
        same(expected, finished(call))
    until(lambda: three.members[2].described, "the worker's successor")
    assert [each.name for each in coordinator.adapters.listed()] == ["blue"]
    [again] = submit(coordinator, replace(asked[4], id="again"))
    same(right[4], finished(again))
    coordinator.adapters.drop("blue")


def test_caches_of_all_workers_are_managed_as_one_and_share_a_folder(three: Fleet, config: Config) -> None:
    name = "bundled-causal"
    coordinator, (encoder, first, other) = three.coordinators[name], three.members
    until(lambda: all(member.described for member in three.members), "all workers")
    shown = (picture(900), picture(901))
    asked = ask("kept", "What is kept? " * 20, images=shown, recompute=Policy(name=RECOMPUTE[name]), max_new_tokens=8)
    asked = replace(asked, model=name, streaming=replace(asked.streaming, tokens=True))
    [call] = submit(coordinator, asked)
    right = finished(call)
    found = coordinator.caches.prefix_of("kept")
    entries = {entry.id: entry for entry in listing(coordinator.caches.blocks()).entries}
    assert entries[found].workers == (first.name,) and set(entries[found].sizes) == {"pages"}
    visual = [id for id, entry in entries.items() if entry.kind == "visual" and entry.workers == (encoder.name,)]
    assert len(visual) >= 2
    pages = coordinator.caches.pin([found], True)
    assert pages == entries[found].tokens // config.engine.page_size
    entries = {entry.id: entry for entry in listing(coordinator.caches.blocks()).entries}
    assert entries[found].pinned and set(entries[found].sizes) == {"pages", "host", "disk"}

    first.serve(("decode",))
    other.serve(("prefill", "decode"))
    try:
        [again] = submit(coordinator, replace(asked, id="again"))
        same(right, finished(again))
        assert again.finished().usage.cached_tokens == entries[found].tokens
        until(lambda: coordinator.stats_of_workers()[other.name].prefix_cache.disk_hits == pages, "it to be counted")
    finally:
        first.serve(first.settings.stages)
        other.serve(other.settings.stages)
    assert coordinator.stats().prefix_cache.disk_hits >= pages
    renamed = coordinator.caches.others([each for each in three.coordinators if each != name])
    [kept] = [entry for entry in listing(renamed.blocks()).entries if entry.id == found]
    assert kept.pinned and not kept.stale and set(kept.sizes) == {"host", "disk"}
    assert renamed.pin([found], False) == pages and not any(block.pinned for block in renamed.blocks())
    assert coordinator.caches.drop([*entries, "0" * 64]) >= pages + len(visual)
    assert coordinator.caches.blocks() == []


def test_a_cluster_without_room_says_so(ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actors, "_PLACING", 1.0)
    with pytest.raises(ConfigError, match="no room for 1 workers"):
        Placement(cluster_config({"workers": [{"roles": "epd", "cpus": 1000.0}]}))
