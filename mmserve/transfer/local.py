"""The transport within one process: payloads are handed over as they are, without a copy."""

from __future__ import annotations

from typing import Any

from mmserve.core.request import RequestId


class LocalTransport:
    """A table of payloads; single operations on a dict are atomic, so stages on threads share it safely."""

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
