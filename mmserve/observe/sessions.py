"""Metrics of video sessions."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mmserve.observe.inventory import PREFIX

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class SessionMetrics:
    """Counters of all sessions of a server, and how many there are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sessions = Gauge(PREFIX + "video_sessions", "Sessions, with and without a connection", registry=registry)
        self._frames = Counter(PREFIX + "video_frames", "Frames by what became of them", ("result",), registry=registry)
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
        """Count a frame that was taken ``ready`` seconds after it was received."""
        self._frames.labels("taken").inc()
        self._ready.observe(ready)

    def dropped(self, count: int) -> None:
        """Count frames that an overload policy dropped."""
        self._frames.labels("dropped").inc(count)

    def push_failed(self, code: str) -> None:
        """Count a push that failed with an error's ``code``."""
        self._failed.labels(code).inc()

    def resumed(self) -> None:
        """Count a session that was resumed."""
        self._resumes.inc()

    def alerted(self) -> None:
        """Count an alert."""
        self._alerts.inc()
