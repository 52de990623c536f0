"""One video stream on a cluster: a worker keeps its frames and K/V; when it exits, or no longer encodes, another one
continues.

The stream is then opened there from its last checkpoint, and the journal is replayed. Callers wait meanwhile, and see
no difference: tokens do not depend on where, nor on how often, a frame is processed.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mmserve.cluster.asking import WorkerEnded
from mmserve.cluster.journal import GivenFrame, GivenQuestion, Journal
from mmserve.cluster.messages import Appended, StreamSaved
from mmserve.cluster.opened_stream import OpenedStream
from mmserve.cluster.requests import admitted_once
from mmserve.cluster.workers import Worker
from mmserve.core.request import Request, Vision
from mmserve.core.session import Asked, Memory
from mmserve.core.tenant import Tenant
from mmserve.engine.request_state import Sink
from mmserve.errors import Cancelled, MMServeError, Unavailable
from mmserve.video.base import EncodedFrame, Frame, Scope, StreamLost, StreamStats

if TYPE_CHECKING:
    from mmserve.cluster.streams import ClusterStreams

logger = logging.getLogger("mmserve.cluster")

#: Timeout (seconds) for finding a worker that continues a stream.
PATIENCE = 120.0
_REPLACING = "the session accepts no frames while its worker is being replaced; try again"


@dataclass(frozen=True)
class RemoteFrame(EncodedFrame):
    """A frame that the stream's worker keeps; its tensors here are empty."""

    stream: ClusterStream
    number: int


class ClusterStream:
    """A ``Stream`` whose frames are kept by a worker; call ``begin`` first.

    ``given``: the arguments of ``Streams.open``. Has its own lock, which is never held while waiting for a worker; it
    may be acquired with the coordinator's lock held, never the other way round.
    """

    def __init__(
        self,
        streams: ClusterStreams,
        given: tuple[Memory, Tenant, Vision | None, int],
        save_frames: int,
        most_losses: int,
    ) -> None:
        self._streams, self._given, self._most_losses = streams, given, most_losses
        self._opened: OpenedStream | None = None
        self._held = 0  # bytes reserved for it there
        self._changed = threading.Condition()
        self._journal = Journal(save_frames)
        self._ready = False  # frames are sent to the worker immediately
        self._wanted = False  # it must be opened again
        self._opening = False  # a thread is opening it
        self._losses = 0  # lost workers since all frames were last appended
        self._number, self._seconds = 0, 0.0  # of the newest frame
        self._futures: dict[int, tuple[float, Future[EncodedFrame]]] = {}  # with the frames' times
        self._ended: MMServeError | None = None

    # --- as a stream ---

    def append(self, frame: Frame) -> Future[EncodedFrame]:
        """See ``Stream.append``; raises ``StreamLost`` if no worker can continue the stream."""
        future: Future[EncodedFrame] = Future()
        image = frame.image.convert("RGB")
        pixels = image.size, image.tobytes(), frame.detail

        def accepted() -> bool:
            return not self._journal.full and (self._ready or self._journal.kept)

        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or accepted(), PATIENCE)
            if self._ended is not None:
                raise self._ended
            if not accepted():
                if not self._ready:
                    raise Unavailable(_REPLACING)
                self._streams.drop(self._journal.give_up())
            self._number, self._seconds = self._number + 1, frame.seconds
            given = GivenFrame(self._number, frame.seconds, pixels)
            self._futures[given.number] = frame.seconds, future
            self._journal.add(given)
            if self._ready and self._opened is not None:
                self._opened.append(given)
                self._save_if_due()
        return future

    def ask(self, request: Request, scope: Scope | None, sink: Sink) -> Asked:
        """See ``Stream.ask``."""
        once = admitted_once(sink)
        for _ in range(self._most_losses + 1):
            opened = self._when_ready()
            with self._changed:
                given = GivenQuestion(request.id, self._number, scope)
                self._journal.add(given)
            put, again = partial(opened.ask, scope), partial(self._again, given)
            try:
                asked = self._streams.requests.submit_there(request, once, opened.worker, put, again)
            except BaseException as error:
                with self._changed:
                    self._journal.remove(given)
                if not isinstance(error, MMServeError) or not self._is_gone(opened, error):
                    raise
                continue
            with self._changed:
                given.asking = False
                if given.lost:
                    self._reopen()
            return asked
        raise self._too_many_losses()

    def stats(self) -> StreamStats:
        """See ``Stream.stats``."""
        stats: StreamStats = self.question("stream.stats")
        return stats

    def close(self) -> None:
        """See ``Stream.close``."""
        self._end(Cancelled("the stream was closed"))

    def question(self, question: str, *arguments: Any, frame: int | None = None) -> Any:
        """The reply of the worker that has ``frame`` (None = all frames) to a question; raises ``StreamLost``."""
        for _ in range(self._most_losses + 1):
            opened = self._when_ready(frame)
            try:
                return opened.question(question, *arguments)
            except MMServeError as error:
                if not self._is_gone(opened, error):
                    raise
        raise self._too_many_losses()

    # --- from its streams ---

    @property
    def worker(self) -> str:
        """The name of the worker that keeps it; empty before there is one."""
        return "" if self._opened is None else self._opened.worker

    @property
    def ended(self) -> MMServeError | None:
        """The error with which it ended, if it did."""
        return self._ended

    def begin(self) -> int:
        """Open it. Returns the bytes reserved for it; raises the errors of ``Streams.open``."""
        with self._changed:
            self._opening = True
        self._open_somewhere(patience=0.0)
        if self._ended is not None:
            raise self._ended
        return self._held

    def on_item(self, item: Appended) -> None:
        """A frame was appended, or failed."""
        with self._changed:
            if self._opened is None or item.key != self._opened.name:
                return
            self._opened.unreported.discard(item.number)
            seconds, future = self._futures.pop(item.number, (0.0, None))
            if item.error is not None:
                self._journal.failed(item.number)
            if not self._opened.unreported and self._ready:
                self._losses = 0
            self._changed.notify_all()
        if future is None:
            return
        if item.error is not None:
            future.set_exception(item.error)
        else:
            future.set_result(RemoteFrame(seconds, torch.empty(0), torch.empty(0), self, item.number))

    def saved(self, item: StreamSaved) -> None:
        """A checkpoint was saved; called with the coordinator's lock."""
        with self._changed:
            unused = item.parcel
            current = self._opened is not None and item.key == self._opened.name
            if current and self._ended is None and item.parcel is not None:
                unused = self._journal.saved(item.parcel, item.number, self._streams.requests.waits_for_stream)
            self._changed.notify_all()
        self._streams.drop(unused)

    def worker_exited(self, worker: str) -> None:
        """A worker has exited."""
        with self._changed:
            if worker == self.worker and self._ended is None:
                self._losses += 1
                self._reopen()

    def move(self) -> None:
        """Have another worker continue it, if possible."""
        with self._changed:
            if self._ready and self._journal.kept:
                self._reopen()

    # --- to its worker ---

    def _save_if_due(self) -> None:
        """Request a checkpoint if one is due and all entries were sent. Call with the lock."""
        if self._journal.due(self._number) and self._opened is not None:
            self._opened.save()

    def _when_ready(self, frame: int | None = None) -> OpenedStream:
        """The stream on its worker, once that has ``frame`` (None = all frames); raises ``StreamLost``."""

        def ready() -> bool:
            return self._ready and self._opened is not None and self._opened.has(frame)

        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or ready(), 2 * PATIENCE)
            if self._ended is not None:
                raise self._ended
            if not ready() or self._opened is None:
                raise Unavailable(_REPLACING)
            return self._opened

    # --- when its worker exits, or must give it up ---

    def _is_gone(self, opened: OpenedStream, error: MMServeError) -> bool:
        """Whether an error means that the stream is not open there any more."""
        with self._changed:
            if self._opened is opened and isinstance(error, WorkerEnded):
                self._reopen()
            return self._ended is not None or self._wanted or self._opened is not opened

    def _again(self, given: GivenQuestion) -> bool:
        """A question was lost before its prompt was handed over. Returns whether it will be asked again. Call with the
        coordinator's lock."""
        with self._changed:
            if self._ended is not None or given not in self._journal.questions:
                return False
            given.lost = True
            if not given.asking:
                self._reopen()
            return True

    def _reopen(self) -> None:
        """Have it opened again. Call with the lock."""
        if self._ended is not None:
            return
        self._wanted, self._ready = True, False
        self._changed.notify_all()
        if not self._opening:
            self._opening = True
            self._streams.run_in_background(self._open_somewhere)

    def _open_somewhere(self, patience: float = PATIENCE) -> None:
        """Open it on a worker and replay the journal, until that succeeds; only one thread at a time."""
        tried: set[str] = set()
        while True:
            with self._changed:
                ended = self._ended is not None
                if done := ended or (self._ready and not self._wanted):
                    self._opening = False
                again, self._wanted = bool(self._number), False
                lost = again and not self._journal.kept
                many = self._losses > self._most_losses
            if ended:
                self._close_there()  # it was opened after its end
            if done:
                return
            if lost or many:
                self._end(self._too_many_losses() if many else self._lost())
                continue
            owner = self._streams.choose(tried, patience)
            if owner is None:
                self._end(self._lost() if again else self._streams.no_worker())
                continue
            try:
                self._open_at(owner)
                self._replay()
            except WorkerEnded:
                tried.add(owner.name)
                with self._changed:
                    self._wanted = True
            except MMServeError as error:
                self._end(self._lost(error) if again else error)
            except Exception:
                logger.exception("a stream of video could not be opened again")
                self._end(self._lost())

    def _open_at(self, owner: Worker) -> None:
        opened = OpenedStream(self._streams.model, owner)
        with self._changed:
            old, self._opened = self._opened, opened
            self._journal.resumed()
            parcel = self._journal.parcel
        if not self._streams.renamed(self, opened.name, "" if old is None else old.name):
            raise Unavailable("the server is shutting down; open the stream at another one")
        if old is not None:
            old.close()
        self._held = opened.open(*self._given, self._streams.sent(parcel, opened.worker))
        if old is not None:
            number = self._journal.number
            logger.info("worker %s goes on with a session's stream after frame %d", opened.worker, number)

    def _replay(self) -> None:
        """Replay the journal in order; returns early if it must be opened once more."""
        opened, given = self._opened, 0
        assert opened is not None
        while True:
            with self._changed:
                if self._wanted or self._ended is not None:
                    return
                if (entry := self._journal.next_after(given)) is None:
                    self._ready = True
                    self._losses = 0 if not opened.unreported else self._losses
                    self._save_if_due()
                    self._changed.notify_all()
                    return
                if isinstance(entry, GivenFrame):
                    given = entry.number
                    opened.append(entry)
                    continue
                self._changed.wait_for(
                    lambda: self._wanted or self._ended is not None or not opened.unreported, PATIENCE
                )
                if self._wanted or opened.unreported:
                    self._wanted = True
                    return
                entry.lost = False
            self._ask_again(opened, entry)

    def _ask_again(self, opened: OpenedStream, given: GivenQuestion) -> None:
        try:
            orders = self._streams.requests.orders_again(given.id, opened.worker)
            for order in orders:
                opened.ask(given.scope, order)
        except WorkerEnded:
            given.lost = True
            raise
        except MMServeError as error:
            self._streams.requests.cancel(given.id, error)
            orders = []
        if not orders:
            with self._changed:
                self._journal.remove(given)

    # --- its end ---

    def _end(self, error: MMServeError) -> None:
        with self._changed:
            if self._ended is not None:
                return
            self._ended = error
            futures, self._futures = self._futures, {}
            questions = [each.id for each in self._journal.questions]
            parcel = self._journal.clear()
            self._changed.notify_all()
        self._close_there()
        self._streams.drop(parcel)
        for _seconds, future in futures.values():
            future.set_exception(error)
        if isinstance(error, StreamLost):
            logger.warning("a session of video ends: %s", error)
            for question in questions:
                self._streams.requests.give_up(question)

    def _close_there(self) -> None:
        with self._changed:
            opened = self._opened
        self._streams.discard(self, "" if opened is None else opened.name)
        if opened is not None:
            opened.close()

    def _lost(self, why: MMServeError | None = None) -> StreamLost:
        """The error for a lost stream."""
        kept = f"frames up to {self._seconds:g} s ({self._number} in all)"
        reason = "" if why is None else f" ({why.message})"
        return StreamLost(
            f"the worker that kept the session's frames has ended, and no other can continue with them{reason}: "
            f"lost are its {kept}; open another session"
        )

    def _too_many_losses(self) -> StreamLost:
        many = self._losses or self._most_losses
        return StreamLost(
            f"{many} workers ended one after another while they had the session, which may be the cause: "
            f"lost are its frames up to {self._seconds:g} s ({self._number} in all)"
        )
