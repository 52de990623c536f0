"""Workers, and how one request's failure is kept from the rest of its batch."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from harness import PATIENCE
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.isolation import run_isolated
from mmserve.engine.workers import InlineWorker, ThreadWorker


class Broken(Exception):
    """A failure of one item."""


@given(st.lists(st.tuples(st.integers(), st.booleans()), max_size=12))
def test_each_item_has_its_own_outcome(items: list[tuple[int, bool]]) -> None:
    def run(batch: list[tuple[int, bool]]) -> list[int]:
        for value, bad in batch:
            if bad:
                raise Broken(str(value))
        return [2 * value for value, _bad in batch]

    outcomes = run_isolated(run, items)
    assert len(outcomes) == len(items)
    for (value, bad), outcome in zip(items, outcomes, strict=True):
        if bad:
            assert isinstance(outcome, Broken)
            assert str(outcome) == str(value)
        else:
            assert outcome == 2 * value


def test_a_batch_without_failure_runs_once_as_a_whole() -> None:
    calls: list[list[int]] = []

    def run(batch: list[int]) -> list[int]:
        calls.append(list(batch))
        return batch

    assert run_isolated(run, [1, 2, 3]) == [1, 2, 3]
    assert calls == [[1, 2, 3]]


def test_a_failing_item_alone_is_tried_once() -> None:
    calls: list[list[int]] = []

    def run(batch: list[int]) -> list[int]:
        calls.append(list(batch))
        raise Broken

    assert [type(o) for o in run_isolated(run, [7])] == [Broken]
    assert calls == [[7]]


def test_what_only_fails_together_succeeds_alone() -> None:
    def run(batch: list[int]) -> list[int]:
        if sum(batch) > 5:
            raise MemoryError
        return batch

    outcomes = run_isolated(run, [3, 4, 9])
    assert outcomes[:2] == [3, 4]
    assert isinstance(outcomes[2], MemoryError)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_nobodys_outcome(interrupt: type[BaseException]) -> None:
    def run(_batch: list[int]) -> list[int]:
        raise interrupt

    with pytest.raises(interrupt):
        run_isolated(run, [1, 2])


def test_the_inline_worker_has_done_its_job_when_start_returns() -> None:
    done: list[int] = []
    worker = InlineWorker()
    worker.start(lambda: done.append(threading.get_ident()))
    assert worker.stop(time.monotonic())
    assert done == [threading.get_ident()]


def test_the_thread_worker_runs_jobs_in_order_on_one_thread_of_its_own_and_ends_after_the_last() -> None:
    seen: list[tuple[int, int]] = []
    gate = threading.Event()
    worker = ThreadWorker("test", 1)
    worker.start(lambda: (gate.wait(30), seen.append((0, threading.get_ident()))))
    for number in range(1, 20):
        worker.start(lambda n=number: seen.append((n, threading.get_ident())))
    assert seen == []
    assert not worker.stop(time.monotonic()), "its first job has not ended"
    gate.set()
    assert worker.stop(time.monotonic() + PATIENCE)
    assert [number for number, _thread in seen] == list(range(20))
    assert len({thread for _number, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    assert not any(t.name == "mmserve-test" for t in threading.enumerate())


def test_a_wide_thread_worker_runs_as_many_jobs_at_once_and_ends_after_the_last() -> None:
    seen: list[int] = []
    both = threading.Barrier(2)
    worker = ThreadWorker("test", 1, 2)
    for _ in range(4):
        worker.start(lambda: (both.wait(30), seen.append(threading.get_ident())))
    assert worker.stop(time.monotonic() + PATIENCE)
    assert len(seen) == 4 and len(set(seen)) == 2
    assert not any(t.name == "mmserve-test" for t in threading.enumerate())


def test_the_thread_worker_takes_its_share_of_cores() -> None:
    seen: list[int] = []
    worker = ThreadWorker("test", 2)
    worker.start(lambda: seen.append(torch.get_num_threads()))
    worker.start(lambda: torch.set_num_threads(1))  # the number is the process's, and other tests want one
    assert worker.stop(time.monotonic() + PATIENCE)
    assert seen == [2]
