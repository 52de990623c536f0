"""Prometheus metrics of a fleet: its workers, and their history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mmserve.cluster.totals import CACHES
from mmserve.core.handover import ROLES
from mmserve.core.stats import Stats
from mmserve.observe.inventory import Unasked, family

if TYPE_CHECKING:
    from mmserve.cluster.fleet import Fleet


class FleetMetrics(Unasked):
    """The metrics of one fleet, computed when they are collected."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families."""
        fleet = self._fleet
        serving = [member for member in fleet.members if member.described is not None]
        roles = Counter(role for member in serving for role in member.roles)
        by_role = (((role,), roles[role]) for role in ROLES)
        yield family(GaugeMetricFamily, "cluster_workers", "Workers that run a stage", ("role",), by_role)
        missing, drained = len(fleet.members) - len(serving), sum(member.drained for member in serving)
        switches = sum(each.switches for each in fleet.coordinators.values())
        spare, head = fleet.spares_ready, not fleet.head_lost
        for kind, name, text, value in (
            (GaugeMetricFamily, "workers_missing", "Workers that are being replaced", missing),
            (GaugeMetricFamily, "workers_drained", "Workers that get no work because they are slow", drained),
            (GaugeMetricFamily, "spares_ready", "Workers with their models loaded that wait for a role", spare),
            (GaugeMetricFamily, "head_up", "Whether Ray's head answers: without it no worker can be started", head),
            (CounterMetricFamily, "workers_lost", "Workers that ended, or were given up", fleet.lost),
            (CounterMetricFamily, "role_switches", "Workers that were given another role", switches),
        ):
            yield family(kind, f"cluster_{name}", text, (), [((), float(value))])
        yield from _of_caches(fleet)


def _of_caches(fleet: Fleet) -> Iterator[Metric]:
    """The caches of each worker, by its name and by cache; all models of a worker share these caches."""
    found: dict[str, Stats] = {}
    for coordinator in list(fleet.coordinators.values()):
        found |= coordinator.stats_of_workers()
    kept = [(worker, name, getattr(stats, name)) for worker, stats in sorted(found.items()) for name in CACHES]
    for kind, name, text, value in (
        (CounterMetricFamily, "queries", "Values that were looked for in a worker's cache", lambda c: c.lookups),
        (CounterMetricFamily, "hits", "Those of them that were found", lambda c: c.found),
        (GaugeMetricFamily, "bytes", "Bytes of values in a worker's memory", lambda c: c.used_bytes),
    ):
        samples = (((worker, cache.removesuffix("_cache")), value(of)) for worker, cache, of in kept)
        yield family(kind, f"cluster_worker_cache_{name}", text, ("worker", "cache"), samples)
