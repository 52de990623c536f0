"""Payloads over NIXL (NVIDIA Inference Xfer Library): one-sided reads of another process's memory from any host, by
RDMA if the network supports it, else by TCP, and by copying between processes within a host.

A payload is written once into memory registered with the process's agent, and stays there until it is dropped; a reader
needs only the region's key, and no response of the writing process. Registered memory is reused. State on GPUs is
copied through host memory.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmserve.errors import ConfigError, TransferError
from mmserve.transfer.codec import Packed
from mmserve.transfer.spare import Spare, capacity_for

logger = logging.getLogger("mmserve.cluster")

#: Timeout of a transfer from another host in seconds.
_PATIENCE = 30.0
#: Interval for polling a transfer in seconds: the first, and the maximum.
_LOOK, _LONGEST_LOOK = 2e-5, 1e-3
#: Interval in seconds for serving peers without RDMA: NIXL's own thread would use a fifth of a core for that.
_SERVE = 1e-3
_BACKEND, _KIND = "UCX", "DRAM"
#: Header before each payload with its number, to detect memory that was overwritten in the meantime. 64 bytes, so that
#: tensors stay aligned.
_HEAD = struct.Struct("=Q56x")


@dataclass(frozen=True)
class Region:
    """Location of a payload of ``size`` bytes after its header: at address ``at`` in the process of agent ``address``,
    with the ``number`` of the payload. ``key``: data that NIXL needs to connect and read."""

    address: str
    number: int
    size: int
    at: int
    key: bytes


class _Registered:
    """``capacity`` bytes of this process registered for NIXL reads and writes, until ``close``."""

    def __init__(self, agent: Any, capacity: int) -> None:
        self._agent, self.capacity = agent, capacity
        self.data = np.empty(capacity, np.uint8)
        self.at = int(self.data.ctypes.data)
        self._known = agent.register_memory([(self.at, capacity, 0, "")], _KIND, [_BACKEND])
        self.key: bytes = agent.get_partial_agent_metadata(self._known, True, [_BACKEND])

    def payload(self, size: int) -> memoryview:
        """The ``size`` bytes after the header."""
        return self.data.data[_HEAD.size : _HEAD.size + size]

    def close(self) -> None:
        self._agent.deregister_memory(self._known, [_BACKEND])


class Regions:
    """The payloads offered by this process by NIXL, and a reader of other processes' payloads. Thread-safe.

    ``address``: unique name of this process; ``spare``: bytes of registered memory kept for reuse; ``patience``:
    timeout of a transfer in seconds. Raises ``ConfigError`` if NIXL is not installed.
    """

    def __init__(self, address: str, spare: int = 256 << 20, patience: float = _PATIENCE) -> None:
        self.address, self._patience = address, patience
        self._agent, self._disconnected = _agent(address)
        self._lock = threading.Lock()
        self._next = 0
        self._offered: dict[int, _Registered] = {}
        self._spare = Spare[_Registered](spare)
        self._unfinished: list[tuple[Any, _Registered]] = []  # transfers that could not be cancelled, and their targets
        self._closed = threading.Event()
        self._server = threading.Thread(target=self._serve, name="mmserve-nixl", daemon=True)
        self._server.start()

    def write(self, packed: Packed) -> Region:
        """Offer ``packed`` until ``drop``, which must not be called before all readers are done."""
        memory = self._blank(packed.size)
        packed.write(memory.payload(packed.size))
        return self._offer(memory, packed.size)

    def copy(self, data: memoryview) -> Region:
        """As ``write``, for bytes read elsewhere."""
        memory = self._blank(len(data))
        memory.payload(len(data))[:] = data
        return self._offer(memory, len(data))

    def read(self, region: Region) -> memoryview:
        """A private copy of the bytes of ``region``; raises ``TransferError`` after a timeout, or if it was dropped."""
        if region.address == self.address:
            with self._lock:
                offered = self._offered.get(region.number)
                if offered is not None:
                    return memoryview(bytearray(offered.payload(region.size)))
            raise TransferError("a payload is not there any more")
        try:
            memory = _Registered(self._agent, _HEAD.size + region.size)
        except Exception as error:
            raise TransferError(f"no memory could be registered with NIXL: {error}") from error
        try:
            self._transfer(region, memory)
        except TransferError:
            raise
        except Exception as error:  # NIXL's exceptions have no common class
            if isinstance(error, self._disconnected):
                with suppress(Exception):
                    self._agent.remove_remote_agent(region.address)
            raise TransferError(f"a payload did not come by NIXL: {error}") from error
        finally:
            if not any(memory is each for _handle, each in self._unfinished):
                memory.close()
        if _HEAD.unpack_from(memory.data.data)[0] != region.number:
            raise TransferError("a payload is not there any more")
        return memory.payload(region.size)

    def drop(self, region: Region) -> None:
        """Stop offering a region. Does nothing if it is not offered."""
        with self._lock:
            memory = self._offered.pop(region.number, None) if region.address == self.address else None
            if memory is None:
                return
            _HEAD.pack_into(memory.data.data, 0, 0)
            if self._spare.put(memory):
                return
        memory.close()

    def __len__(self) -> int:
        return len(self._offered)

    def close(self) -> None:
        """Drop all regions."""
        self._closed.set()
        self._server.join()
        with self._lock:
            held = [*self._offered.values(), *self._spare.clear()]
            self._offered.clear()
        for memory in held:
            memory.close()

    def _serve(self) -> None:
        """Serve peers that do not read by RDMA."""
        while not self._closed.wait(_SERVE):
            try:
                self._agent.get_new_notifs([_BACKEND])
            except Exception:  # NIXL's exceptions have no common class; continue with the next peer
                logger.exception("NIXL cannot answer its peers")
                self._closed.wait(1.0)

    def _offer(self, memory: _Registered, size: int) -> Region:
        with self._lock:
            self._next += 1
            _HEAD.pack_into(memory.data.data, 0, self._next)
            self._offered[self._next] = memory
            return Region(self.address, self._next, size, memory.at, memory.key)

    def _blank(self, size: int) -> _Registered:
        with self._lock:
            found = self._spare.take(_HEAD.size + size)
        return _Registered(self._agent, capacity_for(_HEAD.size + size)) if found is None else found

    def _transfer(self, region: Region, into: _Registered) -> None:
        agent = self._agent
        peer = agent.add_remote_agent(region.key)
        here, there = (agent.get_xfer_descs([(at, _HEAD.size + region.size, 0)], _KIND) for at in (into.at, region.at))
        handle = agent.initialize_xfer("READ", here, there, peer, backends=[_BACKEND])
        try:
            state, end, pause = agent.transfer(handle), time.monotonic() + self._patience, _LOOK
            while state == "PROC" and time.monotonic() < end:
                time.sleep(pause)
                pause = min(_LONGEST_LOOK, 2 * pause)
                state = agent.check_xfer_state(handle)
        finally:
            try:
                handle.release()
            except Exception:  # noqa: BLE001 - it is not known to have ended: its memory stays
                self._unfinished.append((handle, into))
        if state != "DONE":
            why = "in time" if state == "PROC" else f"({state})"
            raise TransferError(f"a payload did not come by NIXL {why}")


def require_nixl() -> None:
    """Raise ``ConfigError`` if NIXL is not installed."""
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError('transport = "nixl" needs NIXL on every host of the cluster: pip install "mmserve[nixl]"')


def _agent(name: str) -> tuple[Any, type[Exception]]:
    """A thread-safe agent, and the exception for the disconnection of a peer."""
    require_nixl()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        from nixl._bindings import nixlRemoteDisconnectError
    except ImportError as error:
        raise ConfigError(f"NIXL is installed and cannot be loaded: {error}") from error
    settings = nixl_agent_config(
        enable_prog_thread=False, backends=[_BACKEND], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    return nixl_agent(name, settings), nixlRemoteDisconnectError
