"""Fitting of temperature and bias for each kind of question, and the expected calibration error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from mmserve.core.decisions import Scaling

#: Number of equal bins of the top-1 probability, and the minimum probability that is distinguished from 0.
BINS = 15
SMALLEST = 1e-12
#: Minimum number of questions of a kind for fitting, and the range of the parameters.
FEWEST, TEMPERATURES, MOST_BIAS = 20, (0.05, 20.0), 10.0


@dataclass(frozen=True)
class ScoredQuestion:
    """One answered question: its kind, unnormalized log-probabilities of its answers, and the index of the correct
    one."""

    kind: str
    log_probabilities: tuple[float, ...]
    right: int


def fitted(judged: Sequence[ScoredQuestion]) -> dict[str, Scaling]:
    """The scaling of each kind that minimizes the log loss; only for kinds with at least ``FEWEST`` questions."""
    ordered = sorted(judged, key=lambda each: each.kind)
    kinds = {kind: list(group) for kind, group in groupby(ordered, key=lambda each: each.kind)}
    return {kind: _scaling(group) for kind, group in kinds.items() if len(group) >= FEWEST}


def calibration_error(probabilities: Iterable[Sequence[float]], right: Iterable[int], *, bins: int = BINS) -> float:
    """Expected calibration error: over ``bins`` equal bins of the top-1 probability, the absolute difference between
    its mean and the accuracy, weighted by the number of questions in the bin (arXiv 1706.04599)."""
    by_bin: dict[int, list[tuple[float, bool]]] = {}
    count = 0
    for row, index in zip(probabilities, right, strict=True):
        highest = max(row)
        by_bin.setdefault(min(bins - 1, int(highest * bins)), []).append((highest, row.index(highest) == index))
        count += 1
    distances = (abs(math.fsum(p for p, _ in held) - sum(hit for _, hit in held)) for held in by_bin.values())
    return math.fsum(distances) / count if count else 0.0


def unscaled(probabilities: Sequence[float], scaling: Scaling) -> tuple[float, ...]:
    """Unnormalized log-probabilities that ``scaling`` maps to ``probabilities``."""
    logs = [math.log(max(p, SMALLEST)) for p in probabilities]
    logs[0] -= scaling.bias
    return tuple(value * scaling.temperature for value in logs)


def _scaling(judged: Sequence[ScoredQuestion]) -> Scaling:
    counts = torch.tensor([len(each.log_probabilities) for each in judged])
    most = int(counts.max())
    padded = [[*each.log_probabilities, *[0.0] * (most - len(each.log_probabilities))] for each in judged]
    logs = torch.tensor(padded, dtype=torch.float64)
    absent = torch.arange(most) >= counts[:, None]
    right = torch.tensor([each.right for each in judged])
    numbers = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # log of the temperature, bias
    first = torch.zeros(most, dtype=torch.float64)
    first[0] = 1.0
    optimizer = torch.optim.LBFGS([numbers], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        # masked after scaling: the gradient of infinite inputs would be NaN
        scores = (logs / numbers[0].exp() + numbers[1] * first).masked_fill(absent, -math.inf)
        # regularization: with perfect accuracy the scale would otherwise diverge
        found = F.cross_entropy(scores, right) + 1e-4 * numbers.square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    logarithm, bias = numbers.detach().tolist()
    temperature = math.exp(logarithm)
    return Scaling(
        temperature=min(max(temperature, TEMPERATURES[0]), TEMPERATURES[1]),
        bias=min(max(bias, -MOST_BIAS), MOST_BIAS),
    )
