"""One decode step of a batch, the same for every kind of model: masked diffusion, uniform-state diffusion, next token.

draft → rows → forward → candidates, for all requests together (``propose``), then choose → commit → emit for each
(``commit``). What either does is the decoder's; see ``decode/loop.py`` and ``decode/uniform_state/decoder.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from mmserve.constraint.session.session import Session
from mmserve.core.encoded import Encoded
from mmserve.core.isolation import run_isolated
from mmserve.core.payloads import CanvasPayload, PrefilledPayload
from mmserve.core.request import Request
from mmserve.decode.state import Answer, Live, Stepped
from mmserve.kv.table import PageTable
from mmserve.observe import calls

P = TypeVar("P")  # a request in prefill
H = TypeVar("H")  # what prefill hands to decode
D = TypeVar("D", bound=Live)  # a request in decode


class Decoder(Protocol[P, H, D]):
    """Prefill and decode of one model; holds no state of any request."""

    def begin(self, request: Request, encoded: Encoded, pages: PageTable, session: Session | None = None) -> P:
        """The prefill state of a request: ``encoded`` its prompt, ``pages`` its pages, ``session`` its constraint."""
        ...

    def ready(self, begun: P) -> bool:
        """Go on with what comes before a request's first pass, by as much as a chunk; whether that pass is due."""
        ...

    def prefill(self, batch: list[tuple[Request, P]]) -> list[H | None]:
        """Run prompts: what each hands to decode, None where some of it is left to run. Can be repeated after a
        failure."""
        ...

    def open(self, request: Request, prefilled: H) -> D:
        """The decode state of a request that prefill handed over."""
        ...

    def payload(self, state: H | D) -> PrefilledPayload | CanvasPayload:
        """A request that goes on over another store, as plain data."""
        ...

    def restored(
        self,
        request: Request,
        payload: PrefilledPayload | CanvasPayload,
        pages: PageTable,
        session: Session | None = None,
    ) -> D:
        """A request that goes on here, over ``pages`` of this store; ``session``: its constraint.

        Raises ``TransferError`` where what came does not fit this store, or this server.
        """
        ...

    def propose(self, batch: list[D]) -> list[None]:
        """Candidates for each request that has none, from one forward pass. Can be repeated after a failure."""
        ...

    def commit(self, d: D) -> Stepped:
        """Make the chosen candidates of one request final, and emit what that gives."""
        ...

    def answer(self, d: D) -> Answer:
        """The answer of a request that ended."""
        ...

    def give_way(self, prefill: Callable[[], None], decode: Callable[[], None]) -> None:
        """Have passes of prefill and of decode call these in each layer: others may use the thread meanwhile."""
        ...


def step(decoder: Decoder[P, H, D], batch: list[D]) -> list[Stepped | BaseException]:
    """One step of each request: what it gave, or the exception that this request alone met."""
    outcomes: list[Stepped | BaseException] = []
    for d, failure in zip(batch, run_isolated(decoder.propose, batch), strict=True):
        calls.working.request = d.request
        outcomes += [failure] if failure is not None else run_isolated(lambda one: [decoder.commit(one[0])], [d])
    calls.working.request = None
    return outcomes
