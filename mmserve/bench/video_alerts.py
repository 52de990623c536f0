"""Latency from events to alerts over real sockets: one session with watches at one frame a second."""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mmserve.bench.measures import Figures, Progress, at_most, percentile, stated
from mmserve.bench.video_clips import PART, clips_of
from mmserve.bench.video_served import PATIENCE, push, served
from mmserve.client import Client
from mmserve.reference.clips import Clip

#: Goal: seconds from an event to its alert.
ALERT_S = 1.5
#: Seconds without an event that make an alert false, and seconds after the last frame in which alerts may arrive.
FALSE_AFTER, LATE = 3.0, 2.0

Holds = Callable[[Clip, float], bool]


def event_to_alert(
    arguments: argparse.Namespace, asked: Sequence[tuple[str, Holds | None]], progress: Progress
) -> tuple[Figures, list[Figures]]:
    """Alerts of ``asked`` over ``--seconds``: pairs of a question and a predicate on a clip's moment (None =
    unchecked).

    The time of an event is when a shape appears in the stream, up to a second before the first frame that shows it.
    """
    seconds = int(arguments.seconds)
    clips = clips_of(arguments.seed, seconds + 16)
    alerts: list[tuple[str, bool, float]] = []  # question, on, time of arrival
    lock = threading.Lock()

    def note(text: str) -> Callable[[Any], None]:
        def take(alert: Any) -> None:
            with lock:
                alerts.append((text, alert.active, time.monotonic()))

        return take

    progress(f"watches: {len(asked)} in a session for {seconds} s")
    with served(arguments) as server, Client(server.address, timeout=PATIENCE) as client:
        client.wait_ready(PATIENCE)
        with client.video_session(timeout=PATIENCE) as session:
            for text, _holds in asked:
                session.watch(text, callback=note(text))
            session.statistics(PATIENCE)  # returns once all watches are accepted
            begun = time.monotonic()
            for second in range(seconds):
                time.sleep(max(0.0, begun + second + PART - time.monotonic()))
                push(session, clips, second)
            time.sleep(LATE)
    delays: list[float] = []
    missed = false = 0
    judged = [(text, holds) for text, holds in asked if holds is not None]
    for text, holds in judged:
        begins = _events(clips, seconds, holds)
        came = [when - begun for of, active, when in alerts if of == text and active]
        for event in begins:
            after = [when for when in came if 0 <= when - event <= FALSE_AFTER]
            missed += not after
            delays += after[:1] and [after[0] - event]
        false += sum(not any(0 <= when - event <= FALSE_AFTER for event in begins) for when in came)
    row = {
        "measured": "watches: alerts over gRPC",
        "seconds": seconds,
        "watches": len(asked),
        "judged": len(judged),
        "events": len(delays) + missed,
        "missed": missed,
        "false_alarms": false,
        "event_to_alert_s_p50": round(statistics.median(delays), 3) if delays else None,
    }
    return row, [
        at_most("event to alert p99", _late(delays, missed), "s", ALERT_S),
        stated(f"false alarms an hour of {len(judged)} watches over gRPC", 3600 * false / max(1, seconds), "1/h"),
        stated("events without an alert over gRPC", missed / max(1, len(delays) + missed), "share"),
    ]


def _late(delays: Sequence[float], missed: int) -> float | None:
    """The 99th percentile of ``delays``, in which each missed event counts as infinite; None without events."""
    every = [*delays, *[math.inf] * missed]
    return percentile(every, 0.99) if every else None


def _events(clips: Sequence[Any], seconds: int, holds: Holds) -> list[float]:
    """The times (seconds of the stream) when the answer becomes yes: events happen at whole seconds."""
    found, before = [], False
    for shown in clips:
        for second in range(shown.clip.seconds):
            now = holds(shown.clip, second + PART)
            if now and not before and shown.begin + second < seconds:
                found.append(float(shown.begin + second))
            before = now
    return found
