"""Payloads over NIXL, from process to process: what comes is what was written; peers that end or stop are noticed."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from mmserve.cluster.payload_store import SharedPayloadStore
from mmserve.core.canvas import Canvas
from mmserve.core.payloads import KVState, PrefilledPayload
from mmserve.errors import ConfigError, TransferError
from mmserve.transfer import nixl
from mmserve.transfer.nixl import Region, Regions
from mmserve.transfer.payloads import PAYLOADS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")


def payload(seed: int, rows: int = 2000) -> PrefilledPayload:
    canvas = Canvas.create(np.arange(5), new_tokens=3, block_length=2, mask_id=9)
    keys = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    return PrefilledPayload(canvas, KVState(8, 4, {"keys": keys}), 8, embeddings=keys[:3].clone())


def regions(**settings: float) -> Regions:
    return Regions(f"test-{secrets.token_hex(6)}", **settings)  # type: ignore[arg-type]


def same(data: memoryview, seed: int, rows: int = 2000) -> bool:
    found, sent = PAYLOADS.decode(data), payload(seed, rows)
    return torch.equal(found.kv.tensors["keys"], sent.kv.tensors["keys"])


def serve(connection: Connection) -> None:
    own = regions()
    while (asked := connection.recv()) is not None:
        if isinstance(asked, Region):
            own.drop(asked)
            connection.send(len(own))
        else:
            connection.send(own.write(PAYLOADS.pack(payload(*asked))))


@pytest.fixture
def other() -> Iterator[tuple[multiprocessing.process.BaseProcess, Connection]]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    yield process, here
    process.kill()
    process.join()


def asked(connection: Connection, what: object) -> Region:
    connection.send(what)
    assert connection.poll(60)
    return connection.recv()  # type: ignore[no-any-return]


def test_another_process_reads_what_was_written(
    other: tuple[multiprocessing.process.BaseProcess, Connection],
) -> None:
    _process, connection = other
    with closing(regions()) as here:
        for seed, rows in enumerate((1, 100, 40_000)):  # 10 MB
            region = asked(connection, (seed, rows))
            assert same(here.read(region), seed, rows)
        # memory is written again, and its first owner's bytes are gone
        first = asked(connection, (7, 100))
        connection.send(first)
        assert connection.recv() == 3
        again = asked(connection, (8, 100))
        assert again.at == first.at and again.number != first.number
        assert same(here.read(again), 8, 100)


def test_processes_that_stop_or_end_are_seen(
    other: tuple[multiprocessing.process.BaseProcess, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, connection = other
    monkeypatch.setenv("UCX_TLS", "tcp")  # within a host a stopped process's memory can be read
    with closing(regions(patience=1.0)) as here, closing(regions()) as patient:
        region = asked(connection, (1,))
        os.kill(process.pid or 0, signal.SIGSTOP)
        with pytest.raises(TransferError, match="did not come by NIXL in time"):
            here.read(region)
        os.kill(process.pid or 0, signal.SIGCONT)
        assert same(patient.read(region), 1)
        process.kill()
        process.join()
        for reader in (patient, here):
            with pytest.raises(TransferError, match="did not come by NIXL"):
                reader.read(region)


def test_threads_read_and_write_at_once() -> None:
    with closing(regions()) as writer, closing(regions()) as reader:
        wrong: list[BaseException] = []

        def run(seed: int) -> None:
            try:
                for _ in range(8):
                    region = writer.write(PAYLOADS.pack(payload(seed, 300)))
                    assert same(reader.read(region), seed, 300)
                    writer.drop(region)
            except BaseException as error:  # noqa: BLE001 - the test reports it
                wrong.append(error)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and len(writer) == 0


def test_spare_memory_is_bounded_and_dropping_twice_does_nothing() -> None:
    with closing(regions(spare=1 << 20)) as own:
        made = [own.write(PAYLOADS.pack(payload(i, 2000))) for i in range(4)]  # half a MB each
        for region in (*made, made[0], Region("elsewhere", 1, 1, 1, b"")):
            own.drop(region)
        assert len(own) == 0 and len(own._spare.clear()) == 2


def test_bytes_that_changed_are_refused() -> None:
    with closing(regions()) as own, closing(regions()) as reader:
        region = own.write(PAYLOADS.pack(payload(1)))
        own._offered[region.number].payload(region.size)[region.size // 2] ^= 1
        with pytest.raises(TransferError, match="checksum"):
            PAYLOADS.decode(reader.read(region))


def test_the_front_keeps_a_state_that_outlives_its_worker() -> None:
    freed: list[Region] = []
    with closing(SharedPayloadStore(lambda _: "elsewhere", freed.append)) as store:  # type: ignore[arg-type]
        worker, reader = regions(), regions()
        region = worker.write(PAYLOADS.pack(payload(3)))
        assert store.persist(region) is region and store.sent(region, "w") is region
        owned = store.own(region)
        assert freed == [region] and store.held == 1
        worker.close()
        assert same(reader.read(owned), 3)
        store.drop(owned)
        assert store.held == 0 and freed == [region]
        store.drop(region)
        assert freed == [region, region]
        reader.close()


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install \"mmserve\[nixl\]\""):
        regions()


def test_a_process_reads_its_own_and_not_what_it_has_dropped() -> None:
    with closing(regions()) as own:
        region = own.write(PAYLOADS.pack(payload(2)))
        data = own.read(region)
        own.drop(region)
        own.write(PAYLOADS.pack(payload(4)))  # to the same memory
        assert same(data, 2)
        with closing(regions()) as reader:
            for each in (own, reader):
                with pytest.raises(TransferError, match="not there any more"):
                    each.read(region)
