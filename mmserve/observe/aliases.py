"""Aliases of metrics under other prefixes, for dashboards made for another server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from mmserve.observe.inventory import PREFIX, Unasked

#: Metric families with the same meaning in vLLM; of the prefix cache only ratios agree, as pages are counted here.
SHARED = frozenset(
    {
        "e2e_request_latency_seconds",
        "generation_tokens",
        "inter_token_latency_seconds",
        "kv_cache_usage_perc",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_prefill_time_seconds",
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success",
        "request_time_per_output_token_seconds",
        "time_to_first_token_seconds",
    }
)


def also_under(registry: CollectorRegistry, prefixes: Sequence[str]) -> CollectorRegistry:
    """The registry to serve: ``registry``, with the ``SHARED`` families repeated under each of ``prefixes``."""
    if not prefixes:
        return registry
    served = CollectorRegistry()
    served.register(_Aliased(registry, prefixes))
    return served


class _Aliased(Unasked):
    def __init__(self, registry: CollectorRegistry, prefixes: Sequence[str]) -> None:
        self._registry, self._prefixes = registry, prefixes

    def collect(self) -> Iterator[Metric]:
        """Each family, followed by its aliases."""
        for family in self._registry.collect():
            yield family
            if family.name.removeprefix(PREFIX) in SHARED:
                yield from (_renamed(family, prefix) for prefix in self._prefixes)


def _renamed(family: Metric, prefix: str) -> Metric:
    alias = Metric(prefix + family.name.removeprefix(PREFIX), family.documentation, family.type, family.unit)
    alias.samples = [sample._replace(name=prefix + sample.name.removeprefix(PREFIX)) for sample in family.samples]
    return alias
