"""The bounded queue in front of an engine: admission of requests, and the expected wait."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter

from mmserve.config import EngineConfig
from mmserve.core.request import Request
from mmserve.core.tenant import Tenant
from mmserve.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from mmserve.schedule.expected_wait import Measured, expected_wait, measured, retry_after, work_of
from mmserve.schedule.fair import guaranteed


class WaitingQueue:
    """Counts of samples that wait, and of samples that have not ended.

    ``take`` is called with ``lock`` held; other methods acquire it if needed. ``refusal``: the reason why new requests
    are refused; "" = they are not. ``draining``: whether questions of open sessions are admitted anyway.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.lock = threading.Lock()
        self.refusal = "the engine is not started"
        self.draining = False
        self.queued = 0  # samples
        self.admitted = 0  # samples that have not ended
        self.shed = 0  # requests refused for their expected wait
        self.idle = threading.Event()  # set while nothing is admitted
        self.idle.set()
        self._tenants: Counter[Tenant] = Counter()  # number of queued samples of each tenant
        self._due: dict[str, list[float]] = {}  # due times of queued samples, ascending, by the names of tenants
        self._work = 0  # total of queued samples (``expected_wait.work_of``)
        self._ended_work = 0  # the same for samples that ended since the last ``measure``
        self._measured = Measured()
        self._seconds = 0.5  # running mean of a request's service time

    def check(self, request: Request) -> None:
        """Raises ``InvalidArgument`` for a number of samples larger than the queue."""
        most = min(self._config.max_samples, self._config.max_queued)
        if not 1 <= request.sampling.n <= most:
            raise InvalidArgument.of("sampling.n", f"must be in [1, {most}], not {request.sampling.n}")

    def take(self, request: Request, due: float, *, of_session: bool) -> int:
        """Queue each sample of ``request``, all of them or none. Returns how many others wait. Call with the lock held.

        ``due``: deadline of its first token, on the monotonic clock (seconds). Raises ``Unavailable``,
        ``ResourceExhausted`` or ``DeadlineExceeded`` for a refused request.
        """
        wanted, allowed = request.sampling.n, self._config.max_queued
        if self.refusal and not (of_session and self.draining):
            raise Unavailable(self.refusal)
        if self.queued + wanted > allowed and not self._has_reserved_place(request.tenant, wanted):
            raise ResourceExhausted(
                f"{self.queued} requests wait already, and max_queued allows {allowed} with the "
                f"{wanted} asked for; try again later",
                retry_after=self._retry_after(),
            )
        self._shed_by_wait(request, due)
        return self.adopt(request, due)

    def adopt(self, request: Request, due: float) -> int:
        """As ``take``, for a request that was admitted elsewhere and is never refused. Call with the lock held."""
        wanted, ahead = request.sampling.n, self.queued
        for _ in range(wanted):
            insort(self._due.setdefault(request.tenant.name, []), due)
        self.queued += wanted
        self._tenants[request.tenant] += wanted
        self._work += wanted * work_of(request.sampling.max_new_tokens)
        self.admitted += wanted
        self.idle.clear()
        return ahead

    def remove(self, tenant: Tenant, samples: int, work: int, due: float) -> None:
        """Remove ``samples`` samples of together ``work``, which were ``due`` then, from the queue: they start, or
        end."""
        with self.lock:
            self.queued -= samples
            own = self._due[tenant.name]
            at = bisect_left(own, due)
            del own[at : at + samples]
            if not own:
                del self._due[tenant.name]
            self._tenants[tenant] -= samples
            self._tenants = +self._tenants  # removes tenants without queued samples
            self._work -= work

    def served(self, work: int, seconds: float) -> None:
        """Record that a request of ``work`` was answered after ``seconds``."""
        self._seconds += 0.1 * (seconds - self._seconds)
        self._ended_work += work

    def end(self, samples: int) -> None:
        """Record that ``samples`` samples ended and were released."""
        with self.lock:
            self.admitted -= samples
            if not self.admitted:
                self.idle.set()

    def measure(self, now: float) -> None:
        """Update the rate of ended work; called by the engine's thread once a turn; ``now``: ``time.monotonic``
        (seconds)."""
        ended = float(self._ended_work)
        self._measured = measured(self._measured, now, waiting=self.queued > 0, ended=ended)
        self._ended_work = 0

    def expected_wait(self) -> float:
        """Expected time (seconds) until all requests queued now have started."""
        return expected_wait(self._measured, self._work)

    def _has_reserved_place(self, tenant: Tenant, wanted: int) -> bool:
        """Whether a full queue still admits ``wanted`` samples of ``tenant``: its share is reserved."""
        return self._own(tenant) + wanted <= guaranteed(self._config.max_queued, tenant, self._tenants)

    def _work_ahead(self, tenant: Tenant, due: float) -> float:
        """Approximate queued work that is served before a new request of ``tenant``: its own with earlier deadlines,
        and that of others according to their shares."""
        places = guaranteed(max(1, self.queued), tenant, self._tenants)
        return self._work * min(1.0, bisect_right(self._due.get(tenant.name, []), due) / places)

    def _own(self, tenant: Tenant) -> int:
        return sum(count for other, count in self._tenants.items() if other.name == tenant.name)

    def _shed_by_wait(self, request: Request, due: float) -> None:
        """Refuse a request whose expected wait exceeds its deadline: it would delay others, and still end late."""
        wait = expected_wait(self._measured, self._work_ahead(request.tenant, due))
        left = None if request.deadline is None else request.deadline - time.monotonic()
        if left is not None and left <= 0:
            raise DeadlineExceeded("the deadline passed before the request was admitted")
        allowed, slo = self._config.max_wait_seconds, request.slo
        target = None if slo is None else slo.first_token_seconds or None
        later = retry_after(wait, allowed, min((t for t in (left, target) if t is not None), default=None))
        if later is not None:
            self.shed += 1
            of_class = "" if target is None or slo is None else f", the class {slo.name!r} ({target:g})"
            raise ResourceExhausted(
                f"the request would wait about {wait:.1f} seconds to start; its deadline{of_class} and [engine] "
                f"max_wait_seconds ({allowed:g}) do not allow that; try again later",
                retry_after=later,
            )

    def _retry_after(self) -> float:
        """Expected time (seconds) until the queue has a free place: the mean service time divided by concurrent
        requests."""
        return min(30.0, max(0.1, self._seconds * self.queued / self._config.max_running))
