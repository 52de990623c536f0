"""The protocol of extensions: optional features of a request in the decode step.

An ``Extension`` belongs to a model's decoder and holds no state of any request. It attaches a ``RequestExtension`` to
each request that uses the feature; that object has the request's state, and its hooks are called in each step. Hooks
that a class does not override do nothing. If several extensions of a request return a replacement for the same value,
they are called in the order of ``Decoding.extensions``, each with the previous one's result.

Every hook before ``choose`` may be called again for the same pass, because a failed pass is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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
    from mmserve.decode.state import Answer, DecodeState, Decoding, Prefilling

E = TypeVar("E")


class RequestExtension:
    """One extension of one request: its state, and its part in each step."""

    @property
    def observes(self) -> bool:
        """Whether it reads the logits of each pass. The first pass then has no draft."""
        return False

    @property
    def runs_ahead(self) -> bool:
        """Whether a pass may run several new positions at once, drafted by its constraint, without changing the
        result."""
        return True

    @property
    def reused(self) -> int:
        """Number of prompt positions that prefill does not run."""
        return 0

    @property
    def evicted(self) -> int:
        """Number of positions whose K/V were evicted."""
        return 0

    @property
    def rewrites_prompt(self) -> bool:
        """Whether K/V that prefill has written may change before decode."""
        return False

    @property
    def pending_rows(self) -> int:
        """Number of rows that ``before_rows`` runs in the next step, if it needs more work before the next pass can
        run; 0 = the pass can run."""
        return 0

    @property
    def seconds(self) -> float:
        """CPU time (seconds) that it took in the request's decode steps so far, if it measures that."""
        return 0.0

    @property
    def complete_at_budget(self) -> bool:
        """Whether an answer that fills its budget is complete, rather than truncated."""
        return False

    def ready(self, most: int) -> bool:
        """Continue the work that precedes the first pass of prefill, up to ``most`` positions times layers (0 = all of
        it). Returns whether that pass can run now."""
        return True

    def draft(self, canvas: Canvas, drafted: np.ndarray, *, ahead: bool) -> np.ndarray:
        """Tokens (int64) to run at the first masked positions, instead of ``drafted``, the policy's draft.

        ``ahead``: whether a draft may be longer than what the policy commits in one step (``runs_ahead`` of all
        extensions).
        """
        return drafted

    def rows(self, rows: np.ndarray, *, first: bool) -> np.ndarray:
        """The positions (int64, ascending) that a pass runs, instead of ``rows``; ``first``: a pass of prefill."""
        return rows

    def watch(self, p: Pass, *, first: bool) -> Pass:
        """``p`` with this extension's observation attached; ``first``: a pass of prefill."""
        return p

    def observe(self, canvas: Canvas, positions: np.ndarray, *, more: bool) -> LogitsObserver | None:
        """The observer of the logits of ``positions`` (int64, ascending) while they become candidates; None = no
        observer.

        ``more``: other positions of the same pass were observed before.
        """
        return None

    def after_forward(self, p: Pass, seconds: float) -> None:
        """Store what the pass observed; its candidates exist now. ``seconds``: CPU time of the pass."""

    def verify(self, canvas: Canvas, proposed: Candidates, commit: Commit) -> Candidates:
        """The candidates ``proposed`` after verification: accepted ones and replacements."""
        return proposed

    def choose(self, canvas: Canvas, proposed: Candidates, commit: Commit) -> Chosen | None:
        """The tokens that become final, instead of the policy's choice; None = the policy's choice."""
        return None

    def committed(self, d: Decoding, reason: str | None) -> None:
        """Called after tokens became final; ``reason``: the finish reason, if the answer ended. May raise an error that
        ends the request."""

    def report(self, answer: Answer, d: DecodeState) -> Answer:
        """``answer`` of a request that ended, with the extension's fields."""
        return answer

    def snapshot(self) -> object | None:
        """Its state as plain data (a dataclass of numbers, arrays and tensors); None if it has no state.

        Returns the state itself, not a copy; it must be read before the next step.
        """
        return None


@dataclass(frozen=True, eq=False)
class Opening:
    """The state of a request that begins, as passed to extensions."""

    request: Request
    encoded: Encoded
    canvas: Canvas
    pages: np.ndarray  # int64 page ids, in order of position
    embeddings: Tensor  # [N, D]
    deep: DeepStack | None


class Extension:
    """One extension of a model's decoder; holds no state of any request."""

    def attach(self, opening: Opening) -> RequestExtension | None:
        """The extension of a request that begins; None if the request does not use it."""
        raise NotImplementedError

    def restore(self, request: Request, canvas: Canvas, snapshot: object) -> RequestExtension | None:
        """The extension of a request in decode, from its ``snapshot``; None if the snapshot is another extension's."""
        raise NotImplementedError

    def after_prefill(self, batch: Sequence[tuple[Prefilling, np.ndarray]]) -> None:
        """Called after a pass of prefill ran these rows (int64, ascending) of each request."""

    def before_rows(self, batch: Sequence[Decoding]) -> None:
        """Called before the next pass of these requests is prepared."""

    def after_candidates(self, batch: Sequence[Decoding]) -> None:
        """Called when all requests of a step have candidates."""


def extension_of(extensions: Iterable[object], kind: type[E]) -> E | None:
    """The extension of this class among those of a request or decoder, or its snapshot; None if there is none."""
    return next((each for each in extensions if isinstance(each, kind)), None)


def watched(p: Pass, extensions: Sequence[RequestExtension], *, first: bool = False) -> Pass:
    """``p`` with the observations of all ``extensions`` of its request attached."""
    for extension in extensions:
        p = extension.watch(p, first=first)
    return p
