"""Implementation of ``mmserve plan``: from its arguments to a report as JSON and as text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mmserve.bench.measures import Progress, stated
from mmserve.cli.options import read_config
from mmserve.config import resolve
from mmserve.errors import ConfigError
from mmserve.plan import costs as costs_file
from mmserve.plan import report
from mmserve.plan import workload as workload_file
from mmserve.plan.compare import compare
from mmserve.plan.costs import Costs, Curve
from mmserve.plan.fleet import cells, fleet
from mmserve.plan.layout import Batching, Layout
from mmserve.plan.search import Problem
from mmserve.plan.simulate import Simulation
from mmserve.plan.sweep import LOADS, over_load, over_targets, serial_seconds
from mmserve.plan.switching import RoleSwitching
from mmserve.plan.workload import Targets


def run(arguments: argparse.Namespace, progress: Progress) -> tuple[dict[str, Any], str]:
    """The report (for ``--json``), and the same as text."""
    if arguments.measure:
        return _measured(arguments, progress)
    if arguments.validate:
        from mmserve.plan.served import validate  # imports torch if no server is given

        return validate(arguments, progress)
    problem, base = problem_of(arguments)
    if arguments.batch:
        made, text = _batch(arguments, problem, base)
    elif arguments.sweep:
        made, text = _swept(arguments, problem, base, progress)
    elif arguments.fleet:
        made, text = _fleet(arguments, problem, base, progress)
    else:
        made, text = _compared(arguments, problem, base, progress)
    settings = {
        "workload": problem.workload.to_json(),
        "costs": problem.costs.name,
        "source": problem.costs.source,
        "workers": arguments.workers,
        "requests": problem.requests,
        "seed": problem.seed,
        "cores": problem.cores,
    }
    return {"bench": "plan", **made, "settings": settings, "machine": dict(problem.costs.machine)}, text


def problem_of(arguments: argparse.Namespace) -> tuple[Problem, Batching]:
    """The planning problem given by the arguments, and the batch limits of the configuration.

    Raises ``ConfigError`` if there are costs without a workload, or a workload with images and no costs of these.
    """
    costs = costs_file.read(arguments.costs)
    workload = workload_file.read(arguments.workload or arguments.costs)
    if workload.most_images and costs.encode == Curve():
        raise ConfigError(
            f"{arguments.costs} has no costs of images, and the workload has images: measure a model that takes them, "
            "or use another --workload"
        )
    targets = Targets(arguments.ttft, arguments.tpot, arguments.share)
    problem = Problem(costs, workload, targets, arguments.requests, arguments.seed, arguments.cores)
    return problem, batching_of(arguments, costs)


def batching_of(arguments: argparse.Namespace, costs: Costs) -> Batching:
    """The batch limits of ``[engine]``, with "auto" resolved for the machine of ``costs``."""
    device = "cpu" if costs.machine.get("gpu", "") == "none" else "cuda"
    return Batching.of(resolve(read_config(arguments).engine, device=device))


def _measured(arguments: argparse.Namespace, progress: Progress) -> tuple[dict[str, Any], str]:
    from mmserve.plan.measure import measure  # imports torch

    measured = measure(arguments, arguments.rounds, progress)
    costs, out = measured.costs, arguments.out or Path("costs.json")
    data = {"costs": costs.to_json(), "workload": measured.workload.to_json()}
    out.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    rows = []
    for stage in ("load", "encode", "prefill", "decode"):
        curve, quality = getattr(costs, stage), costs.quality.get(stage, {})
        residuals = {name: quality.get(name) for name in ("rms", "worst", "samples")}  # None: no pass of this stage
        rows.append({"stage": stage, "a": curve.a, "b": curve.b, "c": curve.c, **residuals})
    link = costs.link
    crowded = costs.interference if "interference" in costs.quality else None
    measures = [stated(f"{row['stage']}: relative residual (rms)", row["rms"], "of the time") for row in rows]
    measures.append(stated("transfer: latency", 1000 * link.latency, "ms"))
    measures.append(stated("transfer: bandwidth", link.bandwidth / 1e9, "GB/s"))
    measures.append(stated("a pass while all cores are busy", crowded, "times as long as alone"))
    text = f"{report.table(rows)}\ntransfer: {1000 * link.latency:.3g} ms + bytes / {link.bandwidth / 1e9:.3g} GB/s\n"
    if crowded is not None:
        text += f"while all cores are busy, a pass takes {crowded:.3g} times as long as alone\n"
    made = {"bench": "plan", "measures": measures, "rows": rows, "settings": {"rounds": arguments.rounds}}
    return {**made, "machine": dict(costs.machine)}, text + f"written to {out}"


def _compared(
    arguments: argparse.Namespace, problem: Problem, base: Batching, progress: Progress
) -> tuple[dict[str, Any], str]:
    comparison = compare(problem, arguments.workers, base, progress)
    rows, advice = report.compared(comparison), comparison.advice
    measures = report.of_comparison(comparison, problem.targets)
    return {"measures": measures, "rows": rows, "advice": advice}, f"{report.table(rows)}\n{advice}"


def _swept(
    arguments: argparse.Namespace, problem: Problem, base: Batching, progress: Progress
) -> tuple[dict[str, Any], str]:
    serial = serial_seconds(problem, base)
    targets = over_targets(problem, arguments.workers, base, progress)
    comparison = compare(problem, arguments.workers, base)
    found = comparison.named
    most = max(one.goodput for one in found.values())
    rates = [share * most for share in LOADS] if most else []
    loads = over_load(problem, {name: one.choice for name, one in found.items()}, rates)
    if arguments.plot is not None:
        from mmserve.plan.plots import draw

        draw(targets, loads, problem.targets, serial, arguments.plot)
    by_target, by_rate = report.by_target(targets), report.by_rate(loads)
    measures = [*report.of_comparison(comparison, problem.targets), *report.of_shape(targets, serial)]
    text = "\n".join(
        [
            f"one request alone on one worker: first token after {serial:.3g} s",
            report.table(by_target),
            "",
            f"at {problem.targets.ttft:g} s and {problem.targets.tpot:g} s a token: {comparison.advice}",
            report.table(by_rate),
        ]
    )
    rows = {"targets": by_target, "loads": by_rate}
    return {"measures": measures, "rows": rows, "advice": comparison.advice}, text


def _fleet(
    arguments: argparse.Namespace, problem: Problem, base: Batching, progress: Progress
) -> tuple[dict[str, Any], str]:
    try:
        rates = [float(part) for part in arguments.fleet.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"--fleet takes rates above 0, separated by commas, not {arguments.fleet!r}")
    comparison = compare(problem, arguments.workers, base, progress)
    if not comparison.best.goodput:
        return {"measures": [], "rows": [], "advice": comparison.advice}, comparison.advice
    chosen = [comparison.best.choice]
    if comparison.all_in_one.goodput and comparison.best is not comparison.all_in_one:
        chosen.append(comparison.all_in_one.choice)
    made = [cell for choice in chosen for cell in cells(problem, choice, progress=progress)]
    fleets = [fleet(rate, cell) for rate in rates for cell in made]
    rows = report.by_fleet(fleets)
    measures = [
        stated(f"workers for {one.rate:g} requests/s in cells of {one.cell.choice.layout}", one.workers, "workers")
        for one in fleets
    ]
    note = (
        "a cell is simulated and multiplied: cells share nothing, and what spreads requests over them is not simulated"
    )
    return {
        "measures": measures,
        "rows": rows,
        "advice": comparison.advice,
        "note": note,
    }, f"{report.table(rows)}\n{note}"


def _batch(arguments: argparse.Namespace, problem: Problem, base: Batching) -> tuple[dict[str, Any], str]:
    layout = Layout.parse(arguments.layout)
    asks = problem.workload.draw(arguments.batch, float("inf"), problem.seed)
    rows = list[dict[str, Any]]()
    for name, rule in (("roles stay", None), ("roles switch", RoleSwitching())):
        outcome = Simulation(problem.costs, layout, base, asks, cores=problem.cores, switching=rule).run()
        rows.append(
            {
                "layout": f"{layout}, {name}",
                "seconds": outcome.makespan,
                "switches": " ".join(f"{move}@{at:.3g}s" for at, move in outcome.switches) or "-",
                "ttft_p90_s": outcome.percentile("ttft", 0.9),
                "utilization": outcome.utilization,
            }
        )
    measures = [stated(f"{arguments.batch} requests at once, {row['layout']}", row["seconds"], "s") for row in rows]
    return {"measures": measures, "rows": rows}, report.table(rows)
