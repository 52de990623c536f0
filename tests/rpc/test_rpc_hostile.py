"""Messages that cost more to read than to send, and calls that send slowly or nothing: over a real socket."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import message_bombs as bombs
import pytest
from echo_server import EchoEngine, config, threaded
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mmserve.bench import hostile_messages as hostile
from mmserve.client import Client
from mmserve.config import ServerConfig
from mmserve.errors import DeadlineExceeded, InvalidArgument, MMServeError, ResourceExhausted
from mmserve.rpc import incoming
from mmserve.rpc.incoming import INLINE_BYTES, SMALL_BYTES, Incoming
from mmserve.rpc.memory_budget import MemoryBudget
from mmserve.rpc.wire import MAX_FIELDS, check_fields, shape_of
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.status import from_rpc_error

MiB = 1 << 20
SHAPE = shape_of(pb.GenerateRequest.DESCRIPTOR)
#: Those whose size is that of many small things.
OF_MANY = sorted(set(bombs.BOMBS) - {"long_text", "long_schema", "large_image"})


def wait_for(what: str, condition: Callable[[], Any]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, f"waited in vain: {what}"
        time.sleep(0.01)


class Looked(bytes):
    """Bytes that count how often one of them is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("bomb", OF_MANY)
def test_counting_fields_takes_no_longer_for_more_of_them(bomb: str) -> None:
    looks = []
    for size in (MiB // 2, 4 * MiB):
        data = Looked(bombs.BOMBS[bomb](size))
        with pytest.raises(InvalidArgument, match="at most"):
            check_fields(data, SHAPE)
        looks.append(data.looks)
    assert abs(looks[1] - looks[0]) < 16  # longer lengths
    assert looks[1] <= 3 * MAX_FIELDS


def test_what_can_be_parsed_passes_the_count() -> None:
    for make in (bombs.valid, lambda: bombs.long_text(MiB), lambda: bombs.large_image(MiB), bytes):
        data = make()
        check_fields(data, SHAPE)
        pb.GenerateRequest.FromString(data)
    largest = pb.GenerateRequest(
        messages=[{"role": "ROLE_USER", "parts": [{"text": "x"}]}] * 2047,
        constraint={"choice": {"options": map(str, range(8000))}},
        diffusion={"early_commit": {"early": 1.5, "answer_after": "x"}},
        sampling={"seed": 1 << 63, "stop": ["a", "b"], "temperature": 0.5},
    )
    check_fields(largest.SerializeToString(), SHAPE)


@pytest.mark.parametrize(
    "data",
    [
        b"\x12",
        b"\x12\x05ab",
        b"\x12\x02\x12\x05" + b"x" * 9,
        b"\x13",
        b"\x0c",
        b"\xff" * 11,
        b"\x10" + b"\xff" * 11,
        b"\x15ab",
        b"\x11abcd",
        bombs.nested(101),
    ],
)
def test_what_is_no_message_does_not_pass(data: bytes) -> None:
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(data)
    with pytest.raises(DecodeError):
        check_fields(data, SHAPE)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    settings = config(
        {
            "max_message_bytes": 4 * MiB,
            "message_seconds": 600.0,
            "connection_calls": 77,
            "connection_idle_seconds": 600.0,
        },
        live_bytes=8 * MiB,
    )
    with threaded(EchoEngine(), settings) as found:
        yield found


@pytest.fixture(scope="module")
def hasty() -> Iterator[str]:
    with threaded(EchoEngine(), config({"max_message_bytes": 4 * MiB, "message_seconds": 1.0})) as found:
        yield found


def refused(address: str, message: bytes, method: str = hostile.GENERATE) -> MMServeError:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(method)(message, timeout=60))
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("bomb", OF_MANY)
def test_messages_of_very_many_fields_are_refused(address: str, bomb: str) -> None:
    error = refused(address, bombs.BOMBS[bomb](MiB))
    assert isinstance(error, InvalidArgument) and f"at most {MAX_FIELDS} fields" in str(error)
    with Client(address, timeout=60) as client:
        assert client.generate("a b").text == "a b"


def test_large_messages_are_parsed_off_the_loop(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[bool, set[str]] = {False: set(), True: set()}
    reader = incoming._reader

    def watched(parse: Any, method: str) -> Any:
        read = reader(parse, method)

        def noted(data: bytes) -> Any:
            threads[len(data) > INLINE_BYTES].add(threading.current_thread().name.rpartition("_")[0])
            return read(data)

        return noted

    monkeypatch.setattr(incoming, "_reader", watched)
    with Client(address, timeout=60) as client:
        assert client.generate("x", images=[b"1" * (MiB + 1)]).text == "x"
        assert client.generate("y").text == "y"
    assert threads[True] == {"mmserve-parse"} and "mmserve-parse" not in threads[False]


@pytest.mark.parametrize("method", [bombs.HEALTH, "/mmserve.v1.ModelService/ListModels"])
def test_messages_that_carry_names_must_be_small(address: str, method: str) -> None:
    error = refused(address, hostile.field(1, b"x" * SMALL_BYTES), method)
    assert isinstance(error, InvalidArgument) and f"at most {SMALL_BYTES} bytes" in str(error)


def test_reflection_takes_small_messages_only(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")] * 2
        assert len(list(stub.ServerReflectionInfo(iter(asked), timeout=60))) == 2
        large = reflection_pb2.ServerReflectionRequest(file_containing_symbol="x" * SMALL_BYTES)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.ServerReflectionInfo(iter([large]), timeout=60))
    assert isinstance(from_rpc_error(caught.value), InvalidArgument)


def test_of_late_messages_there_are_only_so_many(address: str) -> None:
    """Two fit into ``live_bytes``. The others go, the oldest first, and nobody who sends at once waits for them."""
    with hostile.silent_calls(address, calls=6) as [connection], Client(address, timeout=60) as client:
        assert client.generate("a b").text == "a b"
        wait_for("four calls to end", lambda: len(connection.ended) == 4)
        assert sorted(connection.ended) == [1, 3, 5, 7]
        assert client.generate("c d", images=[b"1" * (3 * MiB)]).text == "c d"
        assert len(connection.ended) == 4


def test_a_late_message_is_sent_away_with_a_time_to_come_back(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc.insecure_channel(address) as channel:
        never = threading.Event()
        grpc.channel_ready_future(channel).result(60)
        begun = threading.Event()
        first = Incoming._first
        monkeypatch.setattr(Incoming, "_first", lambda *given: (begun.set(), first(*given))[1])
        late = channel.stream_stream(hostile.GENERATE)(iter(lambda: never.wait(60), True), timeout=60)
        assert begun.wait(60)  # it is the first
        with hostile.silent_calls(address, calls=2), pytest.raises(grpc.RpcError) as caught:
            list(late)
        never.set()
    error = from_rpc_error(caught.value)
    assert isinstance(error, ResourceExhausted) and error.retry_after and "UploadMedia" in str(error)


def test_a_message_has_its_time_to_come(hasty: str) -> None:
    with grpc.insecure_channel(hasty) as channel:
        never = threading.Event()
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream(hostile.GENERATE)(iter(lambda: never.wait(60), True), timeout=60))
        never.set()
    error = from_rpc_error(caught.value)
    assert isinstance(error, DeadlineExceeded) and "message_seconds" in str(error)


def test_health_is_answered_while_messages_trickle(address: str) -> None:
    with (
        hostile.unfinished_messages(address, 4 * MiB, sent=MiB, rate=1000.0, connections=2) as [one, other],
        grpc.insecure_channel(address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(20):
            stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert not one.ended and not other.ended


def test_messages_that_trickle_end_at_their_time(hasty: str) -> None:
    with hostile.unfinished_messages(hasty, 4 * MiB, sent=MiB, rate=1000.0, connections=2) as [one, other]:
        wait_for("the end of both calls", lambda: all(each.closed or 1 in each.ended for each in (one, other)))


def test_a_connection_has_so_many_calls_at_once(address: str) -> None:
    with hostile.RawConnection(address) as connection:
        wait_for("the server's settings", lambda: 3 in connection.settings)
        assert connection.settings[3] == 77  # MAX_CONCURRENT_STREAMS


@pytest.mark.parametrize("limit", ["connection_idle_seconds", "connection_age_seconds"])
def test_connections_end_and_clients_connect_anew(limit: str) -> None:
    with threaded(EchoEngine(), config({limit: 0.3})) as address, Client(address, timeout=60) as client:
        assert client.generate("a").text == "a"
        with hostile.RawConnection(address) as connection:
            if limit == "connection_idle_seconds":
                connection.call(bombs.HEALTH)  # time without calls begins after the first
                connection.send(1, bytes(5))
            wait_for("the end of the connection", lambda: connection.going_away)
        assert client.generate("b").text == "b"


class _Context:
    """A call whose only message is ``data``."""

    def __init__(self, data: bytes) -> None:
        self.data = [data]

    async def read(self) -> bytes:
        return self.data.pop()


async def _refuse(context: _Context) -> MMServeError:
    guard = Incoming(ServerConfig(), MemoryBudget(2 * INLINE_BYTES))
    read = incoming._reader(pb.GenerateRequest.FromString, hostile.GENERATE)
    try:
        await guard._only(read, hostile.GENERATE, context)
    except MMServeError as error:
        return error
    finally:
        guard.close()
    raise AssertionError("the message was not refused")


@pytest.mark.parametrize(
    ("size", "kind"), [(MiB // 2, InvalidArgument), (MiB + 2, InvalidArgument), (3 * MiB, ResourceExhausted)]
)
def test_a_refusal_does_not_hold_the_message(size: int, kind: type[MMServeError]) -> None:
    """It is yet to be sent, and what holds it may be a cycle, which is collected much later."""
    data = hostile.empty_messages(size)
    mine = sys.getrefcount(data)
    gc.disable()
    try:
        error = asyncio.run(_refuse(_Context(data)))
        assert isinstance(error, kind) and sys.getrefcount(data) == mine
    finally:
        gc.enable()
