"""The connection between a front and a worker of its host: in order, without waiting, and over when either end is."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mmserve.cluster import link as links
from mmserve.cluster.link import Link, Listener, connected
from mmserve.errors import Unavailable

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


def pair() -> tuple[Link, Link]:
    one, other = socket.socketpair()
    return Link(one), Link(other)


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
    other.send("nobody reads it")
    other.send("nor that")
    one.send("nor here")
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


def test_a_listener_that_is_not_there_or_belongs_to_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="takes no connection"):
        connected("mmserve-nobody")
    served = Served()
    monkeypatch.setattr(links, "is_own_user", lambda _connection: False)
    with pytest.raises(Unavailable, match="another user"):
        connected(served.listener.address)
