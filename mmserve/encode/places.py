"""Positions of a prompt's rows on several axes (M-RoPE, arXiv 2409.12191).

A row of text has the same position on all axes. Visual tokens without text between them share their first position,
and continue from there in time, by rows and by columns; what follows comes after their last row or column, whichever is
further. Time does not count there, as in ``get_rope_index`` of transformers 5; an answer continues after the last
row, as in its ``generate``, wherever the latest time may be.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def axis_places(visual_R: Tensor, coordinates_An: Tensor) -> Tensor:
    """Places of a picture's rows, counted from where it begins, int64 ``[axes, R + 1]``: the last is what follows.

    ``visual_R`` (bool): which rows are visual tokens, ``coordinates_An`` (int64): the offset of each of those from the
    first that has no text in front of it: time, row and column.
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
