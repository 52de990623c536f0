"""How many workers a rate needs that no one simulation can hold: a cell is simulated, and multiplied.

Cells share nothing and arrivals are spread evenly over them, so that each sees a Poisson process of its share: a sum of
cells is exact for what is inside of a cell. What spreads requests over cells is not simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmserve.plan.search import Choice, Problem, goodput, run

#: A cell is planned for this share of its goodput: the rest is for bursts, and for workers that fail.
HEADROOM = 0.8
#: Items a second that one front passes on, an item for each decode pass of a worker: measured with Ray 2.60.
FRONT_ITEMS = 3000.0


@dataclass(frozen=True)
class Cell:
    """A choice multiplied: its goodput (requests a second), and of a run at ``rate``: what it moves and streams."""

    choice: Choice
    goodput: float
    rate: float
    moved_bytes: float  # a second
    items: float  # decode passes a second
    ttft: float  # 90th percentile (seconds)


@dataclass(frozen=True)
class Fleet:
    """What ``rate`` requests a second need."""

    rate: float
    cell: Cell
    cells: int
    workers: int
    fronts: int
    moved_bytes: float  # a second, in all


def cells(
    problem: Problem, choice: Choice, factors: Sequence[int] = (1, 2, 4), progress: Callable[[str], None] = print
) -> list[Cell]:
    """``choice`` and multiples of it, each simulated with as many more requests."""
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
    """So many of ``cell`` as ``rate`` requests a second need with headroom."""
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
