"""The connection between a front and a worker of its host: in order, without waiting, and over when either end is."""

from __future__ import annotations

import os
import pickle
import queue
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from harness import descriptors, eventually

from mmserve.cluster import link as links
from mmserve.cluster.link import Link, Listener, connected
from mmserve.errors import Unavailable
from mmserve.transfer.shared_memory import Arena, Memory, Reader, Ticket

PATIENCE = 60.0
#: More than a socket has room for.
LARGE = b"x" * (8 << 20)


class Served:
    """A listener whose calls are noted, and whose events come from the test."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.listener = Listener()
        self.listener.serve({"take": lambda *given: self.calls.put(given)}, self._events)

    def _events(self) -> Iterator[Any]:
        while True:
            yield self.events.get()


def pair(arena: Arena | None = None) -> tuple[Link, Link]:
    """Two ends; the first offers what is in ``arena``."""
    one, other = socket.socketpair()
    return Link(one) if arena is None else Link(one, arena.offered), Link(other)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(spare=0)
    yield made
    made.close()


def offer(arena: Arena, data: bytes) -> Ticket:
    """Put ``data`` into the arena, by its descriptor alone."""
    fd = os.memfd_create("test")
    os.write(fd, data)
    return arena.put(Memory(fd, len(data), len(data)))


def content(ticket: Ticket) -> bytes:
    """What the memory that came with ``ticket`` holds."""
    assert ticket.memory is not None
    return bytes(ticket.memory.read())


def test_calls_and_events_come_in_order_whatever_their_sizes() -> None:
    served = Served()
    link = connected(served.listener.address)
    sent = [i if i % 3 else LARGE[: i << 14] for i in range(60)]
    for each in sent:
        link.send(("take", (each,)))
        served.events.put(each)
    assert [served.calls.get(timeout=PATIENCE) for _ in sent] == [(each,) for each in sent]
    messages = link.messages()
    assert [next(messages) for _ in sent] == sent
    link.close()


def test_nobody_waits_for_an_end_that_does_not_read() -> None:
    """A worker that is stopped: messages are kept until it reads again."""
    one, other = pair()
    sent = [LARGE, "small", LARGE, *range(2000)]
    sender = threading.Thread(target=lambda: [one.send(each) for each in sent])
    sender.start()
    sender.join(PATIENCE)
    assert not sender.is_alive()
    messages = other.messages()
    assert [next(messages) for _ in sent] == sent
    one.close()
    other.close()


def test_messages_end_with_the_other_end_and_later_ones_are_dropped() -> None:
    one, other = pair()
    one.send("last")
    one.send(LARGE)  # which is cut off
    one.close()
    assert list(other.messages()) == ["last"]
    other.send("no_worker reads it")
    other.send("nor that")
    one.send("nor here")
    other.close()


def test_memory_comes_with_its_ticket(arena: Arena) -> None:
    one, other = pair(arena)
    tickets = [offer(arena, b"%d" % i) for i in range(links._MOST_DESCRIPTORS + 2)]
    before = descriptors("/memfd:")
    foreign = Ticket("elsewhere", "another", 1, 1)
    one.send({"few": tickets[:3], "again": tickets[0], "foreign": foreign})
    one.send(tickets)
    one.send(LARGE)  # more than there is room for
    one.send(tickets[5])
    messages = other.messages()
    few = next(messages)
    assert [content(each) for each in (*few["few"], few["again"])] == [b"0", b"1", b"2", b"0"]
    assert few["few"] == tickets[:3] and few["foreign"] == foreign and few["foreign"].memory is None
    many = next(messages)
    assert many == tickets
    assert [each.memory is not None for each in many] == [True] * links._MOST_DESCRIPTORS + [False] * 2
    assert content(many[links._MOST_DESCRIPTORS - 1]) == b"%d" % (links._MOST_DESCRIPTORS - 1)
    arena.drop(tickets[5])
    assert next(messages) == LARGE
    late = next(messages)
    assert content(late) == b"5", "it was on its way"
    reader = Reader()
    assert reader.take(late) is late.memory and bytes(reader.read(late)) == b"5"
    reader.close()
    assert pickle.loads(pickle.dumps(few["again"])).memory is None, "it goes by no other way"
    one.send(tickets[5])
    assert next(messages).memory is None, "not there any more"
    del few, many, late
    eventually(lambda: descriptors("/memfd:") == before - 1, "descriptors to be closed")
    one.send(tickets[:4])
    one.close()
    other.close()
    eventually(lambda: descriptors("/memfd:") == before - 1, "those that no_worker read, too")


def broken() -> None:
    raise ValueError("this cannot be read")


class Broken:
    """What can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return broken, ()


def test_a_message_that_cannot_be_read_ends_the_connection_and_leaves_no_descriptor(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = pair(arena)
    tickets = [offer(arena, b"%d" % i) for i in range(6)]
    before = descriptors("/memfd:")
    one.send([tickets[:2], Broken(), tickets[2:]])
    one.send(tickets)
    assert list(other.messages()) == []
    assert "this cannot be read" in caplog.text
    assert list(one.messages()) == [], "both ends notice"
    one.close()
    assert descriptors("/memfd:") == before


def test_a_process_without_room_for_descriptors_gets_tickets_alone(arena: Arena) -> None:
    one, other = pair(arena)
    tickets = [offer(arena, b"%d" % i) for i in range(20)]
    messages, limits = other.messages(), resource.getrlimit(resource.RLIMIT_NOFILE)
    one.send(tickets)
    free = os.dup(0)  # the lowest number that is free
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 3, limits[1]))
    try:
        came = next(messages)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert came == tickets and all(each.memory is None for each in came)
    one.close()
    other.close()


def test_threads_send_whole_messages() -> None:
    one, other = pair()
    threads = [
        threading.Thread(target=lambda i=i: [one.send((i, LARGE[: 1 << 18], n)) for n in range(20)]) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    messages, found = other.messages(), list[tuple[int, int]]()
    for _ in range(80):
        i, data, n = next(messages)
        assert len(data) == 1 << 18
        found.append((i, n))
    assert all([n for i, n in found if i == which] == list(range(20)) for which in range(4))
    for thread in threads:
        thread.join(PATIENCE)
    one.close()
    other.close()


def test_a_process_of_another_user_does_not_take_the_place_of_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    served, own = Served(), links.is_own_user
    others = iter([False])  # the first that is asked about
    monkeypatch.setattr(links, "is_own_user", lambda connection: next(others, True) and own(connection))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(PATIENCE)
        stranger.connect(f"\0{served.listener.address}")
        assert stranger.recv(1) == b"", "it is sent nothing"
        link = connected(served.listener.address)
        link.send(("take", (1,)))
        assert served.calls.get(timeout=PATIENCE) == (1,)
        link.close()


def test_a_listener_that_is_not_there_or_belongs_to_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="accepts no connection"):
        connected("mmserve-no_worker")
    served = Served()
    monkeypatch.setattr(links, "is_own_user", lambda _connection: False)
    with pytest.raises(Unavailable, match="another user"):
        connected(served.listener.address)
