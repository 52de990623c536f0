"""Grammars are compiled side by side: whose constraint takes long holds up nobody else, and no stop."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable

import pytest
from harness import PATIENCE, Bench, eventually
from helpers import ask

from mmserve.core.constraint import ConstraintSpec, Regex
from mmserve.core.request import Request, Stage
from mmserve.errors import Cancelled, Unavailable


def constrained(name: str, pattern: str) -> Request:
    return dataclasses.replace(ask(name, max_new_tokens=4), constraint=ConstraintSpec(Regex(pattern)))


def test_stopping_does_not_wait_for_a_process_that_stands_still(bench: Callable[..., Bench]) -> None:
    b = bench()
    assert b.ask(constrained("first", "a")).text == "a"
    language = b.engine.stages.encoding.admission._language
    assert language is not None
    compiler = language.grammars._compiler
    compiler._patience = 600.0
    eventually(lambda: len(compiler._idle) == 2, "two children are idle")
    other, pid = (child.pid for child in compiler._idle)  # the last is asked next
    os.kill(pid, signal.SIGSTOP)
    [halted] = b.submit(constrained("halted", "b"))
    eventually(lambda: [child.pid for child in compiler._idle] == [other], "it is at its child")
    stopping = threading.Thread(target=b.engine.stop)
    stopping.start()
    assert isinstance(halted.error(), Unavailable)
    stopping.join(PATIENCE)
    stopped = not stopping.is_alive()
    if not stopped:
        os.kill(pid, signal.SIGCONT)
    assert stopped


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_slow_constraint_holds_up_no_other(bench: Callable[..., Bench], cancelled: bool) -> None:
    b = bench()
    assert b.ask(constrained("first", "a")).text == "a"
    language = b.engine.stages.encoding.admission._language
    assert language is not None
    compiler = language.grammars._compiler
    eventually(lambda: len(compiler._idle) == 2, "two children are idle")
    other, pid = (child.pid for child in compiler._idle)  # the last is asked next
    os.kill(pid, signal.SIGSTOP)
    [slow] = b.submit(constrained("slow", "b"))
    eventually(lambda: [child.pid for child in compiler._idle] == [other], "the slow one is at its child")
    if cancelled:
        b.engine.cancel("slow")
        assert isinstance(slow.error(), Cancelled)
    calls = b.submit(*[constrained(f"quick{i}", "c" * (i + 1)) for i in range(3)])
    assert [call.finished().text for call in calls] == ["c", "cc", "ccc"]
    assert b.stage("slow") is Stage.CONSTRAINING, "a worker holds it to its end"
    os.kill(pid, signal.SIGCONT)
    assert cancelled or slow.finished().text == "b"
    b.await_nothing_left()
