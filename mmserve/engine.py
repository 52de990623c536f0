"""The engine of one model: plan → run stages → advance, on a thread of its own.

Everything that happens (a submission, a cancellation, a stage's report) arrives in one inbox; only the engine's
thread touches the table of requests, so nothing here needs a lock but the admission counter.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmserve.config import EngineConfig, MediaConfig
from mmserve.core.events import Admitted, Delta, Event, Failed, Finished, StageTimes, Usage
from mmserve.core.info import ModelInfo
from mmserve.core.plan import Budgets, Entry
from mmserve.core.request import TERMINAL, ImagePart, Request, RequestId, Stage, VideoPart, advance
from mmserve.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Internal,
    MMServeError,
    ResourceExhausted,
    Unavailable,
)
from mmserve.kv.pool import PagePool, pages_for
from mmserve.models.base import LoadedModel
from mmserve.schedule.scheduler import schedule
from mmserve.stages import Stages
from mmserve.worker import InlineWorker, ThreadWorker, Worker

logger = logging.getLogger("mmserve.engine")

Sink = Callable[[Event], None]

#: Seconds. A client's deadline may be centuries away, and a queue refuses to wait that long.
_LONGEST_WAIT = 3600.0
#: Running and following stage of each worker's batch.
_STAGES = {
    "encode": (Stage.ENCODING, Stage.ENCODED),
    "prefill": (Stage.PREFILLING, Stage.PREFILLED),
    "decode": (Stage.STEPPING, Stage.READY),
}


@dataclass
class _Record:
    """A live request as the engine keeps it."""

    request: Request
    sink: Sink
    arrived: float
    stage: Stage = Stage.QUEUED
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    pages: tuple[int, ...] = ()
    last_step: int = 0
    prefilled: int = 0  # positions run, while some of the prompt is left
    doomed: bool = False  # the client has its error; a worker still holds the state
    run: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_STAGES, 0.0))  # seconds in each stage
    first_token: float = 0.0

    @property
    def tokens(self) -> int:
        """Positions of prompt and answer; the prompt's are known once encoded."""
        return self.usage.prompt_tokens + self.request.sampling.max_new_tokens

    def entry(self, page_size: int, frames_per_video: int) -> Entry:
        """What the scheduler sees; a video counts as its frames."""
        parts = [part for message in self.request.messages for part in message.parts]
        images = sum(isinstance(part, ImagePart) for part in parts)
        images += frames_per_video * sum(isinstance(part, VideoPart) for part in parts)
        pages = pages_for(self.tokens, page_size)
        return Entry(self.request.id, self.stage, images, self.tokens, pages, self.last_step, self.prefilled)


@dataclass(frozen=True)
class Stats:
    """A look at the engine, for health, metrics and tests."""

    live: int
    queued: int
    pages_in_use: int
    held: int  # requests of which a stage or transport keeps anything


class Engine:
    """Serves requests to one model. ``config`` must be resolved (``mmserve.config.resolve``)."""

    def __init__(self, model: LoadedModel, config: EngineConfig, media: MediaConfig) -> None:
        self.config, self.media = config, media
        self.stages = Stages(model, config, media)
        if config.pages * config.page_size < self.stages.max_tokens:
            raise ConfigError(
                f"[engine] pages × page_size is {config.pages * config.page_size}, less than one request of "
                f"max_tokens {self.stages.max_tokens} needs"
            )
        self.info: ModelInfo = self.stages.describe()
        self._pool = PagePool(config.pages)
        self._records: dict[RequestId, _Record] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._admission = threading.Lock()
        self._queued = 0
        self._admitted = 0
        self._refusal = "the engine is not started"  # why new requests are refused; "" = they are not
        self._idle = threading.Event()
        self._idle.set()
        self._workers: dict[str, Worker] = {}
        self._busy: set[str] = set()
        self._steps = 0
        self._seconds = 0.5  # running mean of a request's service time
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="mmserve-engine", daemon=True)

    # --- called from any thread ---

    def start(self) -> None:
        """Start the engine's thread and its workers."""
        threads = self.config.torch_threads
        for name in _STAGES:
            self._workers[name] = InlineWorker() if self.config.stages == "inline" else ThreadWorker(name, threads)
        self._refusal = ""
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Take a request in, or refuse it at once with a typed error.

        ``sink`` gets ``Admitted`` before this returns, and later, from the engine's thread, exactly one ``Finished``
        or ``Failed`` as its last event; it must return quickly and never raise.
        """
        self.stages.check(request)
        with self._admission:
            if self._refusal:
                raise Unavailable(self._refusal)
            if self._queued >= self.config.max_queued:
                raise ResourceExhausted(
                    f"{self._queued} requests wait already, as many as max_queued allows; try again later",
                    retry_after=self._retry_after(),
                )
            record = _Record(request, sink, time.monotonic())
            ahead = self._queued
            self._queued += 1
            self._admitted += 1
            self._idle.clear()
            # Within the lock: a drain that begins now must find the request in the inbox before its own message.
            # Before `Admitted`: so must a client that cancels on hearing it. No other event comes before that one,
            # for whatever happens to a queued request first takes it out of the queue, under this lock.
            self._inbox.put(lambda: self._records.__setitem__(request.id, record))
            sink(Admitted(ahead))

    def cancel(self, request: RequestId, error: MMServeError | None = None) -> None:
        """End a request early with ``error`` (``Cancelled`` by default); nothing happens if it ended already."""
        self._inbox.put(lambda: self._fail(request, error or Cancelled("the request was cancelled")))

    def drain(self, timeout: float) -> bool:
        """Refuse new requests, wait for the live ones; after ``timeout`` seconds fail what is left.

        Returns whether all of them ended by themselves.
        """
        with self._admission:
            self._refusal = "the server is shutting down; send the request to another one"
        in_time = self._idle.wait(timeout)
        if not in_time:
            self._inbox.put(lambda: self._fail_all(Unavailable("the server shut down before the request finished")))
            self._idle.wait()
        return in_time

    def stop(self) -> None:
        """End every request that is left, then the threads."""
        if self._thread.is_alive():
            self.drain(0.0)
            self._inbox.put(lambda: setattr(self, "_stopping", True))
            self._thread.join()
        for worker in self._workers.values():
            worker.stop()

    def stats(self) -> Stats:
        """A snapshot of counters; values may be a moment old."""
        return Stats(self._admitted, self._queued, self._pool.in_use, self.stages.held)

    # --- the loop: the engine's thread only ---

    def _loop(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - a bug here must leave no client waiting and no page taken
                self._recover(error)

    def _turn(self) -> None:
        self._absorb()
        self._expire()
        entries = [r.entry(self.config.page_size, self.info.frames_per_video) for r in self._records.values()]
        plan = schedule(entries, self._budgets())
        self._run("encode", plan.encode, self._encode)
        self._run("prefill", plan.prefill, self._prefill)
        self._run("decode", plan.decode, self._decode)

    def _recover(self, error: Exception) -> None:
        """After a bug in the engine itself nothing is known of anybody's state: every live request ends."""
        failed = Failed(_internal(error, "the engine's loop failed"))
        for record in list(self._records.values()):
            told, record.doomed = record.doomed, True
            if not self._held(record):  # else its worker's report ends it
                if record.stage not in TERMINAL:
                    self._advance(record, Stage.FAILED)
                self._release(record)
            if not told:
                record.sink(failed)

    def _absorb(self) -> None:
        """Wait for something to happen, or for the next deadline; then take in all that has happened."""
        deadlines = [r.request.deadline for r in self._records.values() if r.request.deadline and not r.doomed]
        timeout = max(0.0, min(_LONGEST_WAIT, min(deadlines) - time.monotonic())) if deadlines else None
        try:
            self._inbox.get(timeout=timeout)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _expire(self) -> None:
        now = time.monotonic()
        for request, record in list(self._records.items()):
            if record.request.deadline is not None and record.request.deadline <= now:
                self._fail(request, DeadlineExceeded(f"the deadline passed while the request was {record.stage.name}"))

    def _budgets(self) -> Budgets:
        c = self.config
        return Budgets(
            idle=frozenset(set(_STAGES) - self._busy),
            free_pages=self._pool.free,
            handover=c.handover,
            max_running=c.max_running,
            encode_batch=c.encode_batch,
            prefill_tokens=c.prefill_tokens,
            decode_tokens=c.decode_tokens,
        )

    def _run(
        self, name: str, ids: Sequence[RequestId], stage: Callable[[list[_Record]], Callable[[], list[Any]]]
    ) -> None:
        """Give a stage's worker its next batch; the report comes back through the inbox."""
        if not ids:
            return
        records = [self._records[i] for i in ids]
        for record in records:
            self._advance(record, _STAGES[name][0])
        run = stage(records)
        self._busy.add(name)

        def job() -> None:
            begun = time.monotonic()
            try:
                outcomes = run()
            except BaseException as error:  # noqa: BLE001 - reported to every request; native code's panics are these
                outcomes = [error] * len(records)
            seconds = time.monotonic() - begun
            self._inbox.put(lambda: self._report(name, records, outcomes, seconds))

        self._workers[name].start(job)

    def _encode(self, records: list[_Record]) -> Callable[[], list[Any]]:
        requests = [r.request for r in records]
        return lambda: self.stages.encode(requests)

    def _prefill(self, records: list[_Record]) -> Callable[[], list[Any]]:
        for record in records:
            if not record.pages:
                record.pages = self._pool.allocate(pages_for(record.tokens, self.config.page_size))
        batch = [(r.request, r.pages) for r in records]
        return lambda: self.stages.prefill(batch)

    def _decode(self, records: list[_Record]) -> Callable[[], list[Any]]:
        self._steps += 1
        for record in records:
            record.last_step = self._steps
        requests = [r.request for r in records]
        return lambda: self.stages.decode(requests)

    def _report(self, name: str, records: list[_Record], outcomes: list[Any], seconds: float) -> None:
        """A stage's batch is done: advance each of its requests, or end it."""
        self._busy.discard(name)
        for record, outcome in zip(records, outcomes, strict=True):
            record.run[name] += seconds
            if record.doomed:
                self._advance(record, Stage.FAILED)
                self._release(record)
            elif isinstance(outcome, BaseException):
                self._fail_record(record, _typed(outcome, record))
            elif name == "decode":
                try:
                    self._stepped(record, outcome)
                except Exception as error:  # noqa: BLE001 - a bug with one request's result ends that request only
                    self._fail_record(record, _typed(error, record))
            elif name == "prefill" and outcome is not None:
                record.prefilled = outcome
                self._advance(record, Stage.ENCODED)
            else:
                self._advance(record, _STAGES[name][1])
                record.usage = outcome or record.usage
                record.prefilled = 0
                record.last_step = self._steps  # it waits for decode from now on, behind whoever waits already

    def _stepped(self, record: _Record, outcome: Any) -> None:
        wanted = record.request.streaming
        if outcome.delta and not record.first_token:
            record.first_token = time.monotonic()
        if outcome.snapshot is not None:
            record.sink(outcome.snapshot)
        if outcome.delta and wanted.deltas:
            record.sink(Delta(outcome.delta))
        if outcome.reason is None:
            self._advance(record, Stage.READY)
            return
        answer = self.stages.finished(record.request.id)
        self._advance(record, Stage.FINISHED)
        usage = replace(record.usage, completion_tokens=answer.completion_tokens)
        times = self._times(record)
        self._seconds += 0.1 * (times.total / 1000 - self._seconds)
        self._release(record)
        record.sink(
            Finished(
                outcome.reason,
                answer.text,
                usage,
                answer.forwards,
                answer.recomputed_tokens,
                times,
                edits=answer.edits,
                tokens=answer.tokens,
            )
        )

    def _times(self, record: _Record) -> StageTimes:
        now = time.monotonic()
        total = now - record.arrived
        first = (record.first_token or now) - record.arrived
        seconds = (total - sum(record.run.values()), *record.run.values(), total, first)
        return StageTimes(*(round(1000 * s, 3) for s in seconds))

    def _fail(self, request: RequestId, error: MMServeError) -> None:
        record = self._records.get(request)
        if record is not None and not record.doomed:
            self._fail_record(record, error)

    def _fail_all(self, error: MMServeError) -> None:
        for request in list(self._records):
            self._fail(request, error)

    def _fail_record(self, record: _Record, error: MMServeError) -> None:
        """Tell the client now; free the request now, or when the worker that holds it reports."""
        record.doomed = self._held(record)
        if not record.doomed:
            self._advance(record, Stage.FAILED)
            self._release(record)
        record.sink(Failed(error))

    def _held(self, record: _Record) -> bool:
        """Whether a worker holds the request: its stage's batch has not reported yet."""
        return any(record.stage is running and name in self._busy for name, (running, _next) in _STAGES.items())

    def _advance(self, record: _Record, stage: Stage) -> None:
        if record.stage is Stage.QUEUED:
            with self._admission:
                self._queued -= 1
        record.stage = advance(record.stage, stage)

    def _release(self, record: _Record) -> None:
        """A request has ended: nothing of it stays."""
        if record.stage not in TERMINAL:
            raise ValueError(f"released while {record.stage.name}")
        self.stages.release(record.request.id)
        self._pool.release(record.pages)
        del self._records[record.request.id]
        with self._admission:
            self._admitted -= 1
            if not self._admitted:
                self._idle.set()

    def _retry_after(self) -> float:
        """Seconds until a place in the queue is likely: the mean service time over the requests served at once."""
        return min(30.0, max(0.1, self._seconds * self._queued / self.config.max_running))


def _typed(error: BaseException, record: _Record) -> MMServeError:
    """``error`` itself if it is one of ours; a bug becomes ``Internal`` with an id that the log has too."""
    if isinstance(error, MMServeError):
        return error
    return _internal(error, f"request {record.request.id} failed while {record.stage.name}")


def _internal(error: BaseException, what: str) -> Internal:
    error_id = uuid.uuid4().hex[:12]
    logger.error("%s, error id %s", what, error_id, exc_info=error)
    return Internal("an unexpected error ended the request; the server's log has the details", error_id=error_id)
