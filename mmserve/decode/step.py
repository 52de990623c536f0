"""One decode step of a batch, the same for every kind of model: masked diffusion, uniform-state diffusion, next token.

draft → rows → forward → candidates, for all requests together (``propose``), then choose → commit → emit for each
(``commit``). Decoders implement both; see ``decode/loop.py`` and ``decode/uniform_state/decoder.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from mmserve.constraint.session.session import Session
from mmserve.core.encoded import Encoded
from mmserve.core.isolation import run_isolated
from mmserve.core.payloads import CanvasPayload, PrefilledPayload
from mmserve.core.request import Request
from mmserve.decode.state import Answer, DecodeState, Stepped
from mmserve.kv.table import PageTable
from mmserve.observe import calls

P = TypeVar("P")  # a request in prefill
H = TypeVar("H")  # the handover from prefill to decode
D = TypeVar("D", bound=DecodeState)  # a request in decode


class Decoder(Protocol[P, H, D]):
    """Prefill and decode of one model; holds no state of any request."""

    def begin(self, request: Request, encoded: Encoded, pages: PageTable, session: Session | None = None) -> P:
        """The prefill state of a request; ``encoded``: its prompt, ``pages``: its pages, ``session``: its
        constraint."""
        ...

    def ready(self, begun: P) -> bool:
        """Continue the work that precedes a request's first pass, up to a chunk. Returns whether that pass can run."""
        ...

    def prefill(self, batch: list[tuple[Request, P]]) -> list[H | None]:
        """Run prompts. Returns each request's handover to decode; None if part of its prompt is left. Can be repeated
        after a failure."""
        ...

    def open(self, request: Request, prefilled: H) -> D:
        """The decode state of a request after prefill."""
        ...

    def payload(self, state: H | D) -> PrefilledPayload | CanvasPayload:
        """The payload of a request that continues in another store, as plain data."""
        ...

    def restored(
        self,
        request: Request,
        payload: PrefilledPayload | CanvasPayload,
        pages: PageTable,
        session: Session | None = None,
    ) -> D:
        """A request that continues here, in ``pages`` of this store; ``session``: its constraint.

        Raises ``TransferError`` if the payload does not match this store or this server.
        """
        ...

    def propose(self, batch: list[D]) -> list[None]:
        """Make candidates for each request that has none, from one forward pass. Can be repeated after a failure."""
        ...

    def commit(self, d: D) -> Stepped:
        """Make the chosen candidates of one request final, and return the resulting events."""
        ...

    def answer(self, d: D) -> Answer:
        """The answer of a request that ended."""
        ...

    def set_yield_callbacks(self, prefill: Callable[[], None], decode: Callable[[], None]) -> None:
        """Set callbacks that prefill and decode passes call in each layer, to let other passes use the thread."""
        ...


def step(decoder: Decoder[P, H, D], batch: list[D]) -> list[Stepped | BaseException]:
    """One step of each request: its result, or the exception raised for this request alone."""
    outcomes: list[Stepped | BaseException] = []
    for d, failure in zip(batch, run_isolated(decoder.propose, batch), strict=True):
        calls.working.request = d.request
        outcomes += [failure] if failure is not None else run_isolated(lambda one: [decoder.commit(one[0])], [d])
    calls.working.request = None
    return outcomes
