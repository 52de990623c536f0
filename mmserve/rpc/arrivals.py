"""Limits on calls whose message is still being received: the time of each, and their number.

gRPC receives a message outside of Python and delivers it as a whole, so its progress is unknown here, and it must be
assumed to hold as many bytes as a message may have. Most messages arrive at once and are not counted; the number of
late ones is limited, without making any call wait for another: if there are too many, the oldest one of the host with
the most late calls is ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from mmserve.errors import DeadlineExceeded, MMServeError, ResourceExhausted

#: Time (seconds) after which a message counts as late.
PROMPT_SECONDS = 1.0
#: Retry delay (seconds) for refused clients.
_RETRY_AFTER = 1.0


class Arrivals:
    """Reads the messages of calls, on one event loop: each within ``seconds`` (0 = unlimited), with at most ``most``
    late ones at a time."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds or None
        self._late: dict[asyncio.Future[None], str] = {}  # hosts, in order of arrival; a future's error ends its call

    @property
    def late(self) -> int:
        """Number of calls whose message has taken longer than ``PROMPT_SECONDS``."""
        return len(self._late)

    async def read(self, read: Callable[[], Awaitable[Any]], context: Any) -> Any:
        """The next message of the call of ``context``, from ``read``, or ``grpc.aio.EOF``.

        Raises ``DeadlineExceeded`` if it is too slow, ``ResourceExhausted`` if too many are late.
        """
        # In a separate task, never cancelled: gRPC would not free a message whose read is abandoned. The task ends with
        # the call.
        reading = asyncio.ensure_future(read())
        reading.add_done_callback(_look_at)
        if not (await asyncio.wait({reading}, timeout=PROMPT_SECONDS))[0]:
            await self._wait_for(reading, _host(context.peer()))
        return reading.result()

    async def _wait_for(self, reading: asyncio.Future[Any], host: str) -> None:
        sent_away: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sent_away.add_done_callback(_look_at)
        self._late[sent_away] = host
        try:
            if len(self._late) > self._most:
                self._send_one_away()
            left = None if self._seconds is None else max(0.0, self._seconds - PROMPT_SECONDS)
            await asyncio.wait({reading, sent_away}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._late[sent_away]
        if reading.done():
            return
        if sent_away.done():
            sent_away.result()
        raise DeadlineExceeded(
            f"the message did not come within {self._seconds:g} seconds ([server] message_seconds); send large media "
            "with UploadMedia, in chunks"
        )

    def _send_one_away(self) -> None:
        waiting = {call: host for call, host in self._late.items() if not call.done()}
        [(most_of, _)] = Counter(waiting.values()).most_common(1)
        error: MMServeError = ResourceExhausted(
            f"more than {self._most} calls have sent only a part of their message, or nothing, and this one of "
            f"{most_of} has waited longest; try again, and send large media with UploadMedia, in chunks",
            retry_after=_RETRY_AFTER,
        )
        next(call for call, host in waiting.items() if host == most_of).set_exception(error)


def _look_at(ended: asyncio.Future[Any]) -> None:
    """Marks the error, if any, as retrieved: the call has ended in another way."""
    if not ended.cancelled():
        ended.exception()


def _host(peer: str) -> str:
    """The host in gRPC's ``ipv4:HOST:PORT`` or ``ipv6:[HOST]:PORT``."""
    return peer.rpartition(":")[0] or peer
