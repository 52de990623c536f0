from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mmserve.config import VideoConfig
from mmserve.core.tenant import ANONYMOUS
from mmserve.errors import MMServeError
from mmserve.video.registry import Registry


class _Session:
    """What a registry needs of a session."""

    tenant, owner, last_used = ANONYMOUS, "engine", float("inf")

    def __init__(self, handle: str, ended: Callable[[Any], None]) -> None:
        self.handle, self._ended = handle, ended
        self.error: MMServeError | None = None

    def go_away(self, _notice: object) -> None:
        """Drains announce themselves."""

    def end(self, error: MMServeError) -> None:
        self.error = error
        self._ended(self)


def test_two_drains_of_one_engine_at_once_both_return() -> None:
    async def main() -> None:
        registry = Registry(VideoConfig())
        session = registry.open(ANONYMOUS, _Session)  # type: ignore[arg-type]
        await asyncio.gather(registry.drain(60, "engine"), registry.drain(0.01, "engine"))
        assert isinstance(session, _Session) and session.error is not None
        assert len(registry) == 0 and registry.notice(session) is None

    asyncio.run(main())
