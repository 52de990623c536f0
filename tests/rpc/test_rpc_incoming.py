"""What comes in is bounded before it is read, however many clients send, and whatever they send it to."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import grpc
import pytest
from echo_server import EchoEngine, config, threaded
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mmserve.client import Admitted, Client
from mmserve.errors import InvalidArgument, ResourceExhausted, Unavailable
from mmserve.rpc import status
from mmserve.rpc.incoming import Door
from mmserve.rpc.status import from_rpc_error
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import media_pb2, media_pb2_grpc

MiB = 1 << 20
#: Four messages at once: three large ones and one of health and models.
NARROW = {"max_message_bytes": 4 * MiB, "receive_bytes": 16 * MiB}
GENERATE = "/mmserve.v1.GenerationService/Generate"


@contextmanager
def idle_uploads(address: str, count: int) -> Iterator[list[Any]]:
    """Uploads that were begun and bring nothing: each has the place of a message that may come."""
    leave = threading.Event()

    def messages() -> Iterator[media_pb2.UploadMediaRequest]:
        yield media_pb2.UploadMediaRequest(chunk=b"1")
        leave.wait(60)

    with grpc.insecure_channel(address) as channel:
        stub = media_pb2_grpc.MediaServiceStub(channel)
        try:
            yield [stub.UploadMedia.future(messages(), timeout=60) for _ in range(count)]
        finally:
            leave.set()


class Line:
    """A connection to a server through which so many bytes go, until it is opened: then all."""

    def __init__(self, address: str, most: int) -> None:
        self.sent, self.most = 0, most
        self.opened = threading.Event()
        self._server = address.rsplit(":", 1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._listener:
            client, _ = self._listener.accept()
        server = socket.create_connection((self._server[0], int(self._server[1])))
        threading.Thread(target=self._copy, args=(server, client, lambda size: size), daemon=True).start()
        self._copy(client, server, self._room)

    def _room(self, size: int) -> int:
        if not self.opened.is_set() and self.most == self.sent:
            self.opened.wait(60)
        passed = size if self.opened.is_set() else min(size, self.most - self.sent)
        self.sent += passed
        return passed

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, room: Callable[[int], int]) -> None:
        with suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                while data:
                    passed = room(len(data))
                    target.sendall(data[:passed])
                    data = data[passed:]


def test_of_messages_that_nobody_has_asked_for_little_is_taken(
    engine: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 clients send 3 MiB each, and all of them stop before the end."""
    monkeypatch.setattr("mmserve.rpc.incoming._TURN", 60.0)
    with threaded(engine, config(NARROW)) as address, Client(address) as other, ThreadPoolExecutor(12) as pool:
        lines = [Line(address, 2 * MiB) for _ in range(12)]

        def ask(line: Line) -> str:
            with Client(line.address, timeout=60) as client:
                return client.generate("x", images=[b"\1" * (3 * MiB)]).text

        asked = [pool.submit(ask, line) for line in lines]
        limit = time.monotonic() + 30
        while min(line.sent for line in lines) < 60_000 or max(line.sent for line in lines) < 2 * MiB:
            assert time.monotonic() < limit
            time.sleep(0.01)
        for _ in range(5):
            other.wait_ready(5)  # nobody else is kept out
            assert other.models(timeout=5)
        whole = sum(line.sent > 100_000 for line in lines)
        assert whole <= 3, [line.sent for line in lines]
        for line in lines:
            line.opened.set()
        assert [one.result() for one in asked] == ["x"] * 12


class Watched:
    """A message of which can be told whether anybody still has it."""

    seen: ClassVar[list[weakref.ref[Watched]]] = []

    def __init__(self, message: Any) -> None:
        self.message = message
        self.seen.append(weakref.ref(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)


@pytest.mark.parametrize("refused", [False, True])
def test_a_request_under_way_keeps_no_message(
    engine: EchoEngine, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Its media are the request's own by then: a message that stayed would hold them twice."""
    monkeypatch.setattr("mmserve.rpc.incoming._reader", lambda parse, _: lambda data: Watched(parse(data)))
    monkeypatch.setattr(Watched, "seen", [])
    left: list[bool] = []
    abort = status.abort

    async def looked(context: Any, error: Any) -> None:
        await asyncio.sleep(0.01)
        left.extend(ref() is not None for ref in Watched.seen)
        await abort(context, error)

    monkeypatch.setattr(status, "abort", looked)
    engine.pause = 30.0
    with threaded(engine, config(live_bytes=100, max_item_bytes=150)) as address, Client(address, timeout=30) as client:
        if refused:
            with pytest.raises(ResourceExhausted):
                client.generate("x", images=[bytes(101)])
            with pytest.raises(InvalidArgument):
                client.upload(bytes(151))
            assert len(Watched.seen) == 2 and left == [False] * 3
        else:
            stream = client.stream("x", images=[bytes(100)])
            assert isinstance(next(stream), Admitted)
            assert [ref() for ref in Watched.seen] == [None]
            stream.close()


def test_who_is_slow_gives_way_to_who_waits(engine: EchoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.rpc.incoming._TURN", 0.2)
    with threaded(engine, config(NARROW)) as address, Client(address, timeout=30) as client:
        with idle_uploads(address, 2) as uploads:
            assert client.generate("x").text == "x"  # a third place
            assert not any(upload.done() for upload in uploads)
        with idle_uploads(address, 3) as uploads:
            limit = time.monotonic() + 30
            while not (ended := [upload for upload in uploads if upload.done()]):
                assert client.generate("x").text == "x" and time.monotonic() < limit
            error = from_rpc_error(ended[0].exception())
            assert isinstance(error, ResourceExhausted) and "in chunks" in error.message and error.retry_after == 1.0
        assert client.generate("x").text == "x" and client.upload(b"data")


def test_calls_of_a_method_are_bounded_by_themselves(engine: EchoEngine) -> None:
    engine.pause = 30.0
    with (
        threaded(engine, config({"max_calls": 2})) as address,
        Client(address, timeout=10) as client,
        grpc.insecure_channel(address) as channel,
    ):
        held = [client.stream("x") for _ in range(2)]
        for stream in held:
            assert isinstance(next(stream), Admitted)
        with pytest.raises(ResourceExhausted, match=rf"2 calls of {GENERATE} .* server\.max_calls") as caught:
            client.generate("x", timeout=0.5)
        assert caught.value.retry_after == 1.0
        health = health_pb2_grpc.HealthStub(channel)
        watching = [health.Watch(health_pb2.HealthCheckRequest(), timeout=10) for _ in range(2)]
        for watch in watching:
            next(watch)
        with pytest.raises(grpc.RpcError) as refused:
            next(health.Watch(health_pb2.HealthCheckRequest(), timeout=10))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        client.wait_ready(5)
        assert client.models() and client.upload(b"data")
        for stream in held:
            stream.close()
        engine.pause = 0.0
        assert client.generate("x").text == "x"  # tried again until those have left
    assert not engine.running


def test_a_call_without_a_message_is_a_wrong_request(address: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(GENERATE)(iter([]), timeout=10))
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgument) and error.violations[0].field == "request"


def test_clients_that_leave_while_they_send_leave_nothing(engine: EchoEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Some wait for a place, some have one, some have sent everything."""
    never = threading.Event()
    with threaded(engine, config(NARROW)) as address, Client(address, timeout=30) as client:
        message = pb.GenerateRequest(
            messages=[{"role": "ROLE_USER", "parts": [{"image": {"data": b"\1" * MiB}}, {"text": "x"}]}]
        ).SerializeToString()
        with idle_uploads(address, 2), grpc.insecure_channel(address) as channel:
            calls = [channel.unary_stream(GENERATE)(message, timeout=10) for _ in range(60)]
            nothing = iter(lambda: never.wait(60), True)
            silent = [channel.stream_stream(GENERATE)(nothing, timeout=10) for _ in range(4)]
            for index, call in enumerate([*calls, *silent]):
                if index % 3:
                    call.cancel()
            for call in calls[::3]:
                with suppress(grpc.RpcError):
                    list(call)
            never.set()
        assert [client.generate("x", images=[b"1" * 3 * MiB]).text for _ in range(4)] == ["x"] * 4
        limit = time.monotonic() + 30
        while engine.running:
            assert time.monotonic() < limit
            time.sleep(0.01)
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]


class Sender:
    """A call whose message comes when it is told to."""

    def __init__(self) -> None:
        self.came = asyncio.get_running_loop().create_future()
        self.asked = False

    async def read(self) -> Any:
        self.asked = True
        return await self.came


def test_a_door_lets_in_so_many_in_the_order_in_which_they_came() -> None:
    async def main() -> None:
        door, senders = Door(2, 60.0), [Sender() for _ in range(5)]
        reads = [asyncio.create_task(door.read(sender)) for sender in senders]
        await asyncio.sleep(0.01)
        assert [s.asked for s in senders] == [True, True, False, False, False]
        reads[2].cancel()  # gives up while it waits
        reads[0].cancel()  # gives up while its message is on its way: its place is free when that has ended
        await asyncio.sleep(0.01)
        assert [s.asked for s in senders] == [True, True, False, False, False]
        senders[0].came.set_exception(Unavailable("the call has ended"))
        await asyncio.sleep(0.01)
        assert [s.asked for s in senders] == [True, True, False, True, False]
        senders[1].came.set_result("second")
        assert await reads[1] == "second"
        await asyncio.sleep(0.01)
        assert senders[4].asked
        for sender in senders[3:]:
            sender.came.set_result("late")
        assert await asyncio.gather(*reads[3:]) == ["late", "late"]

    asyncio.run(main())


def test_a_pile_of_calls_that_send_nothing_keeps_no_health_check_out(address: str) -> None:
    never = threading.Event()
    with grpc.insecure_channel(address) as channel, Client(address) as client:
        methods = ["/grpc.health.v1.Health/Check", "/mmserve.v1.ModelService/ListModels"]
        for method in methods * 20:
            channel.stream_stream(method)(iter(lambda: never.wait(60), True), timeout=60)
        for _ in range(2):
            client.wait_ready(10)
            assert client.models(timeout=10)
        never.set()


def test_a_place_that_comes_with_the_end_of_who_waits_goes_on_to_the_next() -> None:
    async def main() -> None:
        door = Door(1, 60.0, newest_first=True)
        first, *senders = [Sender() for _ in range(4)]
        reads = [asyncio.create_task(door.read(sender)) for sender in (first, *senders)]
        await asyncio.sleep(0.01)
        first.came.set_result("first")
        await reads[0]
        reads[3].cancel()  # the newest: its place is on its way to it
        await asyncio.sleep(0.01)
        assert [s.asked for s in senders] == [False, True, False]
        for sender in senders:
            sender.came.set_result("")
        assert await asyncio.gather(*reads[1:3]) == ["", ""]
        assert await door.read(first) == "first"

    asyncio.run(main())
