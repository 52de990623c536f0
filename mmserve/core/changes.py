"""Tasks of one event loop that wait for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """A condition variable for tasks of one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Have all waiting tasks check their condition again."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` is true."""
        while not condition():
            await self.changed()

    async def changed(self) -> None:
        """Wait for the next ``notify``."""
        await self._event.wait()
