"""What sessions of video keep, all of it, is within ``session_bytes`` and ``total_bytes``."""

from __future__ import annotations

import asyncio

import pytest
from echo_server import served
from streaming import reserved
from video_client import PATIENCE, Raw, held, image, sdk, video_engine, video_server, wait_for

from mmserve.config import Config
from mmserve.core.session import Memory
from mmserve.engine.engine import Engine
from mmserve.errors import InvalidArgument, ResourceExhausted, Unavailable
from mmserve.v1 import generation_pb2 as gen
from mmserve.v1 import video_pb2 as pb
from mmserve.video.reading import MAX_INIT_BYTES
from mmserve.video.state import state_bytes
from mmserve.video.streams import EngineStream, EngineStreams

BUDGET = 64


def _last_acknowledged(raw: Raw) -> int:
    return max((r.acknowledged.index for r in list(raw.responses) if r.HasField("acknowledged")), default=0)


def _watch_states(raw: Raw) -> int:
    return sum(r.HasField("watch_state") for r in list(raw.responses))


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
        held = reserved(server._hosts.find(engine).streams)
        for raw in every:
            await asyncio.to_thread(raw.close)
        assert not reserved(server._hosts.find(engine).streams)
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


def test_requests_that_wait_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose name was free again before they were looked at."""
    with video_server() as (address, _), held(monkeypatch, EngineStream, "stats") as began:
        raw = Raw.opened(address)
        raw.send(get_statistics=pb.GetStatistics())
        assert began.wait(PATIENCE)
        for _ in range(36):
            raw.send(watch=pb.Watch(watch_id="w", text="x" * 1_000_000, yes_no=pb.YesNo()))
            raw.send(unwatch=pb.Unwatch(watch_id="w"))
        raw.send(get_statistics=pb.GetStatistics())
        wait_for("the end, or the last request", lambda: raw.error or _last_acknowledged(raw) > 73)
        with pytest.raises(ResourceExhausted, match="bytes of requests wait"):
            raise raw.error or AssertionError("they were taken")


def test_requests_that_waited_do_not_count_any_more() -> None:
    with video_server() as (address, _):
        raw = Raw.opened(address)
        for number in range(1, 40):
            raw.send(watch=pb.Watch(watch_id="w", text="x" * 1_000_000, yes_no=pb.YesNo()))
            raw.send(unwatch=pb.Unwatch(watch_id="w"))
            wait_for("its state", lambda number=number: raw.error or _watch_states(raw) >= number)
        raw.close()


def test_a_request_that_ends_every_connection_is_not_sent_for_ever() -> None:
    """Such as one that is too large for the server, or for a proxy; pushes are refused by the client."""
    limit = 2 << 20
    over = pytest.raises(Unavailable, match=r"larger than max .* \(tried \d+ times")
    server = video_server({"credit_bytes": 2 * limit}, server={"max_message_bytes": limit})
    with server as (address, _), sdk(address) as client, over, client.video_session() as session:
        session.push(image(0).data, seconds=0.0)
        with pytest.raises(InvalidArgument, match="the server takes at most"):
            session.push_segment(bytes(limit), 1.0)
        session.statistics()
        session._timeout = 0.5
        session.ask("x" * (limit + 1))


def test_a_configuration_that_is_too_large_or_can_be_guessed_is_refused() -> None:
    """A session keeps it, and sends it back with each resume."""
    with video_server() as (address, _):
        raw = Raw.opened(address, sampling=gen.SamplingParams(stop=["x" * (2 << 20)]), open_id="short")
        wait_for("an answer", lambda: raw.error or raw.responses)
        wrong = "must be at most 1048576 bytes; open_id: must be 16 to 128 printable ASCII characters"
        with pytest.raises(InvalidArgument, match=wrong):
            raise raw.error or AssertionError("it was taken")
