"""A template as one language, for next-token models: fixed texts with other languages between them.

No token spans a seam, and a hole ends where the text after it is first complete: each token sequence has one reading,
which assigns its tokens to the holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmserve.constraint.search import bitmask
from mmserve.constraint.search.completion import after
from mmserve.constraint.search.matcher import Constraint, Matcher
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

    def classes(self) -> PrefixClasses:
        """Classes of prefixes: each its own."""
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
        """The same language with its own parsers."""
        return replace(self, holes=tuple(replace(hole, constraint=hole.constraint.apart()) for hole in self.holes))

    def split(self, tokens: Sequence[int]) -> list[list[int]]:
        """The tokens of each hole, from those of a whole answer. ``ValueError`` if they are none."""
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
        """The partial matches of that text: how many of its bytes are matched, and the index of the first token."""
        ended = state.hole is not None and state.hole.accepting and self.text(state)
        return (*state.texts, (0, state.tokens)) if ended else state.texts

    def roomy(self, state: ConcatenationState) -> Matcher | None:
        """The matcher of the open hole, if it may take one more token."""
        if state.hole is None or state.tokens - state.since >= self.holes[state.number].most:
            return None
        return state.hole

    def step(self, state: ConcatenationState, token: int) -> ConcatenationState | None:
        """The state after ``token``; None if it is not allowed."""
        spelled, text = self.vocabulary.token_bytes[token], self.text(state)
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
    """A state of a concatenation; its matcher is shared and never moves."""

    number: int  # of the hole, -1 before the first
    tokens: int = 0  # consumed
    since: int = 0  # of them, those before the hole
    hole: Matcher | None = None  # None where it is full
    texts: tuple[tuple[int, int], ...] = ()  # as of ``Concatenation.begun``, without one that begins here
    spans: tuple[tuple[int, int], ...] = ()  # first token, and first after, of each hole that is filled


@dataclass
class ConcatenationMatcher:
    """A state in a concatenation's language, as ``Matcher``."""

    language: Concatenation
    state: ConcatenationState

    def fork(self) -> ConcatenationMatcher:
        """An independent copy of the matcher."""
        return ConcatenationMatcher(self.language, self.state)

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` are allowed here; end tokens are not."""
        state: ConcatenationState = self.state
        for count, token in enumerate(tokens):
            following = self._step(state, token)
            if following is None:
                return count
            state = following
        return len(tokens)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` are allowed here and the text may end after them."""
        fork = after(self, tokens)
        return fork is not None and fork.accepting

    def consume(self, tokens: Sequence[int]) -> None:
        """Consume ``tokens``; ``ValueError`` if they are not allowed here."""
        for token in tokens:
            following = self._step(self.state, token)
            if following is None:
                raise ValueError("these tokens may not follow here")
            self.state = following

    def _step(self, state: ConcatenationState, token: int) -> ConcatenationState | None:
        return self.language.step(state, token) if 0 <= token < len(self.language.vocabulary.token_bytes) else None

    def allowed(self) -> np.ndarray:
        """Ids (int64, ascending) of all tokens allowed here."""
        return bitmask.ids(self.mask())

    def mask(self) -> np.ndarray:
        """The tokens allowed here, as a ``bitmask``."""
        hole = self.language.roomy(self.state)
        words = bitmask.of((), len(self.language.vocabulary.token_bytes)) if hole is None else hole.mask()
        bitmask.add(words, self._of_texts())
        return words

    def among(self, tokens: np.ndarray) -> np.ndarray:
        """Bool, of the shape of ``tokens`` (int64): which of them are allowed here."""
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
        """The rest of the text after the hole as soon as the hole may end; else ``ahead`` of the hole."""
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
