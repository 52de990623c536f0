"""What a coordinator needs of the workers of a cluster, and of what carries states between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from mmserve.cluster.messages import Order, Parcel
from mmserve.core.request import RequestId
from mmserve.errors import MMServeError


class Worker(Protocol):
    """A worker as the coordinator sees it; no call but ``ask`` waits for it."""

    @property
    def name(self) -> str:
        """What it is called in logs."""

    @property
    def roles(self) -> frozenset[str]:
        """The stages that it runs now."""

    def take(self, orders: list[Order]) -> None:
        """Go on with these."""

    def cancel(self, model: str, ids: list[RequestId], error: MMServeError | None) -> None:
        """End these, by the ids that they have there, with ``error``; None = they go on elsewhere, so that nothing more
        is reported of them."""

    def serve(self, roles: Iterable[str]) -> None:
        """Run these stages from now on."""

    def ask(self, model: str, question: str, arguments: Sequence[Any]) -> Any:
        """What ``questions.QUESTIONS[question]`` returns there, one after another, but those about streams beside the
        others; raises what it raises, and ``asking.WorkerEnded`` where the worker ends, or does not answer in time."""

    def post(self, model: str, question: str, arguments: Sequence[Any]) -> None:
        """The same, in the same order, without waiting for it."""


class PayloadStore(Protocol):
    """Where states are between two workers; for any number of threads."""

    def keep(self, parcel: Parcel) -> Parcel:
        """A parcel of the same bytes that is there even if the worker that made it ends; may wait for that worker.
        Raises ``TransferError``; ``parcel`` is then still to be dropped."""

    def own(self, parcel: Parcel) -> Parcel:
        """As ``keep``, at the cost of a copy where the worker is on another host: there that is true of ``keep`` only
        while the worker lives."""

    def sent(self, parcel: Parcel, worker: str) -> Parcel:
        """The same for ``worker`` to read."""

    def drop(self, parcel: Parcel) -> None:
        """Nobody reads it any more."""
