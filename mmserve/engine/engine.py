"""The engine of one model: plan → run stages → advance, on its own thread.

All events (submissions, cancellations, reports of stages) arrive in one inbox; only the engine's thread accesses the
table of requests, so that only the admission counter needs a lock.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from mmserve.config import EngineConfig, MediaConfig
from mmserve.config.engine import check_pages
from mmserve.core.constraint import CheckedConstraint
from mmserve.core.encoded import Encoded
from mmserve.core.events import Admitted
from mmserve.core.handover import ROLES, Handover
from mmserve.core.info import ModelInfo
from mmserve.core.plan import Budgets, Served
from mmserve.core.request import Request, RequestId, Stage
from mmserve.core.stats import Pass, Stats
from mmserve.decode.schedulers import Discrete
from mmserve.encode import vocabulary
from mmserve.encode.decoders import Decoders
from mmserve.engine.arrivals import Arrivals
from mmserve.engine.live import LiveRequests
from mmserve.engine.migration import Migration
from mmserve.engine.outcomes import StageOutcomes
from mmserve.engine.prefixes import EngineCaches, Prefixes
from mmserve.engine.request_state import ClientSink, RequestState, Sink, open_group, pass_size
from mmserve.engine.shutdown import Shutdown
from mmserve.engine.waiting import WaitingQueue
from mmserve.engine.workers import Workers
from mmserve.errors import Cancelled, ConfigError, Internal, MMServeError
from mmserve.kv.pool import PagePool
from mmserve.kv.table import PageTable
from mmserve.models.adapters import Adapters
from mmserve.models.base import Model
from mmserve.schedule.scheduler import schedule
from mmserve.stages import EncodedPrompt, Stages
from mmserve.tiers.caches import Caches

logger = logging.getLogger("mmserve.engine")

#: Maximum wait of the inbox (seconds): a client's deadline may be centuries away, which a queue rejects.
_LONGEST_WAIT = 3600.0
#: The running stage of a request in each worker.
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

    ``cache`` of media, and ``decoders`` of files: shared with other engines; None = create them.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        media: MediaConfig,
        schedulers: Mapping[str, Discrete] = MappingProxyType({}),
        cache: Caches | None = None,
        decoders: Decoders | None = None,
    ) -> None:
        self.config, self.media = config, media
        self.stages = Stages(model, config, media, schedulers, cache, decoders)
        check_pages(config, self.stages.capabilities.max_tokens)
        self.info: ModelInfo = self.stages.describe()
        self._pool = PagePool(config.pages, unit=self.stages.shared_pages)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queue = WaitingQueue(config)
        self._live = LiveRequests(self._queue, self._pool, self.stages)
        self._prefixes = Prefixes(
            self._pool,
            self.stages.tier,
            self.stages.prefilling.fetched,
            self._inbox.put,
            self.info.name,
            config.page_size,
            self.stages.page_bytes,
        )
        copy_evicted = self._prefixes.copy_evicted
        self._migration = Migration(self._live, self.stages, self._pool, config, copy_evicted)
        self._outcomes = StageOutcomes(
            self._live, self._queue, self._pool, self._prefixes, self._migration, self.stages, config
        )
        self._arrivals = Arrivals(
            self.stages, self._queue, self._migration, self._outcomes, self._inbox.put, self.withdraw
        )
        self._workers = Workers(config)
        self.passes: deque[Pass] = deque(maxlen=256)  # the latest, until they are read by metrics
        self._served: Mapping[str, Served] = {}  # by each stage's queue
        self._now = 0.0  # virtual time of decode
        self._thread = threading.Thread(target=self._loop, name="mmserve-engine", daemon=True)
        self._shutdown = Shutdown(
            self.info.name,
            self._thread,
            self._inbox.put,
            self._queue,
            self._live,
            self._workers,
            self._prefixes,
            self.stages,
        )

    @property
    def caches(self) -> EngineCaches:
        """The engine's caches for later requests."""
        return EngineCaches(self.info.name, self._prefixes, self.stages.encoder.cache)

    @property
    def adapters(self) -> Adapters:
        """The adapters that requests can use."""
        return self.stages.adapters

    # --- called from any thread ---

    def start(self) -> None:
        """Start the engine's thread and its workers."""
        self._workers.start()
        self.stages.decoder.set_yield_callbacks(
            self._workers.yield_callback("prefill"), self._workers.yield_callback("decode")
        )
        self._queue.refusal = ""
        self._thread.start()

    def warm(self) -> None:
        """Prepare, in the background, what the first constrained request needs; for long-running servers."""
        threading.Thread(target=self.stages.encoding.warm, name="mmserve-warm", daemon=True).start()

    def submit(
        self, request: Request, sink: ClientSink, prompt: Encoded | None = None, *, of_session: bool = False
    ) -> None:
        """Admit a request, or refuse it at once with a typed error.

        ``prompt``: its encoded messages, if the caller has encoded them already. ``of_session``: whether it is a
        question of an open session, which is accepted during a drain, too.

        Each of its samples takes a place in the queue, all of them or none. ``sink`` gets ``Admitted`` before this
        returns. Later, from the engine's thread, the last event is the ``Finished`` of the last sample, or one
        ``Failed``. ``sink`` must return quickly and never raise. An engine that does not have all roles
        (``serve_roles``) also sends ``HandedOver`` and ``Saved``.
        """
        request = self.stages.resolved(request)
        self.stages.capabilities.check(request)
        self._queue.check(request)
        state = open_group(request, cast(Sink, sink), time.monotonic())
        with self._queue.lock:
            ahead = self._queue.take(request, state.due, of_session=of_session)
            self.stages.adapters.acquire(request)
            if prompt is not None:
                self.stages.encoding.set_prompt(request.id, prompt)
            # Within the lock: a drain that begins now must find the request in the inbox before its own message. Before
            # `Admitted`: a client may cancel as soon as it gets that event. No other event can precede it, because
            # every other one first takes the request out of the queue, under this lock.
            self._inbox.put(lambda: self._live.by_id.__setitem__(request.id, state))
            sink(Admitted(ahead))

    def adopt(self, handover: Handover, sink: Sink) -> None:
        """See ``Arrivals.adopt``."""
        self._arrivals.adopt(handover, sink)

    def expect(self, handover: Handover, number: int, sink: Sink) -> None:
        """See ``Arrivals.expect``."""
        self._arrivals.expect(handover, number, sink)

    def serve_roles(self, roles: Iterable[str], save_every: int = 0, ahead_bytes: int = 0) -> None:
        """Set which of ``encode``, ``prefill`` and ``decode`` this engine runs from now on; by default all. A request
        whose next stage is another one leaves with ``HandedOver``; ``Saved`` is sent every ``save_every`` decode steps
        (0 = never). With no roles, all requests leave. ``ahead_bytes``: if decode runs elsewhere, K/V are sent ahead of
        their request in chunks of this size, as ``Ahead``; 0 = with the request."""
        chosen = frozenset(roles)
        if not chosen <= set(ROLES):
            raise ConfigError(f"the roles of an engine are some of {', '.join(ROLES)}, not {sorted(chosen)}")

        def change() -> None:
            self._migration.roles, self._migration.save_every = chosen, save_every
            self._migration.ahead_bytes = ahead_bytes
            self._migration.hand_over_waiting()

        self._inbox.put(change)

    def cancel(self, request: RequestId, error: MMServeError | None = None) -> None:
        """End a request and all its samples with ``error`` (default ``Cancelled``); no effect if it has ended."""
        self._arrivals.discard(request)
        self._inbox.put(lambda: self._live.cancel(request, error or Cancelled("the request was cancelled")))

    def withdraw(self, request: RequestId) -> None:
        """End a request that continues elsewhere, without further events."""
        self._arrivals.discard(request)
        self._inbox.put(lambda: self._live.withdraw(request))

    def check_constraint(self, request: Request, answer: str | None) -> CheckedConstraint:
        """Check whether the constraint of ``request``, which is not submitted, can be enforced, and whether ``answer``
        obeys it.

        Takes as long as compiling the constraint. Raises the errors that the request would fail with.
        """
        self.stages.capabilities.check(request)
        return self.stages.encoding.check_constraint(request, answer)

    def prompt_ids(self, request: Request, special_tokens: bool = True, generation_prompt: bool = True) -> list[int]:
        """See ``ids_of``; ``request`` is not submitted. Raises the errors that it would fail with, except for its
        length."""
        self.stages.capabilities.check(request)
        return vocabulary.ids_of(self.stages.model, request, special_tokens, generation_prompt)

    def token_strs(self, ids: Sequence[int]) -> list[str]:
        """See ``encode.vocabulary``."""
        return vocabulary.token_strs(self.stages.model, ids)

    def detokenized(self, ids: Sequence[int]) -> str:
        """See ``encode.vocabulary``."""
        return vocabulary.detokenized(self.stages.model, ids)

    def drain(self, timeout: float) -> bool:
        """See ``Shutdown.drain``."""
        return self._shutdown.drain(timeout)

    def stop(self) -> None:
        """See ``Shutdown.stop``."""
        self._shutdown.stop()

    def stats(self) -> Stats:
        """A snapshot of counters; values may be slightly outdated."""
        p, decoded = self._pool, self.stages.decoding
        prefix = (p.cached, p.lookups, p.hits)
        steps = (decoded.constraint_steps, decoded.constraint_fallbacks, decoded.constraint_late)
        cache = self.stages.encoder.cache
        return Stats(
            self._queue.admitted,
            self._queue.queued,
            p.in_use,
            self.stages.held,
            self.config.pages,
            *prefix,
            *steps,
            token_cache=cache.tokens.stats(),
            pixel_cache=cache.pixels.stats(),
            kv_cache=cache.kv.stats(),
            prefix_cache=cache.prefix.stats(),
            shed=self._queue.shed,
            stages=self._live.by_stage(),
            expected_wait=self._queue.expected_wait(),
        )

    # --- the loop: the engine's thread only ---

    def _loop(self) -> None:
        while not self._shutdown.stopping:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - a bug here must leave no client waiting and no page taken
                self._live.recover(Internal.logged(error, "the engine's loop", logger))

    def _turn(self) -> None:
        self._process_messages()
        self._live.expire(time.monotonic())
        self._queue.measure(time.monotonic())
        states = sorted(self._live, key=lambda r: r.group.arrived)
        size, frames, now = self.config.page_size, self.info.frames_per_video, time.monotonic()
        arrived_waiting = self._migration.allocate_arrived(states, self._now)
        tokens, causal = self.config.prefill_tokens, self.stages.model.spec.causal
        entries = [r.entry(size, frames, tokens, now, causal=causal) for r in states if not r.waits]
        budgets = self._budgets(0 if arrived_waiting else self._pool.free)
        plan = schedule(entries, budgets)
        self._served, self._now = plan.served, plan.now
        for request, turn in plan.turns.items():
            self._live.by_id[request].turn = turn
        for request in plan.constrain:  # one job each, so that none waits for another's grammar
            self._run("constrain", (request,), self._constrain)
        for request in plan.load:  # one job each
            self._run("load", (request,), self._load)
        self._run("tokenize", plan.tokenize, self._encode)
        self._run("encode", plan.encode, self._encode)
        self._run("prefill", plan.prefill, self._prefill, plan.within["prefill"])
        self._run("decode", plan.decode, self._decode, plan.within["decode"])
        if any(rows and name in budgets.idle for name, rows in plan.within.items()):
            self._inbox.put(lambda: None)  # plan again: a long pass has begun, and shorter ones may run within it

    def _process_messages(self) -> None:
        """Wait for a message or the next deadline, then process all messages."""
        due = self._live.next_deadline()
        timeout = None if due is None else max(0.0, min(_LONGEST_WAIT, due - time.monotonic()))
        try:
            self._inbox.get(timeout=timeout)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _budgets(self, free_pages: int) -> Budgets:
        c = self.config
        return Budgets(
            idle=self._workers.idle(),
            free_pages=free_pages,
            max_pending_per_stage=c.max_pending_per_stage,
            max_running=c.max_running,
            encode_batch=c.encode_batch,
            prefill_tokens=c.prefill_tokens,
            decode_tokens=c.decode_tokens,
            constrain=self._workers.free("constrain"),
            load=self._workers.free("load"),
            served=self._served,
            chunked=self.stages.model.spec.chunked,
            within=self._workers.within(),
            now=self._now,
        )

    def _run(
        self,
        name: str,
        ids: Sequence[RequestId],
        stage: Callable[[list[RequestState]], Callable[[], list[Any]]],
        within: int = 0,
    ) -> None:
        """Give a stage's worker its next batch; the report arrives in the inbox."""
        if not ids:
            return
        states = [self._live.by_id[i] for i in ids]
        for state in states:
            self._live.advance(state, _RUNNING[name])
        run = stage(states)
        for state in states:
            state.workers += 1

        def job(own: bool) -> None:
            begun = time.monotonic()
            try:
                outcomes = run()
            except BaseException as error:  # noqa: BLE001 - reported to every request; native code's panics are these
                outcomes = [error] * len(states)
            seconds = time.monotonic() - begun
            self._inbox.put(lambda: self._report(name, own, states, outcomes, seconds))

        self._workers.run(name, job, within)

    def _constrain(self, states: list[RequestState]) -> Callable[[], list[Any]]:
        requests = [r.request for r in states]
        return lambda: self.stages.encoding.constrain(requests)

    def _load(self, states: list[RequestState]) -> Callable[[], list[Any]]:
        [state] = states
        overlaps = "prefill" in self._migration.roles

        def report(prompt: EncodedPrompt | None, rows: int) -> None:
            self._inbox.put(lambda: self._outcomes.rows_read(state, prompt, rows))

        return lambda: self.stages.encoding.load(
            [state.request], state.group.cancellation, report if overlaps else None
        )

    def _encode(self, states: list[RequestState]) -> Callable[[], list[Any]]:
        requests = [r.request for r in states]
        return lambda: self.stages.encoding.encode(requests)

    def _prefill(self, states: list[RequestState]) -> Callable[[], list[Any]]:
        for state in states:
            if not state.pages.ids and not state.unpruned:
                count = state.pages_wanted(self.config.page_size)
                state.pages = PageTable.take(self._pool, count, state.keys)
                state.usage = replace(state.usage, cached_tokens=state.pages.shared * self.config.page_size)
        self._migration.send_ahead(states)
        batch, copy_evicted = [(r.request, r.pages) for r in states], self._prefixes.evicted()

        def run() -> list[Any]:
            copy_evicted()
            return self._migration.prefilling(states, lambda: self.stages.prefilling.prefill(batch))

        return run

    def _decode(self, states: list[RequestState]) -> Callable[[], list[Any]]:
        requests, run = [r.request for r in states], self._migration.decoding(states)
        return lambda: run(lambda: self.stages.decoding.decode(requests))

    def _report(self, name: str, own: bool, states: list[RequestState], outcomes: list[Any], seconds: float) -> None:
        """Apply the outcomes of a stage's batch to its requests. ``own``: see ``Workers.run``."""
        self._workers.ended(name, own)
        if (size := pass_size(name, states, outcomes)) > 0:
            self.passes.append(Pass(name, size, seconds))
        for state in states:
            state.workers -= 1
        for state, outcome in zip(states, outcomes, strict=True):
            state.run[name] += seconds
            self._outcomes.apply(name, state, outcome, self._now)
