"""What passes between the stages for one request, and what decode keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from mmserve.core.canvas import MASKED, Canvas
from mmserve.core.canvas_record import CanvasRecord
from mmserve.core.decisions import Decided
from mmserve.core.encoded import DeepStack
from mmserve.core.events import CommittedToken, ConstraintStats, Draft, Snapshot
from mmserve.core.progress import Step
from mmserve.core.request import Request
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.extensions.base import RequestExtension
from mmserve.decode.recompute import Recompute
from mmserve.decode.text import TextStream
from mmserve.kv.ahead import Outgoing
from mmserve.models.lora import Adapter

E = TypeVar("E", bound=RequestExtension)


@dataclass(frozen=True)
class Stepped:
    """What one step gave for one request: new final text, the canvas if asked for, and why it ended, if it did."""

    delta: str
    snapshot: Snapshot | None
    reason: str | None  # None = goes on; "end", "stop" or "length"
    pages: int | None = None  # how many it needs from now on; None = all that it has
    rows: int | None = None  # positions of its next pass; None = not known before
    committed: int = 0  # positions that became final
    step: Step | None = None  # of a request that is traced
    draft: Draft | None = None  # what changed of the canvas, if asked for


@dataclass(frozen=True)
class Answer:
    """The answer of a request that ended in decode; ``tokens`` only if it asked for them."""

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


class Live(Protocol):
    """What decode keeps of a request, whatever the kind of its model."""

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
        """The latest candidates of each position; None where the request asks for none."""
        ...

    @property
    def forwards(self) -> int: ...

    @property
    def edits(self) -> int:
        """Committed tokens that were replaced."""
        ...

    @property
    def recomputed(self) -> int:
        """Token positions run through the model so far."""
        ...

    @property
    def held(self) -> int:
        """Positions with K/V."""
        ...


def extension_of(extensions: tuple[RequestExtension, ...], kind: type[E]) -> E | None:
    """The extension of this kind; None where the request has none."""
    return next((each for each in extensions if isinstance(each, kind)), None)


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
    extensions: tuple[RequestExtension, ...] = ()
    run: int = 0
    reused: int = 0  # positions, counted from the left, that earlier requests ran
    deep: DeepStack | None = None
    guidance: Guidance | None = None
    adapter: Adapter | None = None
    masks_run: int = 0  # positions of the guided sequence, whose prompt is masks, that have been run
    outgoing: Outgoing | None = None  # its K/V on their way to another store

    @property
    def lacks_masks(self) -> bool:
        """Whether the guided sequence has fewer positions in its pages than the request's own, which were shared."""
        return self.guidance is not None and self.masks_run < self.run

    @property
    def rewrites_prompt(self) -> bool:
        """Whether K/V that a pass has written may change before decode."""
        return self.guidance is not None or any(each.rewrites_prompt for each in self.extensions)

    def extension(self, kind: type[E]) -> E | None:
        """Its extension of this kind, if it has one."""
        return extension_of(self.extensions, kind)


@dataclass
class Prefilled:
    """Prefill → decode: the canvas, its K/V pages and embeddings, and the candidates of step 0."""

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
    ahead: int = 0  # chunks that its K/V went ahead in, all of them; 0 = they are here alone


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
    record: CanvasRecord | None = None  # the latest candidates of each position, where the request asks for them

    @property
    def canvas(self) -> Canvas:
        return self.prefilled.canvas

    @property
    def extensions(self) -> tuple[RequestExtension, ...]:
        return self.prefilled.extensions

    @property
    def recomputed(self) -> int:
        """Token positions run through the model so far."""
        return self.prefilled.recomputed

    @property
    def held(self) -> int:
        """Positions with K/V."""
        return self.prefilled.held

    @property
    def waits(self) -> int:
        """Rows of what its extensions run before its next pass is due; 0 = it is due."""
        return sum(extension.waits for extension in self.extensions)

    def extension(self, kind: type[E]) -> E | None:
        """Its extension of this kind, if it has one."""
        return extension_of(self.extensions, kind)

    def count_pass(self, rows: int, held: int) -> None:
        """Note a pass that ran so many ``rows``; ``held`` positions have K/V now."""
        self.rows = None
        self.canvas.count_forward()
        self.forwards += 1
        self.prefilled.recomputed += rows * self.request.sequences
        self.prefilled.held = held

    def fill(self, positions: np.ndarray, tokens: np.ndarray, log_probabilities: np.ndarray) -> int:
        """Fill masked positions, replace committed ones, and go on to the next block if this one is final.

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
        if self.commit.settled(self.canvas, edited):
            self.canvas.advance()
        return edited
