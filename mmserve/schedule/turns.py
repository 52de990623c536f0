"""Fair queueing of decode steps between the requests of a tenant, over plain state.

A virtual clock as in start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with work counted in rows of a
forward pass: the next step of a request is due after as many units as its step has rows, times its ``pace``. So a
request with 900 rows a step waits until each of the others of its pace has run 900 rows. The clock is at the latest
request of the last batch; in addition, it advances by a batch's rows divided by the number of live requests (each
weighted by the inverse of its pace), so that new requests, which start at the clock, cannot starve those due later.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.core.plan import Entry
from mmserve.core.request import RequestId, Stage

#: Number of rows that shorter requests may run during a long pass, for each of its rows. 4 suffices for a client of
#: short requests while passes of 900 rows run on a CPU; less does not.
_WITHIN = 4


def advanced(now: float, taken: Sequence[tuple[Entry, int]], live: float) -> tuple[float, dict[RequestId, float]]:
    """The clock after the batch ``taken`` (entries with their rows), and the next due time of each of its requests.

    ``live``: number of requests in decode, at least those taken, each weighted by the inverse of its pace. Requests of
    one batch start at the same time: one that was due later is not penalized for being included. A request's first step
    is free: its tokens were proposed by prefill.
    """
    if not taken:
        return now, {}
    start = max(now, *(entry.turn for entry, _rows in taken))
    passed = sum(rows for _entry, rows in taken) / live
    due = {entry.id: start + (0 if entry.stage is Stage.PREFILLED else rows * entry.pace) for entry, rows in taken}
    return max(start, now + passed), due


def rows_within(rows: int, most: int) -> int:
    """Number of rows that shorter requests may run during a pass of ``rows``; 0 if it is not a long pass.

    ``most``: rows that fit into a batch. A chunk of a prompt uses all of them.
    """
    return _WITHIN * rows if rows >= most else 0
