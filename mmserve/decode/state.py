"""What passes between the stages for one request, and what decode keeps of it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mmserve.core.canvas import Canvas
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


@dataclass(frozen=True)
class Span:
    """The rows of a prompt that an image or a clip became, and what of it pruning left."""

    start: int
    stop: int
    place: int  # where it begins for the rotary embedding: its first row stands there, unless that was pruned
    clip: bool

    def places_of(self, encoded: Encoded) -> np.ndarray:
        """Where its rows stand, counted from where it begins: int64 ``[n]``, or ``[axes, n]``."""
        if encoded.places is None:
            return np.arange(self.stop - self.start)
        return encoded.places[..., self.start : self.stop] - self.place

    def visual_of(self, encoded: Encoded) -> tuple[np.ndarray, Tensor | None]:
        """Which of its rows are visual tokens (int64, ascending), and those tokens ``[n, visual width]``."""
        first, end = np.searchsorted(encoded.image_rows, [self.start, self.stop]).tolist()
        features = None if encoded.features is None else encoded.features[first:end]
        return encoded.image_rows[first:end] - self.start, features


@dataclass(frozen=True)
class Past:
    """K/V of rows of a prompt that were computed before the request came, such as those of a stream of video.

    Both ``[N, n, G, K]``, keys before rotation; nobody changes them while a request has them.
    """

    rows: np.ndarray  # int64 [n], ascending: which rows of the prompt they are of; never its last
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Encoded:
    """Encode → prefill: the prompt as ids, and the visual tokens that stand at ``image_rows`` instead of embeddings."""

    ids: np.ndarray  # int64 [prompt]
    image_rows: np.ndarray  # int64 [visual tokens], ascending
    features: Tensor | None  # [visual tokens, visual width]; None without images
    companion_features: Tensor | None = None  # the same by the companion's tower, for policies that ask for it
    places: np.ndarray | None = None  # int64 [prompt + 1], or [axes, prompt + 1]: see ``Canvas.create``
    pruned: int = 0  # visual tokens that are gone
    spans: tuple[Span, ...] = ()  # of each image and clip, in order
    span_keys: tuple[bytes, ...] = ()  # of each, where its K/V are to be taken from elsewhere
    past: Past | None = None  # rows that no pass runs: their K/V are there already


@dataclass(frozen=True)
class DeepStack:
    """What a request's visual tokens add to the hidden states behind the first layers (see ``DeepRows``)."""

    positions: np.ndarray  # int64 [n], ascending
    features_nLD: Tensor


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
