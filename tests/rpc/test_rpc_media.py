from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from echo_server import PATIENCE, EchoEngine, config, threaded

from mmserve.client import Admitted, Client
from mmserve.errors import DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted
from mmserve.rpc.media import kept_up
from mmserve.rpc.memory_budget import MemoryBudget
from mmserve.v1 import media_pb2, media_pb2_grpc
from mmserve.wire.status import from_rpc_error


def upload(address: str, *chunks: bytes, pause: float = 0.0) -> media_pb2.UploadMediaResponse:
    def messages() -> Iterator[media_pb2.UploadMediaRequest]:
        for chunk in chunks:
            time.sleep(pause)
            yield media_pb2.UploadMediaRequest(chunk=chunk)

    with grpc.insecure_channel(address) as channel:
        try:
            return media_pb2_grpc.MediaServiceStub(channel).UploadMedia(messages(), timeout=PATIENCE)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


def test_chunks_of_any_size_are_one_item(address: str) -> None:
    first = upload(address, b"a", b"", b"bc")
    assert first.media_id == "sha256:" + hashlib.sha256(b"abc").hexdigest()
    assert (first.bytes, first.deduplicated) == (3, False)
    second = upload(address, b"abc")
    assert (second.media_id, second.deduplicated) == (first.media_id, True)


def test_limits(engine: EchoEngine) -> None:
    with threaded(engine, config(max_item_bytes=10, store_bytes=8)) as address:
        assert upload(address, b"12345678").bytes == 8
        for nothing in ((), (b"", b"")):
            with pytest.raises(InvalidArgument, match="must not be empty"):
                upload(address, *nothing)
        with pytest.raises(InvalidArgument, match="chunk: must be at most 10 bytes"):
            upload(address, b"12345678901")
        with pytest.raises(ResourceExhausted, match="does not fit") as caught:
            upload(address, b"12345", b"6789")
        assert caught.value.retry_after is None


def test_least_recently_used_uploads_go(engine: EchoEngine) -> None:
    with threaded(engine, config(store_bytes=100)) as address, Client(address) as client:
        first, second = client.upload(b"1" * 50), client.upload(b"2" * 50)
        client.generate("x", images=[first])
        client.upload(b"3" * 50)
        client.generate("x", images=[first])
        with pytest.raises(NotFound, match=second):
            client.generate("x", images=[second])


def test_unfinished_uploads_together_fit_into_the_store(engine: EchoEngine) -> None:
    with threaded(engine, config(store_bytes=100)) as address, grpc.insecure_channel(address) as channel:
        stub, refused = media_pb2_grpc.MediaServiceStub(channel), threading.Event()

        def slow() -> Iterator[media_pb2.UploadMediaRequest]:
            yield media_pb2.UploadMediaRequest(chunk=b"1" * 80)
            assert refused.wait(30)
            yield media_pb2.UploadMediaRequest(chunk=b"1" * 10)

        call = stub.UploadMedia.future(slow(), timeout=60)
        with pytest.raises(ResourceExhausted, match="at once") as caught:
            while True:  # what comes before the first chunk of the other fits
                if call.done():  # refused itself: its first chunk came during an upload of the loop
                    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    call = stub.UploadMedia.future(slow(), timeout=60)
                upload(address, b"2" * 60)
                time.sleep(0.05)
        assert caught.value.retry_after == 1.0
        refused.set()
        assert call.result().bytes == 90
        assert upload(address, b"2" * 60).bytes == 60  # what was in progress is given back


def test_who_stalls_an_upload_loses_its_place(engine: EchoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()

    def messages() -> Iterator[media_pb2.UploadMediaRequest]:
        yield media_pb2.UploadMediaRequest(chunk=b"1" * 80)
        stop.wait(PATIENCE)

    with threaded(engine, config(store_bytes=100)) as address, grpc.insecure_channel(address) as channel:
        with monkeypatch.context() as hasty:
            hasty.setattr("mmserve.rpc.media._PATIENCE", 0.3)
            call = media_pb2_grpc.MediaServiceStub(channel).UploadMedia.future(messages(), timeout=PATIENCE)
            error = from_rpc_error(call.exception())
        assert isinstance(error, DeadlineExceeded) and "stalled" in error.message
        assert upload(address, b"2" * 100).bytes == 100  # what it held is given back
        stop.set()


class Leaping(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


@pytest.mark.parametrize(("brought", "in_time"), [(1 << 20, True), (1, False)])
def test_an_upload_may_be_slow_but_not_for_ever(brought: int, in_time: bool) -> None:
    ends = 0

    async def chunks(loop: Leaping) -> None:
        nonlocal ends
        async with kept_up() as came:
            for _ in range(10):
                loop.ahead += 25.0  # seconds
                await asyncio.sleep(0.001)
                came(brought)
                ends += 1

    loop = Leaping()
    try:
        if in_time:
            loop.run_until_complete(chunks(loop))
        else:
            with pytest.raises(DeadlineExceeded, match="bytes a second"):
                loop.run_until_complete(chunks(loop))
    finally:
        loop.close()
    assert ends == (10 if in_time else 2)


def test_files_of_requests_under_way_are_bounded_together(engine: EchoEngine) -> None:
    engine.go.clear()
    with (
        threaded(engine, config(live_bytes=100)) as address,
        Client(address, timeout=PATIENCE) as client,
        Client(address, timeout=PATIENCE, retries=False) as once,
        ThreadPoolExecutor(4) as pool,
    ):
        with pytest.raises(ResourceExhausted, match=r"media\.live_bytes allows 100 with the 101") as caught:
            client.generate("x", images=[b"1" * 101])
        assert caught.value.retry_after is None
        uploaded = client.upload(b"2" * 60)
        held = [client.stream("x", images=[uploaded, uploaded]) for _ in range(2)]
        for stream in held:
            assert isinstance(next(stream), Admitted)
        held.append(client.stream("x", images=[b"3" * 40]))
        assert isinstance(next(held[-1]), Admitted)
        with pytest.raises(ResourceExhausted, match="requests in progress hold 100 bytes") as caught:
            next(once.stream("x", images=[b"4"]))
        assert caught.value.retry_after == 1.0
        waiting = pool.submit(client.generate, "", images=[b"5" * 60, b"6" * 40])  # tried again until there is room
        for stream in held:
            stream.close()
        engine.go.set()
        assert waiting.result().text == ""


def test_long_texts_of_requests_under_way_count_too(engine: EchoEngine) -> None:
    engine.go.clear()
    with (
        threaded(engine, config(live_bytes=1 << 20)) as address,
        Client(address, timeout=PATIENCE) as client,
        Client(address, timeout=PATIENCE, retries=False) as once,
    ):
        with pytest.raises(ResourceExhausted, match=r"media\.live_bytes allows"):
            client.generate("x" * (1 << 18))
        with pytest.raises(ResourceExhausted, match=r"media\.live_bytes allows"):
            client.generate("x" * ((1 << 18) - (1 << 13)), stop=[f"{i:x}" + "y" * 1000 for i in range(16)])
        without_stop = client.stream("x" * ((1 << 18) - (1 << 13)))
        assert isinstance(next(without_stop), Admitted)
        without_stop.close()
        held = client.stream("x" * (1 << 17))
        assert isinstance(next(held), Admitted)
        with pytest.raises(ResourceExhausted, match="requests in progress hold") as caught:
            once.generate("x" * (1 << 17))
        assert caught.value.retry_after == 1.0
        short = [client.stream("x" * 1000) for _ in range(9)]
        assert all(isinstance(next(stream), Admitted) for stream in short)
        for stream in (held, *short):
            stream.close()
        engine.go.set()
        assert client.generate("x" * (1 << 17)).text


def test_files_held_by_several_count_once_and_until_the_last_lets_go() -> None:
    room, shared, own = MemoryBudget(10), b"12345678", b"90"
    with room.taken([shared, own]):
        with room.taken([shared, shared]):
            assert room.used == 10
            with pytest.raises(ResourceExhausted), room.taken([bytes(3)]):
                pass
        assert room.used == 10
        with room.taken([]):
            assert room.used == 10
    assert room.used == 0
    with room.taken([bytes(10)]), pytest.raises(ResourceExhausted), room.taken([shared]):
        pass
    assert room.used == 0
