"""From the events of a request to its response: complete, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing, suppress

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mmserve.core.events import Event, Finished, Prefilled
from mmserve.errors import Cancelled, Internal, MMServeError
from mmserve.http.api import Api, Reply
from mmserve.observe import calls

logger = logging.getLogger("mmserve.http")

#: Headers that prevent proxies from buffering events.
_UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}

#: Characters from which a line takes milliseconds to write.
_LONG = 1 << 16


async def ended(events: AsyncIterator[Event]) -> tuple[list[Finished], list[Prefilled]]:
    """The samples of an answer in order, and the prompts that were requested with them."""
    finished: list[Finished] = []
    prompts: list[Prefilled] = []
    async for event in events:
        if isinstance(event, Finished):
            finished.append(event)
        elif isinstance(event, Prefilled):
            prompts.append(event)
    return sorted(finished, key=lambda event: event.sample), prompts


class EventStream(StreamingResponse):
    """A response with the lines of ``reply`` for the events ``begun`` and all further ``events``.

    Closes ``events`` and ``held`` at its end, including errors.
    """

    def __init__(
        self, api: Api, reply: Reply, begun: Sequence[Event], events: AsyncGenerator[Event], held: ExitStack
    ) -> None:
        lines = _lines(api, reply, _after(begun, events))
        super().__init__(lines, media_type="text/event-stream", headers=_UNBUFFERED)
        self._events, self._held = events, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines."""
        with suppress(Cancelled), self._held:  # a client that disconnects cancels its answer
            async with aclosing(self._events):
                await self.stream_response(send)


async def _after(begun: Sequence[Event], events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    for event in begun:
        yield event
    async for event in events:
        yield event


async def _lines(api: Api, reply: Reply, events: AsyncIterator[Event]) -> AsyncIterator[str]:
    """The lines of ``events``; an error after the first event is the last line."""
    try:
        async for line in reply.lines(events):
            yield line
            if len(line) > _LONG:  # those of several samples would block the event loop together
                await asyncio.sleep(0)
        return
    except MMServeError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - a bug ends this request alone
        failure = Internal.logged(error, "a stream", logger)
    calls.current().failed = failure.code
    yield reply.failed(api.error(failure))
