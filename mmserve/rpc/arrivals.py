"""Calls whose message is still on its way: how long each may take, and how many there may be.

gRPC collects a message outside Python and hands it over whole, so how much of one has come is not known here. What is
known is that a message on its way may hold as many bytes as a message may have. Most messages come at once and are
never counted; of those that are late there may be only so many, and no call ever waits for the place of another: where
there are too many, the one goes that has waited longest, of the host with the most of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from mmserve.errors import DeadlineExceeded, MMServeError, ResourceExhausted

#: A message that takes longer counts as late (seconds).
PROMPT_SECONDS = 1.0
#: When a client may try again (seconds).
_RETRY_AFTER = 1.0


class Arrivals:
    """Reads the messages of calls, on one event loop: each within ``seconds`` (0 = no limit), and at most ``most`` late
    ones at a time."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds or None
        self._late: dict[
            asyncio.Future[None], str
        ] = {}  # ends with the error of who must go; hosts, in order of arrival

    @property
    def late(self) -> int:
        """Calls whose message has been on its way for longer than ``PROMPT_SECONDS``."""
        return len(self._late)

    async def read(self, read: Callable[[], Awaitable[Any]], context: Any) -> Any:
        """The next message of the call of ``context`` as ``read`` gives it, or ``grpc.aio.EOF``.

        Raises ``DeadlineExceeded`` for one that is too slow, and ``ResourceExhausted`` where too many are late.
        """
        # A task of its own, never cancelled: gRPC would not free what comes for a read that is given up. It ends
        # with the call.
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
    """Mark the error, if any, as retrieved: the call has ended otherwise."""
    if not ended.cancelled():
        ended.exception()


def _host(peer: str) -> str:
    """The host of gRPC's ``ipv4:HOST:PORT`` or ``ipv6:[HOST]:PORT``."""
    return peer.rpartition(":")[0] or peer
