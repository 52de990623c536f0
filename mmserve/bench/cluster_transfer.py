"""States between two actors of one host: shared memory against Ray's object store, and receivers that are killed.

The first are ordered and reported by messages, as between the front and workers of its host, the others by Ray.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from mmserve.bench.measures import Figures, Progress, at_least, at_most, stated
from mmserve.cluster import prefork
from mmserve.cluster.link import Listener, Offered, connected
from mmserve.cluster.object_store import fetched, stored
from mmserve.cluster.payload_store import SharedPayloadStore
from mmserve.core.canvas import Canvas
from mmserve.core.payloads import KVState, PrefilledPayload
from mmserve.transfer.payloads import PAYLOADS
from mmserve.transfer.shared_memory import Arena, Reader, Ticket, host_id

#: Bytes of K/V.
_SIZES = {"64 kB": 64 << 10, "1 MB": 1 << 20, "8 MB": 8 << 20, "64 MB": 64 << 20}
_KILLS = 100
#: Receivers that start in advance.
_READY = 2


class _End:
    """One end of a transfer, in an actor."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._arena, self._reader = Arena(), Reader()
        self._payloads: dict[int, PrefilledPayload] = {}
        self._pages: dict[int, torch.Tensor] = {}
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._listener = Listener(self._arena.offered)
        named: dict[str, Callable[..., Any]] = {"write": self.write, "read": self.read, "drop": self.drop}
        calls = {name: partial(self._answer, method) for name, method in named.items()}
        self._listener.serve(calls, lambda: iter(self._done.get, None))

    def listen(self) -> str:
        return self._listener.address

    def _answer(self, method: Callable[..., Any], *given: Any) -> None:
        self._done.put(method(*given))

    def pid(self) -> int:
        return os.getpid()

    def write(self, size: int, shared: bool) -> Any:
        """A state of about ``size`` bytes: where it is."""
        if size not in self._payloads:
            canvas = Canvas.create(np.arange(5), new_tokens=3, block_length=2, mask_id=9)
            held = {"keys": torch.rand(size // 256, 64)}
            self._payloads[size] = PrefilledPayload(canvas, KVState(8, 4, held), 8)
        packed = PAYLOADS.pack(self._payloads[size])
        if shared:
            return self._arena.write(packed)
        data = bytearray(packed.size)
        packed.write(memoryview(data))
        return [stored(data)]

    def read(self, where: Any) -> float:
        """Copy the state into pages of this process; the sum of a few of its numbers."""
        if isinstance(where, Ticket):
            payload = PAYLOADS.decode(self._reader.read(where))
        else:
            payload = PAYLOADS.decode(fetched(where[0]))
        keys = payload.kv.tensors["keys"]
        pages = self._pages.setdefault(keys.shape[0], torch.zeros_like(keys))
        pages.copy_(keys)
        return float(pages[:4].sum())

    def again(self, where: Any, times: int) -> int:
        """Read so many times."""
        for _ in range(times):
            self.read(where)
        return times

    def drop(self, ticket: Ticket) -> int:
        """Nobody reads it any more; what the arena still offers."""
        self._arena.drop(ticket)
        return len(self._arena)

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts alone


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """Times of a write and a read by two calls of Ray, and what is left after killed receivers."""
    import ray

    remote: Any = ray.remote
    actor = remote(num_cpus=0, runtime_env={"py_executable": prefork.command()})(_End)
    one, other = actor.remote(), actor.remote()
    reuse = queue.SimpleQueue[Ticket]()
    store = SharedPayloadStore(lambda _worker: host_id(), reuse.put)
    writer, receiver = (_Linked(ray.get(each.listen.remote()), store.offered) for each in (one, other))
    rows, measures = [], []
    for label, size in _SIZES.items():
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(5 + 10 * max(1, arguments.repeats)):
            for shared, seconds in (
                (True, _by_messages(store, reuse, writer, receiver, size)),
                (False, _by_ray(one, other, size)),
            ):
                if turn >= 5:
                    times[shared].append(1000 * seconds)
        shared_ms, stored_ms = median(times[True]), median(times[False])
        rows.append({"bytes": size, "shared_ms": round(shared_ms, 3), "object_store_ms": round(stored_ms, 3)})
        progress(f"{label}: shared memory {shared_ms:.2f} ms, object store {stored_ms:.2f} ms")
        name = f"{label} by shared memory, through the front, two messages and their answers included, p50"
        measures.append(at_most(name, shared_ms, "ms", 5.0) if size == 8 << 20 else stated(name, shared_ms, "ms"))
        measures.append(stated(f"{label} by Ray's object store, p50", stored_ms, "ms"))
    store.close()
    measures += _kills(actor, one, progress)
    return {"rows": rows, "measures": measures, "settings": {"repeats": arguments.repeats, "kills": _KILLS}}


class _Linked:
    """An actor that is asked by messages."""

    def __init__(self, address: str, offered: Offered) -> None:
        self._link = connected(address, offered)
        self._answers = self._link.messages()

    def ask(self, name: str, *arguments: Any) -> Any:
        """What it answers."""
        self._link.send((name, arguments))
        return next(self._answers)


def _by_messages(
    store: SharedPayloadStore, reuse: queue.SimpleQueue[Ticket], one: _Linked, other: _Linked, size: int
) -> float:
    """Seconds to write a state by shared memory, to hold it here as a front does, and to read it."""
    begun = time.perf_counter()
    kept = store.keep(one.ask("write", size, True))
    other.ask("read", store.sent(kept, ""))
    seconds = time.perf_counter() - begun
    store.drop(kept)
    one.ask("drop", reuse.get())
    return seconds


def _by_ray(one: Any, other: Any, size: int) -> float:
    """The same by Ray's object store."""
    import ray

    begun = time.perf_counter()
    ray.get(other.read.remote(ray.get(one.write.remote(size, False))))
    return time.perf_counter() - begun


def _kills(actor: Any, one: Any, progress: Progress) -> list[Figures]:
    """Kill the receiver in the middle of a transfer, again and again."""
    import ray

    before, offered, served = ray.get(one.descriptors.remote()), 0, 0
    ready = deque(actor.remote() for _ in range(_READY))
    for turn in range(_KILLS):
        receiver = ready.popleft()
        ready.append(actor.remote())  # starts while those before it are used
        pid = ray.get(receiver.pid.remote())
        ticket = ray.get(one.write.remote(8 << 20, True))
        ray.get(receiver.read.remote(ticket))
        in_flight = receiver.again.remote(ticket, 10_000)
        time.sleep(0.002 * (turn % 10))
        os.kill(pid, signal.SIGKILL)
        try:
            ray.get(in_flight)
        except ray.exceptions.RayError:
            served += 1
        offered = ray.get(one.drop.remote(ticket))
        if turn % 10 == 9:
            progress(f"{turn + 1} receivers killed in the middle of a transfer")
    after = ray.get(one.descriptors.remote())
    return [
        at_least("receivers killed in mid-transfer whose sender lives on", served, "kills", _KILLS),
        at_most("states that the sender still offers after them", offered, "states", 0),
        at_most("file descriptors of the sender, more than before", after - before, "descriptors", 2),
    ]
