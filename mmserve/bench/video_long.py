"""Hours of video in one session: the section ``long`` of ``mmserve bench video``.

One session receives ``--hours`` of frames, at one frame a second of stream time, as fast as the server processes them.
In the first hour and in the last (or in the first and last tenth of a shorter run), questions about clips that have
just ended are asked.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from mmserve.bench.measures import Figures, Progress, at_least, at_most, stated
from mmserve.bench.video_accuracy import Score
from mmserve.bench.video_clips import clips_of
from mmserve.bench.video_served import PATIENCE, push, served
from mmserve.bench.video_sessions import ANSWER, growth
from mmserve.client import Client

#: Number of clips asked about in each part, frames between two memory samples, questions in progress at once.
CLIPS_ASKED, READ_EVERY, AT_ONCE = 60, 100, 6
#: Frames after which memory must be constant; goals: maximum loss of accuracy in points, relative change of memory.
WARM, POINTS, FLAT = 300, 2.0, 0.03
#: Minimum multiple of the model's trained positions that the stream must reach.
CROSSED = 4


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """Results of one session of ``--hours``."""
    count = max(600, int(3600 * arguments.hours))
    part = min(3600, count // 10)
    clips = clips_of(arguments.seed, count + 16)
    ends = {shown.end - 1: shown for shown in clips}
    spans = {"first": range(8, part), "last": range(count - part, count)}
    scores = {name: Score() for name in spans}
    rng = random.Random(f"long {arguments.seed}")
    at: list[int] = []
    host: list[int] = []
    kv: list[int] = []
    with served(arguments) as server, Client(server.address, timeout=PATIENCE) as client:
        client.wait_ready(PATIENCE)
        longest = client.describe().max_tokens
        asked_clips = {name: _spread([second for second in span if second in ends]) for name, span in spans.items()}
        began = time.monotonic()
        with client.video_session(timeout=PATIENCE) as session:
            for second in range(count):
                push(session, clips, second)
                for name, wanted in asked_clips.items():
                    if second in wanted:
                        _ask(session, ends[second].questions(rng), scores[name])
                if second % READ_EVERY == 0:
                    at.append(second)
                    host.append(server.resident_bytes())
                    kv.append(session.statistics(PATIENCE).kv_bytes)
                if second % 1000 == 0:
                    progress(f"long: {second} of {count} frames")
            found = session.statistics(PATIENCE)
        taken = time.monotonic() - began
    shares = {name: score.share for name, score in scores.items()}
    crossings = (found.kept_rows + found.evicted_rows) / longest
    row = {
        "measured": "long",
        "frames": count,
        "wall_seconds": round(taken, 1),
        "frames_per_second": round(count / taken, 1),
        "rows_taken": found.kept_rows + found.evicted_rows,
        "accuracy": {name: scores[name].row("")["accuracy"] for name in scores},
        "questions": {name: sum(score.asked.values()) for name, score in scores.items()},
        "at_seconds": at,
        "host_mib": [value >> 20 for value in host],
        "kv_kib": [value >> 10 for value in kv],
    }
    measures = [
        at_least("trained length crossed", crossings, "times", CROSSED),
        at_most("frames taken more or less than once", abs(found.frames_taken - count), "", 0),
        at_most("host memory, change", growth(host, at, WARM), "share", FLAT),
        at_most("K/V memory, change", growth(kv, at, WARM), "share", FLAT),
        stated("right about the last clip, in the first part", shares["first"], "share"),
        at_most("first part over last part", 100 * (shares["first"] - shares["last"]), "points", POINTS),
    ]
    return {"rows": [row], "measures": measures, "settings": {"hours": count / 3600, "part_seconds": part}}


def _spread(seconds: list[int]) -> set[int]:
    """``CLIPS_ASKED`` of ``seconds`` at even distances."""
    step = max(1, len(seconds) // CLIPS_ASKED)
    return set(seconds[::step][:CLIPS_ASKED])


def _ask(session: Any, questions: list[Any], score: Score) -> None:
    in_flight = [(q, session.stream(q.text, max_new_tokens=ANSWER, timeout=PATIENCE)) for q in questions[:AT_ONCE]]
    for question, asked in in_flight:
        score.add(question, asked.result().text)
