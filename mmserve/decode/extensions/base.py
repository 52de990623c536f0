"""The protocol of extensions: what a request may have beside the plain decode step.

An ``Extension`` belongs to a model's decoder and holds no state of any request. It attaches a ``RequestExtension`` to
each request that asks for it, which has that request's state and is called at the points of its steps. Hooks that a
class does not override do nothing, so a request without extensions takes the plain path. Where several extensions of a
request decide on the same value, they are called in the order of ``Decoding.extensions``, each with what the one
before it returned.

Every hook before ``choose`` may be called again for the same pass: a pass that fails is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from mmserve.core.candidates import Chosen
from mmserve.core.canvas import Canvas
from mmserve.core.encoded import DeepStack, Encoded
from mmserve.core.request import Request
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.commit.base import LogitsObserver
from mmserve.decode.forward import Pass

if TYPE_CHECKING:
    from mmserve.decode.state import Answer, Decoding, Live, Prefilling


class RequestExtension:
    """One extension of one request: its state, and its part in each step."""

    @property
    def observes(self) -> bool:
        """Whether it looks at the logits of each pass. The first pass then has no draft."""
        return False

    @property
    def runs_ahead(self) -> bool:
        """Whether a pass may run several new positions, drafts of its constraint, without changing their results."""
        return True

    @property
    def reused(self) -> int:
        """Positions of the prompt that no pass of prefill runs."""
        return 0

    @property
    def evicted(self) -> int:
        """Positions whose K/V were dropped."""
        return 0

    @property
    def rewrites_prompt(self) -> bool:
        """Whether K/V that a pass of prefill has written may change before decode."""
        return False

    @property
    def waits(self) -> int:
        """How many rows ``before_rows`` runs at the next step, where it has more to do before the next pass is due; 0 =
        that is due."""
        return 0

    @property
    def seconds(self) -> float:
        """Processor time that it took of the request's decode steps so far, where it measures that."""
        return 0.0

    @property
    def ends_whole(self) -> bool:
        """Whether an answer that fills its budget has come to its end there, and is not cut."""
        return False

    def ready(self, most: int) -> bool:
        """Go on with what comes before the first pass of prefill, by ``most`` positions times layers (0 = all of it);
        whether that pass is due now."""
        return True

    def draft(self, canvas: Canvas, drafted: np.ndarray, *, ahead: bool) -> np.ndarray:
        """Tokens (int64) to run at the first masked positions in place of ``drafted``, the policy's draft.

        ``ahead``: whether a draft may be longer than what the policy commits a step (``runs_ahead`` of all extensions).
        """
        return drafted

    def rows(self, rows: np.ndarray, *, first: bool) -> np.ndarray:
        """The positions (int64, ascending) that a pass runs in place of ``rows``; ``first``: a pass of prefill."""
        return rows

    def watch(self, p: Pass, *, first: bool) -> Pass:
        """``p`` with what is to be observed in it; ``first``: a pass of prefill."""
        return p

    def observe(self, canvas: Canvas, positions: np.ndarray, *, more: bool) -> LogitsObserver | None:
        """What observes the logits of ``positions`` (int64, ascending) while they become candidates.

        ``more``: others of the same pass were observed before.
        """
        return None

    def after_forward(self, p: Pass, seconds: float) -> None:
        """Take over what the pass showed, now that it has its candidates. ``seconds``: its processor time."""

    def verify(self, canvas: Canvas, proposed: Candidates, commit: Commit) -> Candidates:
        """What is left of the candidates ``proposed``, and what replaces them."""
        return proposed

    def choose(self, canvas: Canvas, proposed: Candidates, commit: Commit) -> Chosen | None:
        """What becomes final, in place of the policy's own choice; None = that choice."""
        return None

    def committed(self, d: Decoding, reason: str | None) -> None:
        """Tokens became final; ``reason`` is why the answer ended, if it did. May raise what ends the request."""

    def report(self, answer: Answer, d: Live) -> Answer:
        """``answer`` of a request that ended, with the extension's fields."""
        return answer

    def snapshot(self) -> object | None:
        """Its state as plain data, a dataclass of numbers, arrays and tensors; None where there is none.

        It is the state itself, not a copy: it is read before the next step.
        """
        return None


@dataclass(frozen=True, eq=False)
class Opening:
    """A request that begins, as extensions see it."""

    request: Request
    encoded: Encoded
    canvas: Canvas
    pages: np.ndarray  # int64 page ids, in order of position
    embeddings: Tensor  # [N, D]
    deep: DeepStack | None


class Extension:
    """One extension of a model's decoder; holds no state of any request."""

    def attach(self, opening: Opening) -> RequestExtension | None:
        """The extension of a request that begins; None where the request does not ask for it."""
        raise NotImplementedError

    def restore(self, request: Request, canvas: Canvas, snapshot: object) -> RequestExtension | None:
        """The extension of a request in decode from its ``snapshot``; None where that is of another kind."""
        raise NotImplementedError

    def after_prefill(self, batch: Sequence[tuple[Prefilling, np.ndarray]]) -> None:
        """A pass of prefill ran these rows (int64, ascending) of each request."""

    def before_rows(self, batch: Sequence[Decoding]) -> None:
        """The next pass of these requests is about to be made."""

    def after_candidates(self, batch: Sequence[Decoding]) -> None:
        """All requests of a step have candidates."""


def watched(p: Pass, extensions: Sequence[RequestExtension], *, first: bool = False) -> Pass:
    """``p`` with what the ``extensions`` of its request observe in it."""
    for extension in extensions:
        p = extension.watch(p, first=first)
    return p
