"""Earliest deadline first, within a tenant and a priority class, over plain state.

A request is due at the target of its SLO class for the first token, at its client's deadline, or ``LATEST_SECONDS``
after its arrival, whichever is first. So every request has a due time, later arrivals beyond it cannot overtake, and
there is no starvation. Between tenants, shares decide (``fair.py``); an early deadline moves a request only among those
of its own tenant.

During decode, a request's next step is scheduled after virtual time in proportion to the rows of its step
(``turns.py``), times its ``pace``: the shorter its class's target for the time per token, the more steps it gets while
not all requests fit into a pass.
"""

from __future__ import annotations

from mmserve.core.slo import SLO

#: Maximum time until a request is due, in seconds after its arrival.
LATEST_SECONDS = 60.0
#: Time per token in seconds assumed for requests without a target: their pace is 1.
USUAL_PER_TOKEN = 0.2
#: Minimum pace: bounds how many more steps a class gets than a request without a target.
_LEAST_PACE = 1 / 16


def due(arrived: float, deadline: float | None, slo: SLO | None) -> float:
    """When the first token of a request is due; all times are monotonic (seconds)."""
    times = [arrived + LATEST_SECONDS]
    if deadline is not None:
        times.append(deadline)
    if slo is not None and slo.first_token_seconds:
        times.append(arrived + slo.first_token_seconds)
    return min(times)


def pace(slo: SLO | None) -> float:
    """The factor of a request's virtual time between two steps, in ``[1/16, 1]``."""
    if slo is None or not slo.per_token_seconds:
        return 1.0
    return min(1.0, max(_LEAST_PACE, slo.per_token_seconds / USUAL_PER_TOKEN))
