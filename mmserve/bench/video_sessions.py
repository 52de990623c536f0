"""Concurrent video sessions over real sockets: the section ``sessions`` of ``mmserve bench video``.

Eight clients push one frame a second each and ask questions throughout; the server runs in a separate process on the
same machine. Later memory use is compared with that of the first minute, or of the first half of a shorter run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from mmserve.bench.measures import Figures, Progress, at_least, at_most, figure, percentile
from mmserve.bench.served import ServedProcess
from mmserve.bench.video_clips import clips_of, question_at
from mmserve.bench.video_served import PATIENCE, ReadyTimes, push, served
from mmserve.client import Client, Delta
from mmserve.client.blocking_video import VideoSession
from mmserve.errors import MMServeError

SESSIONS = 8
#: Seconds between two questions of a session, and between two samples of the server's memory.
ASK_EVERY, READ_EVERY = 3.0, 1.0
#: Seconds after which memory must be constant.
WARM = 60.0
#: Goals: seconds of the slowest frames, milliseconds to the first token, relative change of memory.
READY_S, FIRST_MS, FLAT = 1.0, 500.0, 0.03
#: Maximum tokens of an answer.
ANSWER = 24


@dataclass
class Seen:
    """Measurements of all sessions; times in seconds."""

    asked: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # time to first token of each answer
    failures: list[str] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)  # pushed by each session


@dataclass
class Bytes:
    """Memory over time: seconds since the start, bytes of the server's processes, bytes of all sessions' K/V."""

    seconds: list[float] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """Results of ``SESSIONS`` sessions for ``--seconds``."""
    seen, held, ready = Seen(), Bytes(), ReadyTimes()
    seconds = float(arguments.seconds)
    with served(arguments) as server:
        progress(f"sessions: {SESSIONS} for {seconds:.0f} s")
        kv = [0] * SESSIONS
        threads = [
            threading.Thread(target=_session, args=(server.address, i, arguments.seed, seconds, seen, ready, kv))
            for i in range(SESSIONS)
        ]
        for thread in threads:
            thread.start()
        _watch(server, threads, kv, held)
        ready.stop()
    return _report(seen, held, ready.seconds, seconds)


def _session(
    address: str, number: int, seed: int, seconds: float, seen: Seen, ready: ReadyTimes, kv: list[int]
) -> None:
    try:
        _play(address, number, seed, seconds, seen, ready, kv)
    except MMServeError as error:
        seen.failures.append(f"session {number}: {error}")


def _play(address: str, number: int, seed: int, seconds: float, seen: Seen, ready: ReadyTimes, kv: list[int]) -> None:
    clips = clips_of(100 * seed + number, int(seconds) + 16)
    rng = random.Random(f"session {seed} {number}")
    asking: list[threading.Thread] = []
    with Client(address, timeout=PATIENCE) as client:
        client.wait_ready(PATIENCE)
        with client.video_session(timeout=PATIENCE) as session:
            begun = time.monotonic() + number / SESSIONS  # spread over a second
            due = ASK_EVERY * (1 + number / SESSIONS)
            for second in range(int(seconds)):
                time.sleep(max(0.0, begun + second - time.monotonic()))
                ready.pushed(session)
                push(session, clips, second)
                if second >= due:
                    due += ASK_EVERY
                    text = question_at(clips, second, rng)
                    asking.append(threading.Thread(target=_ask, args=(session, text, seen)))
                    asking[-1].start()
                if second % 5 == 4:
                    kv[number] = session.statistics().kv_bytes
            for thread in asking:
                thread.join()
            seen.frames.append(session.statistics().frames_taken)


def _ask(session: VideoSession, text: str, seen: Seen) -> None:
    seen.asked.append(text)
    began = time.monotonic()
    first = None
    try:
        asked = session.stream(text, max_new_tokens=ANSWER, timeout=PATIENCE)
        for event in asked:
            if first is None and isinstance(event, Delta):
                first = time.monotonic() - began
        asked.result()
    except MMServeError as error:
        seen.failures.append(str(error))
        return
    seen.first.append(time.monotonic() - began if first is None else first)


def _watch(server: ServedProcess, threads: Sequence[threading.Thread], kv: Sequence[int], held: Bytes) -> None:
    began = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        held.seconds.append(round(time.monotonic() - began, 1))
        held.host.append(server.resident_bytes())
        held.kv.append(sum(kv))
        time.sleep(READ_EVERY)


def growth(held: Sequence[int], seconds: Sequence[float], warm: float) -> float | None:
    """The largest change of memory after ``warm`` seconds, relative to its value then.

    None if there are fewer than two samples, or if nothing was held then but something later. Both values are means
    over a sixth of the run, as a single sample includes requests in progress.
    """
    later = [value for value, at in zip(held, seconds, strict=True) if at >= warm]
    if len(later) < 2:
        return None
    width = max(1, len(later) // 6)
    means = [statistics.mean(later[i : i + width]) for i in range(0, len(later) - width + 1, width)]
    if not means[0]:
        return None if any(means) else 0.0
    return max(abs(mean / means[0] - 1) for mean in means)


def _report(seen: Seen, held: Bytes, ready: list[float], seconds: float) -> Figures:
    warm = min(WARM, seconds / 2)
    first = [1000 * value for value in seen.first]
    p50, p99 = (partial(percentile, share=share) for share in (0.5, 0.99))
    row = {
        "measured": "sessions",
        "frames": sum(seen.frames),
        "questions": len(seen.asked),
        "answered": len(seen.first),
        "failures": sorted(set(seen.failures)),
        "frame_to_ready_s": [figure(ready, share, 3) for share in (p50, p99)],
        "question_to_first_token_ms": [figure(first, share, 1) for share in (p50, p99)],
        "at_seconds": held.seconds,
        "host_mib": [value >> 20 for value in held.host],
        "kv_kib": [value >> 10 for value in held.kv],
    }
    measures = [
        at_least("questions answered", len(seen.first) / max(1, len(seen.asked)), "share", 1.0),
        at_most("sessions that failed", len(seen.failures), "", 0),
        at_most(f"host memory after {warm:.0f} s, change", growth(held.host, held.seconds, warm), "share", FLAT),
        at_most(f"K/V memory after {warm:.0f} s, change", growth(held.kv, held.seconds, warm), "share", FLAT),
        at_most("frame to ready p99", figure(ready, p99), "s", READY_S),
        at_most("question to first token p50", figure(first, statistics.median), "ms", FIRST_MS),
    ]
    settings = {"sessions": SESSIONS, "seconds": seconds, "frames_per_second": 1, "ask_every_seconds": ASK_EVERY}
    return {"rows": [row], "measures": measures, "settings": settings}
