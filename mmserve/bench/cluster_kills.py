"""Many concurrent requests on a cluster with and without workers being killed: correct and lost answers."""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from mmserve.bench.cluster_fleets import fleet, one_process, request
from mmserve.bench.in_process import Answer, ask_all
from mmserve.bench.measures import Figures, Progress, at_least, at_most, percentile, stated
from mmserve.cluster.fleet import Fleet
from mmserve.cluster.member import Member

_REQUESTS, _IMAGES, _TOKENS, _EVERY = 200, 2, 48, 3.0
#: Seconds between two checks of the workers.
_POLL = 0.01
_PATH, _RECOMPUTE, _ROLES = "bundled-causal", "last", "e e p d d"


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """200 requests of two distinct images each: in one process, on 2e1p2d, and there with a kill every three
    seconds."""
    asked = [request(f"q{i}", _IMAGES, _TOKENS, _RECOMPUTE, i) for i in range(_REQUESTS)]
    with one_process(_PATH) as engine:
        right = [answer.text for answer in ask_all(engine, asked)]
    progress("the answers of one process are there")
    measures: list[Figures] = []
    with fleet(_PATH, _ROLES) as (made, coordinator):
        answers = ask_all(coordinator, asked)
        measures += _judged("all at once", answers, right, made)
        progress("on 2e1p2d, all at once: done")
        kills: list[float] = []
        recoveries: list[float] = []
        over = threading.Event()
        killer = threading.Thread(target=_kill_workers, args=(made, over, kills, recoveries))
        killer.start()
        answers = _asked_until(lambda: len(kills) >= 3, lambda: ask_all(coordinator, asked))
        over.set()
        killer.join()
        measures += _judged(f"a kill every {_EVERY:g} s", answers, right * (len(answers) // len(asked)), made)
        gaps = [gap for answer in answers for gap in _gaps(answer, kills)]
        measures.append(stated("kills", len(kills), "workers"))
        measures.append(stated("workers lost, as the coordinator counts", coordinator.losses, "workers"))
        for share in (0.5, 0.95):
            name = f"from a kill until another worker has its place, p{100 * share:.0f}"
            measures.append(stated(name, percentile(recoveries, share), "s"))
        if gaps:
            measures.append(stated("longest gap in an answer over a kill, p50", percentile(gaps, 0.5), "s"))
            measures.append(stated("longest gap in an answer over a kill, p95", percentile(gaps, 0.95), "s"))
    return {
        "rows": [],
        "measures": measures,
        "settings": {"requests": _REQUESTS, "images": _IMAGES, "tokens": _TOKENS, "workers": _ROLES},
    }


def _asked_until(enough: Callable[[], bool], ask: Callable[[], list[Answer]]) -> list[Answer]:
    """The answers of every call of ``ask``, which is repeated until ``enough``, or until a request does not end.

    Requests may end before the first worker is killed; those of earlier calls count, too.
    """
    answers = ask()
    while not enough() and all(answer.over.is_set() for answer in answers):
        answers = [*answers, *ask()]
    return answers


def _judged(label: str, answers: Sequence[Answer], right: Sequence[str], made: Fleet) -> list[Figures]:
    same = sum(a.finished is not None and a.text == text for a, text in zip(answers, right, strict=True))
    typed = sum(answer.error is not None for answer in answers)
    end = time.monotonic() + 30
    while time.monotonic() < end and (made.payloads.held or any(c.stats().live for c in made.coordinators.values())):
        time.sleep(0.05)
    left = sum(c.stats().live for c in made.coordinators.values()) + made.payloads.held
    return [
        at_least(f"{label}: right answers", same, "requests", len(right)),
        stated(f"{label}: typed errors", typed, "requests"),
        at_most(f"{label}: lost", sum(answer.endings == 0 for answer in answers), "requests", 0),
        at_most(f"{label}: ended twice", sum(answer.endings > 1 for answer in answers), "requests", 0),
        at_most(f"{label}: requests and states left", left, "items", 0),
        stated(f"{label}: time", max(a.ended for a in answers) - min(a.begun for a in answers), "s"),
    ]


def _kill_workers(made: Fleet, over: threading.Event, kills: list[float], recoveries: list[float]) -> None:
    """Kill a worker every few seconds, and record the time until it is replaced; returns once all are replaced."""
    drawn, due = random.Random(0), time.monotonic() + _EVERY
    lost: dict[Member, tuple[int, float]] = {}  # the killed processes, and when
    while lost or not over.is_set():
        serving = {member: member.described.pid for member in made.members if member.described is not None}
        now = time.monotonic()
        for member, (pid, killed) in list(lost.items()):
            if serving.get(member, pid) != pid:
                recoveries.append(now - killed)
                del lost[member]
        alive = [member for member in serving if member not in lost]
        if now >= due and alive and not over.is_set():
            due = now + _EVERY
            member = drawn.choice(alive)
            with suppress(ProcessLookupError):
                os.kill(serving[member], signal.SIGKILL)
                kills.append(now)
                lost[member] = serving[member], now
        time.sleep(_POLL)


def _gaps(answer: Answer, kills: Sequence[float]) -> list[float]:
    """The times between two deltas during which a worker was killed."""
    pairs = zip(answer.deltas, answer.deltas[1:], strict=False)
    return [b - a for a, b in pairs if any(a < kill < b for kill in kills)]
