"""Positions of a stream's rows for the rotary embedding, which a model knows up to a limit only."""

from __future__ import annotations

import numpy as np

#: How positions go on: ``renumber``: rows are numbered from 0, again after every eviction; ``gaps``: they stay
#: where they are, and evicted rows leave a gap, until the model's limit comes near: then it is closed; ``reanchor``:
#: as ``gaps``, but near the limit the rows that are kept are run again from 0.
RULES = ("renumber", "gaps", "reanchor")


def after_eviction(rule: str, places: np.ndarray, first: int) -> np.ndarray:
    """Places (int64 ``[n]``) of the rows that are left of a stream, ``places`` before.

    The first ``first`` rows, sinks and carriers, are numbered from 0 under every rule.
    """
    if rule == "renumber":
        return np.arange(len(places))
    return np.concatenate([np.arange(first), places[first:]])


def next_place(places: np.ndarray) -> int:
    """Where the next row stands."""
    return int(places[-1]) + 1 if len(places) else 0


def is_full(places: np.ndarray, coming: int, limit: int) -> bool:
    """Whether ``coming`` more rows would pass ``limit`` positions, so that counting must begin anew."""
    return next_place(places) + coming > limit
