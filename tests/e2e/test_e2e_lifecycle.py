"""A server's end: running requests finish, new ones are sent away, and nothing of the server stays."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e_helpers import (
    PATIENCE,
    answer,
    draw_asks,
    failure,
    gated,
    running,
    serving,
    settings,
    short_asks,
    wait_for,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mmserve.client import Client, Event, Finished
from mmserve.core.request import Stage
from mmserve.errors import MMServeError, Unavailable

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

#: A thousand forward passes, and so hot that hardly any answer ends early, whatever the model has learned.
ENDLESS = {
    "max_new_tokens": 880,
    "block_length": 880,
    "steps": 880,
    "commit": "low_confidence",
    "recompute": "none",
    "temperature": 50.0,
}


def health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE).status


def test_a_drain_finishes_what_runs_and_refuses_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = short_asks(6)
    with ExitStack() as stack:
        server = stack.enter_context(running(settings(server={"drain_seconds": PATIENCE})))
        alone = [answer(a.of(server.client)) for a in asks]
        with gated(server.engine, monkeypatch) as gates:
            gates.decode.close()
            asked = [server.start(a.of, server.client) for a in asks]
            wait_for("all to be live", lambda: server.engine.stats().live == len(asks))
            drained = server.drain()
            wait_for("health to change", lambda: health(server.address) == NOT_SERVING)
            once = stack.enter_context(Client(server.address, retries=False))
            with pytest.raises(Unavailable, match="shutting down"):
                once.generate("too late")
            assert server.client.models(), "a draining server still answers what costs nothing"
            assert not drained.done() and not any(f.done() for f in asked)
            gates.decode.open()
            drained.result(PATIENCE)
        assert [answer(f.result(PATIENCE)) for f in asked] == alone
        with pytest.raises(Unavailable):
            once.generate("nobody there")


def test_a_drain_that_takes_too_long_ends_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(settings(server={"drain_seconds": 0.2})) as server, gated(server.engine, monkeypatch) as gates:
        gates.prefill.close()
        asked = [server.ask(f"left {i}") for i in range(3)]
        wait_for("all to be live", lambda: server.engine.stats().live == 3)
        # whichever arrived first: the three are sent at once
        wait_for("one to be in prefill", lambda: Stage.PREFILLING in server.stages().values())
        drained = server.drain()
        assert {type(failure(f)) for f in asked} == {Unavailable}
        gates.prefill.open()
        drained.result(PATIENCE)


def test_two_servers_in_one_process_are_strangers() -> None:
    ask = short_asks(1)[0]
    with running() as first, running() as second:
        assert first.address != second.address
        media_id = first.client.upload(ask.images[0])
        with pytest.raises(MMServeError, match="no media"):
            second.client.generate("x", images=[media_id])
        assert answer(ask.of(first.client)) == answer(ask.of(second.client))


def test_a_server_leaves_no_thread_behind() -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("mmserve")}

    before = threads()
    with running() as server:
        server.client.generate("x", max_new_tokens=2)
        assert {t.name for t in threads() - before} >= {"mmserve-engine", "mmserve-grpc", "mmserve-decode"}
    wait_for(f"its threads to end: {threads() - before}", lambda: threads() <= before)


def streams(pool: ThreadPoolExecutor, address: str, count: int, **options: Any) -> list[Future[list[Event]]]:
    """So many streaming requests, each with a client of its own; all of them are admitted on return."""
    admitted = threading.Barrier(count + 1)

    def one(index: int) -> list[Event]:
        ask = draw_asks(count)[index]
        with Client(address, timeout=10 * PATIENCE) as client:
            events = client.stream(ask.prompt, images=ask.images, snapshots=True, **{**ask.options, **options})
            seen = [next(events)]
            admitted.wait(PATIENCE)
            seen += events
        return seen

    futures = [pool.submit(one, index) for index in range(count)]
    admitted.wait(PATIENCE)
    return futures


def test_a_signal_under_load_lets_requests_finish(tmp_path: Path) -> None:
    drain = ("--set", f"server.drain_seconds={PATIENCE}")
    with ThreadPoolExecutor(8) as pool, serving(tmp_path, *drain) as server:
        futures = streams(pool, server.address, 8, max_new_tokens=24)
        server.process.send_signal(signal.SIGTERM)
        for future in futures:
            assert isinstance(future.result(PATIENCE)[-1], Finished)
        assert server.ends() == 0
        assert "SIGTERM: draining" in server.stderr()


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    """The requests would take a thousand forward passes, and the drain an hour."""
    drain = ("--set", "server.drain_seconds=3600")
    with ThreadPoolExecutor(4) as pool, serving(tmp_path, *drain) as server:
        futures = streams(pool, server.address, 4, **ENDLESS)
        server.process.send_signal(signal.SIGINT)
        wait_for("the drain to begin", lambda: health(server.address) == NOT_SERVING)
        server.process.send_signal(signal.SIGTERM)
        assert {type(failure(f)) for f in futures} == {Unavailable}
        assert server.ends() == 0
        assert "SIGINT: draining" in server.stderr()


def test_a_drain_by_signal_is_cut_short_after_its_seconds(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool, serving(tmp_path, "--set", "server.drain_seconds=0.1") as server:
        futures = streams(pool, server.address, 2, **ENDLESS)
        server.process.send_signal(signal.SIGTERM)
        assert {type(failure(f)) for f in futures} == {Unavailable}
        assert server.ends() == 0
        assert "still running after 0.1 seconds" in server.stderr()
