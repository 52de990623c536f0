"""A client asks a full server again until its deadline, at the server's pace, and says how often it has."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest
from echo_server import EchoEngine, config, served, threaded
from harness import eventually

from mmserve.client import AsyncClient, Client
from mmserve.client.base import _channel_options
from mmserve.client.retries import Retries
from mmserve.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    MMServeError,
    ResourceExhausted,
    TLSError,
    Unavailable,
)
from mmserve.v1 import model_pb2_grpc

FULL = ResourceExhausted("full", retry_after=0.01)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No back-off worth the name beside what the server asks for."""
    monkeypatch.setattr("mmserve.client.retries._FIRST_DELAY", 0.001)
    monkeypatch.setattr("mmserve.client.retries._LAST_DELAY", 0.01)


@pytest.mark.usefixtures("hasty")
def test_a_full_server_is_asked_until_it_is_not(address: str, engine: EchoEngine) -> None:
    engine.refusals = [FULL] * 12
    with Client(address) as client:
        assert client.generate("x").text == "x"
        assert len(engine.requests) == 13
        engine.refusals = [FULL] * 12
        assert client.stream("x").__next__() is not None

    async def asked() -> None:
        async with AsyncClient(address) as other:
            engine.refusals = [FULL] * 12
            assert (await other.generate("x")).text == "x"

    asyncio.run(asked())
    assert len(engine.requests) == 3 * 13


@pytest.mark.usefixtures("hasty")
def test_the_last_refusal_says_how_often_and_how_long(address: str, engine: EchoEngine) -> None:
    last = ResourceExhausted("the queue is full", retry_after=3600.0)  # longer than there is time
    engine.refusals = [*[FULL] * 6, last]
    with Client(address) as client, pytest.raises(ResourceExhausted) as caught:
        client.generate("x")
    assert re.fullmatch(r"the queue is full \(tried 7 times in \d+\.\d s\)", caught.value.message)
    assert caught.value.retry_after == 3600.0

    async def asked() -> None:
        async with AsyncClient(address) as other:
            engine.refusals = [*[FULL] * 6, last]
            with pytest.raises(ResourceExhausted, match="tried 7 times in"):
                await other.generate("x")

    asyncio.run(asked())
    assert len(engine.requests) == 2 * 7


@pytest.mark.usefixtures("hasty")
def test_a_server_that_stays_full_is_asked_until_the_deadline(address: str, engine: EchoEngine) -> None:
    engine.refusals = [FULL] * 99_999
    with Client(address) as client:
        for timeout in (0.5, 5.0, 50.0):  # on a machine that stops for longer than the first, few attempts are made
            engine.requests.clear()
            with pytest.raises((ResourceExhausted, DeadlineExceeded)) as caught:
                client.generate("x", timeout=timeout)
            if len(engine.requests) > 4:
                break
    told = re.search(r"\(tried (\d+) times in \d+\.\d s\)$", caught.value.message)
    assert told and int(told[1]) >= len(engine.requests) > 4


def close_when(client: Client, asked: Callable[[], Any]) -> None:
    eventually(asked, "it asks")
    client.close()


def test_a_client_that_is_closed_waits_for_no_other_attempt(engine: EchoEngine) -> None:
    engine.refusals = [ResourceExhausted("full", retry_after=30.0)] * 9
    with threaded(engine) as address:
        client = Client(address)
        threading.Thread(target=lambda: close_when(client, lambda: engine.requests)).start()
        with pytest.raises(Cancelled, match="closed"):
            client.generate("x")

    async def main() -> None:
        full = EchoEngine(refusals=engine.refusals)
        async with served(full) as server:
            other = AsyncClient(f"127.0.0.1:{server.port}")
            asking = asyncio.create_task(other.generate("x"))
            await asyncio.to_thread(eventually, lambda: full.requests, "it asks")
            await other.close()
            with pytest.raises(Cancelled, match="closed"):
                await asking

    asyncio.run(main())


def attempts(retries: Retries, error: MMServeError, most: int = 99) -> list[float]:
    """The pauses behind at most so many attempts that fail with ``error``, until it is raised."""
    pauses: list[float] = []
    with suppress(type(error)):
        while len(pauses) < most:
            pauses.append(retries.delay(error))
    return pauses


def test_pauses_are_the_servers_and_a_bounded_random_part() -> None:
    full = ResourceExhausted("full", retry_after=2.0)
    pauses = [attempts(Retries(3600.0), full, 12) for _ in range(2)]
    assert all(2.05 <= first[0] <= 2.1 and max(first) <= 7.0 for first in pauses)
    assert all(pause > 2.0 for first in pauses for pause in first)
    assert pauses[0] != pauses[1]


def test_what_is_tried_again() -> None:
    nobody = attempts(Retries(60.0), Unavailable("nobody there"))
    assert len(nobody) == 99 and max(nobody) <= 0.5, "a server that is up again is noticed soon"
    assert attempts(Retries(60.0, reconnect_seconds=0.0), Unavailable("nobody there")) == []
    assert len(attempts(Retries(60.0, reconnect_seconds=0.0), FULL, 5)) == 5
    for error in (
        ResourceExhausted("for good"),
        DeadlineExceeded("late"),
        InvalidArgument.of("x", "is wrong"),
        TLSError("no TLS there"),
    ):
        assert attempts(Retries(60.0), error) == []
    with pytest.raises(ResourceExhausted):
        Retries(60.0).delay(FULL, started=True)
    with pytest.raises(ResourceExhausted):
        Retries(1.0).delay(ResourceExhausted("full", retry_after=1.0))


class Losing(model_pb2_grpc.ModelServiceServicer):
    """Takes calls, and loses its connection before it answers."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _lose(self, message: Any, context: grpc.ServicerContext) -> None:
        self.calls.append(type(message).__name__)
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    DescribeModel = LoadModel = UnloadModel = DropAdapter = LoadAdapter = _lose  # type: ignore[assignment]


@pytest.mark.usefixtures("hasty")
def test_calls_that_change_the_server_are_not_repeated_where_it_may_have_got_them() -> None:
    """A model that was unloaded is not there any more: the second call would fail."""
    server, losing = grpc.server(ThreadPoolExecutor(2)), Losing()
    model_pb2_grpc.add_ModelServiceServicer_to_server(losing, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    address = f"127.0.0.1:{port}"

    async def asked(call: Callable[[Any], Any]) -> None:
        async with AsyncClient(address, reconnect_seconds=0.2) as client:
            await call(client)

    once: list[Callable[[Any], Any]] = [
        lambda client: client.load_model("x"),
        lambda client: client.unload_model("x"),
        lambda client: client.drop_adapter("x"),
    ]
    try:
        with Client(address, reconnect_seconds=0.2) as client:
            for call in once:
                with pytest.raises(Unavailable):
                    call(client)
                with pytest.raises(Unavailable):
                    asyncio.run(asked(call))
            for again in (client.describe, lambda: client.load_adapter("x")):
                with pytest.raises(Unavailable, match="tried"):
                    again()
        assert [losing.calls.count(f"{kind}Request") for kind in ("LoadModel", "UnloadModel", "DropAdapter")] == [2] * 3
    finally:
        server.stop(None)
    with Client(address, reconnect_seconds=0.2) as client, pytest.raises(Unavailable, match="tried"):
        client.unload_model("x")  # no server has got it


def test_without_retries_every_error_is_the_first_one(address: str, engine: EchoEngine) -> None:
    for error in (FULL, Unavailable("nobody there")):
        assert attempts(Retries(60.0, again=False), error) == []
    engine.refusals = [FULL] * 9
    with Client(address, retries=False) as client, pytest.raises(ResourceExhausted, match=r"^full$") as caught:
        client.generate("x")
    assert caught.value.retry_after == 0.01 and len(engine.requests) == 1

    async def asked() -> None:
        async with AsyncClient(address, retries=False) as other:
            with pytest.raises(ResourceExhausted, match=r"^full$"):
                await other.generate("x")
        async with AsyncClient(f"127.0.0.1:{free_port()}", retries=False) as other:
            with pytest.raises(Unavailable) as caught:
                await other.describe()
            assert "tried" not in caught.value.message

    asyncio.run(asked())
    assert len(engine.requests) == 2


def test_other_errors_stay_what_they_are() -> None:
    wrong, retries = InvalidArgument.of("x", "is wrong"), Retries(60.0)
    retries.delay(FULL)
    with pytest.raises(InvalidArgument) as caught:
        retries.delay(wrong)
    assert caught.value is wrong
    late = Retries(60.0)
    late.delay(FULL)
    with pytest.raises(DeadlineExceeded, match=r"late \(tried 2 times in \d\.\d s\)"):
        late.delay(DeadlineExceeded("late"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def begun_later(port: int, seconds: float) -> Iterator[None]:
    """A server that listens on ``port`` after ``seconds``."""
    ended = threading.Event()

    def serve() -> None:
        time.sleep(seconds)
        with threaded(EchoEngine(), config({"port": port})):
            ended.wait()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_calls_wait_for_a_server_that_restarts() -> None:
    """For longer than four attempts take, and they are answered soon after it is up again, not seconds later: nothing
    that they wait for lasts longer than half a second."""
    waits = dict(_channel_options(None))
    assert waits["grpc.initial_reconnect_backoff_ms"] <= waits["grpc.max_reconnect_backoff_ms"] <= 500
    assert max(attempts(Retries(60.0), Unavailable("nobody there"))) <= 0.5
    port = free_port()
    with Client(f"127.0.0.1:{port}") as client:
        with threaded(EchoEngine(), config({"port": port})):
            assert client.generate("before").text == "before"
        with begun_later(port, 2.5), ThreadPoolExecutor() as pool:
            calls = [
                pool.submit(lambda: client.generate("x").text),
                pool.submit(lambda: list(client.stream("x"))[-1]),
                pool.submit(client.models),
                pool.submit(lambda: asyncio.run(asked_with_asyncio(port))),
            ]
            assert all(call.result(60) for call in calls)


async def asked_with_asyncio(port: int) -> str:
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        return (await client.generate("x")).text


def test_a_request_the_server_refuses_as_it_ends_is_tried_again(address: str, engine: EchoEngine) -> None:
    engine.refusals = [Unavailable("draining")] * 6
    with Client(address) as client:
        assert client.generate("x").text == "x"
    assert len(engine.requests) == 7


def test_a_call_gives_up_after_reconnect_seconds() -> None:
    with Client(f"127.0.0.1:{free_port()}", reconnect_seconds=0.3) as client:
        for call in (client.models, lambda: client.generate("x")):
            with pytest.raises(Unavailable, match=r"tried [2-9] times in \d+\.\d s"):
                call()


def test_a_server_that_stays_away_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Calls are tried again for a minute by default: the user must see why nothing happens."""
    retries, error = Retries(60), Unavailable("cannot reach localhost:1")
    retries.delay(error)
    assert not caplog.records
    retries._lost = time.monotonic() - 3
    retries.delay(error)
    retries.delay(error)
    (line,) = caplog.records
    assert (line.name, line.levelname) == ("mmserve.client", "WARNING")
    assert re.fullmatch(r"cannot reach localhost:1; trying again for up to \d+ s", line.getMessage())


def test_a_server_that_is_not_there_is_named_with_what_to_check() -> None:
    port = free_port()
    with (
        Client(f"127.0.0.1:{port}", reconnect_seconds=0) as client,
        pytest.raises(Unavailable, match=rf"no connection to 127.0.0.1:{port}: is a server running there"),
    ):
        client.models()
