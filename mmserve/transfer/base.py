"""The interface that passes the state of a request from one stage to the next."""

from __future__ import annotations

from typing import Any, Protocol

from mmserve.core.request import RequestId


class Transport(Protocol):
    """Moves a request's payload from the stage that created it to the stage that needs it.

    The engine bounds the number of waiting payloads (``EngineConfig.max_pending_per_stage``).
    """

    @property
    def in_process(self) -> bool:
        """Whether both ends are in one process and over one store.

        If so, the payload is the sender's own object, without a copy. Otherwise it is one of ``core.payloads``.
        """
        ...

    def send(self, request: RequestId, payload: Any) -> None:
        """Send a payload; called by the stage that created it."""
        ...

    def receive(self, request: RequestId) -> Any:
        """The payload, which belongs to the receiver from then on. Raises ``KeyError`` if there is none."""
        ...

    def drop(self, request: RequestId) -> None:
        """Discard a payload that will not be received; does nothing if there is none."""
        ...

    @property
    def waiting(self) -> int:
        """Number of payloads sent and not yet received or dropped."""
        ...
