"""Children of Prometheus metrics, cached by label values: ``labels`` takes a lock at each call."""

from __future__ import annotations

from typing import Generic, TypeVar

from prometheus_client import Counter, Histogram

Metric = TypeVar("Metric", Counter, Histogram)


class Labelled(Generic[Metric]):
    """A ``metric`` with few combinations of labels."""

    def __init__(self, metric: Metric) -> None:
        self._metric: Metric = metric
        self._children: dict[tuple[str, ...], Metric] = {}

    def of(self, *labels: str) -> Metric:
        """The child with these label values."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._metric.labels(*labels)
        return child
