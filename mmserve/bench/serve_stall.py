"""The section ``stall`` of ``mmserve bench serve``: stalls of eight running streams during a prefill of 10,000 tokens.

Over real sockets and in one process, in turn on servers that prefill a prompt at once and in chunks of one pass budget.
A stream requests a snapshot after every step, so that a gap is the time between two steps as received by its client.
The goal with chunks: the longest gap is at most twice the time of one pass budget, that is the prompt's prefill time
without other requests divided by its number of chunks.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from mmserve.assembly import BackgroundServer
from mmserve.bench.measures import Figures, Progress, at_least, at_most, stated
from mmserve.bench.serve_models import POSITIONS, block_diffusion, next_token
from mmserve.bench.settings import measured_config
from mmserve.client import Client, Finished, Snapshot
from mmserve.config import ModelConfig

STREAMS, PROMPT_TOKENS = 8, 10_000
#: Rows of a prefill pass: of all prompts, and of a prompt's chunk, the default on a CPU.
WHOLE, CHUNK = POSITIONS, 256
#: Goal: the longest gap relative to the time of one pass budget.
MOST_BUDGETS = 2.0
#: Steps of each stream awaited before the prompt is sent, and after its answer.
_STEPS = 8
_STREAM_TOKENS, _PATIENCE = 2_000, 600.0
#: The bundled tokenizer's end tokens, which are banned: a stream that ended would have no gap.
_ENDLESS = {1: -100.0, 2: -100.0}
_WORDS = "the red circle is left of the blue square and "


@dataclass(frozen=True)
class Served:
    """A server under test: its model, whether stages have separate threads, and the rows of its prefill passes."""

    model: str
    stages: str
    rows: int
    server: BackgroundServer


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each model, arrangement of stages and budget; times are medians over the rounds."""
    gaps: dict[tuple[str, str, int], list[float]] = {}
    passes: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="mmserve-stall-") as folder:
        models = {"next token": next_token, "block diffusion": block_diffusion}
        for name, made in models.items():
            path = made(Path(folder) / name.replace(" ", "-"))
            for stages in ("threads", "inline"):
                with ExitStack() as stack:
                    servers = [
                        Served(name, stages, rows, stack.enter_context(_server(arguments, path, stages, rows)))
                        for rows in (WHOLE, CHUNK)
                    ]
                    for number in range(arguments.repeats):
                        progress(f"{name}, {stages}: round {number + 1} of {arguments.repeats}")
                        passes.setdefault((name, stages), []).append(_pass_seconds(servers[1]))
                        for served in servers:
                            gaps.setdefault((name, stages, served.rows), []).append(_longest_gap(served))
    return _report(gaps, passes)


def _server(arguments: argparse.Namespace, path: Path, stages: str, rows: int) -> BackgroundServer:
    config = measured_config(argparse.Namespace(config=None, model=None, companion=None, set=[]))
    pages = (STREAMS * (_STREAM_TOKENS + 256) + POSITIONS) // config.engine.page_size
    engine = replace(
        config.engine, stages=stages, prefill_tokens=rows, max_tokens=POSITIONS, pages=pages, max_pending_per_stage=16
    )
    return BackgroundServer(replace(config, engine=engine, models=(ModelConfig(path=str(path)),)))


def _long(client: Client) -> Finished:
    prompt = _WORDS * (PROMPT_TOKENS // 10 + 1)
    return client.generate(prompt, max_new_tokens=4, timeout=_PATIENCE, logit_bias=_ENDLESS)


def _pass_seconds(served: Served) -> float:
    """Seconds of one pass budget, measured with the prompt alone."""
    with Client(served.server.address) as client:
        client.wait_ready()
        done = _long(client)
    return done.times.prefill / 1000 / math.ceil(done.usage.prompt_tokens / served.rows)


class _Stream(threading.Thread):
    """A stream that runs until ``stop`` is set, with the arrival times of its steps."""

    def __init__(self, address: str, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.error: Exception | None = None
        self._address, self._number, self._stop_asked = address, number, stop

    def run(self) -> None:
        try:
            with Client(self._address) as client:
                asked = client.stream(
                    f"Count to {self._number + 100}.",
                    snapshots=True,
                    max_new_tokens=_STREAM_TOKENS,
                    timeout=_PATIENCE,
                    commit="low_confidence",
                    logit_bias=_ENDLESS,
                )
                with closing(asked) as events:
                    for event in events:
                        if isinstance(event, Snapshot):
                            self.times.append(time.monotonic())
                        if self._stop_asked.is_set():
                            return
            raise RuntimeError(f"a stream of {_STREAM_TOKENS} tokens ended before the prompt was answered")
        except Exception as error:  # noqa: BLE001 - reported by the main thread
            self.error = error


def _longest_gap(served: Served) -> float:
    """The longest time (seconds) between two steps of a stream during the concurrent prefill of the prompt."""
    stop, address = threading.Event(), served.server.address
    streams = [_Stream(address, number, stop) for number in range(STREAMS)]
    for stream in streams:
        stream.start()
    try:
        _await_steps(streams, [_STEPS] * STREAMS)
        with Client(address) as client:
            begun = time.monotonic()
            _long(client)
            ended = time.monotonic()
        _await_steps(streams, [len(stream.times) + _STEPS for stream in streams])
    finally:
        stop.set()
        for stream in streams:
            stream.join()
    return max(
        after - before
        for stream in streams
        for before, after in zip(stream.times, stream.times[1:], strict=False)
        if after >= begun and before <= ended
    )


def _await_steps(streams: Sequence[_Stream], steps: Sequence[int]) -> None:
    while any(len(stream.times) < least for stream, least in zip(streams, steps, strict=True)):
        for stream in streams:
            if stream.error is not None:
                raise stream.error
        time.sleep(0.01)


def _report(gaps: dict[tuple[str, str, int], list[float]], passes: dict[tuple[str, str], list[float]]) -> Figures:
    rows, measures = [], []
    for (model, stages, budget), found in gaps.items():
        one = statistics.median(passes[model, stages])
        gap, at = statistics.median(found), f"{model}, {stages}"
        rows.append(
            {
                "measured": f"{at}, {'whole' if budget == WHOLE else f'chunks of {budget}'}",
                "longest_gap_ms": round(1000 * gap, 1),
                "longest_gap_ms_range": [round(1000 * min(found), 1), round(1000 * max(found), 1)],
                "pass_budget_ms": round(1000 * one, 1),
                "budgets": round(gap / one, 2),
            }
        )
        if budget == CHUNK:
            before = statistics.median(gaps[model, stages, WHOLE])
            measures.append(at_most(f"longest gap, {at}", gap / one, "pass budgets", MOST_BUDGETS))
            measures.append(stated(f"longest gap without chunks, {at}", before / one, "pass budgets"))
            measures.append(at_least(f"gain of chunks, {at}", before / gap, "x", 1.0))
    settings = {"streams": STREAMS, "prompt_tokens": PROMPT_TOKENS, "chunk": CHUNK, "recompute": "the model's default"}
    return {"rows": rows, "measures": measures, "settings": settings}
