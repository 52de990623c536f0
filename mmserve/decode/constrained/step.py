"""A step of a constrained request: the commit policy says how many and which, the witness says what.

The policy is shown the witness's tokens, each with its own probability, as if they were the model's candidates. Any
part of one valid path is jointly safe, so that whatever it takes of them keeps the answer completable. Ends of text
are part of it where the model says them, too: they tell it how long its answer is. Those that only fill the witness up
wait until all of the answer stands. What is left of a block becomes final at once where it can read in one way only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.session.draws import Run
from mmserve.constraint.session.meter import metered
from mmserve.constraint.session.session import Constrained, are_any, known_tokens
from mmserve.constraint.session.top_k import Ranked, first_among
from mmserve.core.canvas import Canvas
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.commit.base import Judged, leading

#: A gap of logits beyond which nothing is surer; where one token alone may stand there would be no end to it.
_SURE = 10.0
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Chosen:
    """What becomes final: tokens for positions of the canvas, and their log-probabilities."""

    positions: np.ndarray  # int64 [n]
    tokens: np.ndarray  # int64 [n]
    log_probabilities: np.ndarray  # float32 [n], before temperature, filters and constraint


@metered
def led(state: Constrained, canvas: Canvas, drafted: np.ndarray) -> np.ndarray:
    """Tokens (int64) for a next-token model's first masked positions: those that must stand there, or else the
    policy's ``drafted`` ones."""
    run = state.forced_run()
    state.forced = len(run) > 0 and state.sampled is None  # of a sample the model says how forced text is spelled
    state.drafted = (run if len(run) else drafted)[: canvas.size - canvas.known() - 1]
    return state.drafted


@metered
def chosen(state: Constrained, canvas: Canvas, proposed: Candidates, commit: Commit, *, causal: bool) -> Chosen:
    """What of the witness becomes final after a pass: one position at least, if any of ``proposed`` is open.

    ``proposed``: the model's candidates for the positions of ``state.ranked``, or for some of them.
    """
    ranked, state.ranked = state.ranked, None
    if ranked is None:
        raise ValueError("chosen before it was asked")
    if isinstance(ranked, Run):
        first = canvas.prompt_length + state.witness.known
        state.take(ranked)
        return Chosen(np.arange(first, first + len(ranked.tokens)), ranked.tokens, ranked.log_probabilities)
    if causal:
        return _one_by_one(state, canvas, ranked)
    return _together(state, canvas, proposed, commit, ranked)


@metered
def settle(state: Constrained, canvas: Canvas, commit: Commit) -> None:
    """Take note of what has become final. Where tokens may be replaced, those of the block count as open."""
    known = known_tokens(canvas)
    if commit.revises:
        known[canvas.block_start - canvas.prompt_length :] = -1
    state.follow(known)


def _one_by_one(state: Constrained, canvas: Canvas, ranked: Ranked) -> Chosen:
    """Next tokens: what is forced, then the model's own, for as long as it had seen what stands left of them."""
    known, asked = known_tokens(canvas), state.witness.tokens[ranked.top.positions]
    count = 0
    for row, position in enumerate(ranked.top.positions.tolist()):
        drafted = int(state.drafted[row]) if row < len(state.drafted) else None
        if drafted is None or not state.forced:
            state.search(known, _rows(ranked.top, slice(row, row + 1)), position + 1)
        token = int(state.witness.tokens[position])
        known[position] = token
        state.follow(known)
        count += 1
        if token != drafted or token in state.witness.ends:
            break
    positions = ranked.top.positions[:count]
    tokens = known[positions]
    log_probabilities = _head(ranked, count).log_probabilities(asked[:count], tokens)
    return Chosen(positions + canvas.prompt_length, tokens, log_probabilities)


def _together(state: Constrained, canvas: Canvas, proposed: Candidates, commit: Commit, ranked: Ranked) -> Chosen:
    """Any of the open positions of a block, or of a canvas."""
    first, known = canvas.prompt_length, known_tokens(canvas)
    proposed = proposed.where(_within(state.spans, proposed.positions - first))
    rows = np.searchsorted(ranked.top.positions, proposed.positions - first)
    at, masked = proposed.positions - first, canvas.masked[proposed.positions]
    top = ranked.top
    for row, token in zip(rows.tolist(), proposed.tokens.tolist(), strict=True):
        if top.tokens[row, 0] != token:  # a companion's choice
            top = first_among(top, row, token)
    reopened = ~masked
    if commit.revises:
        reopened &= commit.choose(canvas, proposed)
        known[at[reopened]] = -1
    before = state.witness.tokens[ranked.top.positions]
    state.search(known, top, _searched(canvas, commit, ranked) - first)
    tokens = state.witness.tokens[at]
    plain = ranked.log_probabilities(before, state.witness.tokens[ranked.top.positions])[rows]
    shown = _projected(proposed, tokens, plain, ranked, rows, masked)
    meant = are_any(proposed.tokens, state.witness.ends) & (not commit.closes)
    if _judges(type(commit)):  # what stands behind a token that was not the draft's has not been judged
        kept = np.arange(len(rows)) <= leading(tokens == proposed.tokens)
        shown, at, masked, reopened = shown.where(kept), at[kept], masked[kept], reopened[kept]
        tokens, plain, meant = tokens[kept], plain[kept], meant[kept]
    final = _final(state, canvas, shown, commit, masked, meant)
    if not commit.revises:  # what may be replaced decides nothing
        known[at[final]] = tokens[final]
        decided = state.decided(known)
        if len(decided):
            final |= np.isin(at, decided)
    final |= reopened
    final &= masked | (tokens != canvas.tokens[shown.positions])
    return _padded(state, canvas, Chosen(shown.positions[final], tokens[final], plain[final]))


@cache
def _judges(policy: type) -> bool:
    """Whether a policy is ``Judged``; to ask a protocol takes a tenth of a millisecond."""
    return issubclass(policy, Judged)


def _searched(canvas: Canvas, commit: Commit, ranked: Ranked) -> int:
    """The first position behind those that are searched: the block, and what the policy has looked at besides."""
    if not commit.whole_canvas or not len(ranked.top.positions):
        return canvas.block_end
    return max(canvas.block_end, canvas.prompt_length + int(ranked.top.positions[-1]) + 1)


def _padded(state: Constrained, canvas: Canvas, final: Chosen) -> Chosen:
    """``final`` and, where nothing but padding can stand behind it, that."""
    known = known_tokens(canvas)
    known[final.positions - canvas.prompt_length] = final.tokens
    padding = state.settled(known)
    return Chosen(
        np.concatenate([final.positions, canvas.prompt_length + padding]),
        np.concatenate([final.tokens, state.witness.tokens[padding]]),
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
    """The witness's tokens as candidates, with what the model's logits say of them.

    A token that the model would choose anyway is as sure as without the constraint, so that tokens become final in the
    order in which they would then; any other is as sure as it is among what may stand there. The gap of a position that
    is final (not ``masked``) is the model's own.
    """
    best = ranked.plain[rows].max(-1)
    behind = tokens != proposed.tokens
    kept = np.exp(ranked.kept[rows])  # the probability of all that may stand there
    alone = np.where(behind, np.exp(np.minimum(plain, 0.0)), proposed.confidence * kept)
    confidence = np.where(alone >= 1 - kept, alone, np.minimum(alone / np.maximum(kept, _TINY), 1.0))
    gap = proposed.gap
    if gap is not None:
        gap = np.where(behind & masked, np.minimum(plain - best, 0.0), np.minimum(gap, _SURE)).astype(np.float32)
    return Candidates(proposed.positions, tokens, confidence.astype(np.float32), gap, proposed.entropy)


def _final(
    state: Constrained, canvas: Canvas, shown: Candidates, commit: Commit, masked: np.ndarray, meant: np.ndarray
) -> np.ndarray:
    """Bool ``[n]``: which of the masked positions become final.

    An end of text that is not ``meant`` by the model is not, before all of the answer is: it would bound the answer,
    and nothing is won by it. With the last of the answer, the end right behind it goes along. Of a template, each hole
    has an answer of its own.
    """
    at = shown.positions - canvas.prompt_length
    still_open = state.content & canvas.masked[canvas.prompt_length :]
    content = masked & state.content[at]
    ends = masked & ~content
    due = content | (ends & (meant | ~_touched(state.spans, still_open)[at]))
    final = commit.choose(canvas, shown) & masked
    early = final & ends & ~meant & _touched(state.spans, _without(still_open, at[final]))[at]
    if early.any() and due.any():
        final = np.zeros_like(final)
        final[due] = commit.choose(canvas, shown.where(due))
    if not final.any() and masked.any():  # a policy with an order of its own may find nothing of it among these
        final[int(np.where(due if due.any() else ends, shown.confidence, -1.0).argmax())] = True
    if (final & ends).any() and not _without(still_open, at[final]).any():
        final |= ends & (at == state.witness.length)
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
