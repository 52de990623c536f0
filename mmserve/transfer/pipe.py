"""The transport between two processes connected by a pipe: payloads are serialized, in the order of sending."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import Any

import torch

from mmserve.core.request import RequestId
from mmserve.errors import TransferError
from mmserve.transfer.payloads import PAYLOADS


class PipeTransport:
    """One end of a pipe. At the receiving end (``receives``), a thread reads and stores incoming payloads, so that
    senders do not wait for a receiver.

    Tensors are placed on ``device``. ``receive`` waits up to ``seconds`` for a payload.
    """

    in_process = False

    def __init__(
        self, connection: Connection, *, receives: bool, device: torch.device | str = "cpu", seconds: float = 30.0
    ) -> None:
        self._connection, self._device, self._seconds = connection, device, seconds
        self._changed = threading.Condition()
        self._arrived: dict[RequestId, bytes] = {}
        self._ended: str | None = None  # reason for the end of the stream
        if receives:
            threading.Thread(target=self._take, name="mmserve-pipe", daemon=True).start()

    def send(self, request: RequestId, payload: Any) -> None:
        """As ``Transport.send``; raises ``TransferError`` if the other end is closed."""
        data = PAYLOADS.encode(payload)
        try:
            with self._changed:
                self._connection.send_bytes(request.encode())
                self._connection.send_bytes(data)
        except OSError as error:
            raise TransferError(f"the receiver of payloads is gone: {error}") from error

    def receive(self, request: RequestId) -> Any:
        """As ``Transport.receive``; raises ``TransferError`` for invalid bytes and if the sender is gone, ``KeyError``
        after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: request in self._arrived or self._ended is not None, self._seconds)
            if request not in self._arrived and self._ended is not None:
                raise TransferError(f"the sender of payloads is gone: {self._ended}")
            data = self._arrived.pop(request)
        return PAYLOADS.decode(data, self._device)

    def drop(self, request: RequestId) -> None:
        """As ``Transport.drop``."""
        with self._changed:
            self._arrived.pop(request, None)

    @property
    def waiting(self) -> int:
        """Number of payloads that arrived and were not received."""
        return len(self._arrived)

    def _take(self) -> None:
        try:
            while True:
                name, data = self._connection.recv_bytes().decode(), self._connection.recv_bytes()
                with self._changed:
                    self._arrived[name] = data
                    self._changed.notify_all()
        except (OSError, EOFError, ValueError) as error:
            with self._changed:
                self._ended = repr(error)
                self._changed.notify_all()
