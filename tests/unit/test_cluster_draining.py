"""Which workers count as slow, and what is done about it; workers that are replaced; spares; forked processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import eventually

from mmserve.cluster import fleet as fleets
from mmserve.cluster import prefork
from mmserve.cluster import spares as spares_module
from mmserve.cluster.config import ClusterConfig, ClusterSettings, WorkerSettings
from mmserve.cluster.draining import DRAIN_SECONDS, PROBATION, SUSTAINED, Action, Draining
from mmserve.cluster.fleet import Fleet
from mmserve.cluster.member import Member
from mmserve.cluster.messages import Described, Heartbeat, Item
from mmserve.cluster.pace import Pace
from mmserve.cluster.ray_actors import Actor
from mmserve.cluster.spares import Loaded, Spares
from mmserve.config import Config
from mmserve.core.stats import Pass
from mmserve.errors import Unavailable
from mmserve.transfer.shared_memory import Ticket


def passes(seconds: float, count: int = 40, size: int = 8) -> list[Pass]:
    return [Pass("decode", size, seconds)] * count


def test_a_worker_is_slow_beside_its_peers_at_passes_of_the_same_size() -> None:
    pace = Pace()
    for _ in range(5):
        for name, seconds in (("a", 0.01), ("b", 0.012), ("c", 0.06)):
            pace.record(name, passes(seconds, 10))
        pace.record("a", passes(1.0, 10, size=4096))
    assert pace.slowness("c") > 4.5
    assert pace.slowness("a") < 1.5 and pace.slowness("b") < 1.5, "large passes take longer"
    pace.reset("c")
    assert pace.slowness("c") == 1.0, "judged anew"
    pace.record("c", passes(0.011, 20))
    assert pace.slowness("c") < 1.5


def test_a_worker_without_peers_is_slow_beside_what_it_was() -> None:
    pace = Pace()
    pace.record("a", passes(0.01, 200))
    assert pace.slowness("a") == pytest.approx(1.0)
    pace.record("a", passes(0.1, 10))
    assert pace.slowness("a") > 3
    pace.discard("a")
    pace.record("a", passes(0.1, 10))
    assert pace.slowness("a") == 1.0, "a successor is not known yet"


def test_one_long_pass_makes_nobody_slow() -> None:
    pace = Pace()
    for name in "ab":
        pace.record(name, passes(0.01, 50))
    pace.record("a", passes(60.0, 1))
    assert pace.slowness("a") < 4


def test_roles_given_to_a_drained_worker_are_those_it_has_when_it_gets_work_again() -> None:
    member = Member(0, WorkerSettings(roles="epd"), ClusterSettings())
    member.serve(("encode", "prefill"))
    member.drain()
    assert member.drained and not member.roles
    member.serve(("decode",))
    assert member.drained and not member.roles, "it is slow as before"
    member.resume()
    assert not member.drained and member.roles == {"decode"}


def test_a_slow_worker_is_drained_tried_again_and_then_replaced() -> None:
    draining = Draining(factor=4.0)

    def look(now: float, slowness: float, *, redundant: bool = True, replaceable: bool = False) -> Action | None:
        return draining.due_action(now, "w", slowness, redundant=redundant, replaceable=replaceable)

    assert look(0.0, 9.0) is None
    assert look(1.0, 1.0) is None, "a break"
    assert look(2.0, 9.0) is None
    assert look(2.0 + SUSTAINED, 9.0) is Action.DRAIN
    drained = 2.0 + SUSTAINED
    assert look(drained + DRAIN_SECONDS / 2, 1.0) is None, "it rests"
    assert look(drained + DRAIN_SECONDS, 1.0) is Action.RETURN
    again = drained + DRAIN_SECONDS
    assert look(again + 1, 9.0) is None
    assert look(again + 1 + SUSTAINED, 9.0) is Action.REPLACE, "it did not recover"
    draining.discard("w")
    assert look(again + 9, 9.0) is None, "its successor begins anew"
    assert look(again + 9 + SUSTAINED, 9.0) is Action.DRAIN
    assert look(again + 9 + SUSTAINED + DRAIN_SECONDS, 9.0) is Action.REPLACE, "it is slow without work, too"


def test_a_worker_that_nobody_can_stand_in_for_is_replaced_where_a_spare_is_ready() -> None:
    draining = Draining(factor=4.0)
    for now in (0.0, SUSTAINED):
        action = draining.due_action(now, "w", 9.0, redundant=False, replaceable=False)
    assert action is None, "slow is better than no worker"
    assert draining.due_action(SUSTAINED, "w", 9.0, redundant=False, replaceable=True) is Action.REPLACE


def test_after_a_while_a_worker_that_was_slow_is_as_any_other() -> None:
    draining = Draining(factor=4.0)
    for now in (0.0, SUSTAINED, SUSTAINED + DRAIN_SECONDS):
        draining.due_action(now, "w", 9.0 if now <= SUSTAINED else 1.0, redundant=True, replaceable=True)
    later = SUSTAINED + DRAIN_SECONDS + PROBATION + 1
    acts = [draining.due_action(later + s, "w", 9.0, redundant=True, replaceable=True) for s in (0.0, SUSTAINED)]
    assert acts == [None, Action.DRAIN]


def test_no_factor_drains_nobody() -> None:
    draining = Draining(factor=0.0)
    assert all(
        draining.due_action(now, "w", 99.0, redundant=True, replaceable=True) is None for now in (0.0, 10.0, 20.0)
    )


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Of one worker, which is not started."""
    made = Fleet(Config(), ClusterConfig())
    yield made
    made.payloads.close()


def described(arena: str = "") -> Described:
    return Described({}, {}, {}, "here", 0, arena)


def test_memory_of_a_worker_that_ended_is_not_reused_at_its_successor(fleet: Fleet) -> None:
    [member] = fleet.members
    called: list[Any] = []
    actor: Any = SimpleNamespace(call=lambda *given: called.append(given))
    member.actor, member.described = actor, described("first")
    fleet.payloads.drop(Ticket("here", "first", 1, 64))
    fleet._worker_exited(member, actor)
    member.actor, member.described = actor, described("second")
    fleet.payloads.drop(Ticket("here", "first", 2, 64))
    fleet.payloads.drop(Ticket("here", "second", 3, 64))
    member.flush()
    member.flush()
    assert called == [("reuse", [3])]


@pytest.mark.timeout(60)
def test_a_place_is_tried_again_whatever_went_wrong_and_the_start_ends_with_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def begin(_member: Member) -> Loaded:
        tried.append(1)
        fleet._stopping = len(tried) == 2
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(fleet, "_start_member", begin)
    monkeypatch.setattr(fleets, "_RESTART_SECONDS", 0.0)
    monkeypatch.setattr(fleets.ray_actors, "Placement", lambda _cluster: None)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        fleet.start()
    eventually(lambda: len(tried) == 2, "another attempt")


class Process:
    """Stands in for an actor, which reports ``events`` and ends then, or when it is to."""

    def __init__(self, *events: list[Item]) -> None:
        self.killed = False
        self._events = events

    def call(self, *given: Any) -> None:
        """It does nothing."""

    def events(self) -> Iterator[list[Item]]:
        yield from self._events

    def kill(self) -> None:
        self.killed = True


def test_what_cannot_be_taken_of_a_workers_reports_ends_neither_the_rest_nor_its_place(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []

    class Model:
        def take(self, _worker: str, items: list[Any]) -> None:
            if len(taken) == 2:
                fleet._stopping = True
            taken.append(items)
            raise KeyError("a bug")

        def worker_exited(self, _worker: str) -> None:
            pass

    item: Any = SimpleNamespace(model="m")
    actor: Any = Process([item], [item], [item])
    fleet.coordinators["m"] = Model()  # type: ignore[assignment]
    monkeypatch.setattr(fleet, "_start_member", lambda _member: Loaded(actor, described()))
    monkeypatch.setattr(fleet, "_joined", lambda member, _described: setattr(member, "actor", actor))
    fleet._keep(fleet.members[0])
    assert len(taken) == 3


def test_the_pace_of_a_worker_that_was_given_up_is_no_measure_for_others(fleet: Fleet) -> None:
    """What it reports last comes on another thread than what ends it."""
    [member] = fleet.members
    member.actor, member.described = Process(), described()  # type: ignore[assignment]
    fleet._deliver(member, [Heartbeat({}, tuple(passes(1.0)))])
    assert fleet._pace._means["decode", 4]
    fleet._give_up(member, member.actor)
    fleet._deliver(member, [Heartbeat({}, tuple(passes(1.0)))])
    assert not fleet._pace._means["decode", 4]


def test_a_worker_that_was_replaced_meanwhile_is_not_given_up(fleet: Fleet) -> None:
    [member] = fleet.members
    old, new = Process(), Process()
    member.actor, member.described = new, described()  # type: ignore[assignment]
    fleet._give_up(member, old)  # type: ignore[arg-type]
    assert not new.killed and member.actor is new and not fleet.lost  # type: ignore[comparison-overlap]
    fleet._give_up(member, new)  # type: ignore[arg-type]
    assert new.killed and not old.killed and member.actor is None and fleet.lost == 1


class Model:
    """Stands in for a coordinator; ``worker_exited`` waits until it ``may``."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.entered, self.may = threading.Event(), threading.Event()

    def worker_ready(self, member: Member) -> None:
        self.heard.append(("ready", member.name))

    def worker_exited(self, name: str) -> None:
        self.entered.set()
        assert self.may.wait(60)
        self.heard.append(("exited", name))

    def tick(self, _now: float) -> None:
        self.heard.append(("tick", ""))
        raise KeyError("a bug")


def test_a_place_is_taken_only_once_all_know_that_its_worker_has_ended(fleet: Fleet) -> None:
    """Else requests for the worker that ended would come to its successor, which has the same place."""
    [member] = fleet.members
    member.actor, member.described = Process(), described()  # type: ignore[assignment]
    actor, model = member.actor, Model()
    fleet.coordinators["m"] = model  # type: ignore[assignment]
    given_up = threading.Thread(target=fleet._give_up, args=(member, actor))  # on the thread that watches
    given_up.start()
    assert model.entered.wait(60)
    # on the thread of the place, which then begins again
    ended = threading.Thread(target=fleet._worker_exited, args=(member, actor))
    ended.start()
    ended.join(0.2)
    assert ended.is_alive()
    model.may.set()
    for each in (given_up, ended):
        each.join(60)
    assert model.heard == [("exited", "0")] and fleet.lost == 1


def test_a_worker_joins_either_before_it_ends_or_not_at_all(fleet: Fleet) -> None:
    [member] = fleet.members
    member.actor = actor = Process()  # type: ignore[assignment]
    first, second = Model(), Model()
    fleet.coordinators.update(a=first, b=second)  # type: ignore[arg-type]
    for each in (first, second):
        each.load_adapters = lambda _member: None  # type: ignore[attr-defined]
        each.may.set()
    ended = threading.Thread(target=fleet._worker_exited, args=(member, actor))
    ready = first.worker_ready

    def joins(member: Member) -> None:
        ended.start()
        ended.join(0.2)
        ready(member)

    first.worker_ready = joins  # type: ignore[method-assign]
    fleet._joined(member, described())
    ended.join(60)
    assert first.heard == second.heard == [("ready", "0"), ("exited", "0")]


@pytest.mark.parametrize("action", [Action.DRAIN, Action.RETURN])
def test_what_is_due_for_a_slow_worker_is_not_done_to_its_successor(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, action: Action
) -> None:
    [member] = fleet.members
    model, old = Model(), Process()
    fleet.coordinators["m"] = model  # type: ignore[assignment]
    member.actor, member.described = Process(), described()  # type: ignore[assignment]
    monkeypatch.setattr(fleet._draining, "due_action", lambda *_given, **_more: action)
    fleet._handle_slowness(member, old, 0.0)  # type: ignore[arg-type]
    assert not member.drained and not model.heard
    fleet._handle_slowness(member, member.actor, 0.0)
    assert member.drained == (action is Action.DRAIN) and model.heard == [("ready", "0")] * (action is Action.RETURN)


def test_one_that_fails_keeps_nobody_else_unwatched(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "_TICK", 0.001)
    models = Model(), Model()
    fleet.coordinators.update(a=models[0], b=models[1])  # type: ignore[arg-type]
    watching = threading.Thread(target=fleet._watch)
    watching.start()
    try:
        eventually(lambda: all(len(each.heard) > 2 for each in models), "several looks at both")
    finally:
        fleet._stopping = True
        watching.join(60)


def test_one_that_ends_meanwhile_is_called_no_more() -> None:
    """Its place loses it at any time, on another thread."""

    class Place(Member):
        @property
        def actor(self) -> Any:
            found, self._last = self._last, None
            return found

        @actor.setter
        def actor(self, given: Any) -> None:
            self._last = given

    member = Place(0, WorkerSettings(), ClusterSettings())
    called: list[str] = []
    for use in (
        lambda: member.take([]),
        lambda: member.post("m", "stream.close", ("s",)),
        lambda: member.ask("m", "blocks", ()),
    ):
        answer: Any = lambda *_given: called.append("yes")  # noqa: E731
        member.actor = SimpleNamespace(call=answer, post=answer, ask=answer)
        use()
    assert called == ["yes"] * 3


def test_spares_are_loaded_again_as_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares_module, "_RETRY_SECONDS", 0.01)
    made: list[Process] = []
    failures = iter([Unavailable("it ended while it began"), RuntimeError("CUDA out of memory"), None, None, None])

    def load(kind: int) -> Loaded:
        if (failure := next(failures)) is not None:
            raise failure
        made.append(Process())
        return Loaded(made[-1], Described({}, {}, {}, "here", kind, ""))  # type: ignore[arg-type]

    spares = Spares({2}, 2, load)
    assert spares.take(2) is None, "none is ready"
    spares.start()
    eventually(lambda: spares.ready == 2, "two spares, though the first attempts failed")
    assert spares.take(3) is None, "of no such kind"
    taken = spares.take(2)
    assert taken is not None and taken.actor is made[0]
    eventually(lambda: spares.ready == 2, "another in its place")
    spares.stop()
    assert [each.killed for each in made] == [False, True, True]


def test_a_spare_that_comes_after_the_end_is_ended() -> None:
    begun, goes = threading.Event(), threading.Event()
    made = Process()

    def load(kind: int) -> Loaded:
        begun.set()
        assert goes.wait(60)
        return Loaded(made, Described({}, {}, {}, "here", kind, ""))  # type: ignore[arg-type]

    spares = Spares({1}, 1, load)
    spares.start()
    assert begun.wait(60)
    stopping = threading.Thread(target=spares.stop)
    stopping.start()
    goes.set()
    stopping.join(60)
    assert made.killed


def test_a_process_that_ray_cannot_end_ends_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray's head its processes may not be ended: the connection to one ends all the same."""

    def lost(_handle: Any) -> None:
        raise RuntimeError("the head is lost")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(kill=lost))
    closed: list[bool] = []
    actor = object.__new__(Actor)
    actor._handle, actor._link = None, SimpleNamespace(close=lambda: closed.append(True))  # type: ignore[assignment]
    spares = Spares({1}, 1, lambda _kind: Loaded(actor, described()))
    spares.start()
    eventually(lambda: spares.ready == 1, "a spare")
    spares.stop()
    assert closed == [True]


SCRIPT = """
import json, os, sys
found = {"pid": os.getpid(), "parent": os.getppid(), "arguments": sys.argv[1:], "folder": os.getcwd(),
         "mark": os.environ["MARK"], "torch": "torch" in sys.modules, "leads": os.getsid(0) == os.getpid()}
print(json.dumps(found), flush=True)
"""


@pytest.mark.timeout(180)
def test_processes_are_forked_from_one_that_has_all_imports_until_the_raylet_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(mark: str, raylet: int | None) -> dict[str, object]:
        environment = {**os.environ, "MARK": mark, **({} if raylet is None else {"RAY_RAYLET_PID": str(raylet)})}
        read, write = os.pipe()
        started = subprocess.run(
            [sys.executable, "-m", "mmserve.cluster.prefork", str(script), "--mark", mark],
            stdout=write,
            env=environment,
            cwd=tmp_path,
            timeout=150,
        )
        os.close(write)
        assert started.returncode == 0
        with os.fdopen(read) as output:
            found: dict[str, object] = json.loads(output.readline())
        assert (found["arguments"], found["mark"], found["folder"]) == (["--mark", mark], mark, str(tmp_path))
        return found

    assert not run("alone", None)["torch"], "no raylet, no template"
    with subprocess.Popen(["sleep", "600"]) as raylet:
        try:
            one = run("one", raylet.pid)
            monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
            for said in (b"", b"half", prefork._SIZE.pack(100) + b"{"):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:  # as it asked for a process
                    killed.connect(prefork._address())
                    killed.sendall(said)
            other = run("other", raylet.pid)
        finally:
            raylet.kill()
    assert one["torch"] and other["torch"]
    assert one["leads"] and other["leads"], "a process group each"
    assert one["parent"] == other["parent"] and one["pid"] != other["pid"]
    eventually(lambda: _ended(one["parent"]), "the template to end")


def _ended(pid: object) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
