"""A worker of a cluster: an engine for each model, limited to the worker's roles, and its communication.

Runs in a Ray actor (``fleet.py``), which forwards calls to it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mmserve.assembly import build_engines
from mmserve.cluster.link import Listener
from mmserve.cluster.messages import (
    Chunk,
    Described,
    Heartbeat,
    Item,
    Moved,
    Order,
    Parcel,
    Refused,
    RequestEvent,
    without_media,
)
from mmserve.cluster.parcels import Parcels
from mmserve.cluster.questions import QUESTIONS, Subject
from mmserve.cluster.worker_streams import WorkerStreams
from mmserve.config import Config
from mmserve.core.events import Admitted, Event, Failed
from mmserve.core.handover import Ahead, HandedOver, Handover, Saved
from mmserve.core.payloads import KVChunk, PrefilledPayload
from mmserve.core.progress import Progress
from mmserve.core.request import RequestId
from mmserve.core.stats import Pass
from mmserve.engine.engine import Engine
from mmserve.errors import Internal, MMServeError, TransferError
from mmserve.models.base import LoadedModel
from mmserve.observe import traces
from mmserve.transfer.kv_coding import coded, decoded
from mmserve.transfer.shared_memory import allow_descriptors, host_id
from mmserve.video.support import session_support

logger = logging.getLogger("mmserve.cluster")

#: Interval (seconds) of heartbeats.
HEARTBEAT_SECONDS = 0.25
#: Maximum number of items in one message.
_MAX_ITEMS = 256
#: Methods that the front end calls by its link.
_CALLS = ("take", "cancel", "serve", "reuse")


class Worker:
    """One process's engines. Methods are called from threads of the actor: ``take``, ``cancel``, ``serve`` and
    ``reuse`` sequentially, ``events`` and ``ask`` concurrently with these."""

    def __init__(self) -> None:
        allow_descriptors()
        self._engines: dict[str, Engine] = {}
        self._subjects: dict[str, Subject] = {}
        self.parcels = Parcels()
        self._outbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._kv_bits = 0
        self._serving = threading.Event()
        self._shard_thread = ThreadPoolExecutor(1, "mmserve-shards")
        self._end_traces: Callable[[], None] = lambda: None

    def load(self, config: Config, *, transport: str, linked: bool, kv_bits: int) -> Described:
        """Load the models; call ``serve`` afterwards. ``transport``: how states are written (``Parcels``); ``linked``:
        whether orders and events use a socket of this host; ``kv_bits``: bits of K/V of prompts that are sent to decode
        (``transfer.kv_coding``), 0 = unchanged."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._end_traces = traces.configure(config.server.otlp_endpoint)
        self._kv_bits = kv_bits
        self.parcels.use(transport)
        self._engines = build_engines(config)
        for engine in self._engines.values():
            engine.start()
        for name, engine in self._engines.items():
            streams = WorkerStreams(engine, config.video, self._outbox.put, self._sink, self.parcels.write, self._read)
            self._subjects[name] = Subject(engine, streams)
        infos = {name: engine.info for name, engine in self._engines.items()}
        stages = {name: engine.stages for name, engine in self._engines.items()}
        support = {name: session_support(each.model, each.capabilities) for name, each in stages.items()}
        adapters = {name: tuple(engine.adapters.listed()) for name, engine in self._engines.items()}
        address = ""
        if linked:
            listener = Listener(self.parcels.arena.offered)
            listener.serve({name: partial(self._called, name) for name in _CALLS}, self.events)
            address = listener.address
        return Described(infos, support, adapters, host_id(), os.getpid(), self.parcels.arena.address, address)

    def take(self, orders: list[Order]) -> None:
        """Accept requests; an error of one is reported by a separate item."""
        for order in orders:
            if order.shard:
                self._shard_thread.submit(self._encode_share, order)
                continue
            try:
                engine, sink = self._engines[order.model], self._sink(order)
                if order.seen:
                    engine.stages.encoder.add_encoded(order.request(), [self._read(parcel) for parcel in order.seen])
                handover = replace(order.handover, request=order.request())
                for number, parcel in order.ahead:
                    engine.expect(replace(handover, payload=self._read(parcel)), number, sink)
                if not order.expects:
                    engine.adopt(replace(handover, payload=self._read(order.parcel)), sink)
            except TransferError as error:
                self._engines[order.model].withdraw(order.handover.request.id)  # drop K/V that were sent ahead
                if not order.expects:  # otherwise reported when the request itself arrives
                    self._outbox.put(Refused(order.model, order.key, order.sample, error))
            except MMServeError as error:
                self._outbox.put(RequestEvent(order.model, order.key, order.sample, Failed(error)))
            except Exception as error:  # noqa: BLE001 - a bug with one request leaves the others alone
                failed = Failed(Internal.logged(error, f"taking in request {order.key}", logger))
                self._outbox.put(RequestEvent(order.model, order.key, order.sample, failed))

    def _encode_share(self, order: Order) -> None:
        """Encode some of a request's media for the worker that will run it; on a separate thread."""
        try:
            engine = self._engines[order.model]
            torch.set_num_threads(engine.config.torch_threads)
            handover = replace(
                order.handover, payload=engine.stages.encoder.encode_shares(order.request(), order.shard)
            )
            self._outbox.put(self._moved(order, order.sample, handover, stays=False))
        except MMServeError as error:
            self._outbox.put(Refused(order.model, order.key, order.sample, error))
        except Exception as error:  # noqa: BLE001 - a bug with one request leaves the others alone
            failed = Internal.logged(error, f"encoding media of request {order.key}", logger)
            self._outbox.put(Refused(order.model, order.key, order.sample, failed))

    def cancel(self, model: str, ids: list[RequestId], error: MMServeError | None) -> None:
        """See ``workers.Worker.cancel``."""
        for each in ids:
            if error is None:
                self._engines[model].withdraw(each)
            else:
                self._engines[model].cancel(each, error)

    def serve(self, roles: Collection[str], save_every: int, ahead_bytes: int) -> None:
        """Change the roles: requests that wait for other stages, and running answers, leave. With no roles, all leave.
        Other arguments as in ``Engine.serve_roles``."""
        for engine in self._engines.values():
            engine.serve_roles(roles, save_every, ahead_bytes)
            if "encode" in roles:
                engine.warm()
        self._serving.set()

    def ask(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        """The result of ``QUESTIONS[question]``; raises its errors, and ``Internal`` for exceptions other than
        ``MMServeError``."""
        subject = self._subjects[model]
        torch.set_num_threads(subject.engine.config.torch_threads)
        try:
            return QUESTIONS[question](subject, *arguments)
        except MMServeError:
            raise
        except Exception as error:
            raise Internal.logged(error, f"the question {question!r}", logger) from error

    def close(self) -> None:
        """End all requests, write persistent caches to disk, and send the last spans."""
        for subject in self._subjects.values():
            subject.streams.stop()
            subject.engine.stop()
        self._end_traces()

    def reuse(self, numbers: list[int]) -> None:
        """Allow reuse of the memory of these states, which have no readers any more."""
        for number in numbers:
            self.parcels.reuse(number)

    def events(self) -> Iterator[list[Item]]:
        """Yields reports endlessly, in batches of all available items; an empty batch is a heartbeat.

        Yields nothing before ``serve``: the reports of a spare have no reader.
        """
        self._serving.wait()
        due, last = 0.0, time.monotonic()
        while True:
            if (now := time.monotonic()) >= due:
                yield [
                    Heartbeat(
                        {name: engine.stats() for name, engine in self._engines.items()}, self._passes(now - last)
                    )
                ]
                due, last = now + HEARTBEAT_SECONDS, now
            if items := self._next(max(0.0, due - time.monotonic())):
                yield items

    def _called(self, name: str, *arguments: Any) -> None:
        """Call a method for the front end; errors are logged, so that later calls are not affected."""
        try:
            getattr(self, name)(*arguments)
        except Exception:
            logger.exception("a call of %r failed", name)

    def _passes(self, since: float) -> tuple[Pass, ...]:
        """The latest passes of the engines, and the duration of this heartbeat as a pass of its own kind."""
        found = [Pass("heartbeat", 1, max(since, HEARTBEAT_SECONDS))]
        for engine in self._engines.values():
            with suppress(IndexError):
                while True:
                    found.append(engine.passes.popleft())
        return tuple(found)

    def _next(self, seconds: float) -> list[Item]:
        """The available items; waits up to ``seconds`` for the first."""
        found: list[Item] = []
        with suppress(queue.Empty):
            found.append(self._outbox.get(timeout=seconds))
            while len(found) < _MAX_ITEMS:
                found.append(self._outbox.get_nowait())
        return found

    def _sink(self, order: Order) -> Callable[[Event | Progress | HandedOver | Saved | Ahead], None]:
        def take(event: Event | Progress | HandedOver | Saved | Ahead) -> None:
            if isinstance(event, Admitted):
                return  # already sent by the coordinator
            sample = getattr(event, "sample", None) if order.sample is None else order.sample
            if isinstance(event, HandedOver | Saved):
                whole = order.sample is None and event.handover.request.sampling.n > 1
                # immediately: a checkpoint's state is modified by its next step
                self._outbox.put(
                    self._moved(order, None if whole else sample, event.handover, isinstance(event, Saved))
                )
            elif isinstance(event, Ahead):
                parcel = self.parcels.write(self._coded(order.model, event.handover.payload))
                plain = _plain(event.handover)
                self._outbox.put(Chunk(order.model, order.key, sample, plain, parcel, event.number))
            else:
                self._outbox.put(RequestEvent(order.model, order.key, sample, event))

        return take

    def _moved(self, order: Order, sample: int | None, handover: Handover, stays: bool) -> Moved:
        payload = None if handover.payload is None else self._coded(order.model, handover.payload)
        parcel = None if payload is None else self.parcels.write(payload)
        return Moved(order.model, order.key, sample, _plain(handover), parcel, stays)

    def _coded(self, model: str, payload: Any) -> Any:
        """K/V of a prompt quantised for transfer, if configured; other payloads unchanged."""
        loaded = self._engines[model].stages.model
        if self._kv_bits and isinstance(payload, PrefilledPayload | KVChunk) and isinstance(loaded, LoadedModel):
            return coded(payload, self._kv_bits, loaded.decoder.config.num_layers)
        return payload

    def _read(self, parcel: Parcel) -> Any:
        return None if parcel is None else decoded(self.parcels.read(parcel))


def _plain(handover: Handover) -> Handover:
    """``handover`` without payload and media, which are sent separately."""
    return replace(handover, payload=None, request=without_media(handover.request))
