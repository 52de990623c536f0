"""Comparison of layouts with the same number of workers, and the resulting advice: disaggregate or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmserve.plan.layout import Batching, Layout, all_in_one, layouts, prefill_decode
from mmserve.plan.search import Found, Problem, best, choices

#: Minimum improvement by a split to be recommended: smaller ones may result from the random arrivals.
MARGIN = 0.05


@dataclass(frozen=True)
class Comparison:
    """The best layout with separate encode workers, and the baselines, all with the same number of workers."""

    split: Found | None  # None if there is nothing to split
    prefill_decode: Found | None
    all_in_one: Found

    @property
    def named(self) -> dict[str, Found]:
        """The existing ones by name."""
        every = {"split": self.split, "prefill/decode": self.prefill_decode, "all in one": self.all_in_one}
        return {name: found for name, found in every.items() if found is not None}

    @property
    def best(self) -> Found:
        """The one with the highest goodput; the simplest of equal ones."""
        found = self.all_in_one
        for other in (self.prefill_decode, self.split):
            if other is not None and other.goodput > found.goodput * (1 + MARGIN):
                found = other
        return found

    @property
    def advice(self) -> str:
        """The recommendation in a sentence: on disaggregation, and on separate encode workers (EPDServe)."""
        one, chosen = self.all_in_one, self.best
        if not chosen.goodput:
            return "no layout keeps these targets at any rate: relax them, or use faster workers"
        if chosen is one:
            return f"do not disaggregate: {one.choice}: {one.goodput:.3g} requests/s"
        encode = "split decode off, and do not disaggregate encode" if chosen is self.prefill_decode else "disaggregate"
        beside = f"{chosen.goodput / one.goodput:.2f}x of all in one" if one.goodput else "where all in one keeps none"
        return f"{encode}: {chosen.choice}: {chosen.goodput:.3g} requests/s, {beside}"


def compare(
    problem: Problem, workers: int, base: Batching, progress: Callable[[str], None] = lambda _: None
) -> Comparison:
    """The best of all layouts with ``workers`` workers over all batch sizes, and the baselines with their best ones."""
    one, pairs = all_in_one(workers, images=problem.images), prefill_decode(workers, images=problem.images)
    known = {one, *pairs}
    others = [layout for layout in layouts(workers, images=problem.images) if layout not in known]

    def found(some: Sequence[Layout]) -> Found | None:
        return best(problem, choices(problem, some, base), progress) if some else None

    whole = found([one])
    assert whole is not None
    return Comparison(found(others), found(pairs), whole)
