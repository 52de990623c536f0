"""The effect of hostile requests on other clients: ``mmserve bench attacks``.

For each attack: the latency of short text requests and of health checks while it runs and on an idle server, and the
server's memory (the median of several readings) before it and some time after it. Server and attacker run in separate
processes. A request or a health check that fails has no latency: it misses a goal by itself, as does a server or an
attacker that ends.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from mmserve.bench.attackers import ATTACKS
from mmserve.bench.measures import Figures, Progress, at_most, figure, percentile
from mmserve.bench.served import ServedProcess
from mmserve.bench.settings import named_tasks
from mmserve.client import Client, Options
from mmserve.errors import MMServeError
from mmserve.reference.evaluate import canvas, item, media_files
from mmserve.reference.items import Question

#: Seconds between two health checks.
CHECK_EVERY = 0.05
#: Duration of an attack, and time after its end until memory is measured again, in seconds.
ATTACK_SECONDS, SETTLE_SECONDS = 15.0, 60.0
#: Readings of the memory for one figure, and seconds between two of them.
MEMORY_READINGS, MEMORY_EVERY = 5, 1.0
#: Goals: p99 of text requests relative to the idle server, latency of a health check (ms), memory relative to before.
SLOWER, CHECK_MS, GROWTH = 3.0, 100.0, 1.2
PATIENCE = 120.0


@dataclass
class Seen:
    """Measurements of an ordinary client during an attack; latencies in milliseconds."""

    texts: list[float] = field(default_factory=list)
    checks: list[float] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)  # by question
    changed: int = 0  # answers that differ from the first one of their question
    failures: list[str] = field(default_factory=list)


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each attack, and a measure for each goal."""
    rows = []
    for name in named_tasks(arguments, ATTACKS):
        with ServedProcess(arguments) as served:  # a new server each, so that attacks are independent
            rows.append(_attacked(served, name, arguments.seed, progress))
    return {
        "rows": rows,
        "measures": [measure for row in rows for measure in _measures(row)],
        "settings": {
            "attack_seconds": ATTACK_SECONDS,
            "settle_seconds": SETTLE_SECONDS,
            "check_every_seconds": CHECK_EVERY,
            "memory_readings": MEMORY_READINGS,
        },
    }


def _attacked(served: ServedProcess, name: str, seed: int, progress: Progress) -> Figures:
    asks = [item("arithmetic", index, seed)[1] for index in range(16)]
    with Client(served.address, timeout=PATIENCE) as client:
        client.wait_ready()
        _warm(client, seed)
    progress(f"{name}: idle")
    _watch(served.address, asks, ATTACK_SECONDS / 4)  # warm-up
    idle = _watch(served.address, asks, ATTACK_SECONDS)
    before = _readings(served)
    progress(f"{name}: attacked for {ATTACK_SECONDS:.0f} s")
    attacker = subprocess.Popen(
        [sys.executable, "-m", "mmserve.bench.attackers", served.address, name], stdout=subprocess.PIPE
    )
    try:
        assert attacker.stdout is not None
        attacker.stdout.readline()  # returns once it has begun, or has failed
        seen = _watch(served.address, asks, ATTACK_SECONDS, idle.answers)
        during = _readings(served)
        alive = attacker.poll() is None
    finally:
        attacker.kill()
        attacker.communicate()
    progress(f"{name}: {SETTLE_SECONDS:.0f} s after it")
    time.sleep(SETTLE_SECONDS)
    return {
        **_row(name, idle, seen),
        **_memory([before, during, _readings(served)]),
        "attack_went_on": alive,
        "server_went_on": served.running,
    }


def _readings(served: ServedProcess) -> list[int]:
    """Resident bytes of the server, read ``MEMORY_READINGS`` times."""
    found = [served.resident_bytes()]
    for _ in range(MEMORY_READINGS - 1):
        time.sleep(MEMORY_EVERY)
        found.append(served.resident_bytes())
    return found


def _memory(readings: Sequence[Sequence[int]]) -> Figures:
    """The median, minimum and maximum of each of the ``readings`` (bytes): before, during and after the attack."""
    return {
        "memory_mib": [round(statistics.median(each)) >> 20 for each in readings],
        "memory_mib_range": [[min(each) >> 20, max(each) >> 20] for each in readings],
    }


def _row(name: str, idle: Seen, seen: Seen) -> Figures:
    """The latencies and failures of an ordinary client without and with the attack; None without a sample."""
    p99 = partial(percentile, share=0.99)
    return {
        "measured": name,
        "text_ms_p50": [figure(each.texts, statistics.median, 1) for each in (idle, seen)],
        "text_ms_p99": [figure(each.texts, p99, 1) for each in (idle, seen)],
        "check_ms_max": [figure(each.checks, max, 1) for each in (idle, seen)],
        "texts": len(seen.texts),
        "changed": seen.changed,
        "failed": len(seen.failures),
        "failures": sorted(set(seen.failures)),
    }


def _warm(client: Client, seed: int) -> None:
    """Send one request of each kind, so that lazily loaded parts count as memory before the attack."""
    for task in ("count", "json", "direction"):
        thing, question = item(task, 0, seed)
        media = media_files(task, thing)
        options: Options = {"max_new_tokens": canvas(task), "videos": media["videos"]}
        client.generate(question.text, media["images"], **options)
    client.generate("Is it so?", choices=["yes", "no"], max_new_tokens=8)


def _watch(address: str, asks: Sequence[Question], seconds: float, answers: dict[str, str] | None = None) -> Seen:
    """Send short text requests one after another, and health checks in parallel, for ``seconds``.

    ``answers``: the expected answers found so far, by question.
    """
    seen, ended = Seen(answers=dict(answers or {})), threading.Event()

    def check() -> None:
        with Client(address, timeout=PATIENCE) as client:
            while not ended.is_set():
                began = time.monotonic()
                try:
                    client.wait_ready(PATIENCE)
                    seen.checks.append(1000 * (time.monotonic() - began))
                except MMServeError as error:
                    seen.failures.append(f"health check: {error.code}")
                ended.wait(CHECK_EVERY)

    checking = threading.Thread(target=check)
    checking.start()
    end = time.monotonic() + seconds
    try:
        with Client(address, timeout=PATIENCE) as client:
            while (began := time.monotonic()) < end:
                question = asks[len(seen.texts) % len(asks)]
                try:
                    answer = client.generate(question.text, max_new_tokens=canvas(question.task))
                except MMServeError as error:
                    seen.failures.append(error.code)
                    continue
                seen.texts.append(1000 * (time.monotonic() - began))
                seen.changed += seen.answers.setdefault(question.text, answer.text) != answer.text
    finally:
        ended.set()
        checking.join()
    return seen


def _measures(row: Figures) -> list[Figures]:
    """The measures of a row, with their goals."""
    name, (idle, attacked) = row["measured"], row["text_ms_p99"]
    before, _during, after = row["memory_mib"]
    slower = None if idle is None or attacked is None else attacked / idle
    ended = sum(not row[f"{which}_went_on"] for which in ("server", "attack"))
    return [
        at_most(f"{name}: text p99 over idle", slower, "x", SLOWER),
        at_most(f"{name}: slowest health check", row["check_ms_max"][1], "ms", CHECK_MS),
        at_most(f"{name}: memory after over before", after / before if row["server_went_on"] else None, "x", GROWTH),
        at_most(f"{name}: requests and health checks that failed", row["failed"], "", 0),
        at_most(f"{name}: server or attacker that ended", ended, "processes", 0),
    ]
