"""The engine of one model: plan → run stages → advance, on a thread of its own.

Everything that happens (a submission, a cancellation, a stage's report) arrives in one inbox; only the engine's
thread touches the table of requests, so nothing here needs a lock but the admission counter.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mmserve.config import EngineConfig, MediaConfig
from mmserve.core.events import Admitted, Delta, Failed
from mmserve.core.info import ModelInfo
from mmserve.core.plan import Budgets, Served
from mmserve.core.request import TERMINAL, Request, RequestId, Stage, advance
from mmserve.core.samples import samples
from mmserve.core.stats import Stats
from mmserve.core.tenant import Tenant
from mmserve.decode.schedulers import Discrete
from mmserve.encode.cache import EncoderCache
from mmserve.encode.decoding import Decoders
from mmserve.encode.encoded import Encoded
from mmserve.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    MMServeError,
    ResourceExhausted,
    Unavailable,
)
from mmserve.kv.pool import PagePool
from mmserve.kv.table import PageTable
from mmserve.models.base import Model
from mmserve.record import Record, Sink, open_call
from mmserve.schedule.expected_wait import Measured, expected_wait, measured, retry_after
from mmserve.schedule.fair import guaranteed
from mmserve.schedule.scheduler import schedule
from mmserve.stages import EncodedPrompt, Stages
from mmserve.workers import Workers

logger = logging.getLogger("mmserve.engine")

#: Seconds. A client's deadline may be centuries away, and a queue refuses to wait that long.
_LONGEST_WAIT = 3600.0
#: The stage of a request that a worker holds.
_RUNNING = {
    "constrain": Stage.CONSTRAINING,
    "load": Stage.LOADING,
    "tokenize": Stage.ENCODING,
    "encode": Stage.ENCODING,
    "prefill": Stage.PREFILLING,
    "decode": Stage.STEPPING,
}


class Engine:
    """Serves requests to one model. ``config`` must be resolved (``mmserve.config.resolve``).

    ``cache`` of media, and ``decoders`` of files: shared with other engines; None = one of its own.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        media: MediaConfig,
        schedulers: Mapping[str, Discrete] = MappingProxyType({}),
        cache: EncoderCache | None = None,
        decoders: Decoders | None = None,
    ) -> None:
        self.config, self.media = config, media
        self.stages = Stages(model, config, media, schedulers, cache, decoders)
        if config.pages * config.page_size < self.stages.capabilities.max_tokens:
            raise ConfigError(
                f"[engine] pages × page_size is {config.pages * config.page_size}, less than one request of "
                f"max_tokens {self.stages.capabilities.max_tokens} needs"
            )
        self.info: ModelInfo = self.stages.describe()
        self._pool = PagePool(config.pages, unit=self.stages.shared_pages)
        self._records: dict[RequestId, Record] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._admission = threading.Lock()
        self._queued = 0
        self._waiting: Counter[Tenant] = Counter()  # samples among those queued, by whose they are
        self._queued_work = 0  # tokens that those who wait ask for
        self._ended_work = 0  # the same of those that ended since the last look
        self._measured = Measured()
        self._shed = 0
        self._admitted = 0
        self._refusal = "the engine is not started"  # why new requests are refused; "" = they are not
        self._draining = False  # whether questions of open sessions are taken although new requests are refused
        self._idle = threading.Event()
        self._idle.set()
        self._workers = Workers(config)
        self._served: Mapping[str, Served] = {}  # by each stage's queue
        self._now = 0.0  # virtual time of decode
        self._seconds = 0.5  # running mean of a request's service time
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="mmserve-engine", daemon=True)

    # --- called from any thread ---

    def start(self) -> None:
        """Start the engine's thread and its workers."""
        self._workers.start()
        self.stages.give_way(self._workers.give_way("prefill"), self._workers.give_way("decode"))
        self._refusal = ""
        self._thread.start()

    def warm(self) -> None:
        """Have what the first constrained request needs made ready in the background, for servers that stay."""
        threading.Thread(target=self.stages.warm, name="mmserve-warm", daemon=True).start()

    def submit(self, request: Request, sink: Sink, prompt: Encoded | None = None, *, of_session: bool = False) -> None:
        """Take a request in, or refuse it at once with a typed error.

        ``prompt``: what its messages became, where the caller has encoded them already. ``of_session``: whether it is a
        question of an open session, which is accepted during a drain, too.

        Its samples take a place in the queue each, all of them or none. ``sink`` gets ``Admitted`` before this returns.
        Later, from the engine's thread, its last event is the ``Finished`` of its last sample, or one ``Failed``. It
        must return quickly and never raise.
        """
        self.stages.check(request)
        wanted = request.sampling.n
        most = min(self.config.max_samples, self.config.max_queued)
        if not 1 <= wanted <= most:
            raise InvalidArgument.of("sampling.n", f"must be in [1, {most}], not {wanted}")
        with self._admission:
            if self._refusal and not (of_session and self._draining):
                raise Unavailable(self._refusal)
            if self._queued + wanted > self.config.max_queued and not self._is_owed(request.tenant, wanted):
                raise ResourceExhausted(
                    f"{self._queued} requests wait already, and max_queued allows {self.config.max_queued} with the "
                    f"{wanted} asked for; try again later",
                    retry_after=self._retry_after(),
                )
            self._shed_by_wait(request)
            record = open_call(request, sink, time.monotonic())
            if prompt is not None:
                self.stages.give(request.id, prompt)
            ahead = self._queued
            self._queued += wanted
            self._waiting[request.tenant] += wanted
            self._queued_work += record.work
            self._admitted += wanted
            self._idle.clear()
            # Within the lock: a drain that begins now must find the request in the inbox before its own message.
            # Before `Admitted`: so must a client that cancels on hearing it. No other event comes before that one,
            # for whatever happens to a queued request first takes it out of the queue, under this lock.
            self._inbox.put(lambda: self._records.__setitem__(request.id, record))
            sink(Admitted(ahead))

    def _is_owed(self, tenant: Tenant, wanted: int) -> bool:
        """Whether a full queue still takes ``wanted`` samples of ``tenant``: others cannot fill its part. Locked."""
        return self._own(tenant) + wanted <= guaranteed(self.config.max_queued, tenant, self._waiting)

    def _work_ahead(self, tenant: Tenant) -> float:
        """About how much waiting work is served before a new request of ``tenant``: of others, as much as its share
        allows them meanwhile. Locked."""
        places = guaranteed(max(1, self._queued), tenant, self._waiting)
        return self._queued_work * min(1.0, self._own(tenant) / places)

    def _own(self, tenant: Tenant) -> int:
        return sum(count for other, count in self._waiting.items() if other.name == tenant.name)

    def cancel(self, request: RequestId, error: MMServeError | None = None) -> None:
        """End a request early, all of its samples, with ``error`` (``Cancelled`` by default); nothing happens if it
        ended already."""
        self._inbox.put(lambda: self._fail(request, error or Cancelled("the request was cancelled")))

    def drain(self, timeout: float) -> bool:
        """Refuse new requests, wait for the live ones; after ``timeout`` seconds fail what is left.

        Returns whether all of them ended by themselves. Questions of open sessions are then still accepted, until
        ``stop``: whoever drains the sessions ends them.
        """
        with self._admission:
            self._refusal = "the server is shutting down; send the request to another one"
            self._draining = timeout > 0
        in_time = self._idle.wait(timeout)
        if not in_time:
            with self._admission:
                self._draining = False
            self._inbox.put(lambda: self._fail_all(Unavailable("the server shut down before the request finished")))
            self.stages.close()  # else a process that stands still holds its request, and this, for a minute
            self._idle.wait()
        return in_time

    def stop(self) -> None:
        """End every request that is left, then the threads."""
        if self._thread.is_alive():
            self.drain(0.0)
            self._inbox.put(lambda: setattr(self, "_stopping", True))
            self._thread.join()
        self.stages.close()
        self._workers.stop()
        self.stages.stop()

    def stats(self) -> Stats:
        """A snapshot of counters; values may be a moment old."""
        p = self._pool
        prefix = (p.cached, p.lookups, p.hits)
        steps = (self.stages.constraint_steps, self.stages.constraint_fallbacks, self.stages.constraint_late)
        cache = self.stages.encoder.cache
        return Stats(
            self._admitted,
            self._queued,
            p.in_use,
            self.stages.held,
            self.config.pages,
            *prefix,
            *steps,
            token_cache=cache.tokens.stats(),
            pixel_cache=cache.pixels.stats(),
            kv_cache=cache.kv.stats(),
            shed=self._shed,
            expected_wait=expected_wait(self._measured, self._queued_work),
        )

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
        self._measured = measured(
            self._measured, time.monotonic(), waiting=self._queued > 0, ended=float(self._ended_work)
        )
        self._ended_work = 0
        records = sorted(self._records.values(), key=lambda r: r.call.arrived)
        size, frames, now = self.config.page_size, self.info.frames_per_video, time.monotonic()
        entries = [r.entry(size, frames, self.config.prefill_tokens, now) for r in records if not r.waits]
        budgets = self._budgets()
        plan = schedule(entries, budgets)
        self._served, self._now = plan.served, plan.now
        for request, turn in plan.turns.items():
            self._records[request].turn = turn
        for request in plan.constrain:  # a job each: none waits for another's grammar
            self._run("constrain", (request,), self._constrain)
        for request in plan.load:  # the same
            self._run("load", (request,), self._load)
        self._run("tokenize", plan.tokenize, self._encode)
        self._run("encode", plan.encode, self._encode)
        self._run("prefill", plan.prefill, self._prefill, plan.within["prefill"])
        self._run("decode", plan.decode, self._decode, plan.within["decode"])
        if any(rows and name in budgets.idle for name, rows in plan.within.items()):
            self._inbox.put(lambda: None)  # another turn: a long pass has begun, and shorter ones may run within it

    def _recover(self, error: Exception) -> None:
        """After a bug in the engine itself nothing is known of anybody's state: every live request ends."""
        failed = Failed(Internal.logged(error, "the engine's loop", logger))
        for record in list(self._records.values()):
            told, record.call.failed = record.doomed, True
            record.call.cancellation.cancel(failed.error)
            if not record.held:  # else its worker's report ends it
                if record.stage not in TERMINAL:
                    self._advance(record, Stage.FAILED)
                self._release(record)
            if not told:
                record.call.sink(failed)

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
        for record in list(self._records.values()):
            if record.request.deadline is not None and record.request.deadline <= now:
                late = DeadlineExceeded(f"the deadline passed while the request was {record.stage.name}")
                self._fail_record(record, late)

    def _budgets(self) -> Budgets:
        c = self.config
        return Budgets(
            idle=self._workers.idle(),
            free_pages=self._pool.free,
            max_pending_per_stage=c.max_pending_per_stage,
            max_running=c.max_running,
            encode_batch=c.encode_batch,
            prefill_tokens=c.prefill_tokens,
            decode_tokens=c.decode_tokens,
            constrain=self._workers.free("constrain"),
            load=self._workers.free("load"),
            served=self._served,
            chunked=self.stages.model.spec.causal,
            within=self._workers.within(),
            now=self._now,
        )

    def _run(
        self,
        name: str,
        ids: Sequence[RequestId],
        stage: Callable[[list[Record]], Callable[[], list[Any]]],
        within: int = 0,
    ) -> None:
        """Give a stage's worker its next batch; the report comes back through the inbox."""
        if not ids:
            return
        records = [self._records[i] for i in ids]
        for record in records:
            self._advance(record, _RUNNING[name])
        run = stage(records)
        for record in records:
            record.holds += 1

        def job() -> None:
            begun = time.monotonic()
            try:
                outcomes = run()
            except BaseException as error:  # noqa: BLE001 - reported to every request; native code's panics are these
                outcomes = [error] * len(records)
            seconds = time.monotonic() - begun
            self._inbox.put(lambda: self._report(name, records, outcomes, seconds))

        self._workers.run(name, job, within)

    def _constrain(self, records: list[Record]) -> Callable[[], list[Any]]:
        requests = [r.request for r in records]
        return lambda: self.stages.constrain(requests)

    def _load(self, records: list[Record]) -> Callable[[], list[Any]]:
        [record] = records

        def tell(prompt: EncodedPrompt | None, rows: int) -> None:
            self._inbox.put(lambda: self._arrived(record, prompt, rows))

        return lambda: self.stages.load([record.request], record.call.cancellation, tell)

    def _encode(self, records: list[Record]) -> Callable[[], list[Any]]:
        requests = [r.request for r in records]
        return lambda: self.stages.encode(requests)

    def _prefill(self, records: list[Record]) -> Callable[[], list[Any]]:
        for record in records:
            if not record.pages.ids:
                count = record.pages_wanted(self.config.page_size)
                record.pages = PageTable.take(self._pool, count, record.keys)
                record.usage = replace(record.usage, cached_tokens=record.pages.shared * self.config.page_size)
        batch = [(r.request, r.pages) for r in records]
        return lambda: self.stages.prefill(batch)

    def _decode(self, records: list[Record]) -> Callable[[], list[Any]]:
        requests = [r.request for r in records]
        return lambda: self.stages.decode(requests)

    def _report(self, name: str, records: list[Record], outcomes: list[Any], seconds: float) -> None:
        """A stage's batch is done: advance each of its requests, or end it."""
        self._workers.ended(name)
        for record in records:
            record.holds -= 1
        for record, outcome in zip(records, outcomes, strict=True):
            record.run[name] += seconds
            if record.stage in TERMINAL:
                continue  # another sample of the same batch failed, and with it this one
            if record.doomed:
                if not record.held:
                    self._advance(record, Stage.FAILED)
                    self._release(record)
            elif isinstance(outcome, BaseException):
                self._fail_record(record, _typed(outcome, record))
            elif name == "decode":
                try:
                    self._stepped(record, outcome)
                except Exception as error:  # noqa: BLE001 - a bug with one request's result ends that request only
                    self._fail_record(record, _typed(error, record))
            elif name == "constrain":
                self._advance(record, Stage.CONSTRAINED)
            elif name == "load":
                self._loaded(record, outcome)
            elif name in ("tokenize", "encode"):
                record.usage, record.keys = outcome.usage, outcome.keys
                if (wanted := record.pages_wanted(self.config.page_size)) > self.config.pages:
                    self._fail_record(record, _too_large(record, wanted, self.config))
                    continue
                self._advance(record, Stage.ENCODED)
                del self._records[record.request.id]
                self._records.update((each.request.id, each) for each in record.split())
            else:
                self._prefilled(record, outcome)

    def _arrived(self, record: Record, prompt: EncodedPrompt | None, rows: int) -> None:
        """While a clip is read its prompt is known, and so many rows of it are final: it can be prefilled so far."""
        if record.doomed or record.stage in TERMINAL:
            return
        record.final = rows
        if prompt is not None:
            record.usage, record.keys = prompt.usage, prompt.keys
            for stage in (Stage.LOADED, Stage.ENCODING, Stage.ENCODED):
                self._advance(record, stage)

    def _loaded(self, record: Record, outcome: EncodedPrompt | None) -> None:
        """All media of a request are read. One that is prefilled meanwhile is encoded, too, unless it was not as
        foreseen: then it begins anew from here."""
        if record.final is None:
            self._advance(record, Stage.LOADED)
        elif outcome is None:
            record.again = True
            self._begin_again(record)
        else:
            record.final, record.keys = None, outcome.keys
            record.pages = replace(record.pages, keys=outcome.keys)

    def _begin_again(self, record: Record) -> None:
        if record.held:
            return  # prefill has it, and comes here with its report
        self.stages.forget_prefill(record.request.id)
        self._pool.release(record.pages.ids)
        record.pages, record.keys, record.prefilled = PageTable(), (), None
        record.final, record.again = None, False
        self._advance(record, Stage.LOADED)

    def _prefilled(self, record: Record, run: int | None) -> None:
        """So many positions have been run, or all: the pages they fill are there for others, too."""
        record.pages.publish(self._pool, None if run is None else run // self.config.page_size)
        record.prefilled = run
        record.turn = self._now  # a newcomer to decode begins at its clock
        self._advance(record, Stage.PREFILLED if run is None else Stage.ENCODED)
        if record.again:
            self._begin_again(record)

    def _stepped(self, record: Record, outcome: Any) -> None:
        wanted = record.request.streaming
        if outcome.delta and not record.first_token:
            record.first_token = time.monotonic()
        if outcome.snapshot is not None:
            record.call.sink(replace(outcome.snapshot, sample=record.sample))
        if outcome.delta and wanted.deltas:
            record.call.sink(Delta(outcome.delta, record.sample))
        record.rows = outcome.rows
        if outcome.reason is None:
            if outcome.pages is not None:
                record.pages = record.pages.trimmed(self._pool, outcome.pages)
            self._advance(record, Stage.READY)
            return
        answer = self.stages.finished(record.request.id)
        self._advance(record, Stage.FINISHED)
        event = record.finished(outcome.reason, answer, time.monotonic())
        self._seconds += 0.1 * (event.times.total / 1000 - self._seconds)
        self._ended_work += record.work
        self._release(record)
        record.call.sink(event)

    def _fail(self, request: RequestId, error: MMServeError) -> None:
        record = next((r for r in self._records.values() if r.call.id == request), None)
        if record is not None:
            self._fail_record(record, error)

    def _fail_all(self, error: MMServeError) -> None:
        for record in list(self._records.values()):
            self._fail_record(record, error)

    def _fail_record(self, record: Record, error: MMServeError) -> None:
        """Tell the client now, once; free its samples now, or when the workers that hold them report."""
        if record.call.failed:
            return
        record.call.failed = True
        record.call.cancellation.cancel(error)
        for each in list(record.call.records):
            if not each.held:
                self._advance(each, Stage.FAILED)
                self._release(each)
        record.call.sink(Failed(error))

    def _advance(self, record: Record, stage: Stage) -> None:
        if record.stage is Stage.QUEUED:
            with self._admission:
                self._queued -= record.samples
                self._waiting[record.request.tenant] -= record.samples
                self._waiting = +self._waiting  # only tenants that wait
                self._queued_work -= record.work
        record.stage = advance(record.stage, stage)

    def _release(self, record: Record) -> None:
        """A record has ended: nothing of it stays."""
        if record.stage not in TERMINAL:
            raise ValueError(f"released while {record.stage.name}")
        for sample in samples(record.request):  # encoded, but not yet split, it has left something for each
            self.stages.release(sample.id)
        self._pool.release(record.pages.ids)
        del self._records[record.request.id]
        record.call.records.remove(record)
        with self._admission:
            self._admitted -= record.samples
            if not self._admitted:
                self._idle.set()

    def _shed_by_wait(self, request: Request) -> None:
        """Refuse a request that would wait too long: it would only keep others waiting, and end late all the same."""
        wait = expected_wait(self._measured, self._work_ahead(request.tenant))
        left = None if request.deadline is None else request.deadline - time.monotonic()
        if left is not None and left <= 0:
            raise DeadlineExceeded("the deadline passed before the request was taken in")
        later = retry_after(wait, self.config.max_wait_seconds, left)
        if later is not None:
            self._shed += 1
            raise ResourceExhausted(
                f"the request would wait about {wait:.1f} seconds to start; its deadline and [engine] max_wait_seconds "
                f"({self.config.max_wait_seconds:g}) do not allow that; try again later",
                retry_after=later,
            )

    def _retry_after(self) -> float:
        """Seconds until a place in the queue is likely: the mean service time over the requests served at once."""
        return min(30.0, max(0.1, self._seconds * self._queued / self.config.max_running))


def _too_large(record: Record, wanted: int, config: EngineConfig) -> InvalidArgument:
    """Why a request that needs so many pages is refused: it would wait for them for good."""
    why = (
        f"{record.tokens} positions of {record.request.sequences} sequences need {wanted} K/V pages, and there are "
        f"{config.pages}: leave out cfg_scale, or shorten the prompt or max_new_tokens"
    )
    return InvalidArgument.of("diffusion.cfg_scale", why)


def _typed(error: BaseException, record: Record) -> MMServeError:
    """``error`` itself if it is one of ours; a bug becomes ``Internal`` with an id that the log has too."""
    if isinstance(error, MMServeError):
        return error
    return Internal.logged(error, f"request {record.request.id} while {record.stage.name}", logger)
