"""What passes between the stages for one request, and what decode keeps of it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.encoded import DeepStack
from mmserve.core.events import Snapshot
from mmserve.core.request import Request
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.commit.base import Verdict
from mmserve.decode.constrained.state import Constrained
from mmserve.decode.recompute import Recompute
from mmserve.decode.repairing import AskingRows, Repairing
from mmserve.decode.text import TextStream
from mmserve.kv.reducer import Reducing


@dataclass(frozen=True)
class Stepped:
    """What one step gave for one request: new final text, the canvas if asked for, and why it ended, if it did."""

    delta: str
    snapshot: Snapshot | None
    reason: str | None  # None = goes on; "end", "stop" or "length"
    pages: int | None = None  # how many it needs from now on; None = all that it has
    rows: int | None = None  # positions of its next pass; None = not known before


@dataclass
class Taken:
    """What comes of K/V that were taken from elsewhere."""

    held: np.ndarray  # bool [canvas]: positions whose K/V stay as they were taken; no policy runs them
    repairing: Repairing | None = None  # where some of them are run while the answer is decoded

    def absorb(self, seen: AskingRows) -> None:
        """Take over what a pass showed, now that it is done; what it ran is the prompt's own from here on."""
        if self.repairing is None:
            raise ValueError("nothing was to be noted of this pass")
        self.repairing.absorb(seen)
        self.held[seen.rows] = False


#: K/V of images on their way into a request's pages: how many positions each piece of that work has run through a
#: layer, and in the end what came of it.
Taking = Generator[int, None, Taken]


@dataclass
class CompanionState:
    """What a companion has of one request, and what it says to the pass that is under way."""

    embeddings: Tensor  # [N, D] of the companion, current at the prompt's positions and at those it has run
    seen: np.ndarray  # int64 [N], the token behind the K/V of each position; -1 = none, or of another prefix
    drafted: np.ndarray | None = None  # int64, from when it is drafted until candidates are judged by it
    verdict: Verdict | None = None  # on the candidates, until they are chosen from
    forwards: int = 0  # passes made
    deep: DeepStack | None = None  # the companion's, of the prompt's visual tokens


@dataclass(frozen=True)
class Guidance:
    """The sequence of a guided request whose prompt is masks (``decode/guidance.py``): where its K/V and what passes
    read are."""

    scale: float
    pages: np.ndarray  # int64 page ids, in order of position
    embeddings: Tensor  # [N, D], current at every position


@dataclass
class Prefilling:
    """A request in prefill: its canvas, its pages and embeddings, and how many positions have been run."""

    canvas: Canvas
    pages: np.ndarray  # int64 page ids, in order of position
    embeddings: Tensor  # [N, D]
    commit: Commit
    run: int = 0
    reused: int = 0  # positions, counted from the left, that earlier requests ran
    taking: Taking | None = None  # until K/V that are taken from elsewhere are in its pages
    taken: Taken | None = None  # what came of that
    companion: CompanionState | None = None  # for policies that ask for it
    constrained: Constrained | None = None
    deep: DeepStack | None = None
    reducing: Reducing | None = None  # where K/V are to be dropped
    guidance: Guidance | None = None


@dataclass
class Prefilled:
    """Prefill → decode: the canvas, its K/V pages and embeddings, and the candidates of step 0."""

    canvas: Canvas
    pages: np.ndarray  # int64 page ids, in order of position
    embeddings: Tensor  # [N, D], current at every position
    candidates: Candidates
    recomputed: int  # token positions run through the model so far
    held: int  # positions with K/V
    companion: CompanionState | None = None
    constrained: Constrained | None = None
    deep: DeepStack | None = None  # for policies that run the prompt again
    reducing: Reducing | None = None
    taken: Taken | None = None
    guidance: Guidance | None = None


@dataclass
class Decoding:
    """A request in decode: what prefill handed over, its policies, and its text so far."""

    request: Request
    prefilled: Prefilled
    recompute: Recompute
    commit: Commit
    text: TextStream
    candidates: Candidates | None  # of step 0, until its tokens are chosen
    log_probabilities: np.ndarray  # float32 [N], of the committed tokens of the answer
    rows: np.ndarray | None = None  # positions of the next pass, from when they are chosen until it is done
    forwards: int = 1
    edits: int = 0  # committed tokens that were replaced
    fresh: tuple[np.ndarray, np.ndarray] | None = None  # positions and tokens whose embeddings are not yet in place

    @property
    def canvas(self) -> Canvas:
        return self.prefilled.canvas

    @property
    def companion(self) -> CompanionState | None:
        return self.prefilled.companion

    @property
    def recomputed(self) -> int:
        """Token positions run through the model so far."""
        return self.prefilled.recomputed

    @property
    def held(self) -> int:
        """Positions with K/V."""
        return self.prefilled.held

    @property
    def evicted(self) -> int:
        """Positions whose K/V were dropped."""
        return self.prefilled.reducing.evicted if self.prefilled.reducing is not None else 0

    @property
    def constrained(self) -> Constrained | None:
        return self.prefilled.constrained
