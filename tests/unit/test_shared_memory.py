"""Payloads in shared memory: what comes is what was written, whoever ends first."""

from __future__ import annotations

import multiprocessing
import os
import resource
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from forked import forked
from harness import descriptors, eventually

from mmserve.cluster import payload_store
from mmserve.core.canvas import Canvas
from mmserve.core.payloads import KVState, PrefilledPayload
from mmserve.errors import TransferError
from mmserve.transfer import shared_memory
from mmserve.transfer.nixl import Region
from mmserve.transfer.payloads import PAYLOADS
from mmserve.transfer.shared_memory import Arena, Reader, Ticket

#: What the names of shared memory's descriptors begin with.
MEMORY = "/memfd:"


def payload(seed: int, rows: int = 2000) -> PrefilledPayload:
    canvas = Canvas.create(np.arange(5), new_tokens=3, block_length=2, mask_id=9)
    keys = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    return PrefilledPayload(canvas, KVState(8, 4, {"keys": keys}), 8, embeddings=keys[:3].clone())


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


def taken(reader: Reader, ticket: Ticket) -> PrefilledPayload:
    memory = reader.take(ticket)
    found: PrefilledPayload = PAYLOADS.decode(memory.read())
    memory.close()
    return found


def test_what_is_taken_is_what_was_written(arena: Arena, reader: Reader) -> None:
    for rows in (1, 100, 5000):
        sent = payload(rows, rows)
        ticket = arena.write(PAYLOADS.pack(sent))
        found = taken(reader, ticket)
        assert torch.equal(found.kv.tensors["keys"], sent.kv.tensors["keys"])
        arena.drop(ticket)
        with pytest.raises(TransferError, match="not there any more"):
            reader.take(ticket)


def test_memory_that_nobody_reads_is_written_again_and_bounded(reader: Reader) -> None:
    small = Arena(spare=3 << 20)
    before = descriptors(MEMORY)
    tickets = [small.write(PAYLOADS.pack(payload(i, 4000))) for i in range(8)]  # 1 MB each
    assert descriptors(MEMORY) == before + 2 * 8  # Python's mapping has a descriptor of its own
    for ticket in tickets:
        small.drop(ticket)
    assert descriptors(MEMORY) == before + 2 * 3
    again = small.write(PAYLOADS.pack(payload(9, 4000)))
    assert descriptors(MEMORY) == before + 2 * 3
    assert torch.equal(taken(reader, again).kv.tensors["keys"], payload(9, 4000).kv.tensors["keys"])
    small.close()


def test_what_was_copied_out_does_not_change_when_memory_is_written_again(arena: Arena, reader: Reader) -> None:
    ticket = arena.write(PAYLOADS.pack(payload(1)))
    found = taken(reader, ticket)
    arena.drop(ticket)
    arena.write(PAYLOADS.pack(payload(2)))
    assert torch.equal(found.embeddings, payload(1).embeddings)


def test_a_reader_finds_memory_again_that_it_has_read_before(arena: Arena, reader: Reader) -> None:
    """Written again by its process, under another number and from another arena: as the front hands it on."""
    with closing(Arena()) as front:
        before, mappings = descriptors(MEMORY), set()
        for seed in range(5):
            ticket = arena.write(PAYLOADS.pack(payload(seed)))
            kept = front.put(reader.take(ticket))
            view = reader.read(kept)
            mappings.add(id(view.obj))
            found = PAYLOADS.decode(view)
            assert torch.equal(found.kv.tensors["keys"], payload(seed).kv.tensors["keys"])
            front.drop(kept)
            arena.drop(ticket)
            eventually(lambda: descriptors(MEMORY) == before + 3, "the spare memory and its two mappings alone")
        assert len(mappings) == 1


def test_a_reader_keeps_no_more_mapped_than_its_bound(arena: Arena) -> None:
    with closing(Reader(mapped=3 << 20)) as reader:
        tickets = [arena.write(PAYLOADS.pack(payload(i, 4000))) for i in range(6)]  # 1 MB each
        views = [reader.read(ticket) for ticket in tickets]
        for i, view in enumerate(views):
            assert torch.equal(PAYLOADS.decode(view).kv.tensors["keys"], payload(i, 4000).kv.tensors["keys"])
        assert len(reader._mapped) == 3
        large = reader.read(arena.write(PAYLOADS.pack(payload(9, 40_000))))
        assert not reader._mapped and torch.equal(
            PAYLOADS.decode(large).kv.tensors["keys"], payload(9, 40_000).kv.tensors["keys"]
        )


def test_bytes_that_changed_on_the_way_are_refused(arena: Arena, reader: Reader) -> None:
    ticket = arena.write(PAYLOADS.pack(payload(1)))
    memory = reader.take(ticket)
    view = memory.read()
    view[len(view) // 2] ^= 1
    with pytest.raises(TransferError, match="checksum"):
        PAYLOADS.decode(view)
    PAYLOADS.decode(memory.read())  # nobody else saw that
    memory.close()


def serve(connection: Connection) -> None:
    arena = Arena()
    connection.send(arena.write(PAYLOADS.pack(payload(5))))
    connection.recv()


@pytest.fixture
def other() -> Iterator[tuple[multiprocessing.process.BaseProcess, Ticket]]:
    context = forked()
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    assert mine.poll(60)
    yield process, mine.recv()
    process.kill()
    process.join()


def test_memory_outlives_the_process_that_wrote_it(
    other: tuple[multiprocessing.process.BaseProcess, Ticket], reader: Reader
) -> None:
    process, ticket = other
    memory = reader.take(ticket)
    process.kill()
    process.join()
    assert torch.equal(PAYLOADS.decode(memory.read()).kv.tensors["keys"], payload(5).kv.tensors["keys"])
    memory.close()
    with pytest.raises(TransferError, match="does not answer"):
        reader.take(ticket)


def test_a_process_that_is_stopped_is_not_waited_for(
    other: tuple[multiprocessing.process.BaseProcess, Ticket],
) -> None:
    process, ticket = other
    hurried = Reader(patience=0.2)
    os.kill(process.pid or 0, signal.SIGSTOP)
    with pytest.raises(TransferError, match="does not answer"):
        hurried.take(ticket)
    hurried.close()


def test_many_readers_at_once(arena: Arena) -> None:
    tickets = [arena.write(PAYLOADS.pack(payload(i))) for i in range(4)]
    wrong: list[BaseException] = []

    def read() -> None:
        own = Reader()
        try:
            for turn in range(40):
                seed = turn % 4
                assert torch.equal(taken(own, tickets[seed]).embeddings, payload(seed).embeddings)
        except BaseException as error:  # noqa: BLE001 - told to the test
            wrong.append(error)
        own.close()

    before = descriptors()
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    eventually(lambda: descriptors() <= before, "their descriptors are closed")


def test_a_reader_that_goes_in_the_middle_leaves_nothing(arena: Arena) -> None:
    ticket, before = arena.write(PAYLOADS.pack(payload(1))), descriptors()
    for sent in (b"", b"\0\0\0", b"\xff" * 8):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
            asker.connect(f"\0{ticket.address}")
            asker.sendall(sent)
    eventually(lambda: descriptors() <= before, "their descriptors are closed")
    own = Reader()
    taken(own, ticket)
    own.close()
    with pytest.raises(TransferError, match="reads no more payloads"):
        own.take(ticket)
    eventually(lambda: descriptors() <= before, "a closed reader opens no connection")


def test_a_process_without_free_descriptors_can_be_read_from_once_it_has_some(
    arena: Arena, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    ticket = arena.write(PAYLOADS.pack(payload(1)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as early:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            early.connect(f"\0{arena.address}")
            eventually(lambda: "no process can connect" in caplog.text, "the connection was not accepted")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert torch.equal(taken(reader, ticket).embeddings, payload(1).embeddings)
    assert caplog.text.count("no process can connect") == 1


def test_other_users_get_nothing(arena: Arena, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = arena.write(PAYLOADS.pack(payload(1)))
    monkeypatch.setattr(shared_memory.os, "getuid", lambda: 4242)
    with pytest.raises(TransferError, match="does not answer"):
        reader.take(ticket)


def test_a_ticket_of_another_shelf_drops_nothing(arena: Arena) -> None:
    ticket = arena.write(PAYLOADS.pack(payload(1)))
    arena.drop(replace(ticket, address="elsewhere"))
    assert len(arena) == 1


def test_a_process_that_does_not_answer_keeps_nobody_waiting_for_another(arena: Arena) -> None:
    reader, ticket = Reader(patience=60.0), arena.write(PAYLOADS.pack(payload(0)))
    errors: list[TransferError] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind("\0mmserve-silent-" + secrets.token_hex(8))
        silent.listen()
        address = silent.getsockname().decode()[1:]

        def ask() -> None:
            try:
                reader.take(replace(ticket, address=address))
            except TransferError as error:
                errors.append(error)

        waiting = threading.Thread(target=ask)
        waiting.start()
        connection, _ = silent.accept()
        assert connection.recv(8), "it has asked"
        beside = threading.Thread(target=lambda: reader.take(ticket).close(), daemon=True)
        beside.start()
        beside.join(30.0)
        done = not beside.is_alive()
        connection.close()
    waiting.join(60.0)
    assert done and errors
    reader.close()


def test_states_of_several_workers_that_come_at_once_by_nixl_are_kept_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one agent, which is made with the first: what another one of the same name has, this one does not know."""
    made: list[Any] = []

    class Slow:
        def __init__(self, _address: str) -> None:
            made.append(self)
            time.sleep(0.1)

        def read(self, region: Region) -> memoryview:
            return memoryview(bytes(region.size))

        def copy(self, data: memoryview) -> Any:
            return self, len(data)

        def close(self) -> None:
            """It has nothing."""

    monkeypatch.setattr(payload_store, "Regions", Slow)
    with closing(payload_store.SharedPayloadStore(lambda _name: "", lambda _parcel: None)) as store:
        with ThreadPoolExecutor(4) as threads:
            kept = list(threads.map(store.own, [Region(f"w{i}", 1, 8, 0, b"") for i in range(4)]))
        assert len(made) == 1 and kept == [(made[0], 8)] * 4
