"""Fair queueing of decode steps between the requests of a tenant, over plain state.

A virtual clock after start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with work counted in rows of a
forward pass: a request is due again so many units later as its step has rows, times its ``pace``. So one of 900 rows a
step waits until each of the others of its pace has run 900 rows. The clock is at the latest request of the last batch;
it advances, in addition, by a batch's rows over the number of live requests, each counted as often as its pace is
short, so that newcomers, who begin at the clock, cannot hold up for ever those who are due later.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.core.plan import Entry
from mmserve.core.request import RequestId, Stage

#: How many rows shorter requests may run during a long pass, for each of its own. With 4 and not fewer, a client of
#: short requests does not use them up while passes of 900 rows take their time on a CPU.
_WITHIN = 4


def advanced(now: float, taken: Sequence[tuple[Entry, int]], live: float) -> tuple[float, dict[RequestId, float]]:
    """The clock after the batch ``taken``, each entry with its rows, and when each of its requests is due next.

    ``live``: requests in decode, at least those taken, each counted as one over its pace. Requests of one batch start
    at the same time: what the batch had room for is not held against the one that was due later. A request's first
    step costs nothing: its tokens were proposed by prefill.
    """
    if not taken:
        return now, {}
    start = max(now, *(entry.turn for entry, _rows in taken))
    passed = sum(rows for _entry, rows in taken) / live
    due = {entry.id: start + (0 if entry.stage is Stage.PREFILLED else rows * entry.pace) for entry, rows in taken}
    return max(start, now + passed), due


def rows_within(rows: int, most: int) -> int:
    """How many rows shorter requests may run during a pass of ``rows``; none if it is no long one.

    ``most``: rows that fit into a batch. A chunk of a prompt takes all of them.
    """
    return _WITHIN * rows if rows >= most else 0
