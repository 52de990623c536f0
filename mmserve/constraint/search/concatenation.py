"""A template as one language, for models that write from left to right: fixed texts, and other languages between them.

No token stands on both sides of a seam, and a hole ends where the text after it is first complete: each row of tokens
is read in one way only, so that it is known which of them fill which hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmserve.constraint.search import bitmask
from mmserve.constraint.search.base import Constraint, Matcher
from mmserve.constraint.search.completion import after
from mmserve.constraint.search.prefix_equivalence import DistinctTexts, PrefixClasses
from mmserve.constraint.search.vocabulary import Vocabulary


@dataclass(frozen=True)
class BoundedHole:
    """A hole: at most ``most`` tokens of ``constraint``."""

    constraint: Constraint
    most: int


@dataclass(frozen=True)
class Concatenation:
    """``texts[0]``, the first hole, ``texts[1]``, …: one text more than holes, none of them empty but the first and the
    last. The holes are over ``vocabulary``."""

    texts: tuple[bytes, ...]
    holes: tuple[BoundedHole, ...]
    vocabulary: Vocabulary

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes of each token id; empty for tokens that no text has."""
        return self.vocabulary.token_bytes

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.vocabulary.end_ids

    def classes(self) -> PrefixClasses:
        """Classes of the beginnings of texts: every one is a class of its own."""
        return DistinctTexts()

    def start(self) -> ConcatenationMatcher:
        """A matcher before the first token."""
        before = ConcatenationState(-1, texts=((0, 0),))
        return ConcatenationMatcher(self, before if self.texts[0] else self._opened(before))

    @property
    def weight(self) -> int:
        """Bytes of the text of all holes' constraints."""
        return sum(hole.constraint.weight for hole in self.holes)

    def apart(self) -> Concatenation:
        """The same language with parsers of its own."""
        return replace(self, holes=tuple(replace(hole, constraint=hole.constraint.apart()) for hole in self.holes))

    def split(self, tokens: Sequence[int]) -> list[list[int]]:
        """Which of ``tokens``, a whole answer, fill each hole. ``ValueError`` if they are none."""
        matcher = self.start()
        matcher.consume(tokens)
        if not matcher.accepting:
            raise ValueError("these tokens are no whole answer")
        state = matcher.state
        spans = state.spans if state.hole is None else (*state.spans, (state.since, state.tokens))
        return [list(tokens[start:end]) for start, end in spans]

    def text(self, state: ConcatenationState) -> bytes:
        """The text that comes next; empty if there is none."""
        return self.texts[state.number + 1] if state.number + 1 < len(self.texts) else b""

    def begun(self, state: ConcatenationState) -> tuple[tuple[int, int], ...]:
        """The ways in which that text may go on: how many bytes of it stand, and before which token it began."""
        ended = state.hole is not None and state.hole.accepting and self.text(state)
        return (*state.texts, (0, state.tokens)) if ended else state.texts

    def roomy(self, state: ConcatenationState) -> Matcher | None:
        """The matcher of the hole that is open, if it may take a token more."""
        if state.hole is None or state.tokens - state.since >= self.holes[state.number].most:
            return None
        return state.hole

    def behind(self, state: ConcatenationState, token: int) -> ConcatenationState | None:
        """The state after ``token``; None if it may not follow."""
        spelled, text = self.token_bytes[token], self.text(state)
        if not spelled:
            return None
        texts = tuple((size + len(spelled), at) for size, at in self.begun(state) if text.startswith(spelled, size))
        for size, at in texts:
            if size == len(text):
                spans = (*state.spans, (state.since, at)) if state.number >= 0 else ()
                return self._opened(replace(state, tokens=state.tokens + 1, spans=spans))
        roomy = self.roomy(state)
        hole = None if roomy is None or not roomy.valid([token]) else after(roomy, [token])
        if hole is None and not texts:
            return None
        return replace(state, tokens=state.tokens + 1, hole=hole, texts=texts)

    def _opened(self, state: ConcatenationState) -> ConcatenationState:
        """``state`` at the next hole, or after the last text."""
        number = state.number + 1
        hole = self.holes[number].constraint.start() if number < len(self.holes) else None
        return replace(state, number=number, since=state.tokens, hole=hole, texts=())


@dataclass(frozen=True)
class ConcatenationState:
    """A state in a concatenation; its matcher is shared, and never moved."""

    number: int  # of the hole, -1 before the first
    tokens: int = 0  # consumed
    since: int = 0  # of them, those before the hole
    hole: Matcher | None = None  # None where nothing more may fill it
    texts: tuple[tuple[int, int], ...] = ()  # as ``Concatenation.begun`` tells them, but for one that begins here
    spans: tuple[tuple[int, int], ...] = ()  # first token, and first after, of each hole that is filled


@dataclass
class ConcatenationMatcher:
    """A state in a concatenation's language, as ``Matcher``."""

    language: Concatenation
    state: ConcatenationState

    def fork(self) -> ConcatenationMatcher:
        """A matcher at the same state that goes its own way."""
        return ConcatenationMatcher(self.language, self.state)

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` may follow here; end tokens may not."""
        state: ConcatenationState = self.state
        for count, token in enumerate(tokens):
            following = self._step(state, token)
            if following is None:
                return count
            state = following
        return len(tokens)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` may follow here and the text may end after them."""
        fork = after(self, tokens)
        return fork is not None and fork.accepting

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on by ``tokens``; ``ValueError`` if they may not follow here."""
        for token in tokens:
            following = self._step(self.state, token)
            if following is None:
                raise ValueError("these tokens may not follow here")
            self.state = following

    def _step(self, state: ConcatenationState, token: int) -> ConcatenationState | None:
        return self.language.behind(state, token) if 0 <= token < len(self.language.token_bytes) else None

    def allowed(self) -> np.ndarray:
        """Ids (int64, ascending) of all tokens that may follow here."""
        return bitmask.ids(self.mask())

    def mask(self) -> np.ndarray:
        """Which tokens may follow here, as a ``bitmask``."""
        hole = self.language.roomy(self.state)
        words = bitmask.of((), len(self.language.token_bytes)) if hole is None else hole.mask()
        bitmask.add(words, self._of_texts())
        return words

    def among(self, tokens: np.ndarray) -> np.ndarray:
        """Bool, of the shape of ``tokens`` (int64): which of them may follow here."""
        return bitmask.has(self.mask(), tokens)

    def _of_texts(self) -> list[int]:
        text = self.language.text(self.state)
        rests = [text[size:] for size, _at in self.language.begun(self.state)]
        return [token for rest in rests for token in self.language.vocabulary.within(rest, whole=True)]

    def forced(self) -> bytes:
        """The bytes that must follow here; empty where there is a choice, or where the text may end."""
        begun, hole = self.language.begun(self.state), self.language.roomy(self.state)
        if hole is not None and not begun:
            return hole.forced()
        if len(begun) == 1 and (hole is None or not len(hole.allowed())):
            return self.language.text(self.state)[begun[0][0] :]
        return b""

    def ahead(self) -> bytes:
        """The rest of the text after the hole, as soon as the hole may end; else what the hole knows."""
        begun, hole = self.language.begun(self.state), self.language.roomy(self.state)
        if begun:
            return self.language.text(self.state)[begun[0][0] :]
        return b"" if hole is None else hole.ahead()

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        state = self.state
        if state.number == len(self.language.holes):
            return True
        last = state.number == len(self.language.holes) - 1 and not self.language.text(state)
        return last and state.hole is not None and state.hole.accepting
