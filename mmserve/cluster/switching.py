"""Role switching of workers: a pure decision based on the demand of each stage.

The method is EPDServe's (arXiv 2501.05460): the demand of each stage is estimated continuously, and every few seconds
the stage with the highest demand takes a worker from the one with the lowest, which keeps at least one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmserve.core.handover import ROLES

#: Required ratio of the demands per worker of the receiving and giving stage, after the switch,
RATIO = 1.5
#: required demand of the receiving stage (seconds),
LEAST_SECONDS = 0.5
#: and number of consecutive checks for which both must hold.
CHECKS = 2


@dataclass(frozen=True)
class Demand:
    """The demand of a stage: ``requests`` that wait or run, each for ``seconds`` of one worker."""

    requests: int
    seconds: float

    @property
    def total(self) -> float:
        """Total seconds of one worker."""
        return self.requests * self.seconds


@dataclass(frozen=True)
class Switch:
    """Move the worker ``name`` from one stage to another."""

    name: str
    taken_from: str
    given_to: str


@dataclass
class Switching:
    """Decides at most once every ``every`` seconds; ``due_change`` is to be called about once a second."""

    every: float
    _move: tuple[str, str] | None = None
    _checks: int = 0
    _last: float = field(default=float("-inf"))

    def due_change(
        self, now: float, demand: Mapping[str, Demand], workers: Mapping[str, tuple[frozenset[str], int]]
    ) -> Switch | None:
        """The role switch that is due at ``now`` (seconds); None if none.

        ``workers``: roles and number of requests of each worker, by its name; workers with several roles are not
        switched.
        """
        move = _move(demand, workers)
        self._checks = self._checks + 1 if move is not None and move == self._move else 1
        self._move = move
        if move is None or self._checks < CHECKS or now - self._last < self.every:
            return None
        self._last, self._move = now, None
        donor, receiver = move
        own = [(busy, name) for name, (roles, busy) in workers.items() if roles == {donor}]
        return Switch(min(own)[1], donor, receiver)


def _move(demand: Mapping[str, Demand], workers: Mapping[str, tuple[frozenset[str], int]]) -> tuple[str, str] | None:
    """The stages from which and to which a worker should move; None if none should."""
    able = {role: sum(role in roles for roles, _busy in workers.values()) for role in ROLES}
    alone = {role: sum(roles == {role} for roles, _busy in workers.values()) for role in ROLES}
    if not all(able.values()):
        return None  # a worker is being replaced
    wait = {role: demand[role].total / able[role] for role in ROLES}
    receiver = max(ROLES, key=lambda role: wait[role])
    if wait[receiver] < LEAST_SECONDS or demand[receiver].requests <= able[receiver]:
        return None  # one more worker would be idle
    donors = [role for role in ROLES if role != receiver and able[role] > 1 and alone[role]]
    if not donors:
        return None
    later = {role: demand[role].total / (able[role] - 1) for role in donors}
    donor = min(donors, key=lambda role: later[role])
    return (donor, receiver) if wait[receiver] > RATIO * later[donor] else None
