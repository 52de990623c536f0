"""The child processes that compile: their limits, what becomes of what they are at, and that none is left behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from harness import PATIENCE, eventually

from mmserve.constraint.compile import wire
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.service import Compiler
from mmserve.constraint.compile.wire import BYTES, Child, CompileReply
from mmserve.constraint.findings import Refused
from mmserve.core.constraint import Choice, ConstraintKind, ConstraintSpec, JsonSchema, Regex
from mmserve.errors import Unavailable


def spec(kind: ConstraintKind) -> ConstraintSpec:
    return ConstraintSpec(kind)


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler(BYTES, 2.0)
    yield made
    made.close()


def next_of(compiler: Compiler) -> int | None:
    """The process id of the child that is asked next; None where none is idle."""
    return compiler._idle[-1].pid if compiler._idle else None


def standing_by(compiler: Compiler) -> int:
    """The process id of the child that is asked after that one, once there is one."""
    eventually(lambda: len(compiler._idle) > 1, "a child stands by")
    return compiler._idle[-2].pid


def children(pid: int) -> set[int]:
    """The processes that ``pid`` has started and that run."""
    lists = (task / "children" for task in Path(f"/proc/{pid}/task").iterdir())
    return {int(child) for each in lists for child in each.read_text().split() if runs(int(child))}


def runs(pid: int) -> bool:
    """Whether the process does anything yet: an ended one may stand in the table until somebody asks for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


_MANY = {f"p{i}": {"type": "string", "pattern": f"a{{{i}}}"} for i in range(4999)}
SLOW = {
    "steps_that_multiply": {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    "five_thousand_properties": {"type": "object", "properties": _MANY},
}


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_too_long_is_killed_and_the_next_one_served(name: str) -> None:
    with closing(Compiler(BYTES, 0.5)) as compiler:
        assert isinstance(compiler.compile(spec(Choice(("a",))))[0], Grammar)
        second, first = standing_by(compiler), next_of(compiler)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        outcome, lasting, *_others = compiler.compile(spec(JsonSchema(json.dumps(SLOW[name]))))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert isinstance(outcome, Refused) and not lasting
        assert "takes more than 0.5 s of processor time to compile; make it smaller" in str(outcome)
        taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert 0.4 < taken < 5, "processor time of the child that has ended, its start among it"
        assert next_of(compiler) == second and not Path(f"/proc/{first}").exists()
        assert isinstance(compiler.compile(spec(Choice(("a",))))[0], Grammar)


def test_a_child_that_dies_is_replaced(compiler: Compiler) -> None:
    assert isinstance(compiler.compile(spec(Regex("a+")))[0], Grammar)
    pid = next_of(compiler)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    outcome = compiler.compile(spec(Regex("b+"))).outcome
    assert isinstance(outcome, Grammar)


def test_who_kills_a_child_does_not_refuse_what_it_was_at(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    first, second = next_of(compiler), standing_by(compiler)
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    killer = threading.Timer(0.2, os.kill, (first, signal.SIGKILL))
    killer.start()
    outcome, lasting, *_others = compiler.compile(spec(Regex("b")))
    killer.join()
    assert isinstance(outcome, Grammar) and lasting
    assert next_of(compiler) == second


def test_where_every_child_is_killed_nothing_is_said_of_the_constraint(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Child.ask

    def killed(self: Child, message: Any, seconds: float) -> Any:
        if "kind" in message:  # a constraint, no vocabulary
            os.kill(self.pid, signal.SIGKILL)
        return ask(self, message, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(Child, "ask", killed)
        with pytest.raises(Unavailable, match="try again"):
            compiler.compile(spec(Regex("a")))
    assert isinstance(compiler.compile(spec(Regex("a")))[0], Grammar)


def test_memory_is_limited(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    limits = Path(f"/proc/{next_of(compiler)}/limits").read_text().splitlines()
    address = next(line for line in limits if line.startswith("Max address space"))
    assert str(1 << 30) in address


def test_the_child_imports_no_torch(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    maps = Path(f"/proc/{next_of(compiler)}/maps").read_text()
    assert "llguidance" in maps
    assert "torch" not in maps


def test_closing_ends_the_child(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    pid = next_of(compiler)
    compiler.close()
    compiler.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(Unavailable):
        compiler.compile(spec(Regex("a")))


def test_a_child_that_stands_still_is_replaced_by_one_that_stood_by() -> None:
    with closing(Compiler(BYTES, 2.0, patience=1.0)) as compiler:
        with suppress(Unavailable):  # where the machine is very busy
            compiler.compile(spec(Regex("a")))
        second, first = standing_by(compiler), next_of(compiler)
        assert first is not None and first != second
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(Unavailable, match=r"sent nothing for 1 s.*try again"):  # not the constraint's fault
            compiler.compile(spec(Regex("b")))
        assert not Path(f"/proc/{first}").exists()
        assert next_of(compiler) == second, "it had read the vocabulary already"
        assert standing_by(compiler) not in (first, second)


def test_waiting_for_a_processor_is_no_time_of_a_constraint() -> None:
    with closing(Compiler(BYTES, 0.5)) as compiler:
        compiler.compile(spec(Regex("a")))
        pid = next_of(compiler)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        later = threading.Timer(0.8, os.kill, (pid, signal.SIGCONT))
        later.start()
        outcome, lasting, *_others = compiler.compile(spec(Regex("b")))
        later.join()
        assert isinstance(outcome, Grammar) and lasting
        assert next_of(compiler) == pid, "the same child has answered"


def test_others_do_not_wait_for_a_slow_one(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    second, first = standing_by(compiler), next_of(compiler)
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    asked: list[CompileReply] = []
    slow = threading.Thread(target=lambda: asked.append(compiler.compile(spec(Regex("slow")))))
    slow.start()
    eventually(lambda: next_of(compiler) == second, "the slow one is asked")
    for pattern in "bcd":
        assert isinstance(compiler.compile(spec(Regex(pattern)))[0], Grammar)
    assert not asked
    assert len(children(os.getpid()) & {first, second}) == 2, "no more were started for it"
    os.kill(first, signal.SIGCONT)
    slow.join(PATIENCE)
    assert isinstance(asked[0][0], Grammar)


def test_too_long_an_answer_is_the_constraints_fault_and_asked_for_once(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(spec(Regex("a")))
    second = standing_by(compiler)
    monkeypatch.setattr(wire, "REPLY_BYTES", 10)  # of the server: its child knows nothing of that
    outcome = compiler.compile(spec(Regex("b"))).outcome
    assert isinstance(outcome, Refused) and "bytes; make it smaller" in str(outcome)
    assert next_of(compiler) == second, "one child was lost to it"


def test_a_child_that_has_taken_much_memory_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "IDLE_BYTES", 4 << 20)
    large = spec(JsonSchema(json.dumps({"properties": {f"p{i}": {"pattern": f"a{{{i}}}b"} for i in range(500)}})))
    with closing(Compiler(BYTES, 20.0)) as compiler:
        compiler.compile(spec(Regex("a")))
        second, first = standing_by(compiler), next_of(compiler)
        for pattern in "bcd":
            compiler.compile(spec(Regex(pattern)))
        assert next_of(compiler) == first
        assert isinstance(compiler.compile(large)[0], Grammar)
        assert next_of(compiler) == second and not Path(f"/proc/{first}").exists()


SERVER = """
import sys, threading, time
from mmserve.constraint.compile.service import Compiler
from mmserve.constraint.compile.wire import BYTES
from mmserve.core.constraint import ConstraintSpec, JsonSchema, Regex

compiler = Compiler(BYTES, 60.0)
compiler.compile(ConstraintSpec(Regex("a")))
while len(compiler._idle) < 2:
    time.sleep(0.01)
second, first = (child.pid for child in compiler._idle)
slow = ConstraintSpec(JsonSchema(sys.argv[1]))
threading.Thread(target=compiler.compile, args=(slow,), daemon=True).start()
while len(compiler._idle) > 1:
    time.sleep(0.001)
print(first, second, flush=True)  # one is asked, one is idle
time.sleep(600)
"""


def test_no_child_outlives_a_server_that_is_killed() -> None:
    slow = json.dumps(SLOW["steps_that_multiply"])
    with subprocess.Popen([sys.executable, "-c", SERVER, slow], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            left = [int(pid) for pid in server.stdout.readline().split()]
            assert set(left) & children(server.pid), "one at least has not been replaced yet"
        finally:
            server.kill()
    eventually(lambda: not any(map(runs, left)), "the children have ended")


def test_a_standby_that_dies_is_not_asked(compiler: Compiler) -> None:
    compiler.compile(spec(Regex("a")))
    first = next_of(compiler)
    assert first is not None
    for pid in (standing_by(compiler), first):
        os.kill(pid, signal.SIGKILL)
    assert isinstance(compiler.compile(spec(Regex("b")))[0], Grammar)


@pytest.mark.parametrize("starting", [True, False])
def test_closing_does_not_wait_for_a_child_that_hangs(starting: bool) -> None:
    made = Compiler(BYTES, 600.0)
    ended: list[object] = []

    def ask() -> None:
        try:
            ended.append(made.compile(spec(Regex("b"))))
        except Unavailable as error:
            ended.append(error)

    if not starting:
        made.compile(spec(Regex("a")))
        standing_by(made)
        pid = next_of(made)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.05)  # it waits for the child to start, or for its answer
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 60, "of the 600 that it may take"
    asking.join(PATIENCE)
    assert len(ended) == 1 and isinstance(ended[0], Unavailable)
    assert next_of(made) is None and not made._idle


def test_the_child_runs_nothing_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mmserve").mkdir()
    (tmp_path / "mmserve" / "__init__.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    made = Compiler(BYTES, 2.0)
    try:
        assert isinstance(made.compile(spec(Choice(("a",))))[0], Grammar)
    finally:
        made.close()


@pytest.mark.parametrize(("of", "name"), [(threading.Thread, "start"), (subprocess.Popen, "__init__")])
def test_where_no_thread_or_process_is_to_be_had_nobody_waits_for_one(
    monkeypatch: pytest.MonkeyPatch, of: type, name: str
) -> None:
    def fails(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("no more of these")

    with closing(Compiler(BYTES, 2.0)) as compiler:
        with monkeypatch.context() as patch:
            patch.setattr(of, name, fails)
            compiler.warm()
            with pytest.raises(Unavailable, match="does not start; try again"):
                compiler.compile(spec(Regex("a")))
        assert isinstance(compiler.compile(spec(Regex("a")))[0], Grammar)
        standing_by(compiler)
        pid = next_of(compiler)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr(of, name, fails)
            for _ in range(2):  # the one that stood by answers, though none takes the other's state
                assert isinstance(compiler.compile(spec(Regex("b")))[0], Grammar)


@pytest.mark.parametrize("executable", ["/bin/false", "/no/such/file"])
def test_where_no_child_starts_nobody_waits_for_one(monkeypatch: pytest.MonkeyPatch, executable: str) -> None:
    with closing(Compiler(BYTES, 2.0)) as compiler:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", executable)
            for _ in range(2):
                with pytest.raises(Unavailable, match="does not start; try again"):
                    compiler.compile(spec(Regex("a")))
        assert isinstance(compiler.compile(spec(Regex("a")))[0], Grammar)
