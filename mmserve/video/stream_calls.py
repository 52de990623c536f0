"""Calls of a session's stream, on other threads and never concurrently."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from mmserve.video.base import Stream, StreamStats
from mmserve.video.session_context import Work

logger = logging.getLogger("mmserve.video")


class StreamCalls:
    """Calls ``stream`` by ``work``; for one event loop."""

    def __init__(self, stream: Stream, work: Work) -> None:
        self._stream, self._work = stream, work
        self._lock = asyncio.Lock()

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a ``method`` of the stream; if cancelled, waits for the call to end, so that calls are never
        concurrent."""
        async with self._lock:
            calling = asyncio.ensure_future(self._work(method, *args))
            try:
                return await asyncio.shield(calling)
            except asyncio.CancelledError:
                await asyncio.wait({calling})
                calling.exception()  # marks the exception as retrieved
                raise

    async def stats(self) -> StreamStats:
        """The stream's counters; zeros if they cannot be read."""
        try:
            found: StreamStats = await self.call(self._stream.stats)
            return found
        except Exception as error:  # noqa: BLE001 - counters are no reason to end
            logger.error("statistics of a stream: %r", error)
            return StreamStats(0, 0, 0, 0, 0)  # each request must have a response: clients count them

    async def close(self) -> None:
        """Close the stream, which also ends a call that waits for a worker; errors are logged."""
        try:
            await self._work(self._stream.close)
        except Exception as error:  # noqa: BLE001 - there is no client any more
            logger.error("a stream could not be closed: %r", error)
