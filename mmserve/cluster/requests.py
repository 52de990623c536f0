"""Requests as the coordinator of a cluster keeps them: where each is, and from where it can go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from mmserve.cluster.messages import Order, Parcel
from mmserve.core.events import Admitted, Event
from mmserve.core.handover import NEXT_ROLE, Handover
from mmserve.core.plan import Entry
from mmserve.core.progress import Progress
from mmserve.core.request import Request, RequestId, Stage
from mmserve.core.samples import samples
from mmserve.core.share import MediaShare
from mmserve.schedule.deadlines import due
from mmserve.schedule.fair import aged

Sink = Callable[[Event | Progress], None]


@dataclass(eq=False)
class Group:
    """What a client sent, and what it has got of it so far."""

    request: Request
    sink: Sink
    arrived: float  # on the monotonic clock (seconds)
    again: Callable[[], bool] | None = None  # of a question about a stream: has that ask it again, if it can
    begun: bool = False  # it has left the queue
    parts: dict[int | None, Part] = field(default_factory=dict)  # that have not ended, by sample; None = all together
    sent: dict[int, int] = field(default_factory=dict)  # characters of each sample's text
    done: set[int] = field(default_factory=set)  # samples
    prefilled: set[int] = field(default_factory=set)  # samples whose client knows what the prompt took

    @property
    def id(self) -> RequestId:
        """Its id, by which workers report it."""
        return self.request.id

    @property
    def due(self) -> float:
        """When its first token is wanted, on the monotonic clock (seconds)."""
        return due(self.arrived, self.request.deadline, self.request.slo)

    @property
    def work(self) -> int:
        """Tokens that it asks for."""
        return self.request.sampling.n * self.request.sampling.max_new_tokens

    def part_of(self, sample: int | None) -> Part | None:
        """The part that has ``sample`` now; negative numbers are shards of its media."""
        if sample is not None and sample < 0:
            return self.parts.get(sample)
        return self.parts.get(sample, self.parts.get(None))

    def split(self, part: Part) -> None:
        """From now on each sample goes its own way, from where the whole is."""
        self.parts = {}
        for i, one in enumerate(samples(self.request)):
            if i not in self.done:
                fresh = Handover(one, Stage.QUEUED, None)
                again = {i: part.skip[i]} if i in part.skip else {}
                self.parts[i] = Part(
                    self,
                    i,
                    fresh,
                    worker=part.worker,
                    taken_as=part.id,
                    stage=part.stage,
                    losses=part.losses,
                    skip=again,
                )


@dataclass(eq=False)
class Part:
    """A request, or one sample of it: the state that it can go on from, and the worker that has it.

    ``point``: that state, its payload in ``parcel``; it may be some steps older than what the worker has.
    """

    group: Group
    sample: int | None
    point: Handover
    parcel: Parcel = None
    worker: str | None = None  # None = it waits
    taken_as: RequestId = ""  # the id of all samples together, where the worker took it in with the others
    stage: str = "encode"  # for which it waits, or came to its worker
    cost: float = 1.0  # there
    losses: int = 0  # workers that ended while they had it
    skip: dict[int, int] = field(default_factory=dict)  # characters of each sample that the client has, and come again
    shard: tuple[MediaShare, ...] = ()  # it is this of the request's media, encoded for the part that has all samples
    seen: list[Parcel] = field(default_factory=list)  # its media that shards have encoded
    media: tuple[Hashable, ...] = ()  # what the index knows of its media, while they are to be encoded, and
    prefix: tuple[Hashable, ...] = ()  # of its prompt
    ahead: list[tuple[int, Parcel]] = field(default_factory=list)  # numbered chunks of its K/V that came before it
    reserved: str | None = None  # the decode worker that gets them at once
    given: int = 0  # how many it has

    @property
    def id(self) -> RequestId:
        """The id that it has on a worker that takes it in by itself."""
        return self.point.request.id

    @property
    def id_there(self) -> RequestId:
        """The id that it has on its worker."""
        return self.taken_as or self.id

    def waits(self) -> None:
        """It goes on from ``point``, wherever."""
        self.worker = None
        self.stage = NEXT_ROLE[self.point.stage]

    def order(self, model: str, worker: str, sent: Callable[[Parcel], Parcel]) -> Order:
        """Have ``worker`` go on with it; from now on it does. ``sent``: a parcel as the worker can read it."""
        self.worker, self.taken_as = worker, ""
        of = self.group.sent if self.sample is None else {self.sample: self.group.sent.get(self.sample, 0)}
        self.skip = {sample: sent - self.point.sent for sample, sent in of.items() if sent > self.point.sent}
        handover, left = self._timed(self.point)
        seen, ahead = tuple(sent(each) for each in self.seen), self._ahead(worker, sent)
        self.reserved, self.given = None, 0
        return Order(model, self.group.id, self.sample, handover, sent(self.parcel), left, self.shard, seen, ahead)

    def lead(self, model: str, handover: Handover, sent: Callable[[Parcel], Parcel]) -> Order:
        """Have the worker that is reserved take what it does not have yet of the K/V. ``handover``: as the request will
        leave; ``sent`` as of ``order``."""
        assert self.reserved is not None
        handover, left = self._timed(handover)
        ahead = self._ahead(self.reserved, sent)
        self.given = len(self.ahead)
        return Order(model, self.group.id, self.sample, handover, left=left, ahead=ahead, expects=True)

    def _timed(self, handover: Handover) -> tuple[Handover, float | None]:
        """``handover`` with the request's age now, and seconds until its deadline."""
        deadline, now = self.group.request.deadline, time.monotonic()
        return replace(handover, age=now - self.group.arrived), None if deadline is None else deadline - now

    def _ahead(self, worker: str, sent: Callable[[Parcel], Parcel]) -> tuple[tuple[int, Parcel], ...]:
        """What ``worker`` does not have yet of the K/V."""
        new = self.ahead[self.given if worker == self.reserved else 0 :]
        return tuple((number, sent(parcel)) for number, parcel in new)

    def new_text(self, sample: int, text: str) -> str:
        """What of ``text`` the client does not have yet; noted as sent."""
        known = min(self.skip.get(sample, 0), len(text))
        if known:
            self.skip[sample] -= known
        self.group.sent[sample] = self.group.sent.get(sample, 0) + len(text) - known
        return text[known:]

    def entry(self, now: float) -> Entry:
        """What fair queueing sees of it; ``now`` on the monotonic clock (seconds)."""
        tenant = self.group.request.tenant
        priority = aged(tenant.priority, now - self.group.arrived)
        return Entry(self.id, self.point.stage, tenant=tenant.name, share=tenant.share, priority=priority)


def admitted_once(sink: Sink) -> Sink:
    """``sink`` without the second ``Admitted`` of a question that was put to a worker which ended."""
    seen = False

    def take(event: Event | Progress) -> None:
        nonlocal seen
        if isinstance(event, Admitted):
            if seen:
                return
            seen = True
        sink(event)

    return take
