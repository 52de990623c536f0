"""Threads of sessions: what waits for another process has its own, so that no session waits for another's."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from mmserve.config import Config, VideoConfig
from mmserve.video.host import Host, Parts, Threads
from mmserve.video.support import SessionSupport

SESSIONS = 12


def test_judgements_elsewhere_may_all_wait_but_one() -> None:
    config = Config(video=VideoConfig(max_sessions=SESSIONS))
    threads, run_in_background, begun = Threads(config.video), threading.Event(), threading.Semaphore(0)
    unused: Any = None
    parts = Parts(SessionSupport(), unused, unused, unused, unused, here=False)
    judge = Host(parts, config, threads).session_context(unused, unused, unused).judge

    def waits() -> None:
        begun.release()
        assert run_in_background.wait(60.0)

    async def sessions() -> str:
        stuck = [asyncio.ensure_future(judge(waits)) for _ in range(SESSIONS - 1)]
        for _ in stuck:
            assert await asyncio.to_thread(begun.acquire, timeout=60.0)
        try:
            return str(await asyncio.wait_for(judge(lambda: "judged"), 60.0))
        finally:
            run_in_background.set()
            await asyncio.gather(*stuck)

    assert asyncio.run(sessions()) == "judged"
    threads.stop()
