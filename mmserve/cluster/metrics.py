"""What a fleet is made of now, and what has become of its workers, as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmserve.cluster.totals import CACHES
from mmserve.core.handover import ROLES
from mmserve.core.stats import Stats
from mmserve.observe.inventory import PREFIX

if TYPE_CHECKING:
    from mmserve.cluster.fleet import Fleet


class FleetMetrics(Collector):
    """Those of one fleet, read when they are asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names are known without asking."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One family after another."""
        fleet = self._fleet
        serving = [member for member in fleet.members if member.described is not None]
        roles = Counter(role for member in serving for role in member.roles)
        workers = GaugeMetricFamily(PREFIX + "cluster_workers", "Workers that run a stage", labels=("role",))
        for role in ROLES:
            workers.add_metric((role,), roles[role])
        yield workers
        for name, text, value in (
            ("cluster_workers_missing", "Workers that are being replaced", len(fleet.members) - len(serving)),
            (
                "cluster_workers_drained",
                "Workers that get no work because they are slow",
                sum(m.drained for m in serving),
            ),
            ("cluster_spares_ready", "Workers with their models loaded that wait for a role", fleet.spares_ready),
            ("cluster_head_up", "Whether Ray's head answers: without it no worker can be started", not fleet.head_lost),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=float(value))
        for name, text, count in (
            ("cluster_workers_lost", "Workers that ended, or were given up", fleet.lost),
            (
                "cluster_role_switches",
                "Workers that were given another role",
                sum(each.switches for each in fleet.coordinators.values()),
            ),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=count)
        yield from _of_caches(fleet)


def _of_caches(fleet: Fleet) -> Iterator[Metric]:
    """What each worker keeps: by its name, and by cache; all models of a worker share these caches."""
    found: dict[str, Stats] = {}
    for coordinator in list(fleet.coordinators.values()):
        found |= coordinator.stats_of_workers()
    for kind, name, text, value in (
        (CounterMetricFamily, "queries", "Values that were looked for in a worker's cache", lambda c: c.lookups),
        (CounterMetricFamily, "hits", "Those of them that were found", lambda c: c.found),
        (GaugeMetricFamily, "bytes", "Bytes of values in a worker's memory", lambda c: c.used_bytes),
    ):
        family = kind(PREFIX + f"cluster_worker_cache_{name}", text, labels=("worker", "cache"))
        for worker, stats in sorted(found.items()):
            for cache in CACHES:
                family.add_metric((worker, cache.removesuffix("_cache")), value(getattr(stats, cache)))
        yield family
