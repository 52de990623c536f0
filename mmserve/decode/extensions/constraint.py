"""A request's constraint in the decode step: calls its session at each hook."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mmserve.constraint.session.session import Session
from mmserve.core.candidates import Chosen
from mmserve.core.canvas import Canvas
from mmserve.core.constraint import Template
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.commit.base import LogitsObserver, uses_verifier
from mmserve.decode.extensions.base import RequestExtension
from mmserve.decode.forward import Pass
from mmserve.decode.state import Answer, DecodeState, Decoding


@dataclass(eq=False)
class Constraint(RequestExtension):
    """The constraint of one request."""

    session: Session

    @property
    def observes(self) -> bool:
        return True

    @property
    def seconds(self) -> float:
        return self.session.stats.seconds

    @property
    def complete_at_budget(self) -> bool:
        return True

    def draft(self, canvas: Canvas, drafted: np.ndarray, *, ahead: bool) -> np.ndarray:
        """The tokens that the constraint forces; if there are none, ``drafted``."""
        return self.session.forced(canvas, drafted) if ahead else drafted

    def observe(self, canvas: Canvas, positions: np.ndarray, *, more: bool) -> LogitsObserver:
        return self.session.observe(canvas, positions, more=more)

    def after_forward(self, p: Pass, seconds: float) -> None:
        self.session.stats.forward_seconds += seconds

    def choose(self, canvas: Canvas, proposed: Candidates, commit: Commit) -> Chosen:
        return self.session.choose(canvas, proposed, commit, verified=uses_verifier(commit))

    def committed(self, d: Decoding, reason: str | None) -> None:
        """Update the session with the final tokens. Raises ``FailedPrecondition`` if a complete answer violates the
        constraint."""
        self.session.sync(d.canvas, revises=d.commit.revises)
        self.check(d, reason)

    def check(self, d: DecodeState, reason: str | None) -> None:
        """Raises ``FailedPrecondition`` if an answer that ended by itself violates the constraint."""
        if reason == "end":
            self.session.check(d.canvas, d.text.text)

    def report(self, answer: Answer, d: DecodeState) -> Answer:
        session, asked = self.session, d.request.constraint
        whole = asked is not None and isinstance(asked.kind, Template) and not d.text.stopped
        return replace(
            answer,
            warnings=session.warnings,
            closed_by_budget=session.cut,
            log_weight=session.log_weight,
            constraint=session.stats.report(),
            holes=session.holes(d.canvas) if whole else (),
        )
