"""The report of a benchmark: rows of results, measures with their goals, lines of progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import mean, median, quantiles
from typing import Any

#: Results by name: a row, a measure or a whole report.
Figures = dict[str, Any]
#: Prints a line of progress.
Progress = Callable[[str], None]


def at_most(name: str, value: float | None, unit: str, goal: float) -> Figures:
    """A measure whose goal is met if ``value`` is at most ``goal``; missed if it is None (nothing was measured)."""
    return _measure(name, value, unit, f"<= {goal:g}", value is not None and value <= goal)


def at_least(name: str, value: float | None, unit: str, goal: float) -> Figures:
    """A measure whose goal is met if ``value`` is at least ``goal``; missed if it is None (nothing was measured)."""
    return _measure(name, value, unit, f">= {goal:g}", value is not None and value >= goal)


def stated(name: str, value: float | None, unit: str) -> Figures:
    """A measure without a goal; a ``value`` of None = nothing was measured."""
    return _measure(name, value, unit, None, None)


def as_text(measure: Figures) -> str:
    """A measure as one line of text."""
    goal = "" if measure["goal"] is None else f" (goal {measure['goal']}, {'met' if measure['met'] else 'missed'})"
    value = "no sample" if measure["value"] is None else f"{measure['value']} {measure['unit']}"
    return f"{measure['name']}: {value}{goal}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of ``values`` do not exceed; ``values`` must not be empty."""
    ordered = sorted(values)
    rank = math.ceil(round(share * len(ordered), 9))  # rounded: 0.07 * 100 is above 7
    return ordered[max(1, rank) - 1]


def figure(
    values: Sequence[float], pick: Callable[[Sequence[float]], float], digits: int | None = None
) -> float | None:
    """``pick(values)``, rounded to ``digits``; None without values, which is no figure."""
    if not values:
        return None
    return pick(values) if digits is None else round(pick(values), digits)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; of a single value that value."""
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return low, middle, high


def times_others(name: str, times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """``times_X`` for each other engine X: the median over rounds of the ratio of ``name``'s time to X's."""
    return {
        f"times_{other}": round(median(mine / its for mine, its in zip(times[name], theirs, strict=True)), 3)
        for other, theirs in times.items()
        if other != name
    }


def share_by_task(answers: Iterable[tuple[str, bool]]) -> dict[str, float]:
    """The share of correct answers of each task, from pairs of a task and whether its answer was correct."""
    by_task: dict[str, list[bool]] = {}
    for task, right in answers:
        by_task.setdefault(task, []).append(right)
    return {task: round(mean(each), 4) for task, each in by_task.items()}


def in_turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Pairs of a round and a name: every name once in each round, starting with a different one each time."""
    ordered = list(names)
    for turn in range(rounds):
        yield from ((turn, name) for name in rotated(ordered, turn))


def rotated(names: Iterable[str], turn: int) -> list[str]:
    """``names`` in their order, starting with a different one in each turn."""
    ordered = list(names)
    first = turn % len(ordered)
    return ordered[first:] + ordered[:first]


def _measure(name: str, value: float | None, unit: str, goal: str | None, met: bool | None) -> Figures:
    shown = None if value is None or not math.isfinite(value) else round(value, 4)
    return {"name": name, "value": shown, "unit": unit, "goal": goal, "met": met}
