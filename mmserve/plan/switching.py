"""Role switching in a simulation: the rule of ``cluster/switching.py``, with the inputs of a real coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmserve.cluster.config import LETTERS, ClusterSettings
from mmserve.cluster.switching import Demand, Switching
from mmserve.plan.workers import Pass, Queues, Worker

#: Seconds between two measurements of the stages' load.
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class RoleSwitching:
    """``every``: minimum seconds between two changes; ``pause``: seconds for which a changing worker is idle."""

    every: float = ClusterSettings().decide_seconds
    pause: float = 0.1


class Coordinator:
    """The measurements of a coordinator: requests at each stage, and their mean service time."""

    def __init__(self, rule: RoleSwitching) -> None:
        self._switching = Switching(rule.every)
        self._took = dict.fromkeys(LETTERS, (0, 0.0))  # by letter: number and total seconds of finished requests

    def ran(self, batch: Pass) -> None:
        """Record a finished pass, in which some requests complete their stage."""
        done = [("e", part.job, part.job.parts_left <= 1) for part in batch.parts]
        done += [("p", job, job.done + new >= job.ask.kind.prefilled) for job, new in batch.prefills]
        done += [("d", job, job.steps_left == 1) for job in batch.steps]
        for stage, job, leaves in done:
            job.took[stage] += batch.seconds
            if leaves:
                count, whole = self._took[stage]
                self._took[stage] = count + 1, whole + job.took[stage]

    def due_change(self, now: float, at: dict[str, int], workers: Sequence[Worker]) -> tuple[Worker, str] | None:
        """The worker that should change, and its next role; None = no change. ``at``: number of requests at each
        stage."""
        demand = {}
        for letter, role in LETTERS.items():
            count, whole = self._took[letter]
            demand[role] = Demand(at[letter], whole / count if count else 0.0)
        roles = {
            f"{worker.number:06}": (
                frozenset(LETTERS[letter] for letter in worker.next_role or worker.role),
                worker.live + worker.coming,
            )
            for worker in workers
        }
        change = self._switching.due_change(now, demand, roles)
        return None if change is None else (workers[int(change.name)], change.given_to[0])


def requests_at(queues: Queues, workers: Sequence[Worker], live: int) -> dict[str, int]:
    """The number of the ``live`` requests at each stage: those not in or queued for prefill or decode are at encode."""
    encoded = queues.prefills_under_way + len(queues.prefills) + sum(len(worker.prefills) for worker in workers)
    decoding = sum(len(worker.running) + len(worker.waiting) + worker.coming + worker.stepping for worker in workers)
    return {"e": max(0, live - encoded - decoding), "p": encoded, "d": decoding}
