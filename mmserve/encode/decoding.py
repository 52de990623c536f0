"""A pool of processes that decodes media files within budgets of time and memory.

The pool serves its callers in turn: a caller with many files delays another by at most one of them.
"""

from __future__ import annotations

import atexit
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from mmserve.config import MediaConfig
from mmserve.core.child_process import ChildExited
from mmserve.encode.child import Child, Pictures, Planned
from mmserve.encode.decoders import Check, T, Work
from mmserve.encode.handover import Handover
from mmserve.encode.media import named
from mmserve.encode.sampling import Sampled
from mmserve.encode.wire import MediaFile
from mmserve.encode.worker import decode_limit_message
from mmserve.errors import InvalidArgument, ResourceExhausted, Unavailable
from mmserve.memory import trim
from mmserve.priority import lower_priority

#: Maximum attempts for a file whose process was killed.
_ATTEMPTS = 3
#: Bytes of a decoded pixel: pillow stores RGB in 32 bits.
_PIXEL_BYTES = 4
#: Decoded bytes after which free memory is returned to the system, once no decoding is active.
_TRIM_BYTES = 16 << 20


class Budget:
    """A budget of at most ``limit`` bytes; requests are served in order, so that large ones do not starve."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self.used = self.most = 0

    def take(self, size: int, check: Check) -> None:
        """Wait until ``size`` bytes are available, and take them; if ``check`` raises, nothing is taken."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or self.used + size > self.limit:
                    self._changed.wait(0.02)
                    check()
                self._use(size)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def try_take(self, size: int) -> bool:
        """Take ``size`` bytes, before all waiting requests, if they are available; returns whether they were."""
        with self._changed:
            if self.used + size > self.limit:
                return False
            self._use(size)
            return True

    def release(self, size: int) -> None:
        """Return ``size`` bytes to the budget."""
        with self._changed:
            self.used -= size
            self._changed.notify_all()

    def _use(self, size: int) -> None:
        self.used += size
        self.most = max(self.most, self.used)


class _Processes:
    """Idle decoding processes, kept for the next job; each exits by itself after some minutes, and all are stopped with
    the last pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._pools = 0

    def open(self) -> None:
        """Increment the number of pools."""
        with self._lock:
            self._pools += 1

    def close(self) -> None:
        """Decrement the number of pools."""
        with self._lock:
            self._pools -= 1
            last = self._pools == 0
        if last:
            self.end()

    def take(self) -> Child:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    return child
                child.end()
        return Child()

    def put_back(self, child: Child) -> None:
        with self._lock:
            ended = [one for one in self._idle if not one.alive]
            self._idle = [*(one for one in self._idle if one not in ended), child]
        for one in ended:
            one.end()  # reaps the process and closes its pipes

    def end(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().end()


#: Shared by all pools of this process; each pool limits its number of active processes.
PROCESSES = _Processes()
atexit.register(PROCESSES.end)


class DecodePool:
    """Decodes in at most ``limits.decode_workers`` processes, each file within the time and memory of ``limits``."""

    def __init__(self, limits: MediaConfig) -> None:
        self._limits = limits
        self.budget = Budget(limits.decode_bytes)
        self._changed = threading.Condition()
        self._queues: OrderedDict[object, deque[Callable[[], None]]] = (
            OrderedDict()
        )  # queues by caller; the first is served next
        self._threads: list[threading.Thread] = []
        self._working = self._decoded_bytes = 0  # active threads; bytes decoded since free memory was returned
        self._waiting_for_tower = 0  # threads whose file waits for the tower
        self._closed = False
        self._users = 0

    def open(self) -> None:
        with self._changed:
            self._users += 1
            first = self._users == 1
        if first:
            PROCESSES.open()

    def map(self, works: Sequence[Work[T]], check: Check) -> Generator[T, None, None]:
        """As ``Decoders.map``; raises ``Unavailable`` if no process can be started, or after ``close``."""
        with self._begun([partial(self._run, work) for work in works], check) as futures:
            for future in futures:
                yield future.result()

    def chunks(
        self, file: MediaFile, size: int, make: Callable[[list[Sampled]], T], check: Check
    ) -> Generator[Planned | T, None, None]:
        """As ``Decoders.chunks``; while chunks wait for the caller, another file may be decoded concurrently."""
        handover: list[Handover[T]] = []

        def read(check: Check) -> None:
            def decode(reservation: _Reservation) -> None:
                self._decode(file, reservation, handover[0])
                handover[0].flush()

            handover[0].check = check
            self._reserving(decode, check)

        handover.append(Handover(size, make, check, self._waiting))
        with self._begun([read], check) as [future]:
            yield from handover[0].chunks(future)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Context in which the thread waits for another one, and is not counted as decoding."""
        with self._changed:
            self._waiting_for_tower += 1
            if self._queues:
                self._start()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting_for_tower -= 1

    @contextmanager
    def _begun(self, works: Sequence[Callable[[Check], T]], check: Check) -> Iterator[list[Future[T]]]:
        """Jobs that run ``works``, each called with a ``check``; all have ended when the context exits."""
        ended = False

        def checked() -> None:
            if ended or self._closed:
                raise Unavailable("the server is stopping")
            check()

        futures: list[Future[T]] = []
        owner = object()
        with self._changed:
            if self._closed:
                raise Unavailable("the server is stopping")
            jobs: deque[Callable[[], None]] = deque()
            for work in works:
                futures.append(Future())
                jobs.append(_job(lambda work=work: work(checked), futures[-1], checked))  # type: ignore[misc]
            self._queues[owner] = jobs
            self._start()
            self._changed.notify_all()
        try:
            yield futures
        finally:
            ended = True
            with self._changed:
                self._queues.pop(owner, None)
            for future in futures:
                if not future.cancel():
                    future.exception()  # running jobs have ended before the caller continues

    def close(self) -> None:
        """As ``Decoders.close``; no decoding is active after the last."""
        with self._changed:
            self._users -= 1
            last = self._users == 0
            if self._users > 0 or self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if last:
            PROCESSES.close()

    def _start(self) -> None:
        """Start another thread, unless there are enough; requires the lock."""
        if len(self._threads) < self._limits.decode_workers + self._waiting_for_tower and not self._closed:
            name = f"mmserve-media-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._loop, name=name, daemon=True))
            self._threads[-1].start()

    def _loop(self) -> None:
        lower_priority()
        torch.set_num_threads(1)
        while (job := self._next()) is not None:
            job()
            del job
            with self._changed:
                self._working -= 1
                self._changed.notify_all()
                idle = not self._working and self._decoded_bytes > _TRIM_BYTES
                if idle:
                    self._decoded_bytes = 0
            if idle:
                trim()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while True:
                if self._closed:
                    for jobs in self._queues.values():
                        for job in jobs:
                            job()  # only reports the closing
                    self._queues.clear()
                    return None
                if self._queues and self._working - self._waiting_for_tower < self._limits.decode_workers:
                    break
                self._changed.wait()
            self._working += 1
            owner, jobs = self._queues.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._queues[owner] = jobs
                self._start()
            return job

    def _run(self, work: Work[T], check: Check) -> T:
        return self._reserving(lambda reservation: work(lambda file: self._decode(file, reservation)), check)

    def _reserving(self, work: Callable[[_Reservation], T], check: Check) -> T:
        reservation = _Reservation(self.budget, self._limits, check)
        try:
            return work(reservation)
        finally:
            self.budget.release(reservation.bytes)
            with self._changed:
                self._decoded_bytes += reservation.bytes

    def _decode(self, file: MediaFile, reservation: _Reservation, handover: Handover[Any] | None = None) -> Pictures:
        for _ in range(_ATTEMPTS):
            reservation.check()
            if handover is not None:
                handover.restart()
            reservation.name = file.name
            before = reservation.bytes
            try:
                child = PROCESSES.take()
            except OSError as error:
                raise Unavailable("no process that decodes media can be started; try again later") from error
            try:
                return child.decode(file, self._limits, reservation, None if handover is None else handover.take)
            except ChildExited:
                child.end()
                reservation.shrink_to(before)
            finally:
                if child.alive:
                    PROCESSES.put_back(child)
                else:
                    child.end()
            if child.exceeded_cpu_limit:
                raise InvalidArgument.of(file.name, decode_limit_message(self._limits.decode_seconds))
            if not child.killed:
                raise InvalidArgument.of(file.name, "crashes the decoder: it is damaged, or needs too much memory")
        raise Unavailable("processes that decode media are killed, probably because the host lacks memory")


class _Reservation:
    """The part of a budget used by the decoding of one file (``watch.Watch``)."""

    def __init__(self, budget: Budget, limits: MediaConfig, check: Check) -> None:
        self._budget, self._limits, self.check = budget, limits, check
        self.name, self.bytes = "", 0

    def reserve(self, pixels: int) -> None:
        size = pixels * _PIXEL_BYTES
        if self.bytes + size > self._limits.decode_bytes:
            why = f"the limit is {self._limits.decode_bytes} {named('decode_bytes')}"
            raise InvalidArgument.of(self.name, f"takes {self.bytes + size} bytes of decoded pixels; {why}")
        if not self.bytes:
            self._budget.take(size, self.check)
        elif not self._budget.try_take(size):  # waiting while holding a part of the budget could deadlock
            raise ResourceExhausted("too many media are decoded at once; try again later", retry_after=1.0)
        self.bytes += size

    def shrink_to(self, size: int) -> None:
        """Return the reserved bytes in excess of ``size``."""
        self._budget.release(self.bytes - size)
        self.bytes = size


def _job(run: Callable[[], T], future: Future[T], check: Check) -> Callable[[], None]:
    def job() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            check()
            future.set_result(run())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)

    return job
