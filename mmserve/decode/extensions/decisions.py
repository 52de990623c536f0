"""Typed questions in the decode step: one pass over a canvas whose tokens are given, except for each branch's slot.

Nothing is sampled: the pass gives the log-probabilities of each slot's answers, and every slot becomes final at once,
with its most probable answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mmserve.core.candidates import Chosen
from mmserve.core.canvas import Canvas
from mmserve.core.decisions import Calibration, Decided, Decision
from mmserve.core.request import Request
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.extensions.base import Extension, Opening, RequestExtension
from mmserve.decode.state import Answer, DecodeState
from mmserve.models.base import LoadedModel
from mmserve.models.decisions import answer_tokens


@dataclass
class SlotState:
    """Log-probabilities of each slot's answers, for the slots read so far; plain data."""

    log_probabilities: list[np.ndarray] = field(default_factory=list)  # float32 [answers] each


class _Reader:
    """Reads the slots' rows of a pass into a ``SlotState``; slots come in the order of their questions."""

    def __init__(self, candidates: Sequence[tuple[int, ...]], state: SlotState) -> None:
        self._candidates, self._state = candidates, state
        state.log_probabilities.clear()

    def restrict(self, logits: Tensor) -> None:
        """No restriction: only the logits of answer tokens are read."""

    def take(
        self,
        logits: Tensor,
        log_z: Tensor,
        tempered: Tensor | None,
        noised: Tensor | None,
        masks: Tensor | None = None,
    ) -> None:
        """Read the next rows."""
        read = self._state.log_probabilities
        for row, total in zip(logits, log_z, strict=True):
            of = torch.tensor(self._candidates[len(read)], device=logits.device)
            read.append((row[of] - total).cpu().numpy())


@dataclass(eq=False)
class Slots(RequestExtension):
    """The typed questions of one request."""

    questions: tuple[Decision, ...]
    candidates: tuple[tuple[int, ...], ...]
    calibration: Calibration
    state: SlotState = field(default_factory=SlotState)

    @property
    def observes(self) -> bool:
        return True

    @property
    def complete_at_budget(self) -> bool:
        return True

    def observe(self, canvas: Canvas, positions: np.ndarray, *, more: bool) -> _Reader:
        return _Reader(self.candidates, self.state)

    def choose(self, canvas: Canvas, proposed: Candidates, commit: Commit) -> Chosen:
        read = self.state.log_probabilities
        best = [int(values.argmax()) for values in read]
        tokens = [of[index] for of, index in zip(self.candidates, best, strict=True)]
        sure = [values[index] for values, index in zip(read, best, strict=True)]
        return Chosen(proposed.positions, np.array(tokens, np.int64), np.array(sure, np.float32))

    def report(self, answer: Answer, d: DecodeState) -> Answer:
        decided = [
            Decided.of(values.tolist(), self.calibration.of(question.kind))
            for question, values in zip(self.questions, self.state.log_probabilities, strict=True)
        ]
        text = "\n".join(question.answers[each.best] for question, each in zip(self.questions, decided, strict=True))
        return replace(answer, text=text, completion_tokens=0, decisions=tuple(decided))  # the canvas is of questions

    def snapshot(self) -> SlotState:
        return self.state


class Decisions(Extension):
    """Typed questions of one model's requests."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def attach(self, opening: Opening) -> Slots | None:
        return self._of(opening.request, SlotState()) if opening.request.decisions else None

    def restore(self, request: Request, canvas: Canvas, snapshot: object) -> Slots | None:
        return self._of(request, snapshot) if isinstance(snapshot, SlotState) else None

    def _of(self, request: Request, state: SlotState) -> Slots:
        candidates = answer_tokens(self._model.tokenizer, request.decisions)
        return Slots(request.decisions, candidates, self._model.calibration, state)
