"""State of a request between the stages, and during decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from mmserve.core.canvas import MASKED, Canvas
from mmserve.core.canvas_record import CanvasRecord
from mmserve.core.decisions import Decided
from mmserve.core.encoded import DeepStack
from mmserve.core.events import CommittedToken, ConstraintStats, Draft, PromptToken, Snapshot
from mmserve.core.progress import Step
from mmserve.core.request import Request
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.extensions.base import RequestExtension
from mmserve.decode.prompt_scores import PromptScores
from mmserve.decode.recompute import Recompute
from mmserve.decode.text import TextStream
from mmserve.kv.ahead import Outgoing
from mmserve.models.lora import Adapter


@dataclass(frozen=True)
class Stepped:
    """The result of one step for one request: new final text, snapshots if requested, and the finish reason."""

    delta: str
    snapshot: Snapshot | None
    reason: str | None  # finish reason; None = continues; "end", "stop" or "length"
    pages: int | None = None  # pages that it needs from now on; None = no change
    rows: int | None = None  # positions of its next pass; None = not known yet
    committed: int = 0  # positions that became final
    step: Step | None = None  # only of a traced request
    draft: Draft | None = None  # changes of the canvas, if requested


@dataclass(frozen=True)
class Answer:
    """The answer of a request that ended in decode; ``tokens`` only if requested."""

    text: str
    completion_tokens: int
    forwards: int
    recomputed_tokens: int
    edits: int
    kv_positions: int
    tokens: tuple[CommittedToken, ...]
    companion_forwards: int = 0
    warnings: tuple[str, ...] = ()
    closed_by_budget: bool = False
    log_weight: float | None = None
    constraint: ConstraintStats | None = None
    holes: tuple[str, ...] = ()  # of a template
    decisions: tuple[Decided, ...] = ()  # of typed questions
    stop: str = ""  # the stop string that ended it
    end_token: CommittedToken | None = None  # that ended it, as ``tokens``


class DecodeState(Protocol):
    """The decode state of a request, for every kind of model."""

    @property
    def request(self) -> Request: ...

    @property
    def canvas(self) -> Canvas: ...

    @property
    def text(self) -> TextStream: ...

    @property
    def extensions(self) -> tuple[RequestExtension, ...]: ...

    @property
    def log_probabilities(self) -> np.ndarray:
        """Float32 ``[N]``, of the final tokens of the answer."""
        ...

    @property
    def record(self) -> CanvasRecord | None:
        """The latest candidates of each position; None if not requested."""
        ...

    @property
    def forwards(self) -> int: ...

    @property
    def edits(self) -> int:
        """Number of committed tokens that were replaced."""
        ...

    @property
    def recomputed(self) -> int:
        """Number of token positions run through the model so far."""
        ...

    @property
    def held(self) -> int:
        """Number of positions with K/V."""
        ...


@dataclass(frozen=True)
class Guidance:
    """The second sequence of a guided request, whose prompt is masks (``decode/guidance.py``): its pages and
    embeddings."""

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
    extensions: tuple[RequestExtension, ...] = ()
    run: int = 0
    reused: int = 0  # leading positions whose K/V come from earlier requests
    deep: DeepStack | None = None
    guidance: Guidance | None = None
    adapter: Adapter | None = None
    masks_run: int = 0  # positions of the guided second sequence that have been run
    outgoing: Outgoing | None = None  # transfer of its K/V to another store, ahead of the handover
    prompt_scores: PromptScores | None = None  # of the prompt's tokens, if requested

    @property
    def lacks_masks(self) -> bool:
        """Whether the guided second sequence has fewer positions in its pages than the request's own, because of
        sharing."""
        return self.guidance is not None and self.masks_run < self.run

    @property
    def rewrites_prompt(self) -> bool:
        """Whether K/V that a pass has written may change before decode."""
        return self.guidance is not None or any(each.rewrites_prompt for each in self.extensions)


@dataclass
class Prefilled:
    """Handover from prefill to decode: the canvas, its K/V pages and embeddings, and the candidates of step 0."""

    canvas: Canvas
    pages: np.ndarray  # int64 page ids, in order of position
    embeddings: Tensor  # [N, D], current at every position
    candidates: Candidates
    recomputed: int  # token positions run through the model so far
    held: int  # positions with K/V
    extensions: tuple[RequestExtension, ...] = ()
    deep: DeepStack | None = None  # for policies that run the prompt again
    guidance: Guidance | None = None
    adapter: Adapter | None = None
    ahead: int = 0  # number of chunks in which its K/V were sent ahead; 0 = not sent
    prompt_tokens: tuple[PromptToken, ...] = ()  # with log-probabilities, if requested


@dataclass
class Decoding:
    """A request in decode: the handover from prefill, its policies, and its text so far."""

    request: Request
    prefilled: Prefilled
    recompute: Recompute
    commit: Commit
    text: TextStream
    candidates: Candidates | None  # of step 0, until its tokens are chosen
    log_probabilities: np.ndarray  # float32 [N], of the committed tokens of the answer
    rows: np.ndarray | None = None  # positions of the next pass, from their selection until the pass is done
    forwards: int = 1
    edits: int = 0  # committed tokens that were replaced
    fresh: tuple[np.ndarray, np.ndarray] | None = None  # positions and tokens whose embeddings are not yet in place
    record: CanvasRecord | None = None  # the latest candidates of each position, if requested

    @property
    def canvas(self) -> Canvas:
        return self.prefilled.canvas

    @property
    def extensions(self) -> tuple[RequestExtension, ...]:
        return self.prefilled.extensions

    @property
    def recomputed(self) -> int:
        """Number of token positions run through the model so far."""
        return self.prefilled.recomputed

    @property
    def held(self) -> int:
        """Number of positions with K/V."""
        return self.prefilled.held

    @property
    def pending_rows(self) -> int:
        """Number of rows that its extensions run before its next pass can run; 0 = it can run."""
        return sum(extension.pending_rows for extension in self.extensions)

    def count_pass(self, rows: int, held: int) -> None:
        """Record a pass that ran ``rows`` rows, after which ``held`` positions have K/V."""
        self.rows = None
        self.canvas.count_forward()
        self.forwards += 1
        self.prefilled.recomputed += rows * self.request.sequences
        self.prefilled.held = held

    def fill(self, positions: np.ndarray, tokens: np.ndarray, log_probabilities: np.ndarray) -> int:
        """Fill masked positions, replace committed ones, and advance to the next block if this one is final.

        Returns how many tokens were replaced.
        """
        self.log_probabilities[positions] = log_probabilities
        old = self.canvas.committed_at[positions] != MASKED
        edited = int(old.sum())
        if edited:
            self.canvas.edit(positions[old], tokens[old])
            positions, tokens = positions[~old], tokens[~old]
        self.canvas.commit(positions, tokens, hold=True)
        self.edits += edited
        if self.commit.is_final(self.canvas, edited):
            self.canvas.advance()
        return edited
