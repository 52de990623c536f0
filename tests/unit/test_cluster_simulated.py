"""A coordinator among workers that by chance end, change their roles, refuse requests and get their calls late:
each client gets its text and its end once, no worker gets a request that it has, and no state is kept."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_workers import MODEL, PayloadStore, coordinator, join
from harness import Call
from helpers import ask, picture

from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.messages import Chunk, Item, Moved, Order, Refused, RequestEvent
from mmserve.core.events import Delta, Failed, Finished, StageTimes, Usage
from mmserve.core.handover import Handover
from mmserve.core.request import Request, Stage
from mmserve.core.samples import samples
from mmserve.errors import Cancelled, MMServeError, TransferError

#: What every sample answers.
TEXT = "one two three four five six"
KINDS = ({"encode"}, {"prefill"}, {"decode"}, {"prefill", "decode"}, {"encode", "prefill"}, {"encode", "decode"})
ENDED: dict[str, Any] = {
    "usage": Usage(1, 0, 1),
    "times": StageTimes(0.0, 0.0, 0.0, 0.0, 0.0),
    "forwards": 1,
    "recomputed_tokens": 0,
}


@dataclass(eq=False)
class DecodeState:
    """A request, or sample, on a worker: where it is, and what it was taken in as."""

    order: Order
    request: Request
    stage: Stage
    sent: int = 0
    steps: int = 0
    chunks: int = 0  # that came ahead of it, or, where it is prefilled, that it has sent
    expected: bool = False

    @property
    def sample(self) -> int | None:
        """As it is reported."""
        if self.order.sample is not None:
            return self.order.sample
        if self.request.sampling.n > 1 or self.order.handover.request.sampling.n == 1:
            return None
        name = self.request.id
        return 0 if name == self.order.key else int(name.rpartition(".")[2])


@dataclass(eq=False)
class Simulated:
    """A worker that gets calls late, and reports what it does later still."""

    name: str
    roles: frozenset[str]
    payloads: PayloadStore
    chance: random.Random
    ahead: bool
    calls: deque[Callable[[], None]] = field(default_factory=deque)
    reports: deque[Item] = field(default_factory=deque)
    live: dict[str, DecodeState] = field(default_factory=dict)
    own: frozenset[str] = frozenset()  # the roles that it knows of

    def __post_init__(self) -> None:
        self.own = self.roles

    # --- as the coordinator sees it ---

    def take(self, orders: list[Order]) -> None:
        for order in orders:
            self.calls.append(lambda order=order: self._taken(order))  # type: ignore[misc]

    def cancel(self, model: str, ids: list[str], error: MMServeError | None) -> None:
        for each in ids:
            self.calls.append(lambda each=each: self._cancelled(each, error))  # type: ignore[misc]

    def serve(self, roles: Any) -> None:
        self.roles = frozenset(roles)

        def change(roles: frozenset[str] = self.roles) -> None:
            self.own = roles
            for live in list(self.live.values()):
                self._leave_if_due(live)

        self.calls.append(change)

    def ask(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        raise NotImplementedError

    post = ask

    # --- what it does ---

    def _cancelled(self, name: str, error: MMServeError | None) -> None:
        groups = {id(live.order) for live in self.live.values() if live.order.handover.request.id == name}
        ended = [key for key, live in self.live.items() if id(live.order) in groups]
        if error is None:
            ended = [key for key in ended if key == name]
        for key in ended:
            del self.live[key]
        if ended and error is not None:
            self.reports.append(RequestEvent(MODEL, name, None, Failed(error)))

    def _taken(self, order: Order) -> None:
        handover = order.handover
        name = handover.request.id
        if order.shard:
            if self.chance.random() < 0.2:
                self._refuse(order)
            else:
                self._moved(order, order.sample, handover)
            return
        if self.chance.random() < 0.03:  # something of it does not come
            self.live.pop(name, None)
            self._refuse(order)
            return
        expected = self.live.get(name)
        for number, _parcel in order.ahead:
            if number == 0:
                assert name not in self.live, f"{self.name} has {name} already"
                expected = self.live[name] = DecodeState(order, handover.request, Stage.EXPECTED, expected=True)
            if expected is None or not expected.expected or expected.chunks != number:
                self.live.pop(name, None)
                self._refuse(order)
                return
            expected.chunks += 1
        if order.expects:
            return
        sent_ahead = int(str(order.parcel).rpartition("ahead=")[2]) if "ahead=" in str(order.parcel) else 0
        if expected is not None and expected.expected:
            del self.live[name]
        came = expected.chunks if expected is not None and expected.expected else 0
        if handover.stage is Stage.PREFILLED and sent_ahead and came != sent_ahead:
            self._refuse(order)
            return
        assert name not in self.live, f"{self.name} has {name} already"
        self.live[name] = live = DecodeState(order, handover.request, handover.stage, sent=handover.sent)
        self._leave_if_due(live)

    def _refuse(self, order: Order) -> None:
        if not order.expects:
            self.reports.append(Refused(MODEL, order.key, order.sample, TransferError("it did not come")))

    def _moved(self, order: Order, sample: int | None, handover: Handover, what: str = "", stays: bool = False) -> None:
        parcel = f"{self.name} {self.chance.random()} {what}"
        self.reports.append(Moved(MODEL, order.key, sample, handover, parcel, stays))

    def _handover(self, live: DecodeState) -> Handover:
        return Handover(live.request, live.stage, None, sent=live.sent)

    def _leave_if_due(self, live: DecodeState) -> None:
        role = {Stage.QUEUED: "encode", Stage.ENCODED: "prefill", Stage.PREFILLED: "decode", Stage.READY: "decode"}
        wanted = role.get(live.stage)
        if wanted is None or wanted in self.own or (live.stage is Stage.ENCODED and live.chunks):
            return
        del self.live[live.request.id]
        if live.stage is Stage.QUEUED:
            self.reports.append(Moved(MODEL, live.order.key, live.sample, self._handover(live), None, stays=False))
            return
        ahead = f"ahead={live.chunks}" if live.stage is Stage.PREFILLED else ""
        self._moved(live.order, live.sample, self._handover(live), ahead)

    def step(self) -> None:
        """Hear something, or go on with a request."""
        if self.calls and self.chance.random() < 0.6:
            self.calls.popleft()()
            return
        going = [live for live in self.live.values() if live.stage is not Stage.EXPECTED]
        if not going:
            return
        live = self.chance.choice(going)
        if live.stage is Stage.QUEUED:
            live.stage = Stage.ENCODED
            if live.request.sampling.n > 1:
                del self.live[live.request.id]
                for one in samples(live.request):
                    assert one.id not in self.live
                    self.live[one.id] = each = DecodeState(live.order, one, Stage.ENCODED)
                    self._leave_if_due(each)
            else:
                self._leave_if_due(live)
        elif live.stage is Stage.ENCODED:
            if self.ahead and "decode" not in self.own and self.chance.random() < 0.6:
                handover = replace(self._handover(live), stage=Stage.PREFILLED)
                parcel = f"chunk {live.chunks} {self.name} {self.chance.random()}"
                self.reports.append(Chunk(MODEL, live.order.key, live.sample, handover, parcel, live.chunks))
                live.chunks += 1
                return
            live.stage = Stage.PREFILLED
            self._leave_if_due(live)
        else:
            self._decode(live)

    def _decode(self, live: DecodeState) -> None:
        live.stage, live.chunks = Stage.READY, 0
        count = self.chance.randrange(1, 5)
        text, live.sent = TEXT[live.sent : live.sent + count], min(len(TEXT), live.sent + count)
        live.steps += 1
        sample = live.sample if live.sample is not None else 0
        if text:
            self.reports.append(RequestEvent(MODEL, live.order.key, live.sample, Delta(text, sample)))
        if live.sent == len(TEXT):
            del self.live[live.request.id]
            done = Finished(reason="stop", text=TEXT, sample=sample, **ENDED)
            self.reports.append(RequestEvent(MODEL, live.order.key, live.sample, done))
        elif live.steps % 2 == 0:
            self._moved(live.order, live.sample, self._handover(live), stays=True)
        if live.request.id in self.live:
            self._leave_if_due(live)


@pytest.mark.parametrize("seed", [*range(16), 44])
def test_nothing_is_lost_or_answered_twice(seed: int) -> None:
    chance = random.Random(seed)
    payloads = PayloadStore()
    made = coordinator(payloads=payloads, settings=ClusterSettings(max_losses=10_000, shard_pixels=1), max_running=2)
    workers: dict[str, Simulated] = {}
    calls: dict[str, Call] = {}
    cancelled: set[str] = set()

    def begin(place: int, roles: frozenset[str]) -> None:
        name = f"{place}.{chance.random()}"
        workers[name] = Simulated(name, roles, payloads, chance, ahead=seed % 3 > 0)
        join(made, workers[name])  # type: ignore[arg-type]

    def ends(name: str) -> None:
        gone = workers.pop(name)
        late = [gone.reports.popleft() for _ in range(chance.randrange(len(gone.reports) + 1))]
        made.worker_exited(name)
        made.take(name, late)  # what it had said, which is taken in too late
        begin(int(name.split(".")[0]), gone.roles)

    for place, roles in enumerate(("encode", "prefill", "decode", *chance.choices(KINDS, k=3))):
        begin(place, frozenset({roles}) if isinstance(roles, str) else frozenset(roles))
    for turn in range(6000):
        quiet = turn > 4000
        if not quiet and chance.random() < 0.02 and len(calls) < 40:
            name = f"r{len(calls)}"
            images = (picture(1), picture(2)) if chance.random() < 0.2 else ()
            request = ask(name, images=images)
            request = replace(request, sampling=replace(request.sampling, n=chance.choice((1, 1, 1, 3))))
            calls[name] = Call(request)
            made.submit(request, calls[name].sink)
        worker = chance.choice(list(workers.values()))
        worker.step()
        if worker.reports and chance.random() < 0.7:
            count = chance.randrange(1, len(worker.reports) + 1)
            made.take(worker.name, [worker.reports.popleft() for _ in range(count)])
        if quiet:
            continue
        if chance.random() < 0.01:
            ends(chance.choice(list(workers)))
        if chance.random() < 0.02:
            chance.choice(list(workers.values())).serve(chance.choice(KINDS))
        if chance.random() < 0.004 and calls:
            name = chance.choice(list(calls))
            made.cancel(name)
            cancelled.add(name)
        if turn == 4000:
            for role, one in zip(("encode", "prefill", "decode"), list(workers.values()), strict=False):
                one.serve({role})
    for _ in range(200_000):
        if all(call.ended for call in calls.values()):
            break
        worker = chance.choice(list(workers.values()))
        worker.step()
        if worker.reports:
            made.take(worker.name, [worker.reports.popleft() for _ in range(len(worker.reports))])
    for name, call in calls.items():
        assert call.ended, name
        last = [event for event in call.events if isinstance(event, Failed)]
        if last:
            assert name in cancelled and isinstance(last[0].error, Cancelled), last[0].error
        if call.request.sampling.n == 1:
            call.wait()
        for sample in range(call.request.sampling.n):
            text = "".join(e.text for e in call.events if isinstance(e, Delta) and e.sample == sample)
            assert text == TEXT if not last else TEXT.startswith(text)
            done = [e for e in call.events if isinstance(e, Finished) and e.sample == sample]
            assert len(done) == 1 if not last else len(done) <= 1
    for worker in list(workers.values()):
        while worker.calls or worker.reports or worker.live:
            worker.step()
            made.take(worker.name, [worker.reports.popleft() for _ in range(len(worker.reports))])
            assert worker.calls or worker.reports or all(e.stage is not Stage.EXPECTED for e in worker.live.values())
    assert made.stats().live == 0 and not payloads.held
