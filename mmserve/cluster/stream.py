"""One video stream on a cluster: a worker keeps its frames and K/V; when it exits, or no longer encodes, another one
continues.

The stream is then opened there from its last checkpoint, and the journal is replayed. Callers wait meanwhile, and see
no difference: tokens do not depend on where, nor on how often, a frame is processed.
"""

from __future__ import annotations

import logging
import threading
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mmserve.cluster.asking import WorkerEnded
from mmserve.cluster.journal import GivenFrame, GivenQuestion, Journal
from mmserve.cluster.messages import Appended, Order, StreamSaved
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
    """A ``Stream`` whose frames are kept by the worker ``owner``; call ``begin`` first.

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
        self.owner: Worker | None = None
        self.worker = ""  # the name of ``owner`` when the stream was opened there
        self.name = ""  # the stream's name there, different each time it is opened
        self._held = 0  # bytes reserved for it there
        self._changed = threading.Condition()
        self._journal = Journal(save_frames)
        self._ready = False  # frames are sent to ``owner`` immediately
        self._wanted = False  # it must be opened again
        self._opening = False  # a thread is opening it
        self._losses = 0  # lost workers since all frames were last appended
        self._number, self._seconds = 0, 0.0  # of the newest frame
        self._unreported: set[int] = set()  # frames sent to ``owner`` that it has not reported
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
            if self._ready:
                self._send(given)
                self._save_if_due()
        return future

    def ask(self, request: Request, scope: Scope | None, sink: Sink) -> Asked:
        """See ``Stream.ask``."""
        once = admitted_once(sink)
        for _ in range(self._most_losses + 1):
            owner, worker, name = self._ready_owner()
            with self._changed:
                given = GivenQuestion(request.id, self._number, scope)
                self._journal.add(given)
            put = partial(self._send_question, owner, name, scope)
            try:
                asked = self._streams.requests.submit_there(request, once, worker, put, partial(self._again, given))
            except BaseException as error:
                with self._changed:
                    self._journal.remove(given)
                if not isinstance(error, MMServeError) or not self._is_gone(name, error):
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
            owner, _, name = self._ready_owner(frame)
            try:
                return owner.ask(self._streams.model, question, (name, *arguments))
            except MMServeError as error:
                if not self._is_gone(name, error):
                    raise
        raise self._too_many_losses()

    # --- from its streams ---

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
            if item.key != self.name:
                return
            self._unreported.discard(item.number)
            seconds, future = self._futures.pop(item.number, (0.0, None))
            if item.error is not None:
                self._journal.failed(item.number)
            if not self._unreported and self._ready:
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
            if item.key == self.name and self._ended is None and item.parcel is not None:
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

    def _send(self, given: GivenFrame) -> None:
        """Call with the lock."""
        assert self.owner is not None
        self._unreported.add(given.number)
        self.owner.post(self._streams.model, "stream.append", (self.name, given.number, given.seconds, *given.pixels))

    def _save_if_due(self) -> None:
        """Request a checkpoint if one is due and all entries were sent. Call with the lock."""
        if self._journal.due(self._number) and self.owner is not None:
            self.owner.post(self._streams.model, "stream.save", (self.name,))

    def _send_question(self, owner: Worker, name: str, scope: Scope | None, order: Order) -> Asked:
        asked: Asked = owner.ask(self._streams.model, "stream.ask", (name, order, scope))
        return asked

    def _ready_owner(self, frame: int | None = None) -> tuple[Worker, str, str]:
        """``owner``, ``worker`` and ``name``, once it has ``frame`` (None = all frames); raises ``StreamLost``."""

        def has() -> bool:
            return self._ready and (not self._unreported if frame is None else frame not in self._unreported)

        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or has(), 2 * PATIENCE)
            if self._ended is not None:
                raise self._ended
            if not has() or self.owner is None:
                raise Unavailable(_REPLACING)
            return self.owner, self.worker, self.name

    # --- when its worker exits, or must give it up ---

    def _is_gone(self, name: str, error: MMServeError) -> bool:
        """Whether an error means that no stream of this name exists there any more."""
        with self._changed:
            if self.name == name and isinstance(error, WorkerEnded):
                self._reopen()
            return self._ended is not None or self._wanted or self.name != name

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
        with self._changed:
            old, former = self.owner, self.name
            self.owner, self.worker, self.name = owner, owner.name, uuid.uuid4().hex
            self._unreported.clear()
            self._journal.resumed()
            parcel, worker, name = self._journal.parcel, self.worker, self.name
        if not self._streams.renamed(self, former):
            raise Unavailable("the server is shutting down; open the stream at another one")
        if old is not None:
            old.post(self._streams.model, "stream.close", (former,))
        state = self._streams.sent(parcel, worker)
        self._held = owner.ask(self._streams.model, "stream.open", (name, *self._given, state))
        if former:
            logger.info("worker %s goes on with a session's stream after frame %d", worker, self._journal.number)

    def _replay(self) -> None:
        """Replay the journal in order; returns early if it must be opened once more."""
        given = 0
        while True:
            with self._changed:
                entries = self._journal.entries
                # Entries that failed meanwhile are removed from the journal, so frames are identified by their numbers.
                left = [e for e in entries if (isinstance(e, GivenQuestion) and e.lost) or _number(e) > given]
                if self._wanted or self._ended is not None:
                    return
                if not left:
                    self._ready = True
                    self._losses = 0 if not self._unreported else self._losses
                    self._save_if_due()
                    self._changed.notify_all()
                    return
                if isinstance(entry := left[0], GivenFrame):
                    given = entry.number
                    self._send(entry)
                    continue
                self._changed.wait_for(
                    lambda: self._wanted or self._ended is not None or not self._unreported, PATIENCE
                )
                if self._wanted or self._unreported:
                    self._wanted = True
                    return
                entry.lost = False
            self._ask_again(entry)

    def _ask_again(self, given: GivenQuestion) -> None:
        assert self.owner is not None
        try:
            orders = self._streams.requests.orders_again(given.id, self.worker)
            for order in orders:
                self._send_question(self.owner, self.name, given.scope, order)
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
            owner, name = self.owner, self.name
        self._streams.discard(self)
        if owner is not None:
            owner.post(self._streams.model, "stream.close", (name,))

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


def _number(entry: GivenFrame | GivenQuestion) -> int:
    return entry.number if isinstance(entry, GivenFrame) else -1
