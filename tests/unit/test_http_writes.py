from __future__ import annotations

import asyncio

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
