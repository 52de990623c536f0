"""One constrained request in the decode loop: all that the loop knows of a constraint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from mmserve.constraint.session.answer import ConstrainedAnswer
from mmserve.constraint.session.choice import CommitPolicy, known_tokens, next_tokens, witness_tokens
from mmserve.constraint.session.draws import RejectionSampler, SampledRun
from mmserve.constraint.session.meter import Meter
from mmserve.constraint.session.top_k import Ranked, TopKObserver
from mmserve.core.candidates import Candidates, Chosen
from mmserve.core.canvas import Canvas


class Projected(NamedTuple):
    """A block of random tokens under a constraint; the answer's positions come first, padding after its budget."""

    tokens: np.ndarray  # int64 [n], the witness's
    given: np.ndarray  # bool [n], final from the start
    padding: int | None  # the token after the budget; None where that part of the canvas is free


@dataclass(frozen=True)
class Observed:
    """What another observer has found, where a pass was made elsewhere."""

    found: Ranked | SampledRun

    def ranked(self) -> Ranked | SampledRun:
        """What was found."""
        return self.found


@dataclass
class Session:
    """The constraint of one sample of a request, from admission to its last token; used by one thread at a time."""

    answer: ConstrainedAnswer
    causal: bool = False  # whether the model predicts next tokens only
    observers: list[TopKObserver | RejectionSampler | Observed] = field(
        default_factory=list
    )  # of the pass under way, until ``choose``

    @property
    def stats(self) -> Meter:
        """What the constraint has cost so far."""
        return self.answer.meter

    @property
    def warnings(self) -> tuple[str, ...]:
        """For the client."""
        return self.answer.warnings

    @property
    def cut(self) -> bool:
        """Whether a better answer was given up because its end did not fit the budget."""
        return self.answer.witness.cut

    @property
    def log_weight(self) -> float | None:
        """Importance weight of the sample (``draws.SampleState``); None where tokens are not drawn by rejection."""
        return None if self.answer.sampled is None else self.answer.sampled.log_weight

    def prepare(self, canvas: Canvas, mask_id: int) -> np.ndarray:
        """Commit the given tokens to a fresh ``canvas``; the tokens (int64 ``[size]``) that passes read of it."""
        answer, first = self.answer, canvas.prompt_length
        positions = np.flatnonzero(answer.given >= 0)
        canvas.commit(first + positions, answer.given[positions])
        canvas.padded, canvas.unread = answer.padded, answer.unread
        return np.concatenate([canvas.tokens[:first], answer.shown(canvas.tokens[first:], mask_id)])

    def forced(self, canvas: Canvas, drafted: np.ndarray) -> np.ndarray:
        """Tokens (int64) that a next-token model runs at its first masked positions: those that the constraint forces,
        or else the policy's ``drafted`` ones."""
        answer = self.answer
        with answer.meter.running():
            run = answer.forced_run()
            answer.forced = (
                len(run) > 0 and answer.sampled is None
            )  # a sample's model decides how forced text is spelled
            answer.drafted = (run if len(run) else drafted)[: canvas.size - canvas.known() - 1]
        return answer.drafted

    def observe(self, canvas: Canvas, targets: np.ndarray, *, more: bool = False) -> TopKObserver | RejectionSampler:
        """An observer of the logits of ``targets`` (positions of the canvas, ascending), for the next ``choose``.

        ``more``: the targets belong to the same pass as those observed before; without it, a new pass begins.
        """
        if not more:
            self.observers = []
        observer = self.answer.observer(targets - canvas.prompt_length, causal=self.causal)
        self.observers.append(observer)
        return observer

    def choose(self, canvas: Canvas, proposed: Candidates, commit: CommitPolicy, *, judged: bool = False) -> Chosen:
        """What of the witness becomes final after a pass: one position at least, if any of ``proposed`` is open.

        Args:
            proposed: the model's candidates for the observed positions, or for some of them.
            judged: whether a verifier model has judged them: then those after the first that differs do not count.

        Raises:
            ValueError: nothing was observed.
        """
        ranked = self._ranked()
        with self.answer.meter.running():
            if isinstance(ranked, SampledRun):
                first = canvas.prompt_length + self.answer.witness.known
                self.answer.take(ranked)
                return Chosen(np.arange(first, first + len(ranked.tokens)), ranked.tokens, ranked.log_probabilities)
            if self.causal:
                return next_tokens(self.answer, canvas, ranked)
            return witness_tokens(self.answer, canvas, proposed, commit, ranked, judged=judged)

    def sync(self, canvas: Canvas, *, revises: bool = False) -> None:
        """Follow what has become final, at the end of a step. ``revises``: tokens of the block may yet be replaced."""
        with self.answer.meter.running():
            known = known_tokens(canvas)
            if revises:
                known[canvas.block_start - canvas.prompt_length :] = -1
            self.answer.follow(known)
        self.answer.meter.end_step()

    def check(self, canvas: Canvas, text: str) -> None:
        """Raise ``FailedPrecondition`` if the finished answer ``text`` does not obey the constraint."""
        self.answer.check(text, known_tokens(canvas))

    def holes(self, canvas: Canvas) -> tuple[str, ...]:
        """The text of each hole of a template whose answer is whole; empty without a template."""
        return self.answer.holes(known_tokens(canvas))

    def prepare_block(self, canvas: Canvas) -> bool:
        """Put the given tokens onto an open block of random tokens; whether they fill it."""
        answer, first, block = self.answer, canvas.prompt_length, canvas.block()
        given = np.full(len(block), min(answer.witness.ends) if answer.padded else -1, np.int64)
        inside = answer.given[block[0] - first :][: len(block)]
        given[: len(inside)] = inside
        canvas.tokens[block] = np.where(given >= 0, given, canvas.tokens[block])
        return bool((given >= 0).all())

    def project(self, canvas: Canvas, logits: Iterable[torch.Tensor]) -> Projected:
        """The witness for an open block of random tokens, after a search among the model's candidates; ends the step.

        Until a block is final it may hold anything, so only its last tokens must obey.

        Args:
            logits: slices ``[rows, V]`` of the block's logits, those after the budget left out or not.
        """
        answer, first = self.answer, canvas.prompt_length
        targets = canvas.block()[: first + len(answer.witness.tokens) - canvas.block_start]
        best, left = answer.best_of(targets - first, causal=False), len(targets)
        for part in logits:
            rows = part[:left].float().clone()
            left -= len(rows)
            if len(rows):
                best.restrict(rows)
                best.take(rows, torch.logsumexp(rows, -1), None, None)
        ranked = best.ranked()
        with answer.meter.running():
            answer.search(self._budgeted(canvas), ranked.top, int(targets[-1]) + 1 - first)
        answer.meter.end_step()
        padding = min(answer.witness.ends) if answer.padded else None
        return Projected(answer.witness.tokens[targets - first], answer.given[targets - first] >= 0, padding)

    def sync_block(self, canvas: Canvas) -> None:
        """Follow a block of random tokens that has become final."""
        self.answer.follow(self._budgeted(canvas))

    def _budgeted(self, canvas: Canvas) -> np.ndarray:
        return known_tokens(canvas)[: len(self.answer.witness.tokens)]

    def observed(self) -> Ranked | SampledRun | None:
        """What was observed of the pass under way, for the next ``choose``; None = nothing."""
        found = [observer.ranked() for observer in self.observers]
        if len(found) < 2:
            return found[0] if found else None
        return Ranked.joined([part for part in found if isinstance(part, Ranked)])

    def _ranked(self) -> Ranked | SampledRun:
        """What was observed of the pass, which is then used up."""
        found, self.observers = self.observed(), []
        if found is None:
            raise ValueError("chosen before it was observed")
        return found
