"""Sessions of the client for asyncio: what is cancelled leaves nothing at the server, and pushes share the credit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clips import clip
from cutting import Cutting
from video_client import PATIENCE, held, picture, registries, video_server, wait_for

from mmserve.client import AsyncClient, asynchronous_video, retries, video_view
from mmserve.client.outgoing import file_bytes
from mmserve.errors import Cancelled, DeadlineExceeded
from mmserve.video.streams import EngineStreams


async def _cancelled_question(address: str, live: Callable[[], int]) -> None:
    async with AsyncClient(address, timeout=PATIENCE) as client, client.video_session() as session:
        await session.push(picture(0), 0.0)
        asking = asyncio.create_task(session.ask("what is it?", max_new_tokens=64))
        await asyncio.to_thread(wait_for, "the question", lambda: live() == 1)
        asking.cancel()
        begun = time.monotonic()
        with suppress(asyncio.CancelledError):
            await asking
        await asyncio.to_thread(wait_for, "its end", lambda: live() == 0)
        assert time.monotonic() - begun < 10  # its 64 tokens take 32 s


def test_a_question_whose_task_is_cancelled_ends_at_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with video_server() as (address, engine):
        propose = engine.stages.decoder.propose

        def slow(batch: list[Any]) -> list[None]:
            time.sleep(0.5)
            return propose(batch)

        monkeypatch.setattr(engine.stages.decoder, "propose", slow)
        asyncio.run(_cancelled_question(address, lambda: engine.stats().live))


async def _cancelled_opening(address: str, sessions: Callable[[], int]) -> None:
    async with AsyncClient(address, timeout=PATIENCE) as client:
        opening = asyncio.create_task(client.video_session().open())
        await asyncio.sleep(0)
        opening.cancel()
        with suppress(asyncio.CancelledError):
            await opening
        await asyncio.sleep(0.5)  # time enough to open a session
        assert not sessions()


def test_a_session_whose_opening_is_cancelled_is_not_opened() -> None:
    with registries() as found, video_server() as (address, _engine):
        asyncio.run(_cancelled_opening(address, lambda: len(found[0]._sessions)))


async def _unopened(address: str, began: threading.Event) -> None:
    async with AsyncClient(address, timeout=PATIENCE) as client:
        with pytest.raises(DeadlineExceeded, match="the session was not opened in time"):
            await client.video_session(timeout=1).open()
    assert began.is_set()


def test_a_session_that_the_server_does_not_open_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with video_server() as (address, _engine), held(monkeypatch, EngineStreams, "open") as began:
        asyncio.run(_unopened(address, began))


async def _closed_while_opening() -> None:
    client = AsyncClient("localhost:1", timeout=PATIENCE)
    opening = asyncio.create_task(client.video_session().open())
    await asyncio.sleep(0.6)  # it waits for its next attempt
    await client.close()
    with pytest.raises(Cancelled, match="the client was closed"):
        await opening


def test_a_session_whose_client_is_closed_while_it_is_opened_is_cancelled() -> None:
    asyncio.run(_closed_while_opening())


async def _in_order(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first picture is encoded after the second; a large push waits for credit, and a small one after it too."""
    second = threading.Event()

    def late(image: Any, where: str) -> bytes:
        if image == first:
            assert second.wait(PATIENCE)
        elif image == picture(1):
            second.set()
        return file_bytes(image, where)

    first, large = picture(0), picture(2, (120, 120))
    async with AsyncClient(address, timeout=PATIENCE) as client, client.video_session() as session:
        with monkeypatch.context() as patch:
            patch.setattr(asynchronous_video, "file_bytes", late)
            await asyncio.gather(*(session.push(each) for each in (first, picture(1), large, picture(3), large, first)))
        assert (await session.statistics()).frames_taken == 6
        assert session.push_failures == ()
        failing = session.push(Path("/none"))
        with pytest.raises(FileNotFoundError):
            await failing
        await session.push(first, wait=False)
        assert (await session.statistics()).frames_taken == 7


async def _idle(address: str, later: list[float]) -> None:
    with Cutting(address) as proxy:
        async with AsyncClient(proxy.address, timeout=PATIENCE) as client, client.video_session() as session:
            await session.push(picture(0), 0.0)
            await session.statistics()
            later[0] = 3600.0
            proxy.cut()
            await asyncio.to_thread(wait_for, "its resume, or end", lambda: session.resumes or session._state.error)
            await session.push(picture(1), 1.0)
            assert (await session.statistics()).frames_taken == 2


async def _pushed_at_once(address: str) -> None:
    async with AsyncClient(address, timeout=PATIENCE) as client, client.video_session() as session:
        await asyncio.gather(*(session.push_segment(clip(frames=10, rate=10)) for _ in range(8)))
        assert (await session.statistics()).frames_taken == 8
        assert session.push_failures == ()


def test_pushes_of_several_tasks_are_sent_in_the_order_of_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with video_server({"credit_pushes": 2, "credit_bytes": 45_000}) as (address, _engine):
        asyncio.run(_in_order(address, monkeypatch))


def test_pushes_of_several_tasks_share_the_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a connection that is lost long after the last of them is resumed."""
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0])
    with video_server({"credit_pushes": 2}) as (address, _engine):
        asyncio.run(_pushed_at_once(address))
        for module in (retries, video_view):
            monkeypatch.setattr(module, "time", clock)
        asyncio.run(_idle(address, later))
