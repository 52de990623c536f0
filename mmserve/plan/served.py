"""Comparison of the simulator with a real server: the makespan of simultaneous requests with images.

The server is one in this process, with all stages, or the one given by ``--server``, with any layout (``mmserve serve
--cluster``). Other load of the machine is measured, and included in the prediction.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

from mmserve.bench.measures import at_most, percentile, stated
from mmserve.bench.settings import measured_config
from mmserve.cli.options import connected
from mmserve.client import Client, Options, Result
from mmserve.core.events import Finished
from mmserve.errors import ConfigError
from mmserve.plan import costs as costs_file
from mmserve.plan import report
from mmserve.plan.costs import Costs, Curve, Link
from mmserve.plan.layout import Batching, Layout
from mmserve.plan.other_load import OtherLoad
from mmserve.plan.outcome import Outcome
from mmserve.plan.pictures import picture
from mmserve.plan.simulate import Simulation
from mmserve.plan.switching import RoleSwitching
from mmserve.plan.workload import Kind, Workload

#: Options of the requests: with pruned visual tokens and short answers, encode is most of the work.
IMAGES, SIDE, NEW_TOKENS, BUDGET = 6, 512, 2, 8
QUESTION = "What is left of the circle?"
#: Maximum relative error of the prediction.
GOAL = 0.2
#: Number of requests sent one by one to determine the lengths of prompts and answers.
_ALONE = 3
_PATIENCE = 600.0
#: Seconds for which other load is measured.
_BESIDE_SECONDS = 1.5


def validate(arguments: argparse.Namespace, progress: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    """Measure and predict in turn; returns the report and its text."""
    from mmserve.plan.command import batching_of
    from mmserve.plan.measure import StageBench, measured  # imports torch

    layout, config = Layout.parse(arguments.layout), measured_config(arguments)
    if arguments.costs in costs_file.SHIPPED:  # of another machine
        with closing(StageBench(config)) as bench:
            measured(bench, arguments.rounds, progress)
            kind, rows = _rounds(arguments, progress)
            costs = measured(bench, arguments.rounds, progress).costs  # for both ways: the speed of a machine varies
    else:
        costs = costs_file.read(arguments.costs)
        kind, rows = _rounds(arguments, progress)
    cores = arguments.cores or int(costs.machine.get("cores", 1))
    batching = batching_of(arguments, costs)
    if not arguments.server:
        costs = replace(costs, link=Link(), handover=Curve())  # by reference, within the process
    switching, loaders = RoleSwitching() if arguments.switches else None, config.media.decode_workers
    for row in rows:
        ran = predicted(costs, layout, batching, kind, arguments.validate, cores, row["background"], loaders, switching)
        row.update(
            predicted_s=ran.makespan,
            predicted_ttft_p90_s=ran.percentile("ttft", 0.9),
            off=ran.makespan / row["measured_s"] - 1,
        )
    off = statistics.median(row["off"] for row in rows)
    name = f"{arguments.validate} requests of {kind.images} images at once"
    measures = [
        stated(f"{name}: measured (median)", statistics.median(row["measured_s"] for row in rows), "s"),
        stated(f"{name}: predicted (median)", statistics.median(row["predicted_s"] for row in rows), "s"),
        at_most(f"{name}: prediction off by (median of rounds)", abs(off), "of the time", GOAL),
    ]
    settings = {"layout": str(layout), "cores": cores, "server": arguments.server or "one process", "kind": str(kind)}
    made = {"bench": "plan", "measures": measures, "rows": rows, "settings": settings, "machine": dict(costs.machine)}
    return made, f"{report.table(rows)}\nprediction off by {100 * off:+.1f}% (median; goal within {100 * GOAL:.0f}%)"


def _rounds(arguments: argparse.Namespace, progress: Callable[[str], None]) -> tuple[Kind, list[dict[str, Any]]]:
    """The kind of the requests, and a row for each round of simultaneous requests."""
    rows = list[dict[str, Any]]()
    with connected(arguments) as client:
        client.wait_ready(_PATIENCE)
        kind = learned(client)
        for number in range(arguments.rounds):
            progress(f"round {number + 1} of {arguments.rounds}: {arguments.validate} requests at once")
            seconds, ttft, beside = _round(client, arguments.validate, 1 + number, apart=bool(arguments.server))
            rows.append({"round": number + 1, "measured_s": seconds, "ttft_p90_s": ttft, "background": beside})
    return kind, rows


def predicted(
    costs: Costs,
    layout: Layout,
    batching: Batching,
    kind: Kind,
    count: int,
    cores: int,
    beside: float,
    loaders: int,
    switching: RoleSwitching | None = None,
) -> Outcome:
    """The simulated outcome of ``count`` simultaneous requests of one kind, on ``cores`` shared with ``beside`` threads
    of other processes."""
    asks = Workload("at once", (kind,)).draw(count, float("inf"), 1)
    return Simulation(
        costs,
        layout,
        batching,
        asks,
        cores=cores,
        background=beside,
        loaders=loaders * max(1, layout.having("e")),
        switching=switching,
    ).run()


def _round(client: Client, count: int, number: int, *, apart: bool) -> tuple[float, float, float]:
    """As ``_all_at_once``, and the mean number of other threads. Those of a separate server (``apart``) cannot be
    distinguished from them, so they are then counted before and after the round."""
    if not apart:
        with OtherLoad() as beside:
            seconds, ttft = _all_at_once(client, count, number)
        return seconds, ttft, beside.threads
    with OtherLoad() as before:
        time.sleep(_BESIDE_SECONDS)
    seconds, ttft = _all_at_once(client, count, number)
    with OtherLoad() as after:
        time.sleep(_BESIDE_SECONDS)
    return seconds, ttft, (before.threads + after.threads) / 2


def learned(client: Client) -> Kind:
    """The kind of a request, from the answers to some sequential ones; the first is a warm-up."""
    results = [
        client.generate(QUESTION, images=_images(0, n), timeout=_PATIENCE, **_options(client))
        for n in range(_ALONE + 1)
    ]
    return kind_of(results[1:], rows=0)


def kind_of(
    results: Sequence[Result | Finished], *, rows: int, images: int = IMAGES, side: int = SIDE, tokens: int = NEW_TOKENS
) -> Kind:
    """The kind of request with the answers ``results``, ``images`` images of ``side`` × ``side`` and ``tokens`` new
    tokens.

    ``rows``: see ``Kind``. Raises ``ConfigError`` for a model without images.
    """
    usage = results[0].usage
    if not usage.visual_tokens:
        raise ConfigError("--validate asks about images, and the model takes none")
    forwards = statistics.mean(result.forwards for result in results)
    visual = usage.visual_tokens // images
    return Kind(
        images=images,
        patches=usage.visual_tokens_before // images,
        megapixels=side * side / 1e6,
        visual_tokens=visual,
        text_tokens=usage.prompt_tokens - images * visual,
        output_tokens=tokens,
        steps=max(1, round(forwards - 1)),  # the first forward is prefill
        rows=rows,
    )


def _images(round_number: int, request: int) -> list[bytes]:
    return [picture(1_000_000 * (1 + round_number) + 100 * request + index, SIDE) for index in range(IMAGES)]


def _options(client: Client) -> Options:
    info = client.describe()
    options: Options = {"max_new_tokens": NEW_TOKENS}
    pruner = next((name for name in ("cls_attention", "column_attention", "random") if name in info.pruners), None)
    if pruner is not None:
        options["pruner"], options["token_budget"] = pruner, BUDGET
    return options


def _all_at_once(client: Client, count: int, number: int) -> tuple[float, float]:
    """Seconds until the last answer, and the 90th percentile of the time to first token."""
    options = _options(client)
    images = [_images(number, request) for request in range(count)]

    def ask(each: list[bytes]) -> float:
        return client.generate(QUESTION, images=each, timeout=_PATIENCE, **options).times.first_token / 1000

    with ThreadPoolExecutor(count) as pool:
        begun = time.monotonic()
        first = list(pool.map(ask, images))
        seconds = time.monotonic() - begun
    return seconds, percentile(first, 0.9)
