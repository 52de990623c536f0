"""The transport between two processes that a pipe joins: payloads travel as bytes, in the order of sending."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import Any

import torch

from mmserve.core.request import RequestId
from mmserve.errors import TransferError
from mmserve.transfer.payloads import PAYLOADS


class PipeTransport:
    """One end of a pipe: that of the stage that sends, or that of the stage that receives.

    Payloads come to ``device``. A receiver waits up to ``seconds`` for a payload that is on its way.
    """

    in_process = False

    def __init__(self, connection: Connection, *, device: torch.device | str = "cpu", seconds: float = 60.0) -> None:
        self._connection, self._device, self._seconds = connection, device, seconds
        self._lock = threading.Lock()
        self._arrived: dict[RequestId, bytes] = {}

    def send(self, request: RequestId, payload: Any) -> None:
        """As ``Transport.send``; raises ``TransferError`` where nobody is at the other end."""
        data = PAYLOADS.encode(payload)
        try:
            with self._lock:
                self._connection.send_bytes(request.encode())
                self._connection.send_bytes(data)
        except OSError as error:
            raise TransferError(f"the receiver of payloads is gone: {error}") from error

    def receive(self, request: RequestId) -> Any:
        """As ``Transport.receive``; raises ``TransferError`` for bytes that cannot be read, and where the sender is
        gone. ``KeyError`` once the time to wait is over."""
        with self._lock:
            while request not in self._arrived:
                self._take(request)
            data = self._arrived.pop(request)
        return PAYLOADS.decode(data, self._device)

    def drop(self, request: RequestId) -> None:
        """As ``Transport.drop``."""
        with self._lock:
            self._arrived.pop(request, None)

    @property
    def waiting(self) -> int:
        """Payloads that have come and were not received."""
        return len(self._arrived)

    def _take(self, wanted: RequestId) -> None:
        try:
            if not self._connection.poll(self._seconds):
                raise KeyError(wanted)
            name = self._connection.recv_bytes().decode()
            self._arrived[name] = self._connection.recv_bytes()
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise TransferError(f"the sender of payloads is gone: {error!r}") from error
