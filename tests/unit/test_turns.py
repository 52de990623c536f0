"""Turns on an event loop: who holds it up goes on alone, and others are served after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from mmserve.rpc import turns
from mmserve.rpc.turns import Turns


class Reads:
    """Reads of messages that become complete together, and each of which then holds up the loop for ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events: list[str] = []

    async def read(self) -> str:
        await asyncio.shield(self.complete)
        self.events.append("copied")
        time.sleep(self._seconds)  # noqa: ASYNC251 - as gRPC's copy does: nothing else runs meanwhile
        return "message"

    async def check(self) -> None:
        """Somebody else, whose answers take a few passes of the loop each."""
        while True:
            for _ in range(4):
                await asyncio.sleep(0)
            self.events.append("served")


async def _finish(reads: Reads, take: Callable[[Callable[[], Awaitable[str]]], Awaitable[str]]) -> list[str]:
    tasks = [asyncio.ensure_future(take(reads.read)) for _ in range(4)]
    await asyncio.sleep(0)
    checking = asyncio.ensure_future(reads.check())
    reads.complete.set_result(None)
    assert await asyncio.gather(*tasks) == ["message"] * 4
    checking.cancel()
    return reads.events


async def _plain(read: Callable[[], Awaitable[str]]) -> str:
    return await read()


def test_others_are_served_between_large_messages() -> None:
    async def run() -> None:
        events = await _finish(Reads(0.02), Turns().take)
        copies = [index for index, event in enumerate(events) if event == "copied"]
        assert all(later - earlier > 1 for earlier, later in pairwise(copies))
        assert "served" not in (plain := await _finish(Reads(0.02), _plain))[: plain.index("copied") + 4]

    asyncio.run(run())


def test_small_messages_wait_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONG_SECONDS", 60.0)  # a slow machine makes no message large
    monkeypatch.setattr(turns, "REST_SECONDS", 3600.0)

    async def run() -> None:
        assert (await asyncio.wait_for(_finish(Reads(0.0), Turns().take), 30)).count("copied") == 4

    asyncio.run(run())


@pytest.mark.parametrize("when", ["it waits", "it has no turn"])
def test_who_is_cancelled_takes_no_turn(when: str) -> None:
    async def run() -> None:
        each = Turns()
        first, second = Reads(0.02), Reads(0.0)
        begun = [asyncio.ensure_future(each.take(reads.read)) for reads in (first, second)]
        await asyncio.sleep(0)
        if when == "it has no turn":
            first.complete.set_result(None)
            second.complete.set_result(None)
            await begun[0]
            await asyncio.sleep(0)
        begun[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun[1]
        assert second.events == []
        third = Reads(0.0)
        third.complete.set_result(None)
        assert await asyncio.wait_for(each.take(third.read), 30) == "message"

    asyncio.run(run())


def test_errors_and_answers_in_their_place_come_through() -> None:
    async def fails() -> str:
        await asyncio.sleep(0)
        raise OSError("gone")

    async def run() -> None:
        each = Turns()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ended.set_exception(ConnectionError("cancelled by the client"))

        async def answers() -> str:
            try:
                await ended
            except ConnectionError:
                return "EOF"
            raise AssertionError

        async def recovers() -> str:
            try:
                await ended
            except ConnectionError:
                await asyncio.sleep(0)
                return "EOF"
            raise AssertionError

        async def at_once() -> str:
            return "now"

        with pytest.raises(OSError, match="gone"):
            await each.take(fails)
        assert [await each.take(read) for read in (answers, recovers, at_once)] == ["EOF", "EOF", "now"]

    asyncio.run(asyncio.wait_for(run(), 30))
