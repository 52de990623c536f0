"""The requests of a cluster in progress: their location, the reports of workers about them, and their clients'
events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from mmserve.cluster.adapters import adapter_missing
from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.dispatch import Dispatch, Holds
from mmserve.cluster.messages import Chunk, Lost, Moved, Order, Refused, RequestEvent, without_media
from mmserve.cluster.requests import Group, Part, Sink
from mmserve.cluster.streams import lost_question
from mmserve.cluster.workers import PayloadStore
from mmserve.core.events import Admitted, Delta, Draft, Event, Failed, Finished, Prefilled, Snapshot
from mmserve.core.handover import ROLES, Handover
from mmserve.core.progress import Progress, Reached, StageEntered, StepTaken
from mmserve.core.request import Request, RequestId, Stage
from mmserve.core.samples import samples
from mmserve.engine.waiting import WaitingQueue
from mmserve.errors import Cancelled, Internal, MMServeError, Unavailable
from mmserve.observe.logs import about

logger = logging.getLogger("mmserve.cluster")

#: Reports of a worker about a request.
Report = RequestEvent | Moved | Chunk | Lost | Refused


class InFlight:
    """The requests to ``model`` in progress; call methods with the coordinator's lock. ``running``: number of answers
    that a worker decodes concurrently; ``holds``: see ``dispatch.Holds``."""

    def __init__(
        self,
        model: str,
        running: int,
        settings: ClusterSettings,
        payloads: PayloadStore,
        queue: WaitingQueue,
        holds: Holds,
    ) -> None:
        self._model, self._settings, self._payloads, self._queue = model, settings, payloads, queue
        self.groups: dict[RequestId, Group] = {}
        self.dispatch = Dispatch(model, running, payloads, self.parts, holds)

    def begin(self, request: Request, sink: Sink) -> None:
        """Admit a request and send it; raises as ``WaitingQueue.take``."""
        part = self._admitted(Group(request, sink, time.monotonic()), of_session=False)
        if not self._split_media(part):
            self.dispatch.wait(part)
        self.send()

    def begin_at(self, worker: str, request: Request, sink: Sink, again: Callable[[], bool]) -> Order:
        """Admit a question about a stream that ``worker`` keeps. Returns the order to be sent to that worker.

        ``again`` is called if the question is lost there before its prompt is encoded; False = it cannot be asked
        again.
        """
        part = self._admitted(Group(request, sink, time.monotonic(), again=again), of_session=True)
        self._leave_queue(part.group)
        return part.order(self._model, worker, lambda parcel: parcel)

    def orders_again(self, request: RequestId, worker: str) -> list[Order]:
        """The orders with which ``worker`` starts a question that was lost before its prompt was encoded."""
        group = self.groups.get(request)
        parts = () if group is None else group.parts.values()
        lost = [part for part in parts if part.worker is None and part.point.stage is Stage.QUEUED]
        return [part.order(self._model, worker, lambda parcel: parcel) for part in lost]

    def waits_for_stream(self, request: RequestId) -> bool:
        """Whether any part of a question has no state besides its order."""
        group = self.groups.get(request)
        return group is not None and any(part.point.stage is Stage.QUEUED for part in group.parts.values())

    def accepted(self, request: RequestId, worker: str) -> None:
        """``worker`` has received a question; if that ended meanwhile, it is ended there, too."""
        if request not in self.groups and (there := self.dispatch.workers.get(worker)) is not None:
            there.cancel(self._model, [request], Cancelled("the request was cancelled"))

    def withdraw(self, request: RequestId) -> None:
        """Remove a question that its worker did not accept, without an event."""
        if (group := self.groups.get(request)) is not None:
            group.parts = {}
            self._end(group)

    def reported(self, worker: str, item: Report) -> None:
        """Process a report of ``worker``, if it still has the request."""
        group = self.groups.get(item.key)
        part = None if group is None else group.part_of(item.sample)
        if group is None or part is None or part.worker != worker:
            self._discard(item)
            return
        try:
            self._on_result(group, part, item)
        except Exception as error:  # noqa: BLE001 - a bug with one request ends that request only
            failure = Internal.logged(error, f"request {group.id}", logger, about(group.request))
            if group.id in self.groups:  # otherwise it has ended already
                self.fail(group, failure)

    def worker_exited(self, worker: str) -> None:
        """``worker`` has exited: its requests continue from their last checkpoints."""
        for part in self.parts():
            if part.reserved == worker:
                part.reserved, part.given = None, 0
        for part in [part for part in self.parts() if part.worker == worker]:
            if part.group.id in self.groups:  # unless another part has ended it
                self._resume(part)

    def parts(self) -> Iterator[Part]:
        """All parts that have not ended."""
        for group in list(self.groups.values()):
            yield from list(group.parts.values())

    def send(self) -> None:
        """Send waiting parts, as far as workers have capacity."""
        sent, without_adapter, lost = self.dispatch.send()
        for part in sent:
            self._leave_queue(part.group)
        for part in without_adapter:
            if part.group.id in self.groups:  # unless another part has ended it
                self.fail(part.group, adapter_missing(part.group.request.adapter, part.stage))
        for part, error in lost:
            if part.group.id in self.groups:
                self._restart(part, f"its state cannot be transferred: {error!r}")
        if lost:
            self.send()

    def fail(self, group: Group, error: MMServeError) -> None:
        """End a request with ``error``."""
        for part in group.parts.values():
            worker = self.dispatch.workers.get(part.worker or "")
            if worker is not None:
                worker.cancel(self._model, [part.id_there], Cancelled("the request was cancelled"))
            else:
                self.dispatch.withdraw(part)
            self._discard_payloads(part)
        group.parts = {}
        self._end(group)
        group.sink(Failed(error))

    def _admitted(self, group: Group, *, of_session: bool) -> Part:
        group.parts[None] = part = Part(group, None, Handover(group.request, Stage.QUEUED, None))
        with self._queue.lock:
            ahead = self._queue.take(group.request, group.due, of_session=of_session)
        self.groups[group.id] = group
        group.sink(Admitted(ahead))
        return part

    def _split_media(self, whole: Part) -> bool:
        """Split a request's media among several idle encode workers, if possible. Returns whether it now waits for
        them."""
        found = self.dispatch.shards(whole, self._settings.shard_pixels)
        for shard in found:
            whole.group.parts[shard.sample] = shard
            self.dispatch.wait(shard)
        return bool(found)

    def _shard_ended(self, group: Group, shard: Part, item: Report) -> None:
        """A shard is encoded, or failed: then the worker of the whole request encodes it, and reports the error."""
        whole = group.parts[None]
        if isinstance(item, Lost):
            logger.warning("a shard of request %s is lost: %s", group.id, item.error)
            self._resume(shard)
            return
        if isinstance(item, Moved):
            whole.seen.append(item.parcel)
        del group.parts[shard.sample]
        if not any(part.shard for part in group.parts.values()):
            self.dispatch.wait(whole)

    def _discard_payloads(self, part: Part) -> None:
        """Drop all states of ``part``."""
        self._payloads.drop(part.parcel)
        self._discard_seen(part)
        self._discard_ahead(part)

    def _discard_seen(self, part: Part) -> None:
        for parcel in part.seen:
            self._payloads.drop(parcel)
        part.seen = []

    def _discard_ahead(self, part: Part) -> None:
        """Drop K/V sent ahead of a request that restarts, ends, or has reached a later stage."""
        for _number, parcel in part.ahead:
            self._payloads.drop(parcel)
        if (worker := self.dispatch.workers.get(part.reserved or "")) is not None:
            worker.cancel(self._model, [part.id], None)
        part.ahead, part.reserved, part.given = [], None, 0

    def _on_result(self, group: Group, part: Part, item: Report) -> None:
        if part.shard:
            self._shard_ended(group, part, item)
        elif isinstance(item, Lost):  # the previous checkpoint remains
            logger.warning("a state of request %s is lost: %s", group.id, item.error)
            if not item.stays:
                self._resume(part)
        elif isinstance(item, Moved):
            self._moved(group, self._split(group, part, item), item)
        elif isinstance(item, Chunk):
            self._on_early_kv(self._split(group, part, item), item)
        elif isinstance(item, Refused):
            self._restart(part, f"refused by worker {part.worker}: {item.error}")
        elif isinstance(item, RequestEvent):
            self._on_event(group, part, item.event)

    def _split(self, group: Group, part: Part, item: Moved | Chunk) -> Part:
        """The part that ``item`` is about; the first report about a single sample splits the request into samples."""
        one = item.handover.request.sampling.n == 1
        if not one or part.sample is not None or group.request.sampling.n == 1:
            return part
        self._payloads.drop(part.parcel)
        self._discard_seen(part)
        group.split(part)
        return group.parts[item.sample]

    def _on_early_kv(self, part: Part, item: Chunk) -> None:
        """K/V of a request that is still prefilled: forward them to its decode worker."""
        if part.point.stage in (Stage.PREFILLED, Stage.READY):  # its worker continues with it after all
            self._payloads.drop(item.parcel)
            return
        if item.number == 0:
            self._discard_ahead(part)
        part.ahead.append((item.number, item.parcel))
        part.reserved = part.reserved or self.dispatch.reserve(part)
        if part.reserved is not None:
            worker = self.dispatch.workers[part.reserved]
            sent = partial(self._payloads.sent, worker=worker.name)
            worker.take([part.chunk_order(self._model, item.handover, sent)])

    def _moved(self, group: Group, part: Part, item: Moved) -> None:
        if part.point.stage in (Stage.PREFILLED, Stage.READY) or item.handover.stage is not Stage.PREFILLED:
            self._discard_ahead(part)
        self._payloads.drop(part.parcel)
        self._discard_seen(part)
        own = self._own(part)
        request = own if item.handover.stage is Stage.QUEUED else without_media(own)
        part.point, part.parcel = replace(item.handover, request=request), item.parcel
        if not item.stays:
            self._timed(part.stage, item.handover.run)
            self._continue(part)

    @staticmethod
    def _own(part: Part) -> Request:
        """The request of ``part``, as it was sent."""
        request = part.group.request
        return request if part.sample is None else samples(request)[part.sample]

    def _on_event(self, group: Group, part: Part, event: Event | Progress) -> None:
        sample = getattr(event, "sample", 0) if part.sample is None else part.sample
        match event:
            case Failed(error):
                self.fail(group, error)
            case Delta(text):
                if sample not in group.done and (new := part.new_text(sample, text)):
                    group.sink(Delta(new, sample))
            case Prefilled():
                if sample not in group.prefilled:  # possibly sent already by a worker that was lost
                    group.prefilled.add(sample)
                    group.sink(replace(event, sample=sample))
            case Finished():
                if sample not in group.done:
                    self._finished(group, part, replace(event, sample=sample))
            case Snapshot() | Draft() | StageEntered() | StepTaken() | Reached() if sample not in group.done:
                group.sink(replace(event, sample=sample))

    def _finished(self, group: Group, part: Part, event: Finished) -> None:
        group.done.add(event.sample)
        for role, ms in zip(ROLES, (event.times.encode, event.times.prefill, event.times.decode), strict=True):
            if ms:  # a request for its prompt alone ends after encode
                self.dispatch.record_service_time(role, ms / 1000)
        total = group.request.sampling.n
        if part.sample is not None or len(group.done) == total:
            self._discard_payloads(part)
            group.parts = {sample: each for sample, each in group.parts.items() if each is not part}
        self._queue.served(group.work // total, event.times.total / 1000)
        if len(group.done) == total:
            self._end(group)
        group.sink(event)

    def _end(self, group: Group) -> None:
        del self.groups[group.id]
        self._leave_queue(group)
        self._queue.end(group.request.sampling.n)

    def _leave_queue(self, group: Group) -> None:
        if not group.begun:
            group.begun = True
            self._queue.remove(group.request.tenant, group.request.sampling.n, group.work, group.due)

    def _restart(self, part: Part, why: str) -> None:
        """Restart ``part``: none of its states can be used."""
        logger.warning("request %s begins anew, %s", part.group.id, why)
        self._discard_payloads(part)
        part.point, part.parcel = Handover(self._own(part), Stage.QUEUED, None), None
        self._resume(part)

    def _resume(self, part: Part) -> None:
        """Its worker exited, or never received it: continue from its last checkpoint."""
        if part.point.stage not in (Stage.PREFILLED, Stage.READY):
            self._discard_ahead(part)
        part.losses += 1
        if part.losses > self._settings.max_losses:
            why = f"the request lost its worker or its state {part.losses} times; it may be the cause itself"
            self.fail(part.group, Unavailable(why))
            return
        self._continue(part)

    def _continue(self, part: Part) -> None:
        """Queue ``part`` to continue from its checkpoint; a question without one, on the worker of its stream."""
        again = part.group.again
        if again is None or part.point.stage is not Stage.QUEUED:
            self.dispatch.wait(part)
            return
        part.worker = None
        if not again():
            self.fail(part.group, lost_question())

    def _timed(self, role: str, run: Mapping[str, float]) -> None:
        """Record the service time of a stage for a request that left it."""
        if role == "encode":
            self.dispatch.record_service_time(
                role, run.get("load", 0.0) + run.get("tokenize", 0.0) + run.get("encode", 0.0)
            )
        elif role == "prefill":
            self.dispatch.record_service_time(role, run.get("prefill", 0.0))

    def _discard(self, item: Report) -> None:
        """Drop the state in a report about a request that has ended, or is elsewhere."""
        if isinstance(item, Moved | Chunk):
            self._payloads.drop(item.parcel)
