"""Sweeps: goodput against targets, and the share of requests that meet their targets against load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mmserve.plan.compare import Comparison, compare
from mmserve.plan.layout import Batching, all_in_one
from mmserve.plan.search import Choice, Problem, run
from mmserve.plan.workload import Targets

#: Targets of a sweep as multiples of ``serial_seconds``.
MULTIPLES = (0.4, 0.6, 0.8, 1.0, 1.2, 1.6, 2.4, 4.0)
#: Loads of a sweep as shares of the highest goodput among what is compared.
LOADS = (0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)


def serial_seconds(problem: Problem, base: Batching) -> float:
    """Time to first token of a single request on one worker that runs all stages (seconds).

    The maximum of a hundred requests: a lower target cannot be met without splitting requests.
    """
    alone = replace(problem, requests=100, cores=None)
    return run(alone, Choice(all_in_one(1, images=problem.images), base), 1e-5).percentile("ttft", 1.0)


@dataclass(frozen=True)
class AtTarget:
    """A comparison at one target for the time to first token."""

    targets: Targets
    comparison: Comparison


def over_targets(
    problem: Problem,
    workers: int,
    base: Batching,
    progress: Callable[[str], None] = lambda _: None,
    multiples: Sequence[float] = MULTIPLES,
) -> list[AtTarget]:
    """The best of each group of layouts at targets around the serial time."""
    serial, rows = serial_seconds(problem, base), list[AtTarget]()
    for multiple in multiples:
        targets = replace(problem.targets, ttft=multiple * serial)
        progress(f"targets: first token within {targets.ttft:.3g} s, {targets.tpot:.3g} s a token")
        rows.append(AtTarget(targets, compare(replace(problem, targets=targets), workers, base)))
    return rows


@dataclass(frozen=True)
class AtRate:
    """Attainment and times (seconds) of each choice at one rate (requests a second)."""

    rate: float
    attainment: Mapping[str, float]
    ttft: Mapping[str, float]  # 90th percentile (seconds)
    tpot: Mapping[str, float]


def over_load(problem: Problem, compared: Mapping[str, Choice], rates: Sequence[float]) -> list[AtRate]:
    """Attainment and times of the ``compared`` choices, by name, at increasing ``rates``."""
    rows = []
    for rate in rates:
        ran = {name: run(problem, choice, rate) for name, choice in compared.items()}
        rows.append(
            AtRate(
                rate,
                {name: outcome.attainment(problem.targets) for name, outcome in ran.items()},
                {name: outcome.percentile("ttft", 0.9) for name, outcome in ran.items()},
                {name: outcome.percentile("tpot", 0.9) for name, outcome in ran.items()},
            )
        )
    return rows
