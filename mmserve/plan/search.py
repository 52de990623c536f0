"""Search for the layout and batch sizes with the highest goodput.

Goodput as in DistServe (arXiv 2401.09670): the maximum rate at which a share of requests, 90% by default, meets both
targets, found by bisection; here with the same requests at every rate, with scaled arrival times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from mmserve.plan.costs import Costs
from mmserve.plan.layout import Batching, Layout
from mmserve.plan.outcome import Outcome, Served
from mmserve.plan.simulate import Simulation
from mmserve.plan.workload import Kind, Targets, Workload

#: Relative precision of the rate at which bisection ends.
PRECISION = 0.02
#: Finite runs may exceed the sustainable rate of the workers by this factor.
_ABOVE = 1.5
#: Share of the workers' capacity below which a layout counts as never meeting the targets.
_LEAST = 1e-3


@dataclass(frozen=True)
class Problem:
    """A planning problem: costs, workload and targets; each run has ``requests`` requests, drawn with ``seed``."""

    costs: Costs
    workload: Workload
    targets: Targets
    requests: int = 400
    seed: int = 1
    cores: int | None = None
    loaders: int = 0

    @property
    def images(self) -> bool:
        """Whether the workload has images."""
        return self.workload.most_images > 0


@dataclass(frozen=True)
class Choice:
    """A layout and its batch sizes."""

    layout: Layout
    batching: Batching

    def __str__(self) -> str:
        b = self.batching
        shards = f", images over {b.shards} workers" if b.shards > 1 else ""
        return f"{self.layout}, encode batch {b.encode_batch}, prefill {b.prefill_tokens} tokens{shards}"


@dataclass(frozen=True)
class Found:
    """A choice and its goodput (requests a second); 0 = the targets are met at no rate."""

    choice: Choice
    goodput: float


def run(problem: Problem, choice: Choice, rate: float) -> Outcome:
    """The outcome of one simulation at ``rate`` requests a second."""
    return _simulation(problem, choice, rate).run()


def _simulation(
    problem: Problem, choice: Choice, rate: float, enough: Callable[[Served], bool] | None = None
) -> Simulation:
    asks = problem.workload.draw(problem.requests, rate, problem.seed)
    return Simulation(
        problem.costs,
        choice.layout,
        choice.batching,
        asks,
        cores=problem.cores,
        loaders=problem.loaders,
        enough=enough,
    )


def keeps(problem: Problem, choice: Choice, rate: float) -> bool:
    """Whether the required share of requests meets the targets at ``rate``; the run ends as soon as that is decided."""
    targets, count = problem.targets, problem.requests
    wanted = math.ceil(targets.share * count - 1e-9)
    seen = {True: 0, False: 0}

    def known(one: Served) -> bool:
        seen[one.meets(targets)] += 1
        return seen[True] >= wanted or seen[False] > count - wanted

    _simulation(problem, choice, rate, known).run()
    return seen[True] >= wanted


def capacity(problem: Problem, choice: Choice) -> float:
    """Upper bound of the sustainable rate (requests a second), from the capacity of each stage and of combined stages.

    With full batches, regardless of targets; infinite if all costs are zero.
    """
    costs, workload, b = problem.costs, problem.workload, choice.batching
    seconds = {"e": 0.0, "p": 0.0, "d": 0.0}
    for kind, share in zip(workload.kinds, workload.shares, strict=True):
        for stage, each in _work(costs, kind, b, bool(problem.loaders)).items():
            seconds[stage] += share * each
    stages = [s for s in "epd" if seconds[s] > 0]
    bounds = [
        choice.layout.having("".join(some)) / sum(seconds[s] for s in some)
        for count in range(1, len(stages) + 1)
        for some in combinations(stages, count)
    ]
    if problem.cores is not None and stages:
        bounds.append(problem.cores / sum(seconds.values()))
    return min(bounds, default=float("inf"))


def _work(costs: Costs, kind: Kind, b: Batching, loaded: bool) -> dict[str, float]:
    """Minimum seconds of a request on the workers of each stage."""
    images = costs.encode_seconds([kind.patches] * kind.images) - costs.encode.a
    encode = images + costs.encode.a * kind.images / max(b.encode_batch, kind.images) if kind.images else 0.0
    load = 0.0 if loaded or not kind.images else costs.load(kind.images * kind.megapixels) - costs.load.a
    new = kind.prefilled
    prefill = costs.prefill_seconds([(0, new)]) - costs.prefill.a * (1 - new / max(new, b.prefill_tokens))
    rows = kind.step_rows
    together = min(b.max_running, max(1, b.decode_tokens // max(1, rows)))
    context = kind.prompt + kind.output_tokens if not kind.rows else kind.prompt
    step = costs.decode_seconds(context, rows) - costs.decode.a * (1 - 1 / together)
    return {"e": encode + load, "p": prefill, "d": kind.passes * step}


def goodput(problem: Problem, choice: Choice) -> float:
    """The highest rate that ``keeps`` the targets, up to ``PRECISION`` (requests a second); 0 = none."""
    high = _ABOVE * min(capacity(problem, choice), 1e9)
    low = high * _LEAST
    if not keeps(problem, choice, low):
        return 0.0
    if keeps(problem, choice, high):
        return high
    while high > low * (1 + PRECISION):
        middle = (low * high) ** 0.5
        if keeps(problem, choice, middle):
            low = middle
        else:
            high = middle
    return low


def choices(problem: Problem, all_layouts: Iterable[Layout], base: Batching) -> list[Choice]:
    """Each layout with all batch sizes that can affect it: for encode the images of one request or the maximum of
    ``base``; for prefill one longest prompt or the maximum of ``base``; images together or one a worker."""
    images, made = problem.workload.most_images, list[Choice]()
    prefill = sorted({_longest(problem.workload), base.prefill_tokens})
    for layout in all_layouts:
        encoders = sum(count for role, count in layout.counts if role == "e")
        for shards in sorted({1, max(1, min(images, encoders))}):
            encode = sorted({max(1, -(-images // shards)), base.encode_batch}) if images else [base.encode_batch]
            made += [
                Choice(layout, replace(base, encode_batch=e, prefill_tokens=p, shards=shards))
                for e in encode
                for p in prefill
            ]
    return made


def _longest(workload: Workload) -> int:
    """Positions of the longest prompt: a prefill budget for one such prompt at a time."""
    return max(kind.prompt for kind in workload.kinds)


def best(problem: Problem, candidates: Sequence[Choice], progress: Callable[[str], None] = lambda _: None) -> Found:
    """The choice with the highest goodput; of equal ones the first, by descending capacity.

    A candidate that does not meet the targets slightly above the best rate so far is discarded after that single
    run.
    """
    if not candidates:
        raise ValueError("no candidates")
    ordered = sorted(candidates, key=lambda choice: -capacity(problem, choice))
    found = Found(ordered[0], 0.0)
    for choice in ordered:
        bar = found.goodput * (1 + PRECISION)
        if bar and (_ABOVE * capacity(problem, choice) <= bar or not keeps(problem, choice, bar)):
            continue
        rate = goodput(problem, choice)
        if rate > found.goodput:
            found = Found(choice, rate)
            progress(f"{choice}: {rate:.3g} requests/s")
    return found
