"""A request's constraint in the decode step: what its session is asked, and when."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.constraint import Template
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.constrained.best import Best, Ranked
from mmserve.decode.constrained.draws import Draws, Run
from mmserve.decode.constrained.state import Constrained, known_tokens
from mmserve.decode.constrained.step import Chosen, chosen, led, settle
from mmserve.decode.extensions.base import RequestExtension
from mmserve.decode.forward import Pass
from mmserve.decode.state import Answer, Decoding, Live


@dataclass(eq=False)
class Constraint(RequestExtension):
    """The constraint of one request."""

    session: Constrained
    causal: bool
    _noted: list[Best | Draws] = field(default_factory=list, init=False)  # of the pass under way

    @property
    def observes(self) -> bool:
        return True

    @property
    def ends_whole(self) -> bool:
        return True

    def prepare(self, canvas: Canvas, mask_id: int) -> np.ndarray:
        """Put onto a fresh ``canvas`` what stands there from the start; the tokens (int64) that passes read of it."""
        self.session.prepare(canvas)
        answer = self.session.shown(canvas.tokens[canvas.prompt_length :], mask_id)
        return np.concatenate([canvas.tokens[: canvas.prompt_length], answer])

    def draft(self, canvas: Canvas, drafted: np.ndarray, *, ahead: bool) -> np.ndarray:
        """What must stand there anyway, or else what was ``drafted``."""
        return led(self.session, canvas, drafted) if ahead else drafted

    def watch(self, p: Pass, *, first: bool) -> Pass:
        self._noted = []
        return p

    def observe(self, canvas: Canvas, positions: np.ndarray) -> Best | Draws:
        self._noted.append(self.session.asks(canvas, positions, causal=self.causal))
        return self._noted[-1]

    def after_forward(self, p: Pass, seconds: float) -> None:
        self.session.meter.forward_seconds += seconds
        ranked = [noted.ranked() for noted in self._noted]
        self._noted = []
        if len(ranked) == 1:
            [self.session.ranked] = ranked
        elif ranked:  # parts of a pass: none of them is of draws
            self.session.ranked = Ranked.joined([each for each in ranked if not isinstance(each, Run)])

    def choose(self, canvas: Canvas, proposed: Candidates, commit: Commit) -> Chosen:
        return chosen(self.session, canvas, proposed, commit, causal=self.causal)

    def committed(self, d: Decoding, reason: str | None) -> None:
        """Note what became final; ``FailedPrecondition`` if the whole answer is not what the constraint asks for."""
        settle(self.session, d.canvas, d.commit)
        self.session.meter.end_step()
        self.check(d, reason)

    def check(self, d: Live, reason: str | None) -> None:
        """Raise ``FailedPrecondition`` if an answer that ended by itself is not what the constraint asks for."""
        if reason == "end":
            self.session.check(d.text.text, known_tokens(d.canvas))

    def report(self, answer: Answer, d: Live) -> Answer:
        session, asked = self.session, d.request.constraint
        whole = asked is not None and isinstance(asked.kind, Template) and not d.text.stopped
        return replace(
            answer,
            warnings=session.warnings,
            closed_by_budget=session.witness.cut,
            log_weight=session.sampled.log_weight if session.sampled is not None else None,
            constraint=session.meter.stats(),
            holes=session.holes(known_tokens(d.canvas)) if whole else (),
        )
