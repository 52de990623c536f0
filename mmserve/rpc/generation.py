"""GenerationService: one request in, its events out."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any

from mmserve.config import MediaConfig
from mmserve.core.events import Event, Failed, Finished
from mmserve.core.request import Request
from mmserve.core.tenant import Tenant
from mmserve.encode.store import MediaStore
from mmserve.errors import DeadlineExceeded, MMServeError
from mmserve.observe import calls
from mmserve.observe.metrics import Metrics, Watch
from mmserve.rpc.auth import current_tenant
from mmserve.rpc.engines import EngineLike, Engines
from mmserve.rpc.request_messages import to_request
from mmserve.rpc.room import Room, media_files, text_bytes
from mmserve.rpc.status import errors_to_status
from mmserve.rpc.stream import Outbox
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import generation_pb2_grpc
from mmserve.wire import request_id
from mmserve.wire.events import to_response

logger = logging.getLogger("mmserve.rpc")

#: Characters of an error that the log has: a refusal may name every field of a request.
_LOGGED = 500


class Generations:
    """Requests on their way to the engine that answers them, from whatever front they come."""

    def __init__(self, engines: Engines, media: MediaStore, limits: MediaConfig, metrics: Metrics, room: Room) -> None:
        self._engines = engines
        self._metrics = metrics
        self._media = media
        self._limits = limits
        self._room = room

    def watch(self) -> Watch:
        """What counts one request from when it is read to its end."""
        return self._metrics.watch()

    def accepted(
        self,
        own: str,
        message: pb.GenerateRequest,
        tenant: Tenant,
        deadline: float | None,
        held: ExitStack,
        watch: Watch,
    ) -> tuple[EngineLike, Request]:
        """The engine and the request of ``message``, whose bytes are counted until ``held`` is closed.

        ``own``: the engine's id of the request. ``deadline`` is on the monotonic clock (seconds). Raises
        ``MMServeError`` where the request cannot be accepted.
        """
        watch.tenant = tenant.name
        engine = self._engines.find(message.model)
        watch.model = calls.current().model = engine.info.name
        request = to_request(
            message,
            request_id=own,
            info=engine.info,
            limits=self._limits,
            media=lambda media_id: self._media.get(media_id, tenant.cache),
            deadline=deadline,
            tenant=tenant,
        )
        held.enter_context(self._room.taken(media_files(request), text_bytes(request)))
        return engine, request


async def answered(engine: EngineLike, request: Request, watch: Watch) -> AsyncGenerator[Event]:
    """The events of ``request``, which is cancelled where the generator is closed before the last one.

    Raises the error of a ``Failed``.
    """
    outbox = Outbox(request.sampling.n)
    engine.submit(request, outbox.put)
    try:
        async for event in outbox:
            if isinstance(event, Failed):
                raise event.error
            watch.see(event)
            if isinstance(event, Finished):
                logger.info("request %s finished: %s", request.id, _summary(event))
            yield event
    finally:
        if not outbox.ended:  # the client went away, or its deadline passed
            late = request.deadline is not None and time.monotonic() >= request.deadline
            watch.left = "DEADLINE_EXCEEDED" if late else "CANCELLED"
            logger.info("request %s abandoned: %s", request.id, "deadline" if late else "cancelled by the client")
            engine.cancel(request.id, DeadlineExceeded("the deadline passed") if late else None)


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Answers ``Generate`` with the engine of the model that the request names."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def Generate(self, message: pb.GenerateRequest, context: Any) -> None:
        """Stream the events of one request; a client that leaves cancels it."""
        label = calls.current().request_id
        own = uuid.uuid4().hex  # two clients may use one label: the engine's ids are its own
        with ExitStack() as held:
            async with errors_to_status(context, f"Generate {label}"):
                with logged(own, label), self._generations.watch() as watch:
                    try:  # without a pause: what came in is counted before more may come
                        engine, request = self._generations.accepted(
                            own, message, current_tenant(), _deadline(context), held, watch
                        )
                    except MMServeError as error:
                        raise error.with_traceback(None) from None  # whose frames hold the message
                    finally:
                        del message  # its media were copied, and `Clear` would free nothing
                        await context.send_initial_metadata(((request_id.KEY, label),))
                    logger.info("request %s for %s (%s: %s)", own, request.model, request_id.KEY, label)
                    async with aclosing(answered(engine, request, watch)) as events:
                        async for event in events:
                            await context.write(to_response(event, label))


@contextmanager
def logged(own: str, label: str) -> Iterator[None]:
    """Write to the log why a request was refused, or failed: in one line, whatever its client wrote."""
    try:
        yield
    except MMServeError as error:
        text = error.message if len(error.message) <= _LOGGED else f"{error.message[:_LOGGED]}…"
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        logger.info("request %s (%s: %s) failed: %s: %s", own, request_id.KEY, label, error.code, line)
        raise


def _summary(event: Finished) -> str:
    usage, times = event.usage, event.times
    return (
        f"sample {event.sample}, {event.reason}, {usage.prompt_tokens} + {usage.completion_tokens} tokens, "
        f"{event.forwards} forwards, {times.total:.0f} ms (queue {times.queue:.0f}, first {times.first_token:.0f})"
    )


def _deadline(context: Any) -> float | None:
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
