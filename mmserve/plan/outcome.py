"""Results of a simulated or measured run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmserve.bench.measures import percentile
from mmserve.plan.workload import Ask, Targets


@dataclass(frozen=True)
class Served:
    """One request: times of its arrival, first token and end (seconds)."""

    ask: Ask
    first: float
    end: float

    @property
    def ttft(self) -> float:
        """Time to first token (seconds)."""
        return self.first - self.ask.arrival

    @property
    def tpot(self) -> float:
        """Mean time per further token (seconds); 0 for an answer of one token."""
        return (self.end - self.first) / max(1, self.ask.kind.output_tokens - 1)

    def meets(self, targets: Targets) -> bool:
        """Whether both targets are met."""
        return self.ttft <= targets.ttft and self.tpot <= targets.tpot


@dataclass(frozen=True)
class Outcome:
    """Results of a run: all requests, and activity of the workers.

    ``busy``: seconds in passes, for each worker; ``switches``: time and kind (``"d>e"``) of each role change;
    ``passes``: number for each stage.
    """

    served: Sequence[Served]
    makespan: float
    busy: Sequence[float] = ()
    switches: Sequence[tuple[float, str]] = ()
    passes: dict[str, int] = field(default_factory=dict)
    moved_bytes: float = 0.0

    def attainment(self, targets: Targets) -> float:
        """The share of requests that meet both targets."""
        return sum(one.meets(targets) for one in self.served) / max(1, len(self.served))

    def percentile(self, what: str, share: float) -> float:
        """A percentile of ``ttft`` or ``tpot`` (seconds)."""
        return percentile([getattr(one, what) for one in self.served], share)

    @property
    def utilization(self) -> float:
        """Mean share of the run that workers spent in passes."""
        return sum(self.busy) / max(len(self.busy) * self.makespan, 1e-12)
