"""What sessions of video keep, all of it, is within ``session_bytes`` and ``total_bytes``."""

from __future__ import annotations

import asyncio

import pytest
from echo_server import served
from video_client import Raw, image, video_engine, wait_for

from mmserve.config import Config
from mmserve.core.session import Memory
from mmserve.engine import Engine
from mmserve.errors import InvalidArgument, ResourceExhausted
from mmserve.v1 import video_pb2 as pb
from mmserve.video.reading import MAX_INIT_BYTES
from mmserve.video.state import state_bytes
from mmserve.video.streams import EngineStreams

BUDGET = 64


async def _opened(config: Config, engine: Engine, count: int) -> int:
    """Bytes that are set aside for so many sessions, one after the other."""
    async with served(engine, config) as server:  # type: ignore[arg-type]
        every = []
        for _ in range(count):
            raw = Raw.opened(f"127.0.0.1:{server.port}", memory=pb.StreamMemory(budget=BUDGET))
            every.append(raw)
            await asyncio.to_thread(wait_for, "an answer", lambda raw=raw: raw.responses or raw.error)
            if raw.error is not None:
                raise raw.error
            raw.send(push_image=image(0))
            await asyncio.to_thread(raw.wait_taken, 1)
        held = server._hosts.find(engine).streams.held_bytes()
        for raw in every:
            await asyncio.to_thread(raw.close)
        assert not server._hosts.find(engine).streams.held_bytes()
        return held


def test_an_initialisation_segment_counts_for_what_a_session_keeps() -> None:
    """It is kept as long as its session: room for the longest is set aside beside the stream's rows."""
    config, engine = video_engine()
    rows = state_bytes(EngineStreams(engine).model, Memory(budget=BUDGET))
    assert asyncio.run(_opened(config, engine, 2)) == 2 * (rows + MAX_INIT_BYTES)
    with pytest.raises(InvalidArgument, match=r"\[video\] session_bytes allows"):
        asyncio.run(_opened(*video_engine({"session_bytes": rows + MAX_INIT_BYTES - 1}), 1))
    with pytest.raises(ResourceExhausted, match=r"\[video\] total_bytes"):
        asyncio.run(_opened(*video_engine({"total_bytes": 2 * (rows + MAX_INIT_BYTES) - 1}), 2))
    assert asyncio.run(_opened(*video_engine({"session_bytes": rows + MAX_INIT_BYTES}), 1)) == rows + MAX_INIT_BYTES
