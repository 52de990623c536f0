"""Role switching in a simulation: the rule of ``cluster/switching.py``, given what a coordinator would know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmserve.cluster.config import LETTERS, ClusterSettings
from mmserve.cluster.switching import Demand, Switching
from mmserve.plan.workers import Pass, Queues, Worker

#: Seconds between two measurements of what each stage has to do.
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class RoleSwitching:
    """``every``: seconds between two changes at least; ``pause``: that a worker does nothing meanwhile."""

    every: float = ClusterSettings().decide_seconds
    pause: float = 0.1


class Coordinator:
    """What a coordinator knows: how many requests each stage has, and what one takes on average."""

    def __init__(self, rule: RoleSwitching) -> None:
        self._switching = Switching(rule.every)
        self._took = dict.fromkeys(LETTERS, (0, 0.0))  # by letter: requests that left, and their seconds

    def ran(self, batch: Pass) -> None:
        """A pass has run, and some of its requests leave their stage."""
        done = [("e", part.job, part.job.parts_left <= 1) for part in batch.parts]
        done += [("p", job, job.done + new >= job.ask.kind.prefilled) for job, new in batch.prefills]
        done += [("d", job, job.steps_left == 1) for job in batch.steps]
        for stage, job, leaves in done:
            job.took[stage] += batch.seconds
            if leaves:
                count, whole = self._took[stage]
                self._took[stage] = count + 1, whole + job.took[stage]

    def look(self, now: float, at: dict[str, int], workers: Sequence[Worker]) -> tuple[Worker, str] | None:
        """The worker that is to change, and its next role; ``at``: requests of each stage."""
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
        change = self._switching.look(now, demand, roles)
        return None if change is None else (workers[int(change.name)], change.given_to[0])


def requests_at(queues: Queues, workers: Sequence[Worker], live: int) -> dict[str, int]:
    """How many of the ``live`` requests are at each stage: those that encode, or wait for it, are what is left over."""
    encoded = queues.prefills_under_way + len(queues.prefills) + sum(len(worker.prefills) for worker in workers)
    decoding = sum(len(worker.running) + len(worker.waiting) + worker.coming + worker.stepping for worker in workers)
    return {"e": max(0, live - encoded - decoding), "p": encoded, "d": decoding}
