"""Earliest deadline first, within a tenant and a priority class, over plain state.

A request is due when its first token is wanted: at the target of its SLO class, at its client's deadline, or
``LATEST_SECONDS`` after it arrived, whichever is first. So every request is due some time, and those that arrive after
that cannot overtake it: none waits for ever. Between tenants shares decide (``fair.py``); an early deadline moves a
request among those of its own tenant only.

While requests decode, each has its turn again after as much virtual time as its step has rows (``turns.py``), times its
``pace``: the shorter the time a token that its class wants, the more steps it gets while not all of them fit into a
pass.
"""

from __future__ import annotations

from mmserve.core.slo import SLO

#: Seconds after its arrival at which a request is due that names no earlier time.
LATEST_SECONDS = 60.0
#: Seconds a token that requests without a target are served for: their pace is 1.
USUAL_PER_TOKEN = 0.2
#: The least pace: no class gets more than so many times the steps of a request without a target.
_LEAST_PACE = 1 / 16


def due(arrived: float, deadline: float | None, slo: SLO | None) -> float:
    """When the first token of a request is due; all times are on the monotonic clock (seconds)."""
    times = [arrived + LATEST_SECONDS]
    if deadline is not None:
        times.append(deadline)
    if slo is not None and slo.first_token_seconds:
        times.append(arrived + slo.first_token_seconds)
    return min(times)


def pace(slo: SLO | None) -> float:
    """How much of the usual virtual time passes between two turns of a request, in ``[1/16, 1]``."""
    if slo is None or not slo.per_token_seconds:
        return 1.0
    return min(1.0, max(_LEAST_PACE, slo.per_token_seconds / USUAL_PER_TOKEN))
