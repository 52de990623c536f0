"""The interfaces of workers, and of the store of their states, for a coordinator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from mmserve.cluster.messages import Order, Parcel
from mmserve.core.request import RequestId
from mmserve.errors import MMServeError


class Worker(Protocol):
    """The coordinator's view of a worker; only ``ask`` blocks."""

    @property
    def name(self) -> str:
        """Its name in logs."""

    @property
    def roles(self) -> frozenset[str]:
        """The stages that it runs currently."""

    def take(self, orders: list[Order]) -> None:
        """Start or continue these requests."""

    def cancel(self, model: str, ids: list[RequestId], error: MMServeError | None) -> None:
        """End these requests, given by their ids there, with ``error``; None = they continue elsewhere, and are no
        longer reported."""

    def serve(self, roles: Iterable[str]) -> None:
        """Run only these stages from now on."""

    def ask(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        """The result of ``questions.QUESTIONS[question]`` there; calls are sequential, except for those about streams.
        Raises its errors, and ``asking.WorkerEnded`` if the worker exits, or does not reply in time."""

    def post(self, model: str, question: str, arguments: Sequence[Any]) -> None:
        """As ``ask``, in the same order, without waiting for the result."""


class PayloadStore(Protocol):
    """The store of states between two workers; thread-safe."""

    def persist(self, parcel: Parcel) -> Parcel:
        """A parcel with the same bytes that remains valid if the worker that wrote it exits; may wait for that worker.
        Raises ``TransferError``; ``parcel`` must then still be dropped."""

    def own(self, parcel: Parcel) -> Parcel:
        """As ``keep``, but also for workers on other hosts, whose states ``keep`` does not copy: these remain valid
        only while the worker runs."""

    def sent(self, parcel: Parcel, worker: str) -> Parcel:
        """The parcel converted for ``worker``."""

    def drop(self, parcel: Parcel) -> None:
        """Free a parcel that has no readers any more."""
