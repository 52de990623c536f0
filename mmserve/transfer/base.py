"""How one stage's result reaches the next stage: all of a request's state, and nothing beside it."""

from __future__ import annotations

from typing import Any, Protocol

from mmserve.core.request import RequestId


class Transport(Protocol):
    """Moves a request's payload from the stage that made it to the stage that needs it.

    The engine bounds how many payloads wait (``EngineConfig.max_pending_per_stage``); a transport holds and moves them.
    """

    @property
    def in_process(self) -> bool:
        """Whether both ends are in one process and over one store.

        A payload is then the sender's own object, without a copy. Otherwise it is one of ``core.payloads``.
        """
        ...

    def send(self, request: RequestId, payload: Any) -> None:
        """Called by the stage that made the payload."""
        ...

    def receive(self, request: RequestId) -> Any:
        """Called by the stage that needs the payload; it is the receiver's from then on. ``KeyError`` if not there."""
        ...

    def drop(self, request: RequestId) -> None:
        """Forget a payload that will not be received; nothing happens if there is none."""
        ...

    @property
    def waiting(self) -> int:
        """Payloads sent and not yet received or dropped."""
        ...
