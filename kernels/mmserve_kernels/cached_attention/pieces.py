"""Splitting of a batch into groups of rows that are attended in one call, with the visibility of each; on integers
only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Maximum rows of a piece whose rows see different numbers of positions. A piece of a long causal prompt reads only the
#: positions visible to its last row; with fewer rows a piece, slower matrix products outweigh that saving.
ROWS = 64
#: ``span`` of rows that all see the whole width, and of rows whose limits are in a device tensor.
ALL, LOOKED_UP = -1, -2


class Piece(NamedTuple):
    """Consecutive ``rows`` of one request, over its first ``width`` positions.

    ``span``: number of positions visible to the first row, if each following row sees one more than the previous one;
    else ``ALL`` or ``LOOKED_UP``.
    """

    request: int
    rows: int
    width: int
    span: int

    @property
    def reach(self) -> int:
        """Number of positions visible to the first row; 0 if its limit is ``LOOKED_UP``."""
        return 0 if self.span == LOOKED_UP else self.width if self.span == ALL else self.span


def pieces(
    row_counts: Sequence[int], kv_lengths: Sequence[int], limits: np.ndarray | None, *, known: bool = True
) -> tuple[Piece, ...]:
    """The pieces of a batch, in the order of its rows. Requests without rows have no piece.

    ``limits``: int64 ``[T]``, the number of positions visible to each row, None = all of its request; ``known=False``:
    there are limits, in a device tensor. The split of a request depends on its own rows only. A request without limits,
    or with at most ``ROWS`` rows, is one piece over all of its positions: sums over another number of keys have
    different last bits, so a row's bits are independent of the other rows' limits. With more rows with limits they are
    not: callers that need equal bits must split requests by position, as a K/V store does at page boundaries.
    """
    made: list[Piece] = []
    start = 0
    for request, (rows, length) in enumerate(zip(row_counts, kv_lengths, strict=True)):
        if not rows:
            continue
        if not known:
            made.append(Piece(request, rows, length, LOOKED_UP))
        elif limits is None:
            made.append(Piece(request, rows, length, ALL))
        else:
            made += _of_request(request, limits[start : start + rows], length)
        start += rows
    return tuple(made)


def _of_request(request: int, limits: np.ndarray, length: int) -> list[Piece]:
    if len(limits) <= ROWS:
        return [Piece(request, len(limits), length, _span(limits, length))]
    limits = np.minimum(limits, length)
    if (limits == limits[0]).all():
        return [Piece(request, len(limits), int(limits[0]), ALL)]
    parts = np.split(limits, range(ROWS, len(limits), ROWS))
    widths = [int(part.max()) for part in parts]
    return [Piece(request, len(p), width, _span(p, width)) for p, width in zip(parts, widths, strict=True)]


def _span(limits: np.ndarray, width: int) -> int:
    first, last = int(limits[0]), int(limits[-1])
    if last - first == len(limits) - 1 and (len(limits) > 1 or first < width) and (np.diff(limits) == 1).all():
        return first
    return ALL if last == width and (limits == width).all() else LOOKED_UP


def triangle(of: Sequence[Piece]) -> tuple[int, int, int]:
    """Size of the mask whose views are the masks of all pieces with a ``span``: rows, columns visible to all rows, and
    further columns. Zero rows if there is no such piece."""
    own = [piece for piece in of if piece.span >= 0]
    if not own:
        return 0, 0, 0
    return max(p.rows for p in own), max(p.span for p in own), max(p.width - p.span for p in own)
