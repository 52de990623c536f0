"""Migration of requests between engines that run different stages: at stage boundaries, and between decode steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mmserve.config import EngineConfig
from mmserve.core.events import Failed
from mmserve.core.handover import NEXT_ROLE, ROLES, Ahead, HandedOver, Handover, Saved
from mmserve.core.isolation import run_isolated
from mmserve.core.payloads import CanvasPayload, KVChunk
from mmserve.core.request import Stage
from mmserve.engine.live import LiveRequests, typed
from mmserve.engine.request_state import RequestState, Sink, open_group
from mmserve.errors import MMServeError, Unavailable, Unimplemented
from mmserve.kv.ahead import Incoming
from mmserve.kv.pool import PagePool
from mmserve.kv.table import PageTable
from mmserve.stages import Stages


class Migration:
    """For the engine's thread only, except for the results of ``prefilling`` and ``decoding``.

    ``roles``: the stages that this engine runs. A request whose next stage is another one leaves; a running stage is
    completed here. ``save_every``: decode steps between two checkpoints of a request (``Saved``); 0 = none.
    ``ahead_bytes``: K/V of a prompt that is decoded elsewhere are sent ahead of it in chunks of this size (``Ahead``);
    0 = with it. ``copy_evicted`` copies the old contents of pages that have just been allocated from the pool.
    """

    def __init__(
        self,
        live: LiveRequests,
        stages: Stages,
        pool: PagePool,
        config: EngineConfig,
        copy_evicted: Callable[[], None],
    ) -> None:
        self.roles = frozenset(ROLES)
        self.save_every = self.ahead_bytes = 0
        self._live, self._stages, self._pool, self._config = live, stages, pool, config
        self._copy_evicted = copy_evicted

    # --- in ---

    def state_of(self, handover: Handover, sink: Sink) -> RequestState:
        """The first state here of a request that is received; thread-safe."""
        state = open_group(handover.request, sink, time.monotonic() - handover.age)
        state.take_over(handover)
        return state

    def arrive(self, state: RequestState, handover: Handover) -> None:
        """Add a received request at the stage where it continues."""
        request, payload = state.request, handover.payload
        self._live.by_id[request.id] = state
        if payload is None:
            return
        if handover.stage is Stage.ENCODED:
            self._stages.to_prefill.send(request.id, payload)
            self._live.advance(state, Stage.ENCODED)
        else:
            self._stages.to_decode.send(request.id, payload)
            self._live.advance(state, Stage.ARRIVED)
        if (refusal := state.too_large(self._config)) is not None:
            self._live.fail(state, refusal)

    def expect(self, state: RequestState, incoming: Incoming) -> None:
        """Add a request that is expected, and whose K/V are being received."""
        self._live.by_id[state.request.id] = state
        self._stages.decoding.expect_ahead(state.request.id, incoming)
        self._live.advance(state, Stage.EXPECTED)

    def complete(self, handover: Handover, sink: Sink) -> None:
        """Receive the rest of an expected request."""
        state = self._live.by_id.get(handover.request.id)
        if state is None or state.stage is not Stage.EXPECTED:  # it ended meanwhile
            sink(Failed(Unavailable("the request's K/V were discarded: send the request again")))
            return
        state.take_over(handover)
        self._stages.to_decode.send(state.request.id, handover.payload)
        self._live.advance(state, Stage.ARRIVED)

    def allocate_arrived(self, states: Sequence[RequestState], now: float) -> bool:
        """Allocate pages for received requests, in order. Returns whether some still wait: other requests must not
        allocate then.

        Expected requests get pages after all received ones. ``now``: virtual time of decode.
        """
        room = self._config.max_running - sum(bool(state.pages.ids) for state in states)
        for stage in (Stage.ARRIVED, Stage.EXPECTED):
            for state in states:
                if state.stage is not stage:
                    continue
                if not state.pages.ids:
                    count = state.pages_wanted(self._config.page_size)
                    if room < 1 or count > self._pool.free:
                        return stage is Stage.ARRIVED
                    room -= 1
                    state.pages = PageTable.take(self._pool, count, ())
                    self._copy_evicted()  # before another thread writes received K/V to these pages
                    self._stages.decoding.expect(state.request.id, state.pages)
                if stage is Stage.ARRIVED:
                    state.turn = now
                    self._live.advance(state, Stage.PREFILLED)
        return False

    # --- out ---

    def must_hand_over(self, state: RequestState) -> bool:
        """Whether ``state`` is at a boundary, and continues elsewhere."""
        if state.stage is Stage.PREFILLED and state.payload is not None:
            return not state.aborted  # its state was removed from decode here
        role = NEXT_ROLE.get(state.stage)
        if state.stage is Stage.QUEUED and self._stages.encoding.has_prompt(state.request.id):
            return False
        begun = state.in_flight or state.prefilled is not None or state.final is not None
        return role is not None and role not in self.roles and not begun and not state.aborted

    def hand_over_waiting(self) -> None:
        """After a change of roles: requests that wait for a stage that now runs elsewhere leave.

        Requests in decode leave after their next step.
        """
        for state in self._live:
            if state.stage is not Stage.READY and self.must_hand_over(state):
                self.hand_over(state)

    def hand_over(self, state: RequestState) -> None:
        """Hand a request over to another engine; it stays if its state cannot be transferred, such as that of samples
        that learn from each other."""
        try:
            payload = state.payload if state.payload is not None else self._make_payload(state)
        except Unimplemented:
            return
        except Exception as error:  # noqa: BLE001 - a bug with one request's state ends that request only
            self._live.fail(state, typed(error, state))
            return
        handover = self._handover(state, payload)
        self._live.advance(state, Stage.LEFT)
        self._live.release(state)
        state.group.sink(HandedOver(handover, state.sample))

    def send_ahead(self, states: Sequence[RequestState]) -> None:
        """Called when the prefill of these begins, or continues: starts sending ahead the K/V of those that will
        leave."""
        if "decode" in self.roles or not self.ahead_bytes:
            return
        for state in states:
            if state.prefilled is None and not state.unpruned:
                handover = replace(self._handover(state, None), stage=Stage.PREFILLED)
                self._stages.prefilling.ahead_senders[state.request.id] = (
                    partial(_send, state, handover),
                    self.ahead_bytes,
                )

    def prefilling(self, states: list[RequestState], run: Callable[[], list[Any]]) -> list[Any]:
        """``run`` a prefill batch on its worker's thread; requests that leave afterwards are packed there."""
        outcomes = run()
        if "decode" not in self.roles:
            for i, state in enumerate(states):
                if outcomes[i] is None:
                    outcomes[i] = self._set_payload(state, self._stages.prefilled_payload)
        return outcomes

    def decoding(self, states: list[RequestState]) -> Callable[[Callable[[], list[Any]]], list[Any]]:
        """A function that runs a decode batch on its worker's thread, and packs requests that leave or are saved
        afterwards."""
        every, leaves = self.save_every, "decode" not in self.roles
        due = [leaves or (every > 0 and state.steps % every == every - 1) for state in states]

        def run(steps: Callable[[], list[Any]]) -> list[Any]:
            outcomes = steps()
            for state, outcome, packs in zip(states, outcomes, due, strict=True):
                if packs and not isinstance(outcome, BaseException) and outcome.reason is None:
                    self._set_payload(state, self._stages.live_payload)
            return outcomes

        return run

    def stepped(self, state: RequestState) -> None:
        """After a decode step that did not end the answer: send the checkpoint, or hand the request over."""
        state.steps += 1
        if state.payload is None:
            return
        if self.must_hand_over(state):
            self.hand_over(state)
        else:
            state.group.sink(Saved(self._handover(state, state.payload), state.sample))
        state.payload = None

    def _set_payload(self, state: RequestState, pack: Callable[[str], Any]) -> MMServeError | BaseException | None:
        """Set ``state.payload``, on a worker's thread. Returns the error, unless the state cannot be transferred."""
        [outcome] = run_isolated(lambda ids: [pack(ids[0])], [state.request.id])
        if not isinstance(outcome, BaseException):
            state.payload = outcome
            return None
        return None if isinstance(outcome, Unimplemented) else outcome

    def _make_payload(self, state: RequestState) -> Any:
        if state.stage is Stage.QUEUED:
            return None
        if state.stage is Stage.ENCODED:
            return self._stages.encoded_payload(state.request.id)
        return self._stages.prefilled_payload(state.request.id)

    def _handover(self, state: RequestState, payload: Any) -> Handover:
        arrived = state.group.arrived
        return Handover(
            state.request,
            state.stage,
            payload,
            state.usage,
            state.keys,
            state.unpruned,
            state.prompt,
            payload.text.sent if isinstance(payload, CanvasPayload) else 0,
            time.monotonic() - arrived,
            dict(state.run),
            {name: at - arrived for name, at in state.reached.items()},
        )


def _send(state: RequestState, handover: Handover, number: int, chunk: KVChunk) -> None:
    """Send K/V ahead of ``state``; on a sender thread."""
    state.group.sink(Ahead(replace(handover, payload=chunk), number, state.sample))
