"""Number of workers for a rate too high for one simulation: a cell is simulated, and multiplied.

Cells share nothing and arrivals are distributed evenly over them, so that each receives a Poisson process with its
share: multiplication is exact for everything within a cell. The load balancer between cells is not simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmserve.plan.search import Choice, Problem, goodput, run

#: Share of its goodput that a cell is planned for: the rest is headroom for bursts and failed workers.
HEADROOM = 0.8
#: Items a second that one server can forward, with an item for each decode pass of a worker: measured with Ray 2.60.
FRONT_ITEMS = 3000.0


@dataclass(frozen=True)
class Cell:
    """A multiplied choice: its goodput (requests a second), and the transfers and stream items of a run at ``rate``."""

    choice: Choice
    goodput: float
    rate: float
    moved_bytes: float  # bytes a second
    items: float  # decode passes a second
    ttft: float  # 90th percentile (seconds)


@dataclass(frozen=True)
class Fleet:
    """The resources for ``rate`` requests a second."""

    rate: float
    cell: Cell
    cells: int
    workers: int
    fronts: int
    moved_bytes: float  # bytes a second, in total


def cells(
    problem: Problem, choice: Choice, factors: Sequence[int] = (1, 2, 4), progress: Callable[[str], None] = print
) -> list[Cell]:
    """``choice`` and multiples of it, each simulated with proportionally more requests."""
    made = []
    for factor in factors:
        grown = replace(choice, layout=choice.layout.times(factor))
        larger = replace(problem, requests=problem.requests * factor)
        rate = goodput(larger, grown)
        if not rate:
            continue
        progress(f"a cell of {grown.layout}: {rate:.3g} requests/s")
        outcome = run(larger, grown, HEADROOM * rate)
        seconds = max(outcome.makespan, 1e-12)
        made.append(
            Cell(
                grown,
                rate,
                HEADROOM * rate,
                outcome.moved_bytes / seconds,
                outcome.passes.get("d", 0) / seconds,
                outcome.percentile("ttft", 0.9),
            )
        )
    return made


def fleet(rate: float, cell: Cell) -> Fleet:
    """The number of cells of type ``cell`` for ``rate`` requests a second with headroom."""
    count = math.ceil(rate / cell.rate)
    share = rate / cell.rate
    return Fleet(
        rate,
        cell,
        count,
        count * cell.choice.layout.workers,
        math.ceil(share * cell.items / FRONT_ITEMS),
        share * cell.moved_bytes,
    )
