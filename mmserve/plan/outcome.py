"""What came of a simulated or measured run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmserve.plan.workload import Ask, Targets


@dataclass(frozen=True)
class Served:
    """One request: when it arrived, its first token left, and it ended (seconds)."""

    ask: Ask
    first: float
    end: float

    @property
    def ttft(self) -> float:
        """Time to first token (seconds)."""
        return self.first - self.ask.arrival

    @property
    def tpot(self) -> float:
        """Time per further token (seconds); 0 of an answer of one token."""
        return (self.end - self.first) / max(1, self.ask.kind.output_tokens - 1)

    def meets(self, targets: Targets) -> bool:
        """Whether both targets are kept."""
        return self.ttft <= targets.ttft and self.tpot <= targets.tpot


@dataclass(frozen=True)
class Outcome:
    """A run: every request, and what workers did.

    ``busy``: seconds in passes, of each worker; ``switches``: when a worker took another role, and which
    (``"d>e"``); ``passes``: of each stage.
    """

    served: Sequence[Served]
    makespan: float
    busy: Sequence[float] = ()
    switches: Sequence[tuple[float, str]] = ()
    passes: dict[str, int] = field(default_factory=dict)
    moved_bytes: float = 0.0

    def attainment(self, targets: Targets) -> float:
        """The share of requests that keep both targets."""
        return sum(one.meets(targets) for one in self.served) / max(1, len(self.served))

    def percentile(self, what: str, share: float) -> float:
        """A percentile of ``ttft`` or ``tpot`` (seconds)."""
        ordered = sorted(getattr(one, what) for one in self.served)
        return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])

    @property
    def utilization(self) -> float:
        """Share of the run that workers were in a pass, on average."""
        return sum(self.busy) / max(len(self.busy) * self.makespan, 1e-12)
