"""The answer of one sample under a constraint: its witness, guarded calls of the parser, and the final validation.

If the parser raises or panics during an answer, it is not called again: the answer is completed from the witness.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.search.matcher import Concatenation, Matcher, after
from mmserve.constraint.search.parser_states import ParserStateCache
from mmserve.constraint.search.vocabulary import Lexicon, add_tokens
from mmserve.constraint.search.witness import Outcome, Witness, advance, improve
from mmserve.constraint.session.observer import Meter, TopKObserver
from mmserve.constraint.session.sampling import RejectionSampler, SampledRun, SampleState
from mmserve.constraint.session.validation import AnswerValidator
from mmserve.errors import FailedPrecondition

logger = logging.getLogger("mmserve.decode")

#: Number of canvas positions that one search covers: bounds its work independently of time.
HORIZON = 256
#: CPU time (seconds) after which a search is aborted, because other requests wait for it. Nearly all searches take less
#: than 10 ms, some with few tokens left 300 ms, or 600 ms on a shared processor: results should not depend on this
#: limit.
SECONDS = 2.0
#: Number of aborted searches after which a request searches no more and commits its witness.
PATIENCE = 2

#: Maximum number of parsers that replace one whose limits are used up; creating a large one takes half a second.
PARSERS = 8

A = TypeVar("A")

#: Splits the tokens of a template's answer by hole.
Split = Callable[[Sequence[int]], list[list[int]]]


@dataclass
class ConstrainedAnswer:
    """The constrained answer of one sample, from its first witness to its last token."""

    witness: Witness
    lexicon: Lexicon
    warnings: tuple[str, ...] = ()  # for the client
    validator: AnswerValidator | None = None  # of the finished answer
    sampled: SampleState | None = None  # state of rejection sampling, if used
    drafted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of the latest pass
    forced: bool = False  # whether the draft is forced by the constraint
    asked: int = -1  # latest frontier for which ``decided`` was computed
    broken: bool = False  # the parser failed and is not called again
    late: int = 0  # number of searches aborted for their time
    parsers: int = field(default=0, kw_only=True)  # number of parsers created after the first
    meter: Meter = field(default_factory=Meter)
    split: Split | None = None  # splits a template's answer by hole
    validators: tuple[AnswerValidator | None, ...] = ()  # of the text of each hole
    #: Int64 ``[N]``: tokens given from the start (padding after the longest possible answer), -1 elsewhere.
    given: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    states: ParserStateCache = field(init=False)  # of its language

    def __post_init__(self) -> None:
        self.states = self.witness.states or ParserStateCache(self.lexicon, self.witness.classes)
        if not len(self.given):
            self.given = np.full(len(self.witness.tokens), -1, np.int64)

    @property
    def weight(self) -> int:
        """Total size (bytes) of the grammars that ``another(own_parsers=True)`` compiles."""
        return 0 if self.witness.language is None else self.witness.language.weight

    def another(self, *, own_parsers: bool) -> ConstrainedAnswer:
        """A copy for another sample, before the first step.

        ``own_parsers``: with its own parsers, so that samples share no parser limits; takes as long as compiling.
        """
        witness = self.witness.with_own_parser() if own_parsers else self.witness
        split = splitter(witness) if own_parsers else self.split
        sampled = None if self.sampled is None else replace(self.sampled, visits=[])
        return replace(self, witness=witness, sampled=sampled, split=split, meter=Meter())

    @property
    def content(self) -> np.ndarray:
        """Bool ``[N]``: where the witness has text rather than padding."""
        return np.arange(len(self.witness.tokens)) < self.witness.length

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """``(start, stop)`` of each generated text."""
        return ((0, int((self.given < 0).sum())),)

    @property
    def padded(self) -> bool:
        """See ``Canvas.padded``."""
        return False

    @property
    def unread(self) -> int:
        """See ``Canvas.unread``: padding that no answer reaches."""
        return int((self.given >= 0).sum())

    def pass_input(self, tokens: np.ndarray, mask_id: int) -> np.ndarray:
        """The input of passes for a fresh answer ``tokens`` (int64 ``[N]``): with masks in place of padding that no
        answer reaches, because a visible end so near would bias the model to short answers."""
        return np.where(self.given >= 0, mask_id, tokens)

    def padding_positions(self, known: np.ndarray) -> np.ndarray:
        """Open positions (int64) that can only be padding; ``known``: int64 ``[N]``, -1 where open."""
        return np.zeros(0, np.int64)

    def decided(self, known: np.ndarray) -> np.ndarray:
        """Open positions (int64) of the witness, including the end after it, if the known prefix has only one possible
        continuation, in any tokenisation; else empty. ``known``: int64 ``[N]``, -1 where open.

        Computed once for each frontier: it takes 1% of a pass, and the result only changes with the frontier.
        """
        first, none = self.witness.known, np.zeros(0, np.int64)
        if first >= self.witness.length or (first == self.asked and known[first] < 0):
            return none
        return self._guarded(lambda: self._decided(known), none)

    def holes(self, known: np.ndarray) -> tuple[str, ...]:
        """The text of each hole of a template, from a whole answer ``known`` (int64 ``[N]``)."""
        split = self.split
        if split is None:
            return ()
        ends = np.flatnonzero(are_any(known, self.witness.ends))
        answer = known[: ends[0]] if len(ends) else known
        return self._tried(lambda: tuple(map(self.read, split(answer.tolist()))), ())  # with a separate parser

    def check(self, text: str, known: np.ndarray) -> None:
        """Raises ``FailedPrecondition`` if the finished answer (``text``; its tokens ``known``, int64 ``[N]``) does not
        satisfy its schema."""
        if self.validator is not None:
            self.validator.check(text)
        if any(self.validators):
            holes = self.holes(known)
            if not holes:
                raise FailedPrecondition("the answer cannot be checked: its parser failed; ask again with another seed")
            for validator, filled in zip(self.validators, holes, strict=True):
                if validator is not None:
                    validator.check(filled)

    def read(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``."""
        return self.lexicon.text(tokens).decode(errors="replace")

    def observer(self, positions: np.ndarray, *, causal: bool) -> TopKObserver | RejectionSampler:
        """The observer of the logits at ``positions`` (relative to the answer's start, ascending)."""
        if self.sampled is not None:
            guard = partial(self._guarded, otherwise=None)
            return RejectionSampler(
                positions, self.witness, self.lexicon, self.drafted, self.sampled, guard, self.meter
            )
        return self.best_of(positions, causal=causal)

    def best_of(self, positions: np.ndarray, *, causal: bool) -> TopKObserver:
        """The observer that records the top-K tokens at ``positions`` (relative to the answer's start, ascending)."""
        with self.meter.running():
            return TopKObserver(
                positions, self.witness.tokens[positions], self.allowed(positions, causal=causal), self.meter
            )

    def allowed(self, positions: np.ndarray, *, causal: bool) -> dict[int, np.ndarray]:
        """The allowed tokens (a bitmask) by row of ``positions``, for rows where they are known."""
        return self._guarded(lambda: dict(self._allowed(positions, causal=causal)), dict[int, np.ndarray]())

    def search(self, known: np.ndarray, top: TopK, end: int) -> None:
        """Replace the witness by the best path found; ``end``: the position after the searched part.

        ``known``: int64 ``[N]``, the answer's committed tokens, -1 where open.
        """
        if self.late >= PATIENCE:
            self.meter.searched(Outcome.LATE)
            return
        before = self._guarded(lambda: self._with_usable_parser(self.witness), self.witness)
        end = min(end, before.known + HORIZON)
        kept = (before, Outcome.KEPT)
        self.witness, outcome = self._guarded(
            lambda: improve(
                before, known, top, end, self.lexicon, states=self.states, seconds=SECONDS, clock=time.thread_time
            ),
            kept,
        )
        self.late += outcome is Outcome.LATE
        self.meter.searched(outcome)

    def advance(self, known: np.ndarray) -> None:
        """Advance the witness by committed tokens (``known``: int64 ``[N]``, -1 where open): its own, or other end
        tokens."""
        witness = self.witness
        ends = are_any(known, witness.ends) & (np.arange(len(known)) >= witness.length)
        if (witness.tokens[ends] != known[ends]).any():
            witness = replace(witness, tokens=np.where(ends, known, witness.tokens))
        still_open = np.flatnonzero(known < 0)
        frontier = int(still_open[0]) if len(still_open) else len(known)
        without_parser = replace(witness, known=frontier)
        self.witness = self._guarded(lambda: self._advanced(witness, known), without_parser)

    def _advanced(self, witness: Witness, known: np.ndarray) -> Witness:
        """``witness`` advanced by the ``known`` tokens."""
        try:
            found = advance(witness, known)
        except ValueError:
            found = advance(self._with_usable_parser(witness), known)
        return self._with_usable_parser(found)

    def _with_usable_parser(self, witness: Witness) -> Witness:
        """``witness`` with another parser if its own does not accept its next token: the matchers of a parser share a
        limit on the lexer's states, beyond which they accept none."""
        language, ended = witness.language, witness.known >= witness.length
        if ended or witness.matcher.valid([int(witness.tokens[witness.known])]):
            return witness
        if language is None or self.parsers >= PARSERS:
            return witness
        self.parsers += 1
        matcher = language.with_own_parser().start()
        matcher.consume(witness.tokens[: witness.known].tolist())
        return replace(witness, matcher=matcher)

    def take(self, run: SampledRun) -> None:
        """Advance the witness by the drawn tokens."""
        self.witness = run.witness
        self.meter.searched(Outcome.KEPT if run.log_weight == -math.inf else Outcome.FOUND)
        if self.sampled is not None:
            self.sampled.take(run, run.witness.ends)

    def forced_run(self) -> np.ndarray:
        """The witness's tokens (int64) at the frontier that the constraint forces, in any tokenisation.

        The last of them is left out, because the model may merge it with the following text.
        """
        if self.sampled is not None and not self.sampled.speculates:
            return np.zeros(0, np.int64)
        return self._guarded(self._forced, np.zeros(0, np.int64))

    def _decided(self, known: np.ndarray) -> np.ndarray:
        witness, none = self.witness, np.zeros(0, np.int64)
        missing = np.flatnonzero(known[: witness.length + 1] < 0)
        if not len(missing) or missing[0] >= witness.length:
            return none
        self.asked = first = int(missing[0])
        passed = witness.tokens[witness.known : first].tolist()
        at = after(witness.matcher, passed) if passed else witness.matcher
        text = b"" if at is None else at.forced()
        rest = witness.tokens[first : witness.length].tolist()
        if at is None or not text or text != self.lexicon.text(rest):
            return none
        end = after(at, rest)
        return none if end is None or end.mask().any() else missing  # there is an optional continuation

    def _forced(self) -> np.ndarray:
        text, run = self.witness.matcher.forced(), list[int]()
        for token in self.witness.tokens[self.witness.known : self.witness.length].tolist():
            spelled = self.lexicon.spelled[token]
            if not text or not text.startswith(spelled):
                break
            text = text[len(spelled) :]
            run.append(token)
        return np.array(run[:-1], np.int64)

    def _allowed(self, positions: np.ndarray, *, causal: bool) -> Iterator[tuple[int, np.ndarray]]:
        """Rows of ``positions`` with known allowed tokens, and these tokens (a bitmask).

        These are the frontier and, for a next-token model, the positions after allowed drafted tokens.
        """
        frontier: Matcher | None = self.witness.matcher
        if self.witness.known > self.witness.length:
            return
        for row in np.flatnonzero(positions == self.witness.known).tolist():
            drafted = self.drafted.tolist() if causal else []
            for i in range(len(drafted) + 1):
                if frontier is None or row + i >= len(positions):
                    return
                mask = frontier.mask()
                if frontier.accepting:
                    add_tokens(mask, self.witness.ends)
                yield row + i, mask
                frontier = after(frontier, drafted[i : i + 1]) if i < len(drafted) else None

    def _guarded(self, ask: Callable[[], A], otherwise: A) -> A:
        """The result of ``ask``; ``otherwise`` if the parser has failed before."""
        return otherwise if self.broken else self._tried(ask, otherwise)

    def _tried(self, ask: Callable[[], A], otherwise: A) -> A:
        """The result of ``ask``; ``otherwise`` if a parser fails in it."""
        try:
            return ask()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            logger.warning("a grammar's parser failed; the answer is finished without it", exc_info=error)
            self.broken = True
            return otherwise


def are_any(tokens: np.ndarray, few: Iterable[int]) -> np.ndarray:
    """Bool, in the shape of ``tokens`` (int64): which are in ``few``; a tenth of the time of ``np.isin``."""
    found = np.zeros(tokens.shape, bool)
    for token in few:
        found |= tokens == token
    return found


def splitter(witness: Witness) -> Split | None:
    """The splitter of a template that is one language; it has its own parser, and needs whole answers."""
    language = witness.language
    return language.with_own_parser().split if isinstance(language, Concatenation) else None
