"""Replies of child processes: a constraint's grammar, and the first answer that obeys it."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.findings import Refused


@dataclass(frozen=True)
class Completion:
    """A completion: its tokens (no end token), and whether it is known that no shorter one exists."""

    tokens: tuple[int, ...]
    exact: bool


@dataclass(frozen=True)
class FirstAnswers:
    """The shortest answers found under a grammar.

    ``near``: by the search that every budget has. ``patient``: by the longer one, for budgets that ``near`` does not
    fit; None as long as ``asked`` is false, or where none was found. ``least``: tokens that every answer has at least.
    """

    near: Completion | None = None
    patient: Completion | None = None
    asked: bool = False
    least: int = 0
    late: bool = False  # a search was ended before it was over

    def covers(self, budget: int) -> bool:
        """Whether this says what an answer of ``budget`` tokens may be."""
        fits = self.near is not None and (self.near.exact or len(self.near.tokens) <= budget)
        return fits or self.asked or self.hopeless(budget)

    def hopeless(self, budget: int) -> bool:
        """Whether no answer of ``budget`` tokens was looked for: all are known to be far longer."""
        return self.near is None and not self.asked and self.least > budget

    def close(self, budget: int) -> Completion | None:
        """The shortest answer found with room for ``budget`` tokens, be it longer."""
        near = self.near
        if near is not None and (near.exact or len(near.tokens) <= budget or self.patient is None):
            return near
        return self.patient


@dataclass(frozen=True)
class CompileReply:
    """A grammar, or why there is none; its first answer, where it was asked for; and whether the same would come of
    the same question again."""

    outcome: Grammar | Refused
    first: FirstAnswers | None = None
    lasting: bool = True
