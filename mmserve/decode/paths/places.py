"""Places of a constraint that a search has been at, so that the parser is asked once where texts are alike.

A step's search goes mostly where the step before it has gone, and half of the ways that it tries at once differ in
nothing that a constraint could tell (``constraint.likeness``): other words in a string, another digit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from mmserve.constraint.likeness import Kinds, Texts
from mmserve.decode.constraint.base import Matcher
from mmserve.decode.paths.completion import after
from mmserve.decode.paths.least import quick_close
from mmserve.decode.paths.lexicon import Lexicon

#: Places that a request keeps from one search to the next. A parser takes about 10 KB.
_KEPT = 400


class Place:
    """What may follow texts of one kind. ``matcher`` stands behind one of them, and is never moved."""

    __slots__ = ("_close", "accepting", "hopeless", "kind", "matcher", "next")

    def __init__(self, matcher: Matcher, kind: Hashable | None) -> None:
        self.matcher, self.kind = matcher, kind
        self.accepting = matcher.accepting
        #: What is behind a token or a row of them, as far as it was asked: a place, None, or that there is one.
        self.next: dict[int | tuple[int, ...], Place | bool | None] = {}
        self.hopeless = False  # whether a thorough search for an end has found none that was near
        self._close: tuple[int, ...] | bool | None = False

    @property
    def asked(self) -> bool:
        """Whether its ``close`` is known."""
        return not isinstance(self._close, bool)

    def close(self, lexicon: Lexicon, places: int) -> tuple[int, ...] | None:
        """As ``quick_close``."""
        if isinstance(self._close, bool):
            self._close = quick_close(self.matcher, lexicon, places)
        return self._close


class Places:
    """The places of one request; the kinds of texts are those of its constraint."""

    def __init__(self, lexicon: Lexicon, kinds: Callable[[], Kinds] = Texts) -> None:
        self._lexicon, self._make = lexicon, kinds
        self._kinds = kinds()
        self._places: dict[Hashable, Place] = {}

    def behind(self, text: bytes, matcher: Matcher) -> Place:
        """The place of ``text``, behind which ``matcher`` stands. A search begins with it."""
        if len(self._places) > _KEPT:
            self._places, self._kinds = {}, self._make()
        return self._of(self._kind(self._kinds.begun(), text), matcher)

    def after(self, place: Place, token: int) -> Place | None:
        """The place behind ``token``; None if it may not follow, or the parser has come to its limits with it."""
        found = place.next.get(token, True)
        if found is True:
            found = place.next[token] = self._moved(place, [token])
        return found or None

    def through(self, place: Place, tokens: Sequence[int]) -> Place | None:
        """The place behind ``tokens``; None if they may not follow."""
        key = tuple(tokens)
        found = place.next.get(key, True)
        if found is True:
            may = place.matcher.valid(tokens) == len(tokens)
            found = place.next[key] = self._moved(place, tokens) if may else None
        return found or None

    def reach(self, place: Place, tokens: list[int]) -> int:
        """How many of ``tokens``, from the first on, may follow one another."""
        for i, token in enumerate(tokens):
            found = place.next.get(token, False)
            if found is None:
                return i
            if not isinstance(found, Place):
                far = place.matcher.valid(tokens[i:] if i else tokens)
                place.next[token] = True if far else None
                return i + far
            place = found
        return len(tokens)

    def _moved(self, place: Place, tokens: Sequence[int]) -> Place | None:
        matcher = after(place.matcher, tokens)
        if matcher is None:
            return None
        return self._of(self._kind(place.kind, self._lexicon.text(tokens)), matcher)

    def _of(self, kind: Hashable | None, matcher: Matcher) -> Place:
        if kind is None:
            return Place(matcher, None)
        found = self._places.get(kind)
        if found is None:
            found = self._places[kind] = Place(matcher, kind)
        return found

    def _kind(self, kind: Hashable | None, text: bytes) -> Hashable | None:
        """The kind behind ``text``; None where that is not known."""
        if kind is None:
            return None
        try:
            return self._kinds.after(kind, text)
        except ValueError:
            return None
