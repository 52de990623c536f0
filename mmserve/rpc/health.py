"""``grpc.health.v1`` for asyncio: the status of each service, and of the server under the empty name.

grpcio's own asyncio servicer loses the other watchers of a service when one disconnects; this one does not, and ends
its watchers when the server stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mmserve.errors import NotFound
from mmserve.rpc.status import abort

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):
    """One status for all ``services`` and the server, initially NOT_SERVING; used on one event loop."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset({"", *services})
        self._status = NOT_SERVING
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, status: int) -> None:
        """Set the status and notify every watcher."""
        self._status = status
        self._wake()

    def close(self) -> None:
        """Send every watcher the last status and end its stream."""
        self._closed = True
        self._wake()

    async def Check(self, request: Any, context: Any) -> Any:
        """The current status of a service; NOT_FOUND for an unknown one."""
        if request.service not in self._services:
            await abort(context, NotFound(f"no service {request.service!r} here"))
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, request: Any, context: Any) -> None:
        """The status of a service now and after each change; SERVICE_UNKNOWN for an unknown one."""
        sent = None
        while True:
            changed, closed = self._changed, self._closed
            status = self._status if request.service in self._services else _UNKNOWN
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            if closed:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server stops")
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
