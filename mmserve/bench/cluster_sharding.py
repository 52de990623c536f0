"""Time to first token of a request with eight images, encoded by one and by two workers."""

from __future__ import annotations

import argparse
from statistics import median

from mmserve.bench.cluster_fleets import fleet, request
from mmserve.bench.in_process import Answer, ask_all
from mmserve.bench.measures import Figures, Progress, at_least, at_most, stated

_IMAGES, _TOKENS, _SIDE = 8, 4, 768
#: Goal: time to first token with two encode workers relative to one.
_GOAL = 0.8


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each number of encode workers: medians over sequential requests, alternating between the fleets."""
    path, recompute = "bundled-causal", "last"
    with (
        fleet(path, "e pd", spares=0) as (_one, single),
        fleet(path, "e e pd", spares=0, shard_pixels=1) as (_two, double),
    ):
        times: dict[str, list[float]] = {"1 encode worker": [], "2 encode workers": []}
        right = turns = 0
        for turn in range(2 * arguments.repeats + 1):
            asked = request(f"sharded.{turn}", _IMAGES, _TOKENS, recompute, 1000 + turn, _SIDE)
            answers: list[Answer] = []
            for coordinator in (single, double):
                answers += ask_all(coordinator, [asked])
            if turn:  # the first turn is a warm-up
                turns += 1
                right += answers[0].finished is not None and answers[0].text == answers[1].text
                for found, answer in zip(times.values(), answers, strict=True):
                    found.append(1000 * ((answer.deltas or [answer.ended])[0] - answer.begun))
            progress(f"turn {turn} of {2 * arguments.repeats}")
    one, two = (median(found) for found in times.values())
    rows = [{"measured": name, "first_token_ms": round(median(found), 1)} for name, found in times.items()]
    measures = [
        stated(f"first token of {_IMAGES} images, 1 encode worker, p50", one, "ms"),
        stated(f"first token of {_IMAGES} images, 2 encode workers, p50", two, "ms"),
        at_most("first token, 2 encode workers over 1", two / one, "ratio", _GOAL),
        at_least("same answers", right / turns, "share", 1.0),
    ]
    return {"rows": rows, "measures": measures, "settings": {"images": _IMAGES, "side": _SIDE, "tokens": _TOKENS}}
