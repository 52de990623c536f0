"""Counters of tenants, labelled only with names from the configuration, and of video sessions."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mmserve.core.events import Finished
from mmserve.observe.inventory import PREFIX


class TenantMetrics:
    """Counters of each tenant, and of calls rejected without a tenant; registered always, used if there are tenants."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        self._ended = counter("tenant_requests", "Generate requests that ended, by status", "tenant", "code")
        self._tokens = counter("tenant_tokens", "Tokens of prompts and of answers", "tenant", "kind")
        self._limited = counter("tenant_limited", "Calls refused for a tenant's own limit", "tenant", "limit")
        self._refused = counter("authentication_failures", "Calls without an accepted token", "reason")

    def ended(self, tenant: str, code: str) -> None:
        """Count a request by ``code``, the name of its gRPC status."""
        if tenant:
            self._ended.labels(tenant, code).inc()

    def finished(self, tenant: str, event: Finished) -> None:
        """Count the prompt and completion tokens of a finished sample."""
        if tenant:
            self._tokens.labels(tenant, "prompt").inc(event.usage.prompt_tokens)
            self._tokens.labels(tenant, "generation").inc(event.usage.completion_tokens)

    def limited(self, tenant: str, limit: str) -> None:
        """Count a call rejected by ``limit``: "rate" or "concurrency"."""
        self._limited.labels(tenant, limit).inc()

    def refused(self, reason: str) -> None:
        """Count a call rejected because its token is "missing" or "unknown" (``reason``)."""
        self._refused.labels(reason).inc()


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class SessionMetrics:
    """Counters of all video sessions of a server, and the number of open ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sessions = Gauge(PREFIX + "video_sessions", "Sessions, with and without a connection", registry=registry)
        self._frames = Counter(PREFIX + "video_frames", "Frames by outcome", ("result",), registry=registry)
        self._failed = Counter(PREFIX + "video_push_failures", "Pushes that failed", ("code",), registry=registry)
        self._resumes = Counter(PREFIX + "video_resumes", "Sessions that were resumed", registry=registry)
        self._alerts = Counter(PREFIX + "video_alerts", "Alerts of standing questions", registry=registry)
        self._ready = Histogram(
            PREFIX + "video_frame_ready_seconds",
            "From when a push was received to when its frame could be seen",
            buckets=_SECONDS,
            registry=registry,
        )

    def taken(self, ready: float) -> None:
        """Count a frame that was processed ``ready`` seconds after it was received."""
        self._frames.labels("taken").inc()
        self._ready.observe(ready)

    def dropped(self, count: int) -> None:
        """Count ``count`` frames dropped by an overload policy."""
        self._frames.labels("dropped").inc(count)

    def push_failed(self, code: str) -> None:
        """Count a push that failed with the error code ``code``."""
        self._failed.labels(code).inc()

    def resumed(self) -> None:
        """Count a resumed session."""
        self._resumes.inc()

    def alerted(self) -> None:
        """Count an alert of a watch."""
        self._alerts.inc()
