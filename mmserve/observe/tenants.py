"""What tenants ask for and are refused, as Prometheus metrics: labels are names of the configuration, and no others."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from mmserve.core.events import Finished

_PREFIX = "mmserve:"


class TenantMetrics:
    """Counters for each tenant, and of calls that are no tenant's; a server without tenants counts nothing here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        self._ended = counter("tenant_requests", "Generate requests that ended, by status", "tenant", "code")
        self._tokens = counter("tenant_tokens", "Tokens of prompts and of answers", "tenant", "kind")
        self._limited = counter("tenant_limited", "Calls refused for a tenant's own limit", "tenant", "limit")
        self._refused = counter("authentication_failures", "Calls without an accepted token", "reason")

    def ended(self, tenant: str, code: str) -> None:
        """Count a request by the name of its gRPC status."""
        if tenant:
            self._ended.labels(tenant, code).inc()

    def finished(self, tenant: str, event: Finished) -> None:
        """Count the tokens of a sample."""
        if tenant:
            self._tokens.labels(tenant, "prompt").inc(event.usage.prompt_tokens)
            self._tokens.labels(tenant, "generation").inc(event.usage.completion_tokens)

    def limited(self, tenant: str, limit: str) -> None:
        """Count a call that is over ``limit``: "rate" or "concurrency"."""
        self._limited.labels(tenant, limit).inc()

    def refused(self, reason: str) -> None:
        """Count a call whose token is "missing" or "unknown"."""
        self._refused.labels(reason).inc()
