"""The answer of one sample under a constraint: its witness, guarded calls of the parser, and the final validation.

A parser that raises or panics in the middle of an answer is not called again: the answer is finished from the witness.
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
from mmserve.constraint.search.witness import Outcome, Witness, follow, improve
from mmserve.constraint.session.judge import Judge
from mmserve.constraint.session.observer import Meter, TopKObserver
from mmserve.constraint.session.sampling import RejectionSampler, SampledRun, SampleState
from mmserve.errors import FailedPrecondition

logger = logging.getLogger("mmserve.decode")

#: Positions of a canvas that one search covers: this bounds its work independently of time.
HORIZON = 256
#: Seconds of processor time after which a search is given up, since other requests wait for it. Nearly all searches
#: take less than 10 ms, some with few tokens left 300 ms, or 600 ms on a shared processor: results should not depend
#: on this limit.
SECONDS = 2.0
#: Given-up searches after which a request searches no more: the witness is its answer.
PATIENCE = 2

#: Parsers that an answer makes in place of one that has used its limits up; a large one takes half a second.
PARSERS = 8

A = TypeVar("A")

#: Splits the tokens of a template's answer into those of each hole.
Split = Callable[[Sequence[int]], list[list[int]]]


@dataclass
class ConstrainedAnswer:
    """The answer of one sample, from its first witness to its last token."""

    witness: Witness
    lexicon: Lexicon
    warnings: tuple[str, ...] = ()  # for the client
    judge: Judge | None = None  # of the finished answer
    sampled: SampleState | None = None  # where tokens are drawn from the model's distribution
    drafted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of the latest pass, at the frontier
    forced: bool = False  # whether the draft is forced by the constraint
    asked: int = -1  # the latest frontier for which ``decided`` was computed
    broken: bool = False  # the parser failed: it is not called any more
    late: int = 0  # searches given up for their time
    parsers: int = field(default=0, kw_only=True)  # made since the first
    meter: Meter = field(default_factory=Meter)
    split: Split | None = None  # of a template's answer into what fills its holes
    judges: tuple[Judge | None, ...] = ()  # of what fills each hole of a template
    #: Int64 ``[N]``: the tokens given from the start, -1 elsewhere: padding after the longest possible answer.
    given: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    states: ParserStateCache = field(init=False)  # of the language

    def __post_init__(self) -> None:
        self.states = self.witness.states or ParserStateCache(self.lexicon, self.witness.classes)
        if not len(self.given):
            self.given = np.full(len(self.witness.tokens), -1, np.int64)

    @property
    def weight(self) -> int:
        """Bytes of the grammars that another answer with parsers of its own compiles."""
        return 0 if self.witness.language is None else self.witness.language.weight

    def another(self, *, apart: bool) -> ConstrainedAnswer:
        """A copy for another sample, before the first step.

        ``apart``: with parsers of its own, so that samples share no parser limits; takes as long as compiling.
        """
        witness = self.witness.apart() if apart else self.witness
        split = splitter(witness) if apart else self.split
        sampled = None if self.sampled is None else replace(self.sampled, met=[])
        return replace(self, witness=witness, sampled=sampled, split=split, meter=Meter())

    @property
    def content(self) -> np.ndarray:
        """Bool ``[N]``: where the witness holds text, not padding."""
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
        """See ``Canvas.unread``: the padding that no answer reaches."""
        return int((self.given >= 0).sum())

    def shown(self, tokens: np.ndarray, mask_id: int) -> np.ndarray:
        """The input of passes for a fresh answer ``tokens`` (int64 ``[N]``): masks in place of the padding that no
        answer reaches, since a visible end so near would bias a model to short answers."""
        return np.where(self.given >= 0, mask_id, tokens)

    def settled(self, known: np.ndarray) -> np.ndarray:
        """Open positions (int64; -1 in ``known``, int64 ``[N]``) that can only be padding."""
        return np.zeros(0, np.int64)

    def decided(self, known: np.ndarray) -> np.ndarray:
        """Open positions (int64; -1 in ``known``, int64 ``[N]``) of the witness and the end after it, where the known
        prefix leaves one text to the end, whichever tokens spell it.

        Computed once for each frontier, since it takes 1% of a pass and the result only changes with the frontier."""
        first, none = self.witness.known, np.zeros(0, np.int64)
        if first >= self.witness.length or (first == self.asked and known[first] < 0):
            return none
        return self._guarded(lambda: self._decided(known), none)

    def holes(self, known: np.ndarray) -> tuple[str, ...]:
        """The text of each hole of a template in a whole answer ``known`` (int64 ``[N]``)."""
        split = self.split
        if split is None:
            return ()
        ends = np.flatnonzero(are_any(known, self.witness.ends))
        answer = known[: ends[0]] if len(ends) else known
        return self._tried(lambda: tuple(map(self.read, split(answer.tolist()))), ())  # by another parser

    def check(self, text: str, known: np.ndarray) -> None:
        """Raise ``FailedPrecondition`` if the finished answer (``text``; its tokens ``known``, int64 ``[N]``) does not
        satisfy its schema."""
        if self.judge is not None:
            self.judge.check(text)
        if any(self.judges):
            holes = self.holes(known)
            if not holes:
                raise FailedPrecondition("the answer cannot be checked: its parser failed; ask again with another seed")
            for judge, filled in zip(self.judges, holes, strict=True):
                if judge is not None:
                    judge.check(filled)

    def read(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``."""
        return self.lexicon.text(tokens).decode(errors="replace")

    def observer(self, positions: np.ndarray, *, causal: bool) -> TopKObserver | RejectionSampler:
        """The observer of the logits at ``positions`` (from the answer's start, ascending)."""
        if self.sampled is not None:
            guard = partial(self._guarded, otherwise=None)
            return RejectionSampler(
                positions, self.witness, self.lexicon, self.drafted, self.sampled, guard, self.meter
            )
        return self.best_of(positions, causal=causal)

    def best_of(self, positions: np.ndarray, *, causal: bool) -> TopKObserver:
        """The observer that records the top-K tokens at ``positions`` (from the answer's start, ascending)."""
        with self.meter.running():
            return TopKObserver(
                positions, self.witness.tokens[positions], self.allowed(positions, causal=causal), self.meter
            )

    def allowed(self, positions: np.ndarray, *, causal: bool) -> dict[int, np.ndarray]:
        """The allowed tokens (a bitmask) by row of ``positions``, for the rows where they are known."""
        return self._guarded(lambda: dict(self._allowed(positions, causal=causal)), dict[int, np.ndarray]())

    def search(self, known: np.ndarray, top: TopK, end: int) -> None:
        """Make the witness the best path found; ``end``: the first position after the part that is searched.

        ``known``: int64 ``[N]``, the answer's committed tokens, -1 where open.
        """
        if self.late >= PATIENCE:
            self.meter.searched(Outcome.LATE)
            return
        before = self._guarded(lambda: self._fresh(self.witness), self.witness)
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

    def follow(self, known: np.ndarray) -> None:
        """Follow the ``known`` tokens (int64 ``[N]``, -1 where open): the witness's, or other end tokens."""
        witness = self.witness
        ends = are_any(known, witness.ends) & (np.arange(len(known)) >= witness.length)
        if (witness.tokens[ends] != known[ends]).any():
            witness = replace(witness, tokens=np.where(ends, known, witness.tokens))
        still_open = np.flatnonzero(known < 0)
        frontier = int(still_open[0]) if len(still_open) else len(known)
        blindly = replace(witness, known=frontier)
        self.witness = self._guarded(lambda: self._followed(witness, known), blindly)

    def _followed(self, witness: Witness, known: np.ndarray) -> Witness:
        """``witness`` after the ``known`` tokens."""
        try:
            found = follow(witness, known)
        except ValueError:
            found = follow(self._fresh(witness), known)
        return self._fresh(found)

    def _fresh(self, witness: Witness) -> Witness:
        """``witness`` with another parser where its own does not take its next token: the matchers of a parser share a
        limit on the states of its lexer, beyond which they take none."""
        language, ended = witness.language, witness.known >= witness.length
        if ended or witness.matcher.valid([int(witness.tokens[witness.known])]):
            return witness
        if language is None or self.parsers >= PARSERS:
            return witness
        self.parsers += 1
        matcher = language.apart().start()
        matcher.consume(witness.tokens[: witness.known].tolist())
        return replace(witness, matcher=matcher)

    def take(self, run: SampledRun) -> None:
        """Advance the witness by the drawn tokens."""
        self.witness = run.witness
        self.meter.searched(Outcome.KEPT if run.log_weight == -math.inf else Outcome.FOUND)
        if self.sampled is not None:
            self.sampled.take(run, run.witness.ends)

    def forced_run(self) -> np.ndarray:
        """The witness's tokens (int64) that the constraint forces at the frontier, however they are spelled.

        The last of them is left out: a model may join it with what follows.
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
        return none if end is None or end.mask().any() else missing  # an optional continuation is possible

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
        """Rows of ``positions`` where the allowed tokens are known, and those tokens (a bitmask).

        These are the frontier and, for a next-token model, the positions after drafted tokens that are allowed.
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
        """The result of ``ask``, ``otherwise`` once the parser has failed."""
        return otherwise if self.broken else self._tried(ask, otherwise)

    def _tried(self, ask: Callable[[], A], otherwise: A) -> A:
        """The result of ``ask``, ``otherwise`` where a parser fails in it."""
        try:
            return ask()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            logger.warning("a grammar's parser failed; the answer is finished without it", exc_info=error)
            self.broken = True
            return otherwise


def are_any(tokens: np.ndarray, few: Iterable[int]) -> np.ndarray:
    """Bool, of the shape of ``tokens`` (int64): which of them are any of ``few``; a tenth of ``np.isin``'s time."""
    found = np.zeros(tokens.shape, bool)
    for token in few:
        found |= tokens == token
    return found


def splitter(witness: Witness) -> Split | None:
    """The splitter of a template that is one language; it has its own parser and is used on whole answers."""
    language = witness.language
    return language.apart().split if isinstance(language, Concatenation) else None
