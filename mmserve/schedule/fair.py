"""Fair queueing between tenants: the order in which queued requests are served, over plain state.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each tenant has a virtual time, which advances by the
cost of each of its served requests, divided by its share; the tenant with the lowest virtual time is served next. The
queue's virtual time is that of the last served request. A tenant without queued requests restarts there: it accumulates
neither credit nor debt. So while two tenants have queued requests, they are served in the ratio of their shares, up to
the cost of one request each. Lower priority classes are served before higher ones; the order within a tenant is the
given one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from mmserve.core.plan import Entry, Served
from mmserve.core.tenant import Tenant

#: Seconds of waiting after which a request moves up one priority class, which prevents starvation.
AGING_SECONDS = 10.0


def fair_order(entries: Sequence[Entry], costs: Sequence[float], served: Served) -> list[int]:
    """Indices of ``entries`` in serving order, for a queue with the state ``served``.

    ``costs``: of each entry, in any unit, non-negative. Entries of one tenant keep their order, and so do tenants that
    are equal in everything else.
    """
    if len({e.tenant for e in entries}) < 2:
        return list(range(len(entries)))
    waiting: dict[str, list[int]] = {}
    for i in reversed(range(len(entries))):
        waiting.setdefault(entries[i].tenant, []).append(i)
    start = {tenant: served.start(tenant) for tenant in waiting}
    heads = [(entries[own[-1]].priority, start[tenant], own[-1]) for tenant, own in waiting.items()]
    heapq.heapify(heads)
    order: list[int] = []
    while heads:
        _priority, begun, i = heapq.heappop(heads)
        order.append(i)
        own = waiting[entries[i].tenant]
        own.pop()
        if own:
            heapq.heappush(heads, (entries[own[-1]].priority, begun + costs[i] / entries[i].share, own[-1]))
    return order


def charged(served: Served, taken: Sequence[tuple[Entry, float]]) -> Served:
    """``served`` updated for the entries ``taken``, each with its cost, in the order of ``fair_order``."""
    if not any(entry.tenant for entry, _cost in taken):
        return served  # no tenant is named: there is only one, or none was served
    time, tenants = served.time, dict(served.tenants)
    for entry, cost in taken:
        time = max(time, tenants.get(entry.tenant, 0.0))
        tenants[entry.tenant] = time + cost / entry.share
    return Served(time, {tenant: end for tenant, end in tenants.items() if end > time})


def aged(priority: int, waited: float) -> int:
    """The effective class of a request of class ``priority`` that arrived ``waited`` seconds ago."""
    return max(0, priority - int(waited / AGING_SECONDS)) if priority > 0 else 0


def guaranteed(places: int, tenant: Tenant, waiting: Iterable[Tenant]) -> int:
    """The number of a queue's ``places`` reserved for ``tenant`` while the tenants ``waiting`` have requests in it.

    A single tenant gets all of them; every tenant gets at least one.
    """
    shares = {other.name: other.share for other in waiting} | {tenant.name: tenant.share}
    return max(1, int(places * (tenant.share / sum(shares.values()))))  # the share of a single tenant is exactly 1
