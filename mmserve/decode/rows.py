"""Which positions each request of a batch runs next, by its recompute policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmserve.decode.forward import Watch
from mmserve.decode.recompute.base import is_watching
from mmserve.decode.runner import Runner
from mmserve.decode.state import Decoding


def rows_of(running: Sequence[Decoding], runner: Runner) -> list[np.ndarray]:
    """Positions (int64, ascending) that each request runs next; measures changes first for policies that need them.

    Stored until the request has its candidates: a failed pass may already have written K/V.
    """
    undecided = [d for d in running if d.rows is None]
    watching = [
        (d, Watch(d.canvas, d.prefilled.pages, d.prefilled.embeddings, positions, d.prefilled.adapter))
        for d in undecided
        if is_watching(d.recompute) and len(positions := d.recompute.watched(d.canvas))
    ]
    if watching:
        changes = runner.changes([watch for _d, watch in watching])
        for (d, _watch), moved in zip(watching, changes, strict=True):
            assert is_watching(d.recompute)
            d.rows = d.recompute.rows(d.canvas, moved)
    for d in undecided:
        if d.rows is None:
            d.rows = d.recompute.rows(d.canvas)
    return [d.rows for d in running if d.rows is not None]


def count_next_rows(d: Decoding) -> int | None:
    """The number of positions of the next pass, without drafts; None if it depends on changes not measured yet."""
    if is_watching(d.recompute):
        return None
    d.rows = d.recompute.rows(d.canvas)
    return len(d.rows) * d.request.sequences
