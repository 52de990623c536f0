"""The session of one constrained request: the interface of a constraint for the decode loop.

The commit policy decides how many of the witness's tokens become final after a pass, and at which positions. It is
given these tokens, each with its own probability, instead of the model's candidates. Any subset of a valid path is
jointly safe, so the answer remains completable whatever the policy chooses. End tokens that the model predicts are
included: they give the policy the length of its answer. End tokens that only pad the witness are left out until the
whole answer is final. The rest of a block becomes final at once if only one text is possible.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from mmserve.constraint.session.answer import ConstrainedAnswer, are_any
from mmserve.constraint.session.observer import Meter, Ranked, TopKObserver, first_among
from mmserve.constraint.session.sampling import RejectionSampler, SampledRun
from mmserve.core.candidates import Candidates, Chosen, leading
from mmserve.core.canvas import MASKED, Canvas

#: Maximum gap of logits; a single allowed token would have an infinite one.
_SURE = 10.0
_TINY = float(np.finfo(np.float32).tiny)


class Projected(NamedTuple):
    """A block of random tokens under a constraint; the answer's positions come first, then padding beyond its
    budget."""

    tokens: np.ndarray  # int64 [n], of the witness
    given: np.ndarray  # bool [n], final from the start
    padding: int | None  # the token beyond the budget; None if that part of the canvas is free


@dataclass
class Session:
    """The constraint of one sample of a request, from admission to its last token; not thread-safe."""

    answer: ConstrainedAnswer
    causal: bool = False  # whether the model only predicts next tokens
    #: Observers of the current pass, until ``choose``; and observations received from another process.
    observers: list[TopKObserver | RejectionSampler] = field(default_factory=list)
    found: list[Ranked | SampledRun] = field(default_factory=list)

    @property
    def stats(self) -> Meter:
        """The cost of the constraint so far."""
        return self.answer.meter

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the client."""
        return self.answer.warnings

    @property
    def cut(self) -> bool:
        """Whether a better answer was rejected because its end did not fit the budget."""
        return self.answer.witness.cut

    @property
    def log_weight(self) -> float | None:
        """Importance weight (natural log) of the sample (``sampling.SampleState``); None without rejection sampling."""
        return None if self.answer.sampled is None else self.answer.sampled.log_weight

    def prepare(self, canvas: Canvas, mask_id: int) -> np.ndarray:
        """Commit the given tokens to a fresh ``canvas``. Returns the tokens (int64 ``[size]``) that passes read."""
        answer, first = self.answer, canvas.prompt_length
        positions = np.flatnonzero(answer.given >= 0)
        canvas.commit(first + positions, answer.given[positions])
        canvas.padded, canvas.unread = answer.padded, answer.unread
        return np.concatenate([canvas.tokens[:first], answer.pass_input(canvas.tokens[first:], mask_id)])

    def forced(self, canvas: Canvas, drafted: np.ndarray) -> np.ndarray:
        """Tokens (int64) that a next-token model runs at its first masked positions: those that the constraint forces;
        if none, the policy's ``drafted`` ones."""
        answer = self.answer
        with answer.meter.running():
            run = answer.forced_run()
            # When sampling, the model decides the tokenisation of forced text.
            answer.forced = len(run) > 0 and answer.sampled is None
            answer.drafted = (run if len(run) else drafted)[: canvas.size - canvas.known() - 1]
        return answer.drafted

    def observe(self, canvas: Canvas, targets: np.ndarray, *, more: bool = False) -> TopKObserver | RejectionSampler:
        """An observer of the logits of ``targets`` (positions of the canvas, ascending), for the next ``choose``.

        ``more``: the targets belong to the same pass as those observed before; otherwise a new pass begins.
        """
        if not more:
            self.observers, self.found = [], []
        observer = self.answer.observer(targets - canvas.prompt_length, causal=self.causal)
        self.observers.append(observer)
        return observer

    def choose(self, canvas: Canvas, proposed: Candidates, commit: CommitPolicy, *, verified: bool = False) -> Chosen:
        """The tokens of the witness that become final after a pass: at least one, if any of ``proposed`` is open.

        Args:
            proposed: the model's candidates for the observed positions, or for some of them.
            verified: whether ``proposed`` are a verifier model's choices for a draft: none after the first that differs
                from it has been verified.

        Raises:
            ValueError: nothing was observed.
        """
        ranked = self.observed()
        self.observers, self.found = [], []
        if ranked is None:
            raise ValueError("chosen before it was observed")
        with self.answer.meter.running():
            if isinstance(ranked, SampledRun):
                first = canvas.prompt_length + self.answer.witness.known
                self.answer.take(ranked)
                return Chosen(np.arange(first, first + len(ranked.tokens)), ranked.tokens, ranked.log_probabilities)
            if self.causal:
                return next_tokens(self.answer, canvas, ranked)
            return witness_tokens(self.answer, canvas, proposed, commit, ranked, verified=verified)

    def sync(self, canvas: Canvas, *, revises: bool = False) -> None:
        """Update the witness at the end of a step. ``revises``: committed tokens of the block may still be replaced."""
        with self.answer.meter.running():
            known = known_tokens(canvas)
            if revises:
                known[canvas.block_start - canvas.prompt_length :] = -1
            self.answer.advance(known)
        self.answer.meter.end_step()

    def check(self, canvas: Canvas, text: str) -> None:
        """Raises ``FailedPrecondition`` if the finished answer ``text`` violates the constraint."""
        self.answer.check(text, known_tokens(canvas))

    def holes(self, canvas: Canvas) -> tuple[str, ...]:
        """The text of each hole of a template, whose answer must be complete; empty without a template."""
        return self.answer.holes(known_tokens(canvas))

    def prepare_block(self, canvas: Canvas) -> bool:
        """Write the given tokens to an open block of random tokens. Returns whether they fill it."""
        answer, first, block = self.answer, canvas.prompt_length, canvas.block()
        given = np.full(len(block), min(answer.witness.ends) if answer.padded else -1, np.int64)
        inside = answer.given[block[0] - first :][: len(block)]
        given[: len(inside)] = inside
        canvas.tokens[block] = np.where(given >= 0, given, canvas.tokens[block])
        return bool((given >= 0).all())

    def project(self, canvas: Canvas, logits: Iterable[torch.Tensor]) -> Projected:
        """The witness for an open block of random tokens, after a search among the model's candidates; ends the step.

        A block may hold any tokens until it is final, so only its final tokens must obey the constraint.

        Args:
            logits: slices ``[rows, V]`` of the block's logits, with or without those beyond the budget.
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
        """Update the witness with a block of random tokens that has become final."""
        self.answer.advance(self._budgeted(canvas))

    def _budgeted(self, canvas: Canvas) -> np.ndarray:
        return known_tokens(canvas)[: len(self.answer.witness.tokens)]

    def observed(self) -> Ranked | SampledRun | None:
        """The observation of the current pass, for the next ``choose``; None if there is none."""
        found = [*self.found, *(observer.ranked() for observer in self.observers)]
        if len(found) < 2:
            return found[0] if found else None
        return Ranked.joined([part for part in found if isinstance(part, Ranked)])


class CommitPolicy(Protocol):
    """The methods of a commit policy (``decode.commit.base.Commit``) that a session needs."""

    @property
    def whole_canvas(self) -> bool: ...

    @property
    def revises(self) -> bool: ...

    @property
    def closes(self) -> bool: ...

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray: ...


def known_tokens(canvas: Canvas) -> np.ndarray:
    """Int64 ``[N]``: the answer's committed tokens, -1 where masked."""
    answer = slice(canvas.prompt_length, canvas.size)
    return np.where(canvas.committed_at[answer] == MASKED, -1, canvas.tokens[answer])


def next_tokens(answer: ConstrainedAnswer, canvas: Canvas, ranked: Ranked) -> Chosen:
    """Next tokens: the forced ones, then the model's own, as long as the pass had run the tokens before them."""
    known, asked = known_tokens(canvas), answer.witness.tokens[ranked.top.positions]
    count = 0
    for row, position in enumerate(ranked.top.positions.tolist()):
        drafted = int(answer.drafted[row]) if row < len(answer.drafted) else None
        if drafted is None or not answer.forced:
            answer.search(known, ranked.top.rows(slice(row, row + 1)), position + 1)
        token = int(answer.witness.tokens[position])
        known[position] = token
        answer.advance(known)
        count += 1
        if token != drafted or token in answer.witness.ends:
            break
    positions = ranked.top.positions[:count]
    tokens = known[positions]
    log_probabilities = ranked.rows(slice(count)).log_probabilities(asked[:count], tokens)
    return Chosen(positions + canvas.prompt_length, tokens, log_probabilities)


def witness_tokens(
    answer: ConstrainedAnswer,
    canvas: Canvas,
    proposed: Candidates,
    commit: CommitPolicy,
    ranked: Ranked,
    *,
    verified: bool,
) -> Chosen:
    """The tokens that become final, at any open positions of a block or canvas."""
    first, known = canvas.prompt_length, known_tokens(canvas)
    offsets = proposed.positions - first
    proposed = proposed.where(np.any([(offsets >= start) & (offsets < stop) for start, stop in answer.spans], axis=0))
    rows = np.searchsorted(ranked.top.positions, proposed.positions - first)
    at, masked = proposed.positions - first, canvas.masked[proposed.positions]
    top = ranked.top
    for row, token in zip(rows.tolist(), proposed.tokens.tolist(), strict=True):
        if top.tokens[row, 0] != token:  # the verifier model's choice
            top = first_among(top, row, token)
    reopened = ~masked
    if commit.revises:
        reopened &= commit.choose(canvas, proposed)
        known[at[reopened]] = -1
    before = answer.witness.tokens[ranked.top.positions]
    end = canvas.block_end - first  # length of the searched part: the block, and further positions that the policy uses
    if commit.whole_canvas and len(ranked.top.positions):
        end = max(end, int(ranked.top.positions[-1]) + 1)
    answer.search(known, top, end)
    tokens = answer.witness.tokens[at]
    plain = ranked.log_probabilities(before, answer.witness.tokens[ranked.top.positions])[rows]
    projected = _projected(proposed, tokens, plain, ranked, rows, masked)
    model_ended = are_any(proposed.tokens, answer.witness.ends) & (not commit.closes)
    if verified:  # tokens after one that differs from the draft have not been verified
        kept = np.arange(len(rows)) <= leading(tokens == proposed.tokens)
        projected, at, masked, reopened = projected.where(kept), at[kept], masked[kept], reopened[kept]
        tokens, plain, model_ended = tokens[kept], plain[kept], model_ended[kept]
    final = _final(answer, canvas, projected, commit, masked, model_ended)
    if not commit.revises:  # replaceable tokens force nothing
        known[at[final]] = tokens[final]
        decided = answer.decided(known)
        if len(decided):
            final |= np.isin(at, decided)
    final |= reopened
    final &= masked | (tokens != canvas.tokens[projected.positions])
    return _padded(answer, canvas, Chosen(projected.positions[final], tokens[final], plain[final]))


def _padded(answer: ConstrainedAnswer, canvas: Canvas, final: Chosen) -> Chosen:
    """``final`` and the padding after it, if nothing else is possible."""
    known = known_tokens(canvas)
    known[final.positions - canvas.prompt_length] = final.tokens
    padding = answer.padding_positions(known)
    return Chosen(
        np.concatenate([final.positions, canvas.prompt_length + padding]),
        np.concatenate([final.tokens, answer.witness.tokens[padding]]),
        np.concatenate([final.log_probabilities, np.zeros(len(padding), np.float32)]),
    )


def _projected(
    proposed: Candidates,
    tokens: np.ndarray,
    plain: np.ndarray,
    ranked: Ranked,
    rows: np.ndarray,
    masked: np.ndarray,
) -> Candidates:
    """The witness's tokens as candidates, scored by the model's logits.

    A token that is also the model's choice has the same confidence as without the constraint, so that tokens become
    final in the same order; any other has its probability among the allowed tokens. The gap of a final position (not
    ``masked``) is the model's own.
    """
    best = ranked.plain[rows].max(-1)
    changed = tokens != proposed.tokens
    kept = np.exp(ranked.kept[rows])  # total probability of the allowed tokens
    alone = np.where(changed, np.exp(np.minimum(plain, 0.0)), proposed.confidence * kept)
    confidence = np.where(alone >= 1 - kept, alone, np.minimum(alone / np.maximum(kept, _TINY), 1.0))
    gap = proposed.gap
    if gap is not None:
        gap = np.where(changed & masked, np.minimum(plain - best, 0.0), np.minimum(gap, _SURE)).astype(np.float32)
    return Candidates(proposed.positions, tokens, confidence.astype(np.float32), gap, proposed.entropy)


def _final(
    answer: ConstrainedAnswer,
    canvas: Canvas,
    projected: Candidates,
    commit: CommitPolicy,
    masked: np.ndarray,
    model_ended: np.ndarray,
) -> np.ndarray:
    """Bool ``[n]``: which of the masked positions become final.

    An end of text that the model did not choose (not ``model_ended``) becomes final only with the whole answer: it
    would only bound the answer's length. It becomes final together with the answer's last token. In a template, each
    hole is a separate answer.
    """
    at = projected.positions - canvas.prompt_length
    still_open = answer.content & canvas.masked[canvas.prompt_length :]
    content = masked & answer.content[at]
    ends = masked & ~content
    due = content | (ends & (model_ended | ~_touched(answer.spans, still_open)[at]))
    final = commit.choose(canvas, projected) & masked
    early = final & ends & ~model_ended & _touched(answer.spans, _without(still_open, at[final]))[at]
    if early.any() and due.any():
        final = np.zeros_like(final)
        final[due] = commit.choose(canvas, projected.where(due))
    if not final.any() and masked.any():  # a policy with its own order may choose none of these
        final[int(np.where(due if due.any() else ends, projected.confidence, -1.0).argmax())] = True
    if (final & ends).any() and not _without(still_open, at[final]).any():
        final |= ends & (at == answer.witness.length)
    return final


def _without(marked: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """``marked`` (bool ``[N]``) without ``positions``."""
    left = marked.copy()
    left[positions] = False
    return left


def _touched(spans: tuple[tuple[int, int], ...], marked: np.ndarray) -> np.ndarray:
    """Bool ``[N]``: all positions of the spans that contain a ``marked`` one (bool ``[N]``)."""
    found = np.zeros_like(marked)
    for start, stop in spans:
        found[start:stop] = marked[start:stop].any()
    return found
