"""Applies the outcomes of stages to the requests of one engine: each advances, leaves for another engine, or ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from mmserve.config import EngineConfig
from mmserve.core.events import Delta, Prefilled, PromptText
from mmserve.core.handover import Handover
from mmserve.core.request import TERMINAL, Stage
from mmserve.decode.state import Answer, Stepped
from mmserve.engine.live import LiveRequests, typed
from mmserve.engine.migration import Migration
from mmserve.engine.prefixes import Prefixes
from mmserve.engine.request_state import RequestGroup, RequestState
from mmserve.engine.waiting import WaitingQueue
from mmserve.kv.pool import PagePool
from mmserve.kv.table import PageTable
from mmserve.stages import EncodedPrompt, Stages

#: The answer of a request for its prompt alone.
_NO_ANSWER = Answer("", completion_tokens=0, forwards=0, recomputed_tokens=0, edits=0, kv_positions=0, tokens=())


class StageOutcomes:
    """Applies outcomes to requests; called on the engine's thread only."""

    def __init__(
        self,
        live: LiveRequests,
        waiting: WaitingQueue,
        pool: PagePool,
        prefixes: Prefixes,
        migration: Migration,
        stages: Stages,
        config: EngineConfig,
    ) -> None:
        self._live, self._queue, self._pool, self._prefixes = live, waiting, pool, prefixes
        self._migration, self._stages, self._config = migration, stages, config

    def apply(self, name: str, state: RequestState, outcome: Any, now: float) -> None:
        """Apply one request's ``outcome`` of the stage ``name``, which no longer holds it: its result, or an exception.

        ``now``: virtual time of decode.
        """
        if state.stage in TERMINAL:
            return  # another sample of the same batch failed, which ended this one
        if state.aborted:
            if not state.in_flight:
                self._live.end_failed(state)
        elif isinstance(outcome, BaseException):
            self._live.fail(state, typed(outcome, state))
        elif name == "decode":
            try:
                self._stepped(state, outcome)
            except Exception as error:  # noqa: BLE001 - a bug with one request's result ends that request only
                self._live.fail(state, typed(error, state))
        elif name == "constrain":
            self._live.advance(state, Stage.CONSTRAINED)
        elif isinstance(outcome, EncodedPrompt) and name != "load":
            self._encoded(state, outcome)
        elif name == "load":
            self._loaded(state, outcome)
        else:
            self._prefilled(state, outcome, now)

    def _encoded(self, state: RequestState, prompt: EncodedPrompt) -> None:
        """A prompt is complete; if the decoder prunes it first (``unpruned``), prefill returns it once more."""
        state.usage, state.keys, state.unpruned = prompt.usage, prompt.keys, prompt.unpruned
        state.prompt = prompt.text
        if (refusal := state.too_large(self._config)) is not None:
            self._live.fail(state, refusal)
            return
        self._live.advance(state, Stage.ENCODED)
        if not prompt.unpruned:
            self._live.split(state)
        if state.request.encodes_only:
            for each in list(state.group.members):
                self._finish_encoded(each)
            return
        for each in list(state.group.members):
            self._leave_if_due(each)
        self._fetch(state.group)

    def _finish_encoded(self, state: RequestState) -> None:
        """End a request for its prompt alone, which is known."""
        prompt = state.prompt or PromptText()
        state.group.sink(Prefilled(state.usage, state.sample, prompt.ids, prompt.text))
        self._finish(state, "length", _NO_ANSWER)

    def adopted(self, state: RequestState, handover: Handover) -> None:
        """A request from another engine was received."""
        self._migration.arrive(state, handover)
        self._fetch(state.group)

    def _fetch(self, group: RequestGroup) -> None:
        """Fetch pages that are not in the pool from other tiers, for prompts that are prefilled here next."""
        for state in group.members:
            if state.stage is Stage.ENCODED and state.prefilled is None:
                self._prefixes.fetch(state)

    def rows_read(self, state: RequestState, prompt: EncodedPrompt | None, rows: int) -> None:
        """The first ``rows`` rows of a prompt are final while its clip is still loading: they can be prefilled.

        ``prompt``: the outline of the prompt, in the first call.
        """
        if state.aborted or state.stage in TERMINAL:
            return
        state.final = rows
        if prompt is not None:
            state.usage, state.keys, state.prompt = prompt.usage, prompt.keys, prompt.text
            if (refusal := state.too_large(self._config)) is not None:
                self._live.fail(state, refusal)
                return
            for stage in (Stage.LOADED, Stage.ENCODING, Stage.ENCODED):
                self._live.advance(state, stage)

    def _loaded(self, state: RequestState, outcome: EncodedPrompt | None) -> None:
        """All media of a request are loaded. If its prompt was prefilled meanwhile, it is encoded too; if it differs
        from its outline, prefill restarts."""
        if state.final is None:
            self._live.advance(state, Stage.LOADED)
        elif outcome is None:
            state.reload = True
            self._reload(state)
        else:
            state.final, state.keys = None, outcome.keys
            state.pages = replace(state.pages, keys=outcome.keys)

    def _reload(self, state: RequestState) -> None:
        if state.in_flight:
            return  # in prefill, whose outcome is processed here
        self._stages.prefilling.discard(state.request.id)
        self._pool.release(state.pages.ids)
        state.pages, state.keys, state.prefilled = PageTable(), (), None
        state.final, state.reload = None, False
        self._live.advance(state, Stage.LOADED)

    def _prefilled(self, state: RequestState, run: int | None, now: float) -> None:
        """The first ``run`` positions of a prompt are prefilled (None = all): publish the pages that they fill.

        ``now``: virtual time of decode.
        """
        state.pages.publish(self._pool, None if run is None else run // self._config.page_size)
        self._prefixes.published(state)
        restored = self._stages.prefilling.restored.pop(state.request.id, 0)
        if restored:
            found = (state.pages.shared + restored) * self._config.page_size
            state.usage = replace(state.usage, cached_tokens=found)
        if run is None and self._stages.model.spec.renoising is None:
            state.reach("draft")
            state.rows = 0  # its first step already has candidates
        state.prefilled, state.turn = run, now  # starts at the current virtual time of decode
        self._live.advance(state, Stage.PREFILLED if run is None else Stage.ENCODED)
        if state.reload:
            self._reload(state)
            return
        wanted = state.request.streaming
        if run is None and wanted.returns_prompt:
            prompt, state.prompt = state.prompt or PromptText(), None
            tokens = self._stages.prefilling.prompt_tokens.pop(state.request.id, ())
            state.group.sink(Prefilled(state.usage, state.sample, prompt.ids, prompt.text, tokens))
        self._leave_if_due(state)

    def _leave_if_due(self, state: RequestState) -> None:
        if self._migration.must_hand_over(state):
            self._migration.hand_over(state)

    def _stepped(self, state: RequestState, outcome: Stepped) -> None:
        state.stepped(outcome)
        if not state.request.prompt_only:
            self._report_step(state, outcome)
        state.rows = outcome.rows
        if outcome.reason is None:
            if outcome.pages is not None:
                state.pages = state.pages.trimmed(self._pool, outcome.pages)
            self._live.advance(state, Stage.READY)
            self._migration.stepped(state)
            return
        reason, answer = outcome.reason, self._stages.decoding.finished(state.request.id)
        if state.request.prompt_only:
            counts = answer.forwards, answer.recomputed_tokens
            reason, answer = "length", Answer("", 0, *counts, 0, answer.kv_positions, (), warnings=answer.warnings)
        self._finish(state, reason, answer)

    @staticmethod
    def _report_step(state: RequestState, outcome: Stepped) -> None:
        """Send what a step has changed to the client."""
        if outcome.snapshot is not None:
            state.group.sink(replace(outcome.snapshot, sample=state.sample))
        if outcome.draft is not None:
            state.group.sink(replace(outcome.draft, sample=state.sample))
        if outcome.delta and state.request.streaming.deltas:
            state.group.sink(Delta(outcome.delta, state.sample))

    def _finish(self, state: RequestState, reason: str, answer: Answer) -> None:
        """End a request with its answer."""
        self._live.advance(state, Stage.FINISHED)
        event = state.finished(reason, answer, time.monotonic())
        self._queue.served(state.work, event.times.total / 1000)
        self._live.release(state)
        state.group.sink(event)
