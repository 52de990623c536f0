"""Where the rows of a prompt stand on several axes of position (M-RoPE, arXiv 2409.12191).

A row of text stands at one place on all axes. Visual tokens without text between them share the place where they begin,
and lie from there in time, by rows and by columns; what follows stands behind their last row or column, whichever is
further. Time has no say in that, as in ``get_rope_index`` of transformers 5; an answer goes on behind the prompt's last
row, as in its ``generate``, wherever the latest time may be.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def axis_places(visual_R: Tensor, coordinates_An: Tensor) -> Tensor:
    """Places of a picture's rows, counted from where it begins, int64 ``[axes, R + 1]``: the last is what follows.

    ``visual_R`` (bool) says which rows are visual tokens, ``coordinates_An`` (int64) where each of those lies from the
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
