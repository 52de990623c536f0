"""Messages as they come in: nobody keeps them, and whoever leaves on the way leaves nothing."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import grpc
import pytest
from echo_server import EchoEngine, config, threaded

from mmserve.client import Admitted, Client
from mmserve.errors import InvalidArgument, ResourceExhausted
from mmserve.rpc import status
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import media_pb2, media_pb2_grpc
from mmserve.wire.status import from_rpc_error

MiB = 1 << 20
GENERATE = "/mmserve.v1.GenerationService/Generate"


@contextmanager
def idle_uploads(address: str, count: int) -> Iterator[list[Any]]:
    """Uploads that were begun and bring nothing more."""
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
    engine.pause = 3600.0
    with threaded(engine, config(live_bytes=100, max_item_bytes=150)) as address, Client(address, timeout=60) as client:
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


def test_a_call_without_a_message_is_a_wrong_request(address: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(GENERATE)(iter([]), timeout=60))
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgument) and error.violations[0].field == "request"


def test_clients_that_leave_while_they_send_leave_nothing(engine: EchoEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Some have sent everything, some nothing."""
    never = threading.Event()
    with threaded(engine, config()) as address, Client(address, timeout=30) as client:
        message = pb.GenerateRequest(
            messages=[{"role": "ROLE_USER", "parts": [{"image": {"data": b"\1" * MiB}}, {"text": "x"}]}]
        ).SerializeToString()
        with idle_uploads(address, 2), grpc.insecure_channel(address) as channel:
            calls = [channel.unary_stream(GENERATE)(message, timeout=60) for _ in range(60)]
            nothing = iter(lambda: never.wait(60), True)
            silent = [channel.stream_stream(GENERATE)(nothing, timeout=60) for _ in range(4)]
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
    ours = [r for r in caplog.records if not r.name.startswith("grpc.")]  # gRPC's: a status came too late for a client
    assert not [r for r in ours if r.levelname in ("WARNING", "ERROR")]
