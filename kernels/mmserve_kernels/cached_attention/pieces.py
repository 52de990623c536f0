"""Which rows of a batch are attended to in one call, and what each of them sees: plain integers, before any tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Rows that are attended to together where rows see different numbers of positions. Of a long causal prompt, a piece
#: reads no further than its last row sees; with fewer rows the matrix products are slower than what that spares.
ROWS = 64
#: ``sight`` of rows that all see the whole width, and of rows whose limits have to be looked up.
ALL, LOOKED_UP = -1, -2


class Piece(NamedTuple):
    """``rows`` of one request, one after another, over its first ``width`` positions.

    ``sight``: how many positions the first row sees, where each of the others sees one more than the row before it;
    else ``ALL`` or ``LOOKED_UP``.
    """

    request: int
    rows: int
    width: int
    sight: int

    @property
    def reach(self) -> int:
        """How many positions the first row sees; 0 where that has to be looked up."""
        return 0 if self.sight == LOOKED_UP else self.width if self.sight == ALL else self.sight


def pieces(
    row_counts: Sequence[int], kv_lengths: Sequence[int], limits: np.ndarray | None, *, known: bool = True
) -> tuple[Piece, ...]:
    """The pieces of a batch, in the order of its rows. Of requests without rows there are none.

    ``limits``: int64 ``[T]``, how many positions each row sees, None = all of its request; not ``known``: there are
    some, and they are looked up. How a request is cut depends on its own rows only. One without limits, or of at most
    ``ROWS`` rows, is one piece over all of its positions: sums over another number of keys come out with other last
    bits, so a row's do not depend on how far the request's other rows see. Of more rows with limits they do: whoever
    needs the same bits of those cuts requests by position, as a store does at the ends of pages.
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
        return [Piece(request, len(limits), length, _sight(limits, length))]
    limits = np.minimum(limits, length)
    if (limits == limits[0]).all():
        return [Piece(request, len(limits), int(limits[0]), ALL)]
    parts = np.split(limits, range(ROWS, len(limits), ROWS))
    widths = [int(part.max()) for part in parts]
    return [Piece(request, len(p), width, _sight(p, width)) for p, width in zip(parts, widths, strict=True)]


def _sight(limits: np.ndarray, width: int) -> int:
    first, last = int(limits[0]), int(limits[-1])
    if last - first == len(limits) - 1 and (len(limits) > 1 or first < width) and (np.diff(limits) == 1).all():
        return first
    return ALL if last == width and (limits == width).all() else LOOKED_UP


def triangle(of: Sequence[Piece]) -> tuple[int, int, int]:
    """Size of the mask whose views are those of all pieces with a ``sight``: rows, positions that all rows see, and
    columns after those. No rows: there is no such piece."""
    own = [piece for piece in of if piece.sight >= 0]
    if not own:
        return 0, 0, 0
    return max(p.rows for p in own), max(p.sight for p in own), max(p.width - p.sight for p in own)
