"""What benchmarks report: rows of figures, measures beside the goals that are set for them, lines of progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import Any

#: Figures by their names: a row, a measure or a whole report.
Figures = dict[str, Any]
#: Shows a person a line of progress.
Progress = Callable[[str], None]


def at_most(name: str, value: float, unit: str, goal: float) -> Figures:
    """A measure that is met where ``value`` is at most ``goal``."""
    return _measure(name, value, unit, f"<= {goal:g}", value <= goal)


def at_least(name: str, value: float, unit: str, goal: float) -> Figures:
    """A measure that is met where ``value`` is at least ``goal``."""
    return _measure(name, value, unit, f">= {goal:g}", value >= goal)


def stated(name: str, value: float, unit: str) -> Figures:
    """A figure without a goal."""
    return _measure(name, value, unit, None, None)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that at least ``share`` of ``values`` do not exceed; there must be one value at least."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper one; of one value that value."""
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return low, middle, high


def _measure(name: str, value: float, unit: str, goal: str | None, met: bool | None) -> Figures:
    return {"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "met": met}
