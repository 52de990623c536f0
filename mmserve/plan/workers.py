"""The state of simulated workers and their queues, and the selection of a worker's next batch.

As in ``schedule/scheduler.py``: first come, first served; each batch is the longest prefix of a queue within its
budget, at least one entry, and at most an equal share of the queue while other workers are idle. Work that any worker
of a stage can do is in a shared queue; work bound to a worker that holds its K/V or embeddings is in that worker's
queue.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from mmserve.plan.costs import Costs
from mmserve.plan.layout import Batching
from mmserve.plan.workload import Ask


@dataclass(eq=False)
class Job:
    """A request in progress."""

    ask: Ask
    parts_left: int = 0  # parts of its images not yet available to prefill
    place: Worker | Queues | None = None  # counter that includes it between encode and prefill
    undecoded: bool = False  # counted between prefill and decode
    done: int = 0  # positions prefilled
    steps_left: int = 0
    first: float | None = None
    took: dict[str, float] = field(default_factory=lambda: {"e": 0.0, "p": 0.0, "d": 0.0})  # seconds of passes

    @property
    def context(self) -> int:
        """Number of positions attended to by a decode step."""
        kind = self.ask.kind
        return kind.prompt + kind.output_tokens if not kind.rows else kind.prompt + kind.passes - self.steps_left


@dataclass(eq=False)
class Part:
    """Images of one request that are encoded by one worker."""

    job: Job
    images: int


@dataclass(eq=False)
class Worker:
    """One worker: its role, its own queues, and the requests whose K/V it holds."""

    number: int
    role: str
    idle: bool = True
    prefills: deque[Job] = field(default_factory=deque)
    running: deque[Job] = field(default_factory=deque)  # ready for their next step
    waiting: deque[Job] = field(default_factory=deque)  # for a decode slot
    live: int = 0  # requests with K/V here
    coming: int = 0  # in transfer to this worker
    stepping: int = 0  # in the current pass
    encoded: int = 0  # being encoded here, or waiting here for prefill
    link_free: float = 0.0
    busy: float = 0.0
    next_role: str = ""  # role to change to as soon as possible


@dataclass(frozen=True)
class Pass:
    """The batch of one pass of a worker, and its cost (seconds)."""

    parts: tuple[Part, ...]
    prefills: tuple[tuple[Job, int], ...]  # with the positions to run
    steps: tuple[Job, ...]
    seconds: float


class Queues:
    """Shared queues of the stages, and numbers of requests between two stages."""

    def __init__(self, costs: Costs, batching: Batching) -> None:
        self.costs, self.batching = costs, batching
        self.parts: deque[Part] = deque()
        self.prefills: deque[Job] = deque()
        self.prefills_under_way = 0
        self.encoded = 0  # encoded or in encode, on a worker without prefill
        self.undecoded = 0  # prefilled or in prefill, on a worker without decode
        self.count = {"p": 0, "d": 0}  # workers that run these stages
        self.idle = {"e": 1, "p": 1}  # of them, and of encode workers, those without a pass

    def any_for(self, worker: Worker) -> bool:
        """Whether there is queued work for ``worker``, regardless of capacity between stages."""
        role = worker.role
        waits = bool(worker.running) or ("e" in role and bool(self.parts))
        return waits or ("p" in role and bool(worker.prefills or self.prefills))

    def take(self, worker: Worker) -> Pass | None:
        """The next pass of an idle worker; None = there is no work.

        Later stages come first: a worker with several stages runs decode steps together with encoded prompts, and
        encodes if there are none, so that no prompt waits for the images of another.
        """
        prefills = self._prefills(worker) if "p" in worker.role else ()
        parts = self._parts(worker) if "e" in worker.role and not prefills else ()
        steps = self._steps(worker) if "d" in worker.role else ()
        costs, seconds = self.costs, 0.0
        if parts:
            sizes = [part.job.ask.kind.patches for part in parts for _ in range(part.images)]
            seconds += costs.encode_seconds(sizes)
        if prefills:
            seconds += costs.prefill_seconds([(job.done, new) for job, new in prefills])
        if steps:
            rows = sum(job.ask.kind.step_rows for job in steps)
            seconds += costs.decode_seconds(sum(job.context for job in steps), rows)
        return Pass(parts, prefills, steps, seconds) if parts or prefills or steps else None

    def _parts(self, worker: Worker) -> tuple[Part, ...]:
        home: Worker | Queues = worker if "p" in worker.role else self
        places = self.batching.max_pending * (1 if home is worker else max(1, self.count["p"]))
        taken, most = list[Part](), self.batching.encode_batch
        left = min(most, -(-sum(part.images for part in islice(self.parts, most)) // max(1, self.idle["e"])))
        while self.parts:
            part = self.parts[0]
            if (taken and part.images > left) or (part.job.place is None and home.encoded >= places):
                break
            if part.job.place is None:
                part.job.place = home
                home.encoded += 1
            left -= part.images
            taken.append(self.parts.popleft())
        return tuple(taken)

    def _prefills(self, worker: Worker) -> tuple[tuple[Job, int], ...]:
        taken, budget, apart = list[tuple[Job, int]](), self.batching.prefill_tokens, "d" not in worker.role
        waiting = sum(job.ask.kind.prefilled - job.done for job in islice(self.prefills, self.batching.max_running))
        share = min(budget, waiting // max(1, self.idle["p"]))
        while worker.prefills or self.prefills:
            own = bool(worker.prefills)
            job = worker.prefills[0] if own else self.prefills[0]
            cost = job.ask.kind.prefilled - job.done
            if taken and cost > (budget if own else min(budget, share)):
                break
            if not job.done and not self._room(worker, apart):
                break
            (worker.prefills if own else self.prefills).popleft()
            if not job.done:
                worker.live += 1
                if apart:
                    self.undecoded += 1
                    job.undecoded = True
                if job.place is not None:
                    job.place.encoded -= 1
                    job.place = None
            new = min(cost, self.batching.prefill_tokens) if self.costs.chunked else cost
            budget, share = budget - new, share - (0 if own else new)
            taken.append((job, new))
        return tuple(taken)

    def _room(self, worker: Worker, apart: bool) -> bool:
        places = self.batching.max_pending * max(1, self.count["d"])
        return worker.live < self.batching.max_running and (not apart or self.undecoded < places)

    def _steps(self, worker: Worker) -> tuple[Job, ...]:
        taken, left = list[Job](), self.batching.decode_tokens
        while worker.running:
            rows = worker.running[0].ask.kind.step_rows
            if taken and rows > left:
                break
            left -= rows
            taken.append(worker.running.popleft())
        return tuple(taken)
