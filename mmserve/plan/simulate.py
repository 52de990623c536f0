"""Discrete-event simulation of workers that encode, prefill and decode.

A custom event loop: passes on one host share its cores, which requires a clock of work in addition to that of time
(``clock.py``), and a search runs it thousands of times. It is deterministic; arrivals are drawn in advance.

Not simulated: the server, failures, caches, and links between hosts beyond one transfer at a time for each sender.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from mmserve.errors import ConfigError
from mmserve.plan.clock import Action, Clock
from mmserve.plan.costs import Costs, Curve
from mmserve.plan.layout import Batching, Layout
from mmserve.plan.outcome import Outcome, Served
from mmserve.plan.switching import LOOK_SECONDS, Coordinator, RoleSwitching, requests_at
from mmserve.plan.workers import Job, Part, Pass, Queues, Worker
from mmserve.plan.workload import Ask


class Simulation:
    """One run of ``asks`` through a layout.

    ``cores``: of the single host of all workers, shared with ``background`` threads of other processes; None = each
    worker has a separate device. ``loaders``: number of files decoded concurrently outside the workers; 0 = encode
    workers decode within their passes. ``enough`` is called with each finished request, and stops the run if it returns
    true; ``audit`` is called after every event, for tests.
    """

    def __init__(
        self,
        costs: Costs,
        layout: Layout,
        batching: Batching,
        asks: Sequence[Ask],
        *,
        cores: int | None = None,
        background: float = 0.0,
        loaders: int = 0,
        switching: RoleSwitching | None = None,
        audit: Callable[[Simulation], None] | None = None,
        enough: Callable[[Served], bool] | None = None,
    ) -> None:
        if any(ask.kind.images for ask in asks) and not layout.having("e"):
            raise ConfigError(f"{layout}: no worker encodes, and the workload has images")
        self.costs, self.batching, self.asks, self.switching = costs, batching, asks, switching
        self.workers = [Worker(number, role) for number, role in enumerate(layout.roles)]
        self.queues = Queues(costs, batching)
        self.clock = Clock(cores, background, costs.interference)
        self._one_host = cores is not None
        self.live: dict[int, Job] = {}
        self.served: list[Served] = []
        self._coordinator = None if switching is None else Coordinator(switching)
        self._loaders, self._loading, self._unloaded = loaders, 0, deque[Job]()
        self._switches: list[tuple[float, str]] = []
        self._passes: Counter[str] = Counter()
        self._moved = 0.0
        self._audit, self._enough, self._stopped = audit, enough, False
        self._count_roles()

    def run(self) -> Outcome:
        """Run all requests to their ends; raises ``ConfigError`` if one can never end."""
        for ask in self.asks:
            self.clock.at(ask.arrival, partial(self._arrive, ask))
        if self.switching is not None:
            self.clock.at(LOOK_SECONDS, self._look)
        while len(self.served) < len(self.asks) and not self._stopped and self.clock.step():
            self._dispatch()
            if self._audit is not None:
                self._audit(self)
        if len(self.served) < len(self.asks) and not self._stopped:
            raise ConfigError(f"{len(self.live)} requests never end")
        self.served.sort(key=lambda one: one.ask.number)
        return Outcome(
            self.served,
            max((one.end for one in self.served), default=0.0),
            [worker.busy for worker in self.workers],
            self._switches,
            dict(self._passes),
            self._moved,
        )

    # --- a request's way ---

    def _arrive(self, ask: Ask) -> None:
        job = self.live[ask.number] = Job(ask, steps_left=ask.kind.passes)
        if not ask.kind.images:
            self.queues.prefills.append(job)
        elif self._loaders and self.costs.load(1):
            self._unloaded.append(job)
            self._load()
        else:
            self._enqueue(job)

    def _load(self) -> None:
        while self._unloaded and self._loading < self._loaders:
            job = self._unloaded.popleft()
            self._loading += 1
            kind = job.ask.kind
            self.clock.run(self.costs.load(kind.images * kind.megapixels), partial(self._loaded, job))

    def _loaded(self, job: Job) -> None:
        self._loading -= 1
        self._enqueue(job)
        self._load()

    def _enqueue(self, job: Job) -> None:
        """Queue its images, in as many equal parts as there are shards."""
        images = job.ask.kind.images
        apart = sum(worker.role == "e" for worker in self.workers)
        parts = max(1, min(images, self.batching.shards, apart))
        job.parts_left = parts
        for index in range(parts):
            self.queues.parts.append(Part(job, images // parts + (index < images % parts)))

    def _encoded(self, worker: Worker, part: Part) -> None:
        job = part.job
        if "p" in worker.role and part.images == job.ask.kind.images:
            worker.prefills.append(job)
            return
        size = part.images * job.ask.kind.visual_tokens * self.costs.embedding_bytes
        self._send(worker, size, partial(self._joined, job))

    def _joined(self, job: Job) -> None:
        job.parts_left -= 1
        if not job.parts_left:
            self.queues.prefills.append(job)

    def _prefilled(self, worker: Worker, job: Job, new: int) -> None:
        job.done += new
        if job.done < job.ask.kind.prefilled:
            return
        if self.costs.first_token == "prefill":
            job.first = self.clock.now
        if "d" in worker.role:
            self._join(worker, job)
        elif not job.steps_left and job.first is not None:
            worker.live -= 1
            self._decoding(job)
            self._end(job)
        else:
            self._hand_over(worker, job)

    def _decoding(self, job: Job) -> None:
        """The request no longer waits between prefill and decode."""
        self.queues.undecoded -= job.undecoded
        job.undecoded = False

    def _hand_over(self, sender: Worker, job: Job) -> None:
        """Send to the decode worker with the fewest requests; if there is none, to one that is about to become one."""
        ready = [worker for worker in self.workers if "d" in worker.role and not worker.next_role]
        ready = ready or [worker for worker in self.workers if worker.next_role == "d"]
        target = min(ready, key=lambda worker: (worker.live + worker.coming, worker.number))
        target.coming += 1

        def arrived() -> None:
            sender.live -= 1
            target.coming -= 1
            if "d" in (target.next_role or target.role):
                target.waiting.append(job)
                self._admit(target)
            else:  # it has changed its role in the meantime
                target.live += 1
                self._hand_over(target, job)

        self._send(sender, job.context * self.costs.kv_bytes, arrived)

    def _admit(self, worker: Worker) -> None:
        while worker.waiting and not worker.next_role and worker.live < self.batching.max_running:
            worker.live += 1
            job = worker.waiting.popleft()
            self._decoding(job)
            self._join(worker, job)

    def _join(self, worker: Worker, job: Job) -> None:
        if job.first is None:
            job.first = self.clock.now
        if job.steps_left:
            worker.running.append(job)
        else:
            worker.live -= 1
            self._end(job)

    def _stepped(self, worker: Worker, job: Job) -> None:
        job.steps_left -= 1
        if job.steps_left:
            worker.running.append(job)
        else:
            worker.live -= 1
            self._end(job)

    def _end(self, job: Job) -> None:
        assert job.first is not None
        del self.live[job.ask.number]
        self.served.append(Served(job.ask, job.first, self.clock.now))
        self._stopped = self._enough is not None and self._enough(self.served[-1])

    # --- workers ---

    def _dispatch(self) -> None:
        q = self.queues
        idle = [worker for worker in self.workers if worker.idle]
        ready = [worker for worker in idle if worker.next_role or q.any_for(worker)]
        if len(ready) > 1:
            ready.sort(key=lambda w: (w.live + w.encoded, w.number))
        if q.parts or q.prefills:
            q.idle = {stage: sum(stage in w.role for w in idle) for stage in q.idle}
        for worker in ready:
            if worker.next_role:
                self._leave(worker)
                continue
            batch = q.take(worker)
            for stage in q.idle:
                q.idle[stage] -= stage in worker.role
            if batch is None:
                continue
            seconds = batch.seconds
            if batch.parts and not self._loaders:
                seconds += self.costs.load(sum(p.images * p.job.ask.kind.megapixels for p in batch.parts))
            self._begin(worker, batch, seconds)

    def _begin(self, worker: Worker, batch: Pass, seconds: float) -> None:
        worker.idle = False
        worker.busy += seconds
        worker.stepping += len(batch.steps)
        self.queues.prefills_under_way += len(batch.prefills)
        for stage, has in (("e", batch.parts), ("p", batch.prefills), ("d", batch.steps)):
            self._passes[stage] += bool(has)
        self.clock.run(seconds, partial(self._ran, worker, batch))

    def _ran(self, worker: Worker, batch: Pass) -> None:
        worker.idle = True
        worker.stepping -= len(batch.steps)
        self.queues.prefills_under_way -= len(batch.prefills)
        if self._coordinator is not None:
            self._coordinator.ran(batch)
        for part in batch.parts:
            self._encoded(worker, part)
        for job, new in batch.prefills:
            self._prefilled(worker, job, new)
        begun = [job for job, _new in batch.prefills if job.done < job.ask.kind.prefilled]
        worker.prefills.extendleft(reversed(begun))  # before new ones: these hold pages already
        for job in batch.steps:
            self._stepped(worker, job)
        if "d" in worker.role:
            self._admit(worker)

    def _send(self, worker: Worker, size: float, arrived: Action) -> None:
        """A transfer, after pending transfers of the worker, which continues in parallel. On one host it is work for
        the cores: requesting, copying and verifying."""
        link, handover = self.costs.link, self.costs.handover
        self._moved += size
        if self._one_host and handover != Curve():
            self.clock.run(handover(size), arrived)
            return
        worker.link_free = max(worker.link_free, self.clock.now) + link.seconds(size)
        self.clock.at(worker.link_free + link.latency, arrived)

    # --- roles ---

    def _count_roles(self) -> None:
        for stage in self.queues.count:
            self.queues.count[stage] = sum(stage in worker.role for worker in self.workers)

    def _look(self) -> None:
        assert self._coordinator is not None
        if self.clock.pending:  # else nothing could change any more
            self.clock.at(self.clock.now + LOOK_SECONDS, self._look)
        at = requests_at(self.queues, self.workers, len(self.live))
        change = self._coordinator.due_change(self.clock.now, at, self.workers)
        if change is None:
            return
        worker, role = change
        self._switches.append((self.clock.now, f"{worker.role}>{role}"))
        worker.next_role = role

    def _leave(self, worker: Worker) -> None:
        """An idle worker sends its requests with their pages to others, and takes its next role."""
        assert self.switching is not None
        if worker.role == "d":
            worker.live += len(worker.waiting)  # while they are in transfer
            moved = [*worker.running, *worker.waiting]
            worker.running.clear()
            worker.waiting.clear()
            for job in moved:
                self._hand_over(worker, job)
        if worker.prefills:  # partially prefilled prompts
            batch = self.queues.take(worker)
            if batch is not None:
                self._begin(worker, batch, batch.seconds)
            return
        worker.idle = False
        worker.role, to = "", worker.next_role
        self._count_roles()

        def ready() -> None:
            worker.role, worker.next_role, worker.idle = to, "", True
            self._count_roles()
            self._admit(worker)

        self.clock.at(self.clock.now + self.switching.pause, ready)
