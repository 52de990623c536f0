"""Tasks of one event loop that wait for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Lets tasks of one event loop wait until something is so."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Have everybody who waits look again."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def until(self, so: Callable[[], bool]) -> None:
        """Wait until ``so()``."""
        while not so():
            await self.changed()

    async def changed(self) -> None:
        """Wait for the next ``notify``."""
        await self._event.wait()
