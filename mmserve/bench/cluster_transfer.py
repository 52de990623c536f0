"""Transfers of states between two actors of one host, by shared memory, NIXL (if installed) and Ray's object store; and
receivers that are killed.

Transfers by the first two are requested by messages, as between the server and workers of its host; the last by Ray
calls.
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
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch

from mmserve.bench.measures import Figures, Progress, at_least, at_most, stated
from mmserve.cluster import prefork
from mmserve.cluster.link import Listener, Offered, connected
from mmserve.cluster.parcels import Parcels
from mmserve.cluster.payload_store import SharedPayloadStore
from mmserve.core.canvas import Canvas
from mmserve.core.payloads import KVState, PrefilledPayload
from mmserve.transfer.nixl import Region
from mmserve.transfer.shared_memory import Ticket, host_id

#: Size of the K/V in bytes.
_SIZES = {"64 kB": 64 << 10, "1 MB": 1 << 20, "8 MB": 8 << 20, "64 MB": 64 << 20}
_KILLS = 100
#: Number of receivers started in advance.
_READY = 2
_SHARED, _NIXL, _STORED = "shared memory", "NIXL", "Ray's object store"
_TRANSPORTS = {_SHARED: "shared_memory", _NIXL: "nixl", _STORED: "object_store"}


class _End:
    """One end of a transfer, in an actor."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._parcels: dict[str, Parcels] = {}
        self._payloads: dict[int, PrefilledPayload] = {}
        self._pages: dict[int, torch.Tensor] = {}
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._listener = Listener(self._by(_SHARED).arena.offered)
        named: dict[str, Callable[..., Any]] = {"write": self.write, "read": self.read, "drop": self.drop}
        calls = {name: partial(self._answer, method) for name, method in named.items()}
        self._listener.serve(calls, lambda: iter(self._done.get, None))

    def listen(self) -> str:
        return self._listener.address

    def _answer(self, method: Callable[..., Any], *given: Any) -> None:
        self._done.put(method(*given))

    def pid(self) -> int:
        return os.getpid()

    def _by(self, name: str) -> Parcels:
        if name not in self._parcels:
            self._parcels[name] = made = Parcels()
            made.use(_TRANSPORTS[name])
        return self._parcels[name]

    def write(self, size: int, transport: str) -> Any:
        """Write a state of about ``size`` bytes; returns its reference, in a list, as Ray resolves bare references."""
        if size not in self._payloads:
            canvas = Canvas.create(np.arange(5), new_tokens=3, block_length=2, mask_id=9)
            held = {"keys": torch.rand(size // 256, 64)}
            self._payloads[size] = PrefilledPayload(canvas, KVState(8, 4, held), 8)
        return [self._by(transport).write(self._payloads[size])]

    def read(self, where: list[Any], transport: str) -> float:
        """Copy the state into pages of this process; returns the sum of some of its numbers."""
        keys = self._by(transport).read(where[0]).kv.tensors["keys"]
        pages = self._pages.setdefault(keys.shape[0], torch.zeros_like(keys))
        pages.copy_(keys)
        return float(pages[:4].sum())

    def again(self, where: list[Any], times: int) -> int:
        """Read from shared memory ``times`` times."""
        for _ in range(times):
            self.read(where, _SHARED)
        return times

    def drop(self, number: int, transport: str) -> int:
        """Release the state; returns the number of free bytes of the arena."""
        self._by(transport).reuse(number)
        return len(self._by(_SHARED).arena)

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts alone


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """Times of a write and a read by each transport, and the memory left after receivers were killed."""
    import ray

    remote: Any = ray.remote
    actor = remote(num_cpus=0, runtime_env={"py_executable": prefork.command()})(_End)
    one, other = actor.remote(), actor.remote()
    reuse = queue.SimpleQueue[Ticket | Region]()
    store = SharedPayloadStore(lambda _worker: host_id(), reuse.put)
    writer, receiver = (_Linked(ray.get(each.listen.remote()), store.offered) for each in (one, other))
    rows, measures = [], []
    ways: dict[str, Callable[[int], float]] = {
        _SHARED: lambda size: _by_memory(store, reuse, writer, receiver, size),
        _STORED: lambda size: _by_ray(one, other, size),
    }
    if find_spec("nixl") is not None:
        ways[_NIXL] = lambda size: _by_regions(writer, receiver, size)
    for label, size in _SIZES.items():
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(5 + 10 * max(1, arguments.repeats)):
            for name, way in ways.items():
                seconds = way(size)
                if turn >= 5:
                    times[name].append(1000 * seconds)
        found = {name: median(each) for name, each in times.items()}
        rows.append({"bytes": size, **{f"{_TRANSPORTS[name]}_ms": round(ms, 3) for name, ms in found.items()}})
        progress(f"{label}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in found.items()))
        shared = f"{label} by shared memory, through the front, two messages and their answers included, p50"
        measures.append(
            at_most(shared, found[_SHARED], "ms", 5.0) if size == 8 << 20 else stated(shared, found[_SHARED], "ms")
        )
        measures += [stated(f"{label} by {name}, p50", ms, "ms") for name, ms in found.items() if name != _SHARED]
    store.close()
    measures += _kills(actor, one, progress)
    return {"rows": rows, "measures": measures, "settings": {"repeats": arguments.repeats, "kills": _KILLS}}


class _Linked:
    """An actor that is called by messages."""

    def __init__(self, address: str, offered: Offered) -> None:
        self._link = connected(address, offered)
        self._answers = self._link.messages()

    def ask(self, name: str, *arguments: Any) -> Any:
        """The result of the actor's method ``name``."""
        self._link.send((name, arguments))
        return next(self._answers)


def _by_memory(
    store: SharedPayloadStore, reuse: queue.SimpleQueue[Ticket | Region], one: _Linked, other: _Linked, size: int
) -> float:
    """Seconds to write a state to shared memory, hold it in this process as a server does, and read it."""
    begun = time.perf_counter()
    kept = store.persist(one.ask("write", size, _SHARED)[0])
    other.ask("read", [store.sent(kept, "")], _SHARED)
    seconds = time.perf_counter() - begun
    store.drop(kept)
    one.ask("drop", reuse.get().number, _SHARED)
    return seconds


def _by_regions(one: _Linked, other: _Linked, size: int) -> float:
    """Seconds of the same by NIXL: this process holds only the region's key."""
    begun = time.perf_counter()
    where: list[Region] = one.ask("write", size, _NIXL)
    other.ask("read", where, _NIXL)
    seconds = time.perf_counter() - begun
    one.ask("drop", where[0].number, _NIXL)
    return seconds


def _by_ray(one: Any, other: Any, size: int) -> float:
    """Seconds of the same by Ray's object store."""
    import ray

    begun = time.perf_counter()
    ray.get(other.read.remote(ray.get(one.write.remote(size, _STORED)), _STORED))
    return time.perf_counter() - begun


def _kills(actor: Any, one: Any, progress: Progress) -> list[Figures]:
    """Repeatedly kill the receiver during a transfer."""
    import ray

    before, offered, served = ray.get(one.descriptors.remote()), 0, 0
    ready = deque(actor.remote() for _ in range(_READY))
    for turn in range(_KILLS):
        receiver = ready.popleft()
        ready.append(actor.remote())  # starts while earlier receivers are in use
        pid = ray.get(receiver.pid.remote())
        where = ray.get(one.write.remote(8 << 20, _SHARED))
        ray.get(receiver.read.remote(where, _SHARED))
        in_flight = receiver.again.remote(where, 10_000)
        time.sleep(0.002 * (turn % 10))
        os.kill(pid, signal.SIGKILL)
        try:
            ray.get(in_flight)
        except ray.exceptions.RayError:
            served += 1
        offered = ray.get(one.drop.remote(where[0].number, _SHARED))
        if turn % 10 == 9:
            progress(f"{turn + 1} receivers killed in the middle of a transfer")
    after = ray.get(one.descriptors.remote())
    return [
        at_least("receivers killed in mid-transfer whose sender lives on", served, "kills", _KILLS),
        at_most("states that the sender still offers after them", offered, "states", 0),
        at_most("file descriptors of the sender, more than before", after - before, "descriptors", 2),
    ]
