"""Overhead of a one-host cluster for a request, compared with one process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from mmserve.bench.cluster_fleets import fleet, one_process, request
from mmserve.bench.in_process import ask_all
from mmserve.bench.measures import Figures, Progress, at_least, at_most, stated
from mmserve.cluster.coordinator import Coordinator

_REQUESTS, _TOKENS, _IMAGES = 30, 16, 1


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """Requests one after another, alternating between one process and 1e1p1d; and the coordinator's CPU time."""
    rows, measures = [], []
    for path, recompute in (("bundled", "none"), ("bundled-causal", "last")):
        with one_process(path) as engine, fleet(path, "e p d") as (_made, coordinator):
            own = _timed(coordinator)
            times: dict[str, list[float]] = {"one process": [], "1e1p1d": []}
            right = 0
            for turn in range(_REQUESTS * arguments.repeats // 3 + 5):
                asked = request(f"{path}.{turn}", _IMAGES, _TOKENS, recompute, turn)
                [here] = ask_all(engine, [asked])
                [there] = ask_all(coordinator, [asked])
                right += here.finished is not None and there.finished is not None and here.text == there.text
                if turn >= 5:
                    for name, answer in (("one process", here), ("1e1p1d", there)):
                        times[name].append(1000 * (answer.ended - answer.begun))
            spent = 1000 * own["seconds"] / own["requests"]
        here_ms, there_ms = median(times["one process"]), median(times["1e1p1d"])
        rows.append({"model": path, "one_process_ms": here_ms, "cluster_ms": there_ms, "coordinator_ms": spent})
        progress(f"{path}: {here_ms:.1f} ms in one process, {there_ms:.1f} on 1e1p1d, coordinator {spent:.2f}")
        measures += [
            stated(f"{path}, one process, p50", here_ms, "ms"),
            stated(f"{path}, 1e1p1d, p50", there_ms, "ms"),
            stated(f"{path}, a request's overhead on 1e1p1d, p50", there_ms - here_ms, "ms"),
            at_most(f"{path}, the coordinator's own time a request", spent, "ms", 1.0),
            at_least(f"{path}, same answers", right / (turn + 1), "share", 1.0),
        ]
    return {"rows": rows, "measures": measures, "settings": {"requests": _REQUESTS, "tokens": _TOKENS}}


def _timed(coordinator: Coordinator) -> dict[str, float]:
    """Count the time spent in the coordinator's own methods from now on; updated in place."""
    own = {"seconds": 0.0, "requests": 0.0}

    def counted(method: Callable[..., None], requests: int) -> Callable[..., None]:
        def run(*given: Any) -> None:
            begun = time.thread_time()
            method(*given)
            own["seconds"] += time.thread_time() - begun
            own["requests"] += requests

        return run

    coordinator.submit = counted(coordinator.submit, 1)  # type: ignore[method-assign]
    coordinator.take = counted(coordinator.take, 0)  # type: ignore[method-assign]
    return own
