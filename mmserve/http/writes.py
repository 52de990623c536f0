"""Joined writes: what a response writes in one turn of the event loop is sent by one system call."""

from __future__ import annotations

import asyncio
from typing import Any

#: Bytes that are sent at once, whatever else is written in the same turn.
_MOST = 64 << 10


class JoinedWrites:
    """The transport ``inner``, whose small writes are sent together at the end of the loop's turn.

    A response writes its head and its first event separately, and so its last event and the end of its chunks.
    """

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._inner, self._loop = inner, loop
        self._unsent: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        """See ``asyncio.Transport.write``."""
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(data)
        self._size += len(data)
        if self._size > _MOST:  # the transport has to say whether the client still accepts data
            self._send()

    def close(self) -> None:
        """See ``asyncio.Transport.close``."""
        self._send()
        self._inner.close()

    def _send(self) -> None:
        data, self._unsent, self._size = b"".join(self._unsent), [], 0
        if data:
            self._inner.write(data)
