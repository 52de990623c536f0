"""Layouts of equally many workers beside each other, and what follows: disaggregate, or do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmserve.plan.layout import Batching, Layout, all_in_one, layouts, prefill_decode
from mmserve.plan.search import Found, Problem, best, choices

#: A split must be better by this share to be advised: below it, a difference may be the draw of arrivals.
MARGIN = 0.05


@dataclass(frozen=True)
class Comparison:
    """Layouts of equally many workers: the best that splits encode off, and the baselines."""

    split: Found | None  # None where there is nothing to split
    prefill_decode: Found | None
    all_in_one: Found

    @property
    def named(self) -> dict[str, Found]:
        """Those that there are, by name."""
        every = {"split": self.split, "prefill/decode": self.prefill_decode, "all in one": self.all_in_one}
        return {name: found for name, found in every.items() if found is not None}

    @property
    def best(self) -> Found:
        """The highest goodput; of equal ones the simplest."""
        found = self.all_in_one
        for other in (self.prefill_decode, self.split):
            if other is not None and other.goodput > found.goodput * (1 + MARGIN):
                found = other
        return found

    @property
    def advice(self) -> str:
        """What to do, in a sentence: of splits, and of encode, which is the one that EPDServe adds."""
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
    """The best of every layout of ``workers``, with every batch size, beside the baselines with theirs."""
    one, pairs = all_in_one(workers, images=problem.images), prefill_decode(workers, images=problem.images)
    known = {one, *pairs}
    others = [layout for layout in layouts(workers, images=problem.images) if layout not in known]

    def found(some: Sequence[Layout]) -> Found | None:
        return best(problem, choices(problem, some, base), progress) if some else None

    whole = found([one])
    assert whole is not None
    return Comparison(found(others), found(pairs), whole)
