"""GenerationService: streams the events of one request."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mmserve.config import MediaConfig
from mmserve.core.events import LARGE, Event, Failed, Finished, scored
from mmserve.core.info import ModelInfo
from mmserve.core.request import Request, TextPart, TokensPart
from mmserve.core.slo import SLO
from mmserve.core.tenant import Tenant
from mmserve.encode.store import MediaStore
from mmserve.errors import DeadlineExceeded, InvalidArgument, MMServeError
from mmserve.models.adapters import TOOLS
from mmserve.observe import calls, traces
from mmserve.observe.metrics import Metrics
from mmserve.observe.watch import Watch
from mmserve.rpc.auth import current_tenant
from mmserve.rpc.engines import EngineLike, Engines, info_with, own_adapter
from mmserve.rpc.fetching import Fetcher, urls_in
from mmserve.rpc.memory_budget import MemoryBudget, media_files, text_bytes
from mmserve.rpc.request_messages import to_request
from mmserve.rpc.status import DEADLINE_SLACK, errors_to_status
from mmserve.rpc.stream import Outbox
from mmserve.rpc.tool_events import tool_events
from mmserve.rpc.violations import violations
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import generation_pb2_grpc
from mmserve.wire import request_id
from mmserve.wire.events import to_response

logger = logging.getLogger("mmserve.rpc")

#: Maximum characters of an error in the log: it may name every field of a request.
_LOGGED = 500


class Generations:
    """Validates requests and sends them to engines, for all protocols."""

    def __init__(
        self,
        engines: Engines,
        media: MediaStore,
        limits: MediaConfig,
        metrics: Metrics,
        budget: MemoryBudget,
        fetcher: Fetcher,
        slo: Sequence[SLO] = (),
    ) -> None:
        self._engines = engines
        self._metrics = metrics
        self._media = media
        self._limits = limits
        self._budget = budget
        self._fetcher = fetcher
        self._slo = {each.name: each for each in slo}

    def watch(self) -> Watch:
        """A recorder of one request's metrics, from when it is read to its end."""
        return Watch(self._metrics, traces.begin(calls.current()))

    async def fetched(
        self, message: pb.GenerateRequest, fields: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, bytes]:
        """Download the URLs of ``message``; ``fields``: the client's field of each URL, for errors.

        Raises ``InvalidArgument`` for any other violation of the message, before downloading, and the errors of
        ``Fetcher.fetch``.
        """
        wanted = urls_in(message.messages)
        if not wanted:
            return {}
        _adapter, info = self._asked_of(self._engines.find(self._engines.split(message.model)[0]), message)
        if wrong := tuple(violations(message, info, self._limits)):
            raise InvalidArgument(*wrong)
        return await self._fetcher.fetch({**wanted, **fields})

    def accepted(
        self,
        own: str,
        message: pb.GenerateRequest,
        tenant: Tenant,
        deadline: float | None,
        held: ExitStack,
        watch: Watch,
        fetched: Mapping[str, bytes] = MappingProxyType({}),
    ) -> tuple[EngineLike, Request]:
        """The engine and the request of ``message``, whose bytes are counted until ``held`` is closed.

        ``own``: the engine's id of the request. ``deadline``: monotonic clock (seconds). ``fetched``: the downloaded
        files of its URLs. Raises ``MMServeError`` if the request is not accepted.
        """
        watch.tenant = tenant.name
        engine = self._engines.find(self._engines.split(message.model)[0])
        watch.model = calls.current().model = engine.info.name
        request = self.read(own, message, tenant, engine, deadline, fetched)
        held.enter_context(self._budget.taken(media_files(request), text_bytes(request)))
        return engine, watch.accepted(request)

    def alike(self, own: str, first: Request, prompt: TextPart | TokensPart, held: ExitStack, watch: Watch) -> Request:
        """The request for ``prompt`` that is otherwise equal to ``first``; arguments and errors as in ``accepted``."""
        watch.tenant, watch.model = first.tenant.name, first.model
        request = replace(first, id=own, messages=(replace(first.messages[0], parts=(prompt,)),))
        held.enter_context(self._budget.taken(media_files(request), text_bytes(request)))
        return watch.accepted(request)

    def read(
        self,
        own: str,
        message: pb.GenerateRequest,
        tenant: Tenant,
        engine: EngineLike,
        deadline: float | None = None,
        fetched: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Request:
        """The request of ``message`` for ``engine``; arguments and errors as in ``accepted``."""
        adapter, info = self._asked_of(engine, message)
        return to_request(
            message,
            request_id=own,
            info=info,
            adapter=adapter,
            limits=self._limits,
            media=lambda name: fetched[name] if name in fetched else self._media.get(name, tenant.cache),
            deadline=deadline,
            tenant=tenant,
            slo=self._slo,
        )

    def _asked_of(self, engine: EngineLike, message: pb.GenerateRequest) -> tuple[str, ModelInfo]:
        """The adapter of a request to ``engine``, and the description of the model with it."""
        adapter = message.adapter or self._engines.split(message.model)[1]
        if not adapter and message.tools and message.tool_choice != pb.TOOL_CHOICE_NONE:
            adapter = own_adapter(engine, TOOLS)
        return adapter, info_with(engine, adapter)


async def answered(engine: EngineLike, request: Request, watch: Watch) -> AsyncGenerator[Event]:
    """Yields the events of ``request``, which is cancelled if the generator is closed early.

    Raises the error of a ``Failed``.
    """
    outbox = Outbox(request.sampling.n)
    converted = tool_events(request, engine.info)
    engine.submit(request, watch.sink(outbox.put))
    try:
        async for event in outbox:
            if not isinstance(event, Failed):
                watch.record(event)
            if isinstance(event, Finished):
                logger.info("request %s finished: %s", request.id, _summary(event))
            for sent in converted(event):
                if isinstance(sent, Failed):
                    raise sent.error
                yield sent
    finally:
        if not outbox.ended:  # the client disconnected, or its deadline passed
            late = request.deadline is not None and time.monotonic() >= request.deadline - DEADLINE_SLACK
            watch.left = "DEADLINE_EXCEEDED" if late else "CANCELLED"
            logger.info("request %s abandoned: %s", request.id, "deadline" if late else watch.why_cancelled)
            engine.cancel(request.id, DeadlineExceeded("the deadline passed") if late else None)


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Answers ``Generate`` with the engine of the requested model."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def Generate(self, message: pb.GenerateRequest, context: Any) -> None:
        """Stream the events of one request; cancelled if the client disconnects."""
        label = calls.current().request_id
        own = uuid.uuid4().hex  # labels of clients may collide, so the engine has its own ids
        with ExitStack() as held:
            async with errors_to_status(context, f"Generate {label}"):
                with logged(own, label), self._generations.watch() as watch:
                    try:  # without yielding, except for URLs: a received message is counted before others arrive
                        files = await self._generations.fetched(message)
                        engine, request = self._generations.accepted(
                            own, message, current_tenant(), deadline_of(context), held, watch, files
                        )
                        del files
                    except MMServeError as error:
                        raise error.with_traceback(None) from None  # its frames hold the message
                    finally:
                        del message  # its media were copied; ``Clear`` would not free memory
                        await context.send_initial_metadata(((request_id.KEY, label),))
                    logger.info("request %s for %s (%s: %s)", own, request.model, request_id.KEY, label)
                    async with aclosing(answered(engine, request, watch)) as events:
                        async for event in events:
                            await context.write(await _response(event, label))


async def _response(event: Event, label: str) -> pb.GenerateResponse:
    """The response message of ``event``; a large one is made on a thread, so that the event loop is not blocked."""
    if scored(event) > LARGE:
        return await asyncio.to_thread(to_response, event, label)
    return to_response(event, label)


@contextmanager
def logged(own: str, label: str) -> Iterator[None]:
    """Context that logs why a request was refused or failed, in one line, whatever its client sent."""
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


def deadline_of(context: Any) -> float | None:
    """The deadline of the call of ``context``, on the monotonic clock (seconds); None if it has none."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
