"""Arrivals of an open-loop load: drawn ahead, the same from the same seed, and of the rate that was asked for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.bench.serve_mix import arrival_times, kinds


@given(st.floats(0.1, 50), st.floats(0.1, 20), st.integers(0, 99), st.integers(1, 9))
def test_times_are_drawn_ahead(rate: float, seconds: float, seed: int, burst: int) -> None:
    found = arrival_times(rate, seconds, seed=seed, burst=burst)
    assert found == arrival_times(rate, seconds, seed=seed, burst=burst)
    assert found == sorted(found) and all(0 < t < seconds for t in found)
    assert all(count == burst for count in Counter(found).values())
    longer = arrival_times(rate, 2 * seconds, seed=seed, burst=burst)
    assert longer[: len(found)] == found, "a longer load begins as a shorter one"


@pytest.mark.parametrize("burst", [1, 8])
def test_arrivals_are_poisson(burst: int) -> None:
    """Their number has the mean of the rate and, but for bursts, its variance; so have the gaps."""
    counts = np.array([len(arrival_times(5, 40, seed=seed, burst=burst)) for seed in range(400)])
    assert counts.mean() == pytest.approx(200, rel=0.03)
    assert counts.var() == pytest.approx(200 * burst, rel=0.25)
    gaps = np.diff(arrival_times(5, 4000, seed=1, burst=burst)[::burst])
    assert gaps.mean() == pytest.approx(burst / 5, rel=0.05) and gaps.std() == pytest.approx(gaps.mean(), rel=0.05)


@pytest.mark.parametrize(("rate", "seconds", "burst"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (float("nan"), 1, 1)])
def test_what_cannot_be_drawn(rate: float, seconds: float, burst: int) -> None:
    with pytest.raises(ValueError, match="no arrivals"):
        arrival_times(rate, seconds, seed=0, burst=burst)


def test_kinds_are_in_the_ratio_of_their_weights() -> None:
    found = Counter(kinds(8000, {"text": 3, "image": 1, "video": 0}, seed=4))
    assert set(found) == {"text", "image"} and found["text"] == pytest.approx(6000, rel=0.03)
    assert kinds(50, {"text": 1, "image": 1}, seed=4) == kinds(80, {"text": 1, "image": 1}, seed=4)[:50]
    for wrong in ({}, {"text": 0.0}, {"text": -1.0, "image": 2.0}):
        with pytest.raises(ValueError, match="no mix"):
            kinds(1, wrong, seed=0)
