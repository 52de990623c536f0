"""Which of the witness's tokens become final after a pass: the commit policy decides how many and at which positions.

The policy is given the witness's tokens, each with its own probability, in place of the model's candidates. Any part of
one valid path is jointly safe, so whatever the policy takes of them keeps the answer completable. End tokens that the
model predicts are among them: they give the policy the length of its answer. Those that only pad the witness wait until
the whole answer is final. What is left of a block becomes final at once where only one text is possible.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.session.answer import ConstrainedAnswer, are_any
from mmserve.constraint.session.top_k import Ranked, first_among
from mmserve.core.candidates import Candidates, Chosen, leading
from mmserve.core.canvas import MASKED, Canvas

#: A gap of logits above which nothing is more certain; a single allowed token would have an infinite one.
_SURE = 10.0
_TINY = float(np.finfo(np.float32).tiny)


class CommitPolicy(Protocol):
    """The part of a commit policy (``decode.commit.base.Commit``) that a session needs."""

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
    """Next tokens: the forced ones, then the model's own, as long as it had seen the tokens before them."""
    known, asked = known_tokens(canvas), answer.witness.tokens[ranked.top.positions]
    count = 0
    for row, position in enumerate(ranked.top.positions.tolist()):
        drafted = int(answer.drafted[row]) if row < len(answer.drafted) else None
        if drafted is None or not answer.forced:
            answer.search(known, _rows(ranked.top, slice(row, row + 1)), position + 1)
        token = int(answer.witness.tokens[position])
        known[position] = token
        answer.follow(known)
        count += 1
        if token != drafted or token in answer.witness.ends:
            break
    positions = ranked.top.positions[:count]
    tokens = known[positions]
    log_probabilities = _head(ranked, count).log_probabilities(asked[:count], tokens)
    return Chosen(positions + canvas.prompt_length, tokens, log_probabilities)


def witness_tokens(
    answer: ConstrainedAnswer,
    canvas: Canvas,
    proposed: Candidates,
    commit: CommitPolicy,
    ranked: Ranked,
    *,
    judged: bool,
) -> Chosen:
    """Any of the open positions of a block, or of a canvas."""
    first, known = canvas.prompt_length, known_tokens(canvas)
    proposed = proposed.where(_within(answer.spans, proposed.positions - first))
    rows = np.searchsorted(ranked.top.positions, proposed.positions - first)
    at, masked = proposed.positions - first, canvas.masked[proposed.positions]
    top = ranked.top
    for row, token in zip(rows.tolist(), proposed.tokens.tolist(), strict=True):
        if top.tokens[row, 0] != token:  # chosen by a verifier model
            top = first_among(top, row, token)
    reopened = ~masked
    if commit.revises:
        reopened &= commit.choose(canvas, proposed)
        known[at[reopened]] = -1
    before = answer.witness.tokens[ranked.top.positions]
    answer.search(known, top, _searched(canvas, commit, ranked) - first)
    tokens = answer.witness.tokens[at]
    plain = ranked.log_probabilities(before, answer.witness.tokens[ranked.top.positions])[rows]
    shown = _projected(proposed, tokens, plain, ranked, rows, masked)
    meant = are_any(proposed.tokens, answer.witness.ends) & (not commit.closes)
    if judged:  # tokens after one that differs from the draft have not been judged
        kept = np.arange(len(rows)) <= leading(tokens == proposed.tokens)
        shown, at, masked, reopened = shown.where(kept), at[kept], masked[kept], reopened[kept]
        tokens, plain, meant = tokens[kept], plain[kept], meant[kept]
    final = _final(answer, canvas, shown, commit, masked, meant)
    if not commit.revises:  # tokens that may be replaced decide nothing
        known[at[final]] = tokens[final]
        decided = answer.decided(known)
        if len(decided):
            final |= np.isin(at, decided)
    final |= reopened
    final &= masked | (tokens != canvas.tokens[shown.positions])
    return _padded(answer, canvas, Chosen(shown.positions[final], tokens[final], plain[final]))


def _searched(canvas: Canvas, commit: CommitPolicy, ranked: Ranked) -> int:
    """The first position after those that are searched: the block, and further positions that the policy looks at."""
    if not commit.whole_canvas or not len(ranked.top.positions):
        return canvas.block_end
    return max(canvas.block_end, canvas.prompt_length + int(ranked.top.positions[-1]) + 1)


def _padded(answer: ConstrainedAnswer, canvas: Canvas, final: Chosen) -> Chosen:
    """``final`` and the padding after it, where nothing else is possible."""
    known = known_tokens(canvas)
    known[final.positions - canvas.prompt_length] = final.tokens
    padding = answer.settled(known)
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
    """The witness's tokens as candidates, with the figures of the model's logits.

    A token that the model would choose anyway is as sure as without the constraint, so that tokens become final in the
    order in which they would then; any other has its probability among the allowed tokens. The gap of a position that
    is final (not ``masked``) is the model's own.
    """
    best = ranked.plain[rows].max(-1)
    changed = tokens != proposed.tokens
    kept = np.exp(ranked.kept[rows])  # the probability of all allowed tokens
    alone = np.where(changed, np.exp(np.minimum(plain, 0.0)), proposed.confidence * kept)
    confidence = np.where(alone >= 1 - kept, alone, np.minimum(alone / np.maximum(kept, _TINY), 1.0))
    gap = proposed.gap
    if gap is not None:
        gap = np.where(changed & masked, np.minimum(plain - best, 0.0), np.minimum(gap, _SURE)).astype(np.float32)
    return Candidates(proposed.positions, tokens, confidence.astype(np.float32), gap, proposed.entropy)


def _final(
    answer: ConstrainedAnswer,
    canvas: Canvas,
    shown: Candidates,
    commit: CommitPolicy,
    masked: np.ndarray,
    meant: np.ndarray,
) -> np.ndarray:
    """Bool ``[n]``: which of the masked positions become final.

    An end of text that is not ``meant`` by the model is not, before all of the answer is: it would bound the answer,
    and nothing is won by it. With the last of the answer, the end right after it goes along. Of a template, each hole
    has an answer of its own.
    """
    at = shown.positions - canvas.prompt_length
    still_open = answer.content & canvas.masked[canvas.prompt_length :]
    content = masked & answer.content[at]
    ends = masked & ~content
    due = content | (ends & (meant | ~_touched(answer.spans, still_open)[at]))
    final = commit.choose(canvas, shown) & masked
    early = final & ends & ~meant & _touched(answer.spans, _without(still_open, at[final]))[at]
    if early.any() and due.any():
        final = np.zeros_like(final)
        final[due] = commit.choose(canvas, shown.where(due))
    if not final.any() and masked.any():  # a policy with its own order may choose none of these
        final[int(np.where(due if due.any() else ends, shown.confidence, -1.0).argmax())] = True
    if (final & ends).any() and not _without(still_open, at[final]).any():
        final |= ends & (at == answer.witness.length)
    return final


def _without(marked: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """``marked`` (bool ``[N]``) but for ``positions``."""
    left = marked.copy()
    left[positions] = False
    return left


def _touched(spans: tuple[tuple[int, int], ...], marked: np.ndarray) -> np.ndarray:
    """Bool ``[N]``: positions of the spans in which any is ``marked`` (bool ``[N]``)."""
    found = np.zeros_like(marked)
    for start, stop in spans:
        found[start:stop] = marked[start:stop].any()
    return found


def _within(spans: tuple[tuple[int, int], ...], positions: np.ndarray) -> np.ndarray:
    """Bool ``[n]``: which of ``positions`` lie in any of the spans."""
    return np.any([(positions >= start) & (positions < stop) for start, stop in spans], axis=0)


def _rows(top: TopK, rows: slice) -> TopK:
    return TopK(top.positions[rows], top.tokens[rows], top.log_probabilities[rows])


def _head(ranked: Ranked, count: int) -> Ranked:
    head = slice(0, count)
    return Ranked(_rows(ranked.top, head), ranked.plain[head], ranked.own[head], ranked.kept[head])
