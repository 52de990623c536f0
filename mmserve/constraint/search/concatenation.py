"""A template as one language, for models that write from left to right: fixed texts, and other languages between them.

No token stands on both sides of a seam, and a hole ends where the text behind it is first complete: each row of tokens
is read in one way only, so that it is known which of them fill which hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmserve.constraint.search import bitmask
from mmserve.constraint.search.base import Constraint, Matcher
from mmserve.constraint.search.completion import after
from mmserve.constraint.search.prefix_equivalence import Kinds, Texts
from mmserve.constraint.search.vocabulary import Vocabulary


@dataclass(frozen=True)
class Bounded:
    """A hole: at most ``most`` tokens of ``constraint``."""

    constraint: Constraint
    most: int


@dataclass(frozen=True)
class Concatenation:
    """``texts[0]``, the first hole, ``texts[1]``, …: one text more than holes, none of them empty but the first and the
    last. The holes are over ``vocabulary``."""

    texts: tuple[bytes, ...]
    holes: tuple[Bounded, ...]
    vocabulary: Vocabulary

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes of each token id; empty for tokens that no text has."""
        return self.vocabulary.token_bytes

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.vocabulary.end_ids

    def kinds(self) -> Kinds:
        """Classes of the beginnings of texts: every one is a class of its own."""
        return Texts()

    def start(self) -> ConcatenationMatcher:
        """A matcher in front of the first token."""
        before = Place(-1, texts=((0, 0),))
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
        place = matcher.place
        spans = place.spans if place.hole is None else (*place.spans, (place.since, place.tokens))
        return [list(tokens[start:end]) for start, end in spans]

    def text(self, place: Place) -> bytes:
        """The text that comes next; empty if there is none."""
        return self.texts[place.number + 1] if place.number + 1 < len(self.texts) else b""

    def begun(self, place: Place) -> tuple[tuple[int, int], ...]:
        """The ways in which that text may go on: how many bytes of it stand, and in front of which token it began."""
        ended = place.hole is not None and place.hole.accepting and self.text(place)
        return (*place.texts, (0, place.tokens)) if ended else place.texts

    def roomy(self, place: Place) -> Matcher | None:
        """The matcher of the hole that is open, if it may take a token more."""
        if place.hole is None or place.tokens - place.since >= self.holes[place.number].most:
            return None
        return place.hole

    def behind(self, place: Place, token: int) -> Place | None:
        """The place behind ``token``; None if it may not follow."""
        spelled, text = self.token_bytes[token], self.text(place)
        if not spelled:
            return None
        texts = tuple((size + len(spelled), at) for size, at in self.begun(place) if text.startswith(spelled, size))
        for size, at in texts:
            if size == len(text):
                spans = (*place.spans, (place.since, at)) if place.number >= 0 else ()
                return self._opened(replace(place, tokens=place.tokens + 1, spans=spans))
        roomy = self.roomy(place)
        hole = None if roomy is None or not roomy.valid([token]) else after(roomy, [token])
        if hole is None and not texts:
            return None
        return replace(place, tokens=place.tokens + 1, hole=hole, texts=texts)

    def _opened(self, place: Place) -> Place:
        """``place`` at the next hole, or behind the last text."""
        number = place.number + 1
        hole = self.holes[number].constraint.start() if number < len(self.holes) else None
        return replace(place, number=number, since=place.tokens, hole=hole, texts=())


@dataclass(frozen=True)
class Place:
    """A place in a concatenation; its matcher is shared, and never moved."""

    number: int  # of the hole, -1 in front of the first
    tokens: int = 0  # consumed
    since: int = 0  # of them, those in front of the hole
    hole: Matcher | None = None  # None where nothing more may fill it
    texts: tuple[tuple[int, int], ...] = ()  # as ``Concatenation.begun`` tells them, but for one that begins here
    spans: tuple[tuple[int, int], ...] = ()  # first token, and first behind, of each hole that is filled


@dataclass
class ConcatenationMatcher:
    """A place in a concatenation's language, as ``Matcher``."""

    language: Concatenation
    place: Place

    def fork(self) -> ConcatenationMatcher:
        """A matcher at the same place that goes its own way."""
        return ConcatenationMatcher(self.language, self.place)

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` may follow here; end tokens may not."""
        place: Place = self.place
        for count, token in enumerate(tokens):
            following = self._step(place, token)
            if following is None:
                return count
            place = following
        return len(tokens)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` may follow here and the text may end behind them."""
        fork = after(self, tokens)
        return fork is not None and fork.accepting

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on by ``tokens``; ``ValueError`` if they may not follow here."""
        for token in tokens:
            following = self._step(self.place, token)
            if following is None:
                raise ValueError("these tokens may not follow here")
            self.place = following

    def _step(self, place: Place, token: int) -> Place | None:
        return self.language.behind(place, token) if 0 <= token < len(self.language.token_bytes) else None

    def allowed(self) -> np.ndarray:
        """Ids (int64, ascending) of all tokens that may follow here."""
        return bitmask.ids(self.mask())

    def mask(self) -> np.ndarray:
        """Which tokens may follow here, as a ``bitmask``."""
        hole = self.language.roomy(self.place)
        words = bitmask.of((), len(self.language.token_bytes)) if hole is None else hole.mask()
        bitmask.add(words, self._of_texts())
        return words

    def among(self, tokens: np.ndarray) -> np.ndarray:
        """Bool, of the shape of ``tokens`` (int64): which of them may follow here."""
        return bitmask.has(self.mask(), tokens)

    def _of_texts(self) -> list[int]:
        text = self.language.text(self.place)
        rests = [text[size:] for size, _at in self.language.begun(self.place)]
        return [token for rest in rests for token in self.language.vocabulary.within(rest, whole=True)]

    def forced(self) -> bytes:
        """The bytes that must follow here; empty where there is a choice, or where the text may end."""
        begun, hole = self.language.begun(self.place), self.language.roomy(self.place)
        if hole is not None and not begun:
            return hole.forced()
        if len(begun) == 1 and (hole is None or not len(hole.allowed())):
            return self.language.text(self.place)[begun[0][0] :]
        return b""

    def ahead(self) -> bytes:
        """The rest of the text behind the hole, as soon as the hole may end; else what the hole knows."""
        begun, hole = self.language.begun(self.place), self.language.roomy(self.place)
        if begun:
            return self.language.text(self.place)[begun[0][0] :]
        return b"" if hole is None else hole.ahead()

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        place = self.place
        if place.number == len(self.language.holes):
            return True
        last = place.number == len(self.language.holes) - 1 and not self.language.text(place)
        return last and place.hole is not None and place.hole.accepting
