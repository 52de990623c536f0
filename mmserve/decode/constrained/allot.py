"""How the positions of a canvas are shared among the holes of a scaffold."""

from __future__ import annotations

from collections.abc import Sequence


def allotted(least: Sequence[int], most: Sequence[int | None], room: int) -> list[int] | None:
    """Positions for each hole, ``room`` in all at most; None where not even the ``least`` fit.

    Each gets its least, and then the one that has fewest gets one more, up to its ``most`` (None: as many as there
    are).
    """
    given, left = list(least), room - sum(least)
    if left < 0:
        return None
    while left:
        short = [i for i, limit in enumerate(most) if limit is None or given[i] < limit]
        if not short:
            break
        given[min(short, key=given.__getitem__)] += 1
        left -= 1
    return given
