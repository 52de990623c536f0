from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

import grpc
import pytest
from echo_server import EchoEngine, config, threaded

from mmserve.client import Client
from mmserve.errors import InvalidArgument, NotFound, ResourceExhausted
from mmserve.rpc.status import from_rpc_error
from mmserve.v1 import media_pb2, media_pb2_grpc


def upload(address: str, *chunks: bytes, pause: float = 0.0) -> media_pb2.UploadMediaResponse:
    def messages() -> Iterator[media_pb2.UploadMediaRequest]:
        for chunk in chunks:
            time.sleep(pause)
            yield media_pb2.UploadMediaRequest(chunk=chunk)

    with grpc.insecure_channel(address) as channel:
        try:
            return media_pb2_grpc.MediaServiceStub(channel).UploadMedia(messages(), timeout=10)
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
        stub = media_pb2_grpc.MediaServiceStub(channel)

        def slow() -> Iterator[media_pb2.UploadMediaRequest]:
            yield media_pb2.UploadMediaRequest(chunk=b"1" * 80)
            time.sleep(1.0)
            yield media_pb2.UploadMediaRequest(chunk=b"1" * 10)

        call = stub.UploadMedia.future(slow(), timeout=10)
        time.sleep(0.3)
        with pytest.raises(ResourceExhausted, match="at once") as caught:
            upload(address, b"2" * 60)
        assert caught.value.retry_after == 1.0
        assert call.result().bytes == 90
        assert upload(address, b"2" * 60).bytes == 60  # what was in progress is given back
