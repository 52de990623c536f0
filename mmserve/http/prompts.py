"""Several prompts in one body: similar requests, admitted together, whose answers are returned as samples of one."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace

from mmserve.core.events import Admitted, Event, Failed
from mmserve.core.request import Request, TextPart, TokensPart
from mmserve.core.tenant import Tenant
from mmserve.errors import DoesNotFit, InvalidArgument
from mmserve.http.api import ParsedRequest
from mmserve.http.errors import renamed
from mmserve.observe.watch import Watch
from mmserve.rpc.engines import EngineLike
from mmserve.rpc.generation import answered
from mmserve.rpc.server import Server

logger = logging.getLogger("mmserve.http")


class Prompts:
    """Creates requests to ``server`` for the prompts of a body."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def take(self, asked: ParsedRequest, tenant: Tenant, held: ExitStack) -> None:
        """Count the prompts of ``asked`` after the first towards the limits of ``tenant``, until ``held`` is closed.

        Raises ``InvalidArgument`` if this number can never be admitted with the current settings, and as
        ``Quotas.taken``.
        """
        count, samples = 1 + len(asked.prompts), asked.message.sampling.n or 1
        engine, own = self._server.config.engine, self._server.quotas.most(tenant)
        most = min(engine.max_samples, engine.max_queued)
        if samples <= most < samples * count:
            why = f"must hold at most {most // samples} prompts with n = {samples}, not {count}: a server raises "
            raise InvalidArgument.of("prompt", f"{why}that by [engine] max_samples and max_queued")
        if own is not None and count > own:
            why = f"must hold at most {own} prompts, not {count}: each counts in the rate and concurrency of"
            raise InvalidArgument.of("prompt", f"{why} the tenant {tenant.name!r}")
        held.enter_context(self._server.quotas.taken(tenant, count - 1))

    def answered(
        self,
        engine: EngineLike,
        request: Request,
        watch: Watch,
        prompts: Sequence[TextPart | TokensPart],
        held: ExitStack,
    ) -> AsyncGenerator[Event]:
        """Events of ``request``, and of copies of it with each of ``prompts``; arguments as in ``answered`` and
        ``Generations.alike``.

        The number of new tokens is reduced to what fits after each prompt.
        """
        first = _fitted(engine, request, watch)
        if not prompts:
            return first
        watches = [watch]

        def failed() -> None:
            for each in watches:
                each.why_cancelled = "another prompt of its body failed"

        others = (self._other(engine, request, each, i, held, watches) for i, each in enumerate(prompts, 1))
        return joined([_placed(0, first), *others], request.sampling.n, failed)

    async def _other(
        self,
        engine: EngineLike,
        first: Request,
        prompt: TextPart | TokensPart,
        number: int,
        held: ExitStack,
        watches: list[Watch],
    ) -> AsyncGenerator[Event]:
        """Events of the request for prompt ``number``, whose watch is added to ``watches``."""
        with self._server.generations.watch() as watch:
            watches.append(watch)
            request = self._server.generations.alike(uuid.uuid4().hex, first, prompt, held, watch)
            logger.info("request %s for prompt %d of the body of %s", request.id, number, first.id)
            async with aclosing(_placed(number, _fitted(engine, request, watch))) as events:
                async for event in events:
                    yield event


async def _placed(number: int, events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
    """``events``, with errors that name the prompt by its index in the body."""
    with renamed({"messages": f"prompt[{number}]"}):
        async with aclosing(events):
            async for event in events:
                yield event


async def _fitted(engine: EngineLike, request: Request, watch: Watch) -> AsyncGenerator[Event]:
    """As ``answered``, with the number of new tokens reduced to what fits after the prompt."""
    while True:
        try:
            async with aclosing(answered(engine, request, watch)) as events:
                async for event in events:
                    yield event
            return
        except DoesNotFit as error:  # precedes all events except for ``Admitted``
            if not 0 < error.room < request.sampling.max_new_tokens:
                raise
            fitting = replace(request.sampling, max_new_tokens=error.room)
            request = replace(request, id=uuid.uuid4().hex, sampling=fitting)


async def joined(
    streams: Sequence[AsyncGenerator[Event]], samples: int, failed: Callable[[], None] = lambda: None
) -> AsyncGenerator[Event]:
    """The events of several requests, of ``samples`` samples each, as those of one request with samples numbered
    consecutively.

    No event is yielded before all requests are admitted. An error of one request ends the others, after ``failed`` is
    called.
    """
    ready: asyncio.Queue[Event | Exception | None] = asyncio.Queue(1)  # unsent events are merged only in outboxes

    async def pass_on(first: int, stream: AsyncGenerator[Event]) -> None:
        try:
            async for event in stream:
                if not isinstance(event, Admitted | Failed):
                    await ready.put(replace(event, sample=first + event.sample))
            await ready.put(None)
        except Exception as error:  # noqa: BLE001 - raised where the events are read
            await ready.put(error)

    tasks: list[asyncio.Task[None]] = []
    try:
        for stream in streams:
            await anext(stream)  # ``Admitted``
        tasks += [asyncio.create_task(pass_on(i * samples, stream)) for i, stream in enumerate(streams)]
        unfinished = len(streams)
        while unfinished:
            found = await ready.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                unfinished -= 1
            else:
                yield found
    except Exception:
        failed()
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
