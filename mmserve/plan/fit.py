"""Non-negative least squares, and the residuals of the fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from mmserve.errors import ConfigError
from mmserve.plan.costs import Curve


@dataclass(frozen=True)
class Sample:
    """A measured pass: the sums ``x`` and ``y`` of ``Curve``, and its seconds."""

    x: float
    y: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A curve, and its residuals relative to the measured seconds: root mean square, and maximum."""

    curve: Curve
    rms: float
    worst: float
    samples: int

    @property
    def quality(self) -> dict[str, float]:
        """The residuals for a report."""
        return {"rms": round(self.rms, 4), "worst": round(self.worst, 4), "samples": float(self.samples)}


def fit(samples: Sequence[Sample]) -> Fit:
    """The curve that minimizes the squared relative errors on ``samples``, so that short and long passes count equally.

    Exact for three coefficients: the least squares solution for every subset of them is computed, and the best one
    without negative coefficients is returned. Raises ``ConfigError`` without samples.
    """
    if not samples:
        raise ConfigError("no pass was measured: nothing to fit")
    seconds = np.array([s.seconds for s in samples])
    weights = 1.0 / np.maximum(seconds, 1e-9)
    columns = np.array([[1.0, s.x, s.y] for s in samples]) * weights[:, None]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
    best, error = np.zeros(3), float(len(samples))
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            used = list(chosen)
            solved, *_ = np.linalg.lstsq(columns[:, used] / scale[used], np.ones(len(samples)), rcond=1e-9)
            if (solved < 0).any():
                continue
            off = float(((columns[:, used] / scale[used] @ solved - 1.0) ** 2).sum())
            if off < error * (1 - 1e-9):
                best, error = np.zeros(3), off
                best[used] = solved / scale[used]
    off_each = np.abs(columns @ best - 1.0)
    return Fit(
        Curve(*(float(value) for value in best)),
        float(np.sqrt(np.mean(off_each**2))),
        float(off_each.max()),
        len(samples),
    )
