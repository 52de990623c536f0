"""Latency, forward passes and throughput of the server, over real gRPC: ``mmserve bench serving``.

Three comparisons of pairs, measured in turn in this process on the same scenes: the speed-up of a cache policy
(``none`` and ``dkv_decode``), the speed-up of concurrency (eight concurrent requests and the same in sequence, with the
model's default policies), and the overhead of the server (the share of a request's time spent outside its stages).
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mmserve.assembly import BackgroundServer
from mmserve.bench.measures import Figures, Progress, quartiles
from mmserve.bench.settings import measured_config
from mmserve.client import Client, Result
from mmserve.config import Config
from mmserve.reference.evaluate import canvas, item, media_files
from mmserve.reference.items import Question
from mmserve.reference.tasks import correct

CONCURRENT = 8


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """Rows of results; times are medians (milliseconds) with quartiles."""
    settings: Config = measured_config(arguments)
    scenes = [item("json", index, arguments.seed) for index in range(arguments.limit)]
    with BackgroundServer(settings) as server, server.client(600) as client:
        _ask(client, *scenes[0])  # warm-up
        rows = _policies(client, scenes, arguments.repeats, progress)
        rows += _throughput(client, scenes, arguments.repeats, progress)
    return {
        "rows": rows,
        "settings": {
            "canvas": canvas("json"),
            "scenes": arguments.limit,
            "repeats": arguments.repeats,
            "prefix_cache": False,
        },
    }


def _ask(client: Client, scene: Any, question: Question, **options: Any) -> Result:
    return client.generate(
        question.text, **media_files(question.task, scene), max_new_tokens=canvas(question.task), **options
    )


def _policies(client: Client, scenes: list[tuple[Any, Question]], repeats: int, progress: Progress) -> list[Figures]:
    """A row for each policy, measured on each scene in turn, so that noise affects all equally."""
    policies: dict[str, dict[str, Any]] = {
        "none × low_confidence": {"recompute": "none", "commit": "low_confidence"},
        "dkv_decode × low_confidence": {"recompute": "dkv_decode", "commit": "low_confidence"},
        "none × threshold": {"recompute": "none", "commit": "threshold"},
        "dkv_decode × threshold": {"recompute": "dkv_decode", "commit": "threshold"},
    }
    results: dict[str, list[tuple[Result, float, bool]]] = {name: [] for name in policies}
    for repeat in range(repeats):
        for index, (scene, question) in enumerate(scenes):
            progress(f"policies: round {repeat + 1} of {repeats}, scene {index + 1} of {len(scenes)}")
            for name, options in policies.items():
                begun = time.monotonic()
                result = _ask(client, scene, question, **options)
                seen = 1000 * (time.monotonic() - begun)
                results[name].append((result, seen, correct(question, result.text)))
    baseline = statistics.median(r.times.total for r, _seen, _right in results["none × low_confidence"])
    return [_policy_row(name, measured, baseline) for name, measured in results.items()]


def _policy_row(name: str, measured: list[tuple[Result, float, bool]], baseline: float) -> Figures:
    totals = [r.times.total for r, _seen, _right in measured]
    # The client's latency beyond the stages' own time: queues, the engine's loop, gRPC and the network stack.
    outside = [1 - (r.times.encode + r.times.prefill + r.times.decode) / seen for r, seen, _right in measured]
    low, _middle, high = quartiles(totals)
    return {
        "measured": name,
        "accuracy": round(sum(right for _r, _seen, right in measured) / len(measured), 4),
        "total_ms": round(statistics.median(totals), 1),
        "total_ms_quartiles": [round(low, 1), round(high, 1)],
        "forwards": round(statistics.mean(r.forwards for r, _seen, _right in measured), 1),
        "tokens_per_forward": round(statistics.mean(r.tokens_per_forward for r, _seen, _right in measured), 2),
        "recomputed_tokens": round(statistics.mean(r.recomputed_tokens for r, _seen, _right in measured), 1),
        "speedup": round(baseline / statistics.median(totals), 2),
        "outside_stages": round(statistics.median(outside), 4),
    }


def _throughput(client: Client, scenes: list[tuple[Any, Question]], repeats: int, progress: Progress) -> list[Figures]:
    """A row for the same requests in sequence and ``CONCURRENT`` at once, alternating."""
    serial: list[float] = []
    together: list[float] = []
    texts: list[list[str]] = []
    with ThreadPoolExecutor(CONCURRENT) as pool:
        for repeat in range(repeats):
            progress(f"throughput: round {repeat + 1} of {repeats}")
            begun = time.monotonic()
            texts.append([_ask(client, *asked).text for asked in scenes])
            serial.append(len(scenes) / (time.monotonic() - begun))
            begun = time.monotonic()
            texts.append([r.text for r in pool.map(lambda asked: _ask(client, *asked), scenes)])
            together.append(len(scenes) / (time.monotonic() - begun))
    return [
        {
            "measured": f"{CONCURRENT} at once against one after another",
            "serial_per_second": round(statistics.median(serial), 2),
            "concurrent_per_second": round(statistics.median(together), 2),
            "speedup": round(statistics.median(c / s for c, s in zip(together, serial, strict=True)), 2),
            "speedup_range": [
                round(pick(c / s for c, s in zip(together, serial, strict=True)), 2) for pick in (min, max)
            ],
            "answers_equal": all(t == texts[0] for t in texts),
        }
    ]
