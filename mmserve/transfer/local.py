"""The transport within one process: payloads are passed by reference, without a copy."""

from __future__ import annotations

from typing import Any

from mmserve.core.request import RequestId


class LocalTransport:
    """A dict of payloads; single operations on it are atomic, so stages in different threads can share it."""

    in_process = True

    def __init__(self) -> None:
        self._payloads: dict[RequestId, Any] = {}

    def send(self, request: RequestId, payload: Any) -> None:
        self._payloads[request] = payload

    def receive(self, request: RequestId) -> Any:
        return self._payloads.pop(request)

    def drop(self, request: RequestId) -> None:
        self._payloads.pop(request, None)

    @property
    def waiting(self) -> int:
        return len(self._payloads)
