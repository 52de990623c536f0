"""Positions of a prompt's rows on several axes (M-RoPE, arXiv 2409.12191).

A row of text has the same position on all axes. Visual tokens without text in between share their first position, and
advance from there in time, by rows and by columns; the next piece starts after the last row or column, whichever is
larger. Time is not counted for that, as in ``get_rope_index`` of transformers 5; an answer continues after the last
row, as in its ``generate``, regardless of the latest time.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def axis_places(visual_R: Tensor, coordinates_An: Tensor) -> Tensor:
    """Positions of a picture's rows relative to its start, int64 ``[axes, R + 1]``; the last is the start of the next
    piece.

    ``visual_R`` (bool): which rows are visual tokens, ``coordinates_An`` (int64): for each of these, its offset in
    time, row and column from the first one of its group without text in between.
    """
    places = torch.zeros(len(coordinates_An), len(visual_R) + 1, dtype=torch.int64)
    edges = [0, *(visual_R.diff().nonzero().flatten() + 1).tolist(), len(visual_R)]
    start = seen = 0
    for first, end in pairwise(edges):
        if visual_R[first:end].any():
            own = coordinates_An[:, seen : seen + end - first]
            seen += end - first
            places[:, first:end] = start + own
            start += int(own[1:].max()) + 1
        else:
            places[:, first:end] = start + torch.arange(end - first)
            start += end - first
    places[:, -1] = start
    return places
