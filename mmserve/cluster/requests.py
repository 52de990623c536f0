"""The coordinator's state of requests: where each runs, and from which point it can be continued."""

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
    """A client's request, and the events sent to the client so far."""

    request: Request
    sink: Sink
    arrived: float  # on the monotonic clock (seconds)
    again: Callable[[], bool] | None = None  # for a question about a stream: asks it again, if possible
    begun: bool = False  # whether it has left the queue
    parts: dict[int | None, Part] = field(default_factory=dict)  # that have not ended, by sample; None = all together
    sent: dict[int, int] = field(default_factory=dict)  # number of characters sent of each sample's text
    done: set[int] = field(default_factory=set)  # samples that have ended
    prefilled: set[int] = field(default_factory=set)  # samples whose client has the prompt's usage

    @property
    def id(self) -> RequestId:
        """Its id in workers' reports."""
        return self.request.id

    @property
    def due(self) -> float:
        """Deadline of its first token, on the monotonic clock (seconds)."""
        return due(self.arrived, self.request.deadline, self.request.slo)

    @property
    def work(self) -> int:
        """Number of tokens requested."""
        return self.request.sampling.n * self.request.sampling.max_new_tokens

    def part_of(self, sample: int | None) -> Part | None:
        """The part that currently contains ``sample``; negative numbers are shards of its media."""
        if sample is not None and sample < 0:
            return self.parts.get(sample)
        return self.parts.get(sample, self.parts.get(None))

    def split(self, part: Part) -> None:
        """Replace ``part``, the whole request, by one part for each sample."""
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
    """A request, or one of its samples: the state from which it can be continued, and its worker.

    ``point``: that state, with its payload in ``parcel``; it may be some steps older than the worker's.
    """

    group: Group
    sample: int | None
    point: Handover
    parcel: Parcel = None
    worker: str | None = None  # None = waiting
    taken_as: RequestId = ""  # the id of the whole request, if the worker received it as a whole
    stage: str = "encode"  # the stage that it waits for, or was sent for
    cost: float = 1.0  # cost in that stage
    losses: int = 0  # number of workers that exited while they had it
    skip: dict[int, int] = field(default_factory=dict)  # characters of each sample that the client has, and come again
    shard: tuple[MediaShare, ...] = ()  # a shard of the request's media, encoded for the part with all samples
    seen: list[Parcel] = field(default_factory=list)  # its media encoded by shards
    media: tuple[Hashable, ...] = ()  # index keys of its media, while they are to be encoded
    prefix: tuple[Hashable, ...] = ()  # index keys of its prompt
    ahead: list[tuple[int, Parcel]] = field(default_factory=list)  # numbered chunks of its K/V sent ahead
    reserved: str | None = None  # the decode worker to which they are forwarded
    given: int = 0  # number of chunks forwarded

    @property
    def id(self) -> RequestId:
        """Its id on a worker that receives it separately."""
        return self.point.request.id

    @property
    def id_there(self) -> RequestId:
        """Its id on its current worker."""
        return self.taken_as or self.id

    def waits(self) -> None:
        """Let it wait, to continue from ``point`` on any worker."""
        self.worker = None
        self.stage = NEXT_ROLE[self.point.stage]

    def order(self, model: str, worker: str, sent: Callable[[Parcel], Parcel]) -> Order:
        """The order with which ``worker`` continues it; assigns it to that worker. ``sent``: converts a parcel for the
        worker."""
        self.worker, self.taken_as = worker, ""
        of = self.group.sent if self.sample is None else {self.sample: self.group.sent.get(self.sample, 0)}
        self.skip = {sample: sent - self.point.sent for sample, sent in of.items() if sent > self.point.sent}
        handover, left = self._timed(self.point)
        seen, ahead = tuple(sent(each) for each in self.seen), self._ahead(worker, sent)
        self.reserved, self.given = None, 0
        return Order(model, self.group.id, self.sample, handover, sent(self.parcel), left, self.shard, seen, ahead)

    def chunk_order(self, model: str, handover: Handover, sent: Callable[[Parcel], Parcel]) -> Order:
        """The order with the K/V chunks that the reserved worker does not have yet. ``handover``: as the request will
        be handed over; ``sent``: see ``order``."""
        assert self.reserved is not None
        handover, left = self._timed(handover)
        ahead = self._ahead(self.reserved, sent)
        self.given = len(self.ahead)
        return Order(model, self.group.id, self.sample, handover, left=left, ahead=ahead, expects=True)

    def _timed(self, handover: Handover) -> tuple[Handover, float | None]:
        """``handover`` with the request's current age, and the seconds until its deadline."""
        deadline, now = self.group.request.deadline, time.monotonic()
        return replace(handover, age=now - self.group.arrived), None if deadline is None else deadline - now

    def _ahead(self, worker: str, sent: Callable[[Parcel], Parcel]) -> tuple[tuple[int, Parcel], ...]:
        """The K/V chunks that ``worker`` does not have yet."""
        new = self.ahead[self.given if worker == self.reserved else 0 :]
        return tuple((number, sent(parcel)) for number, parcel in new)

    def new_text(self, sample: int, text: str) -> str:
        """The part of ``text`` that the client does not have yet; recorded as sent."""
        known = min(self.skip.get(sample, 0), len(text))
        if known:
            self.skip[sample] -= known
        self.group.sent[sample] = self.group.sent.get(sample, 0) + len(text) - known
        return text[known:]

    def entry(self, now: float) -> Entry:
        """The entry for fair queueing; ``now``: monotonic clock (seconds)."""
        tenant = self.group.request.tenant
        priority = aged(tenant.priority, now - self.group.arrived)
        return Entry(self.id, self.point.stage, tenant=tenant.name, share=tenant.share, priority=priority)


def admitted_once(sink: Sink) -> Sink:
    """``sink`` without the second ``Admitted`` of a question whose first worker exited."""
    seen = False

    def take(event: Event | Progress) -> None:
        nonlocal seen
        if isinstance(event, Admitted):
            if seen:
                return
            seen = True
        sink(event)

    return take
