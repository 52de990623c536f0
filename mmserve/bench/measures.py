"""What benchmarks report: rows of figures, measures beside the goals that are set for them, lines of progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import mean, median, quantiles
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


def as_text(measure: Figures) -> str:
    """A measure in one line."""
    goal = "" if measure["goal"] is None else f" (goal {measure['goal']}, {'met' if measure['met'] else 'missed'})"
    return f"{measure['name']}: {measure['value']} {measure['unit']}{goal}"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that at least ``share`` of ``values`` do not exceed; there must be one value at least."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper one; of one value that value."""
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return low, middle, high


def times_others(name: str, times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """``times_X`` for each other engine X: the median over rounds of the time of ``name`` over that of X."""
    return {
        f"times_{other}": round(median(mine / its for mine, its in zip(times[name], theirs, strict=True)), 3)
        for other, theirs in times.items()
        if other != name
    }


def share_by_task(answers: Iterable[tuple[str, bool]]) -> dict[str, float]:
    """The share of right answers of each task, from pairs of a task and whether its answer was right."""
    by_task: dict[str, list[bool]] = {}
    for task, right in answers:
        by_task.setdefault(task, []).append(right)
    return {task: round(mean(each), 4) for task, each in by_task.items()}


def in_turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Every name once in each round, which begins with another one each time: pairs of the round and the name."""
    ordered = list(names)
    for turn in range(rounds):
        first = turn % len(ordered)
        yield from ((turn, name) for name in ordered[first:] + ordered[:first])


def _measure(name: str, value: float, unit: str, goal: str | None, met: bool | None) -> Figures:
    return {"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "met": met}
