from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack
from typing import Any

from mmserve.core.events import Event
from mmserve.http.chat import Chat
from mmserve.http.event_stream import EventStream
from mmserve.http.writes import JoinedWrites


class _Recorded:
    """The system calls of a transport."""

    def __init__(self) -> None:
        self.made: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.made.append(data)

    def close(self) -> None:
        self.made.append("closed")

    def is_closing(self) -> bool:
        return "closed" in self.made


def test_writes_of_one_turn_are_one_call() -> None:
    async def main() -> None:
        inner = _Recorded()
        joined = JoinedWrites(inner, asyncio.get_running_loop())  # type: ignore[arg-type]
        joined.write(b"head ")
        joined.write(b"first event")
        assert inner.made == []
        await asyncio.sleep(0)
        assert inner.made == [b"head first event"]
        joined.write(b"later")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert inner.made == [b"head first event", b"later"]

    asyncio.run(main())


def test_closing_sends_what_was_written() -> None:
    async def main() -> None:
        inner = _Recorded()
        joined = JoinedWrites(inner, asyncio.get_running_loop())  # type: ignore[arg-type]
        joined.write(b"the end")
        joined.close()
        await asyncio.sleep(0)
        assert inner.made == [b"the end", "closed"]
        assert joined.is_closing()

    asyncio.run(main())


def test_long_responses_do_not_wait_for_the_turns_end() -> None:
    async def main() -> None:
        inner = _Recorded()
        joined = JoinedWrites(inner, asyncio.get_running_loop())  # type: ignore[arg-type]
        part = bytes(40 << 10)
        for _ in range(4):
            joined.write(part)
        assert inner.made == [part * 2, part * 2]

    asyncio.run(main())


class _LongLines:
    """A reply of two lines with log-probabilities of thousands of tokens."""

    async def lines(self, _events: AsyncIterator[Event]) -> AsyncIterator[str]:
        for _ in range(2):
            yield "x" * (1 << 17)


def test_others_run_between_two_long_lines_of_a_stream() -> None:
    async def main() -> None:
        made: list[str] = []

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                made.append("line")
                asyncio.get_running_loop().call_soon(made.append, "other")

        async def events() -> AsyncGenerator[Event]:
            return
            yield

        stream: Any = EventStream(Chat(), _LongLines(), [], events(), ExitStack())  # type: ignore[arg-type]
        await stream({"type": "http"}, None, send)
        assert made[:3] == ["line", "other", "line"]

    asyncio.run(main())
