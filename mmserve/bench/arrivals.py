"""When the requests of an open-loop load are due, and of which kind each is: drawn ahead from a seed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def arrival_times(rate: float, seconds: float, *, seed: int, burst: int = 1) -> list[float]:
    """Ascending times in ``[0, seconds)`` of a Poisson process with ``rate`` arrivals a second on average.

    ``burst``: so many requests arrive at once each time, as many times fewer. Raises ``ValueError`` for a rate or a
    length that is not above 0, or a burst below 1.
    """
    if not (rate > 0 and seconds > 0 and burst >= 1):
        raise ValueError(f"no arrivals are drawn at {rate} a second for {seconds} seconds in bursts of {burst}")
    generator = np.random.default_rng([seed, 0])
    times: list[float] = []
    now = generator.exponential(burst / rate)
    while now < seconds:
        times += [float(now)] * burst
        now += generator.exponential(burst / rate)
    return times


def kinds(count: int, weights: Mapping[str, float], *, seed: int) -> list[str]:
    """Which kind each of ``count`` requests is of, in the ratio of ``weights``; it does not depend on the rate.

    Raises ``ValueError`` where no weight is above 0, or one is below.
    """
    shares = np.array(list(weights.values()), dtype=float)
    if not len(shares) or (shares < 0).any() or not shares.sum() > 0:
        raise ValueError(f"no mix of requests: {dict(weights)}")
    drawn = np.random.default_rng([seed, 1]).choice(len(shares), size=count, p=shares / shares.sum())
    names = list(weights)
    return [names[int(i)] for i in drawn]
