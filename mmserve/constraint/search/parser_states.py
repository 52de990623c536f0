"""Places of a constraint that searches have been at, so that the parser is asked once where texts are alike.

A step's search goes mostly where the step before it has gone, and half of the ways that it tries at once differ in
nothing that a constraint could tell (``prefix_equivalence``): other words in a string, another digit. What is kept
changes the time that a search takes, never what it finds, so that all requests under a grammar may share it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mmserve.constraint.search import bitmask
from mmserve.constraint.search.base import Matcher
from mmserve.constraint.search.completion import after
from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.prefix_equivalence import Kinds, Scalar, Texts
from mmserve.constraint.search.shortest_completion import Effort, quick_close, shortest_close
from mmserve.constraint.search.vocabulary import LONGEST
from mmserve.memory import resident

#: Bytes that may be kept from one search to the next.
LIMIT = 16 << 20
#: Bytes of a place, of a byte of text in front of it (a parser keeps what it has read, up to 190 bytes for each), and
#: of a way that was asked for, with what the parser's lexer has learned on it. Measured, and rounded up.
_PLACE, _BYTE, _WAY = 8_000, 200, 500
#: Bytes that a process grows by in a search, from which on they are taken for the search's own.
_NOTICED = 1 << 20
#: Most bytes that a lexer takes with all the states that ``PARSER_LIMITS`` allow it. Measured, and rounded up.
_LEXER = 12 << 20
#: A matcher is put in another's place where it has read so much less: to fork it takes time for all that it has read.
_DEEPER = 500
#: Places gone on from in search of an end that a walk of the parser did not find.
_FAR = 24
#: The same for texts that are each of their own kind.
BLIND = Effort(exact_tokens=200, patient_tokens=0, places=60, alternatives=4)


@dataclass(frozen=True, slots=True)
class Around:
    """What stands for a place where it is asked how far the end is (``lookahead``): itself, or all that are alike."""

    key: Hashable
    next: tuple[Place, ...] | None  # one token farther on; None if they are not known
    tokens: tuple[int, ...]  # some that may lead there


class Place:
    """What may follow texts of one kind. ``matcher`` stands behind one of them, and is never moved."""

    __slots__ = ("_close", "accepting", "around", "depth", "far", "few", "kind", "matcher", "next")

    def __init__(self, matcher: Matcher, kind: Hashable | None, depth: int) -> None:
        self.matcher, self.kind, self.depth = matcher, kind, depth  # bytes in front of the matcher
        self.accepting = matcher.accepting
        #: What is behind a token or a row of them, as far as it was asked: a place, None, that there is one (True), or
        #: that there is one which the parser does not reach within its limits (False).
        self.next: dict[int | tuple[int, ...], Place | bool | None] = {}
        self._close: tuple[int, ...] | bool | None = False  # False: not looked for yet
        self.few: list[int] | None = None  # as ``Closing.next_tokens``
        self.far: tuple[int, ...] | bool | None = False  # as ``Places.far_close``
        self.around: Around | None = None

    def close(self, lexicon: Lexicon, places: int) -> tuple[int, ...] | None:
        """As ``quick_close``."""
        if isinstance(self._close, bool):
            self._close = quick_close(self.matcher, lexicon, places)
        return self._close


class Spent(Exception):
    """The places' own parser has come to its limits for good, as ``Places.spent`` says."""


class Places:
    """The places of one constraint, and the kinds of its texts. Everything is asked of what ``lent`` gives.

    ``parser`` gives a matcher in front of the first token, of a parser that no request has: what searches spend of its
    limits, requests keep. It may take as long as compiling. Without it, searches have their request's parser.
    """

    def __init__(
        self, lexicon: Lexicon, kinds: Callable[[], Kinds] = Texts, parser: Callable[[], Matcher] | None = None
    ) -> None:
        self._lock = threading.Lock()
        self.lexicon, self._make, self._parser = lexicon, kinds, parser
        self._start: Matcher | None = None  # of that parser, and a token that may follow there
        self._follows: list[int] = []
        self._limited, self._learned = False, 0
        self._built = 0  # bytes that the process has grown by while that parser was made, of the search under way
        self._lexer = 0  # bytes that its lexer has grown by since
        self._forget()

    def _forget(self) -> None:
        if self._limited:  # else the parser stays: to make it anew can take half a second of a step
            self._start, self._lexer = None, 0
        elif self._start is not None:
            self._lexer = min(self._lexer + self._learned, _LEXER)
        self._learned = 0  # bytes that the process has grown by in searches, beside what places count for
        self._kinds, self._places = self._make(), dict[Hashable, Place]()
        self._root: tuple[bytes, Hashable] = b"", self._kinds.begun()  # where the latest search began
        self._limited = False
        #: Of each request's parser that places were made with, one of its matchers and a token that may follow there.
        self._parsers: list[tuple[Matcher, list[int]]] = []
        #: What stands for the places within a string or number, by what ``inside`` says of them.
        self.around: dict[Hashable, Around] = {}
        self.ahead = False  # whether it was looked at what is behind the start of a text (``lookahead``)
        self.size = self._lexer  # about so many bytes

    @property
    def spent(self) -> bool:
        """Whether one of the parsers has come to its limits for good.

        What its lexer has learned is shared by all matchers of a parser, and bounded. With the last of it they all deny
        whatever they are asked, and say of no error.
        """
        own = [] if self._start is None else [(self._start, self._follows)]
        return any(matcher.valid(follows) < len(follows) for matcher, follows in (*own, *self._parsers))

    @contextmanager
    def lent(self) -> Iterator[Places]:
        """For one search: these places, or new ones where another thread's search is at them, so that none waits.

        Nothing is kept of a search in which a parser has failed or come to its limits, nor more than ``LIMIT`` bytes.
        """
        if not self._lock.acquire(blocking=False):
            yield Places(self.lexicon, self._make)
            return
        size, before, self._built = self.size, resident(), 0
        try:
            yield self
            self._limited |= self.spent
        except BaseException:
            self._limited = True
            raise
        finally:
            learned = resident() - before - max(0, self.size - size) - self._built
            learned = learned if learned > _NOTICED else 0
            self._learned += learned  # by the parsers' lexers, mostly, which no one else can tell
            self.size += learned
            if self._limited or self.size - self._lexer > LIMIT:
                self._forget()
            self._lock.release()

    def behind(self, text: bytes, matcher: Callable[[], Matcher], follows: Sequence[int] = ()) -> Place:
        """The place of ``text``, behind which ``matcher`` gives one. A search begins with it.

        ``follows``: what is known to be able to follow, a token.
        """
        known, kind = self._root
        if kind is None or not text.startswith(known):
            known, kind = b"", self._kinds.begun()
        kind = self._kind(kind, text[len(known) :])
        self._root = text, kind
        place = None if kind is None else self._places.get(kind)
        if place is None or place.depth > len(text) + _DEEPER:
            place = self._of(kind, matcher(), len(text))
            if self._parser is None:
                self._parsers.append((place.matcher, list(follows) or _follows(place.matcher)))
        return place

    def own(self, before: Sequence[int]) -> Matcher | None:
        """A matcher behind the tokens ``before`` of the parser that no request has; None if there is none.

        Raises ``Spent``.
        """
        if self._parser is None:
            return None
        if self._start is None:  # up to half a second, so what it takes is no reason to forget it
            smaller = resident()
            self._start = self._parser()
            self._follows = _follows(self._start)
            self._built += max(0, resident() - smaller)
        matcher = self._start.fork()
        try:
            matcher.consume(list(before))
        except ValueError as error:
            self._limited = True
            raise Spent from error
        return matcher

    def after(self, place: Place, token: int) -> Place | None:
        """The place behind ``token``; None if it may not follow, or the parser has come to its limits with it."""
        found = place.next.get(token, True)
        if found is True or (isinstance(found, Place) and found.depth > place.depth + LONGEST + _DEEPER):
            asked = token in place.next
            found = place.next[token] = self._moved(place, [token], valid=asked)
        return found if isinstance(found, Place) else None

    def through(self, place: Place, tokens: Sequence[int]) -> Place | None:
        """The place behind ``tokens``; None if they may not follow."""
        key = tuple(tokens)
        found = place.next.get(key, True)
        if found is True or (isinstance(found, Place) and found.depth > place.depth + LONGEST * len(key) + _DEEPER):
            found = place.next[key] = self._moved(place, key)
        return found if isinstance(found, Place) else None

    def reach(self, place: Place, tokens: list[int]) -> int:
        """How many of ``tokens``, from the first on, may follow one another."""
        for i, token in enumerate(tokens):
            found = place.next.get(token, False)
            if found is None:
                return i
            if not isinstance(found, Place):
                far = place.matcher.valid(tokens[i:] if i else tokens)
                if token not in place.next:
                    place.next[token] = True if far else None
                    self.size += _WAY
                return i + far
            place = found
        return len(tokens)

    def inside(self, place: Place) -> tuple[Scalar, Hashable] | None:
        """As ``Kinds.inside``."""
        return None if place.kind is None else self._kinds.inside(place.kind)

    @property
    def known(self) -> bool:
        """Whether texts have classes."""
        return not isinstance(self._kinds, Texts)

    def far_close(self, place: Place) -> tuple[int, ...] | None:
        """A completion found with more effort than ``Place.close``, where what comes first leads nowhere, as in `a+b`;
        None if there was none so near."""
        if isinstance(place.far, bool):
            if not self.known:
                found = shortest_close(place.matcher, self.lexicon, BLIND)
                place.far = None if found is None else found.tokens
            else:
                place.far = self._nearest_end(place)
        return place.far

    def _nearest_end(self, place: Place) -> tuple[int, ...] | None:
        """The fewest closers that lead from ``place`` to the end; of ways to places that are alike one is gone on."""
        ways: dict[Place, tuple[int, ...]] = {place: ()}
        queue = deque([place])
        for _ in range(_FAR):
            if not queue:
                break
            at = queue.popleft()
            forced = self.lexicon.cover(at.matcher.forced())
            for step in [forced] if forced else self._apart(at):
                behind = self.through(at, step) if forced else self.after(at, step[0])
                if behind is None or behind in ways:
                    continue
                ways[behind] = (*ways[at], *step)
                if behind.accepting:
                    return ways[behind]
                queue.append(behind)
        return None

    def _apart(self, place: Place) -> list[list[int]]:
        """Closers that may follow ``place``, the first of those behind which texts are alike."""
        closers, spelled = self.lexicon.closers, self.lexicon.spelled
        alike = None if place.kind is None else self._kinds.alike(place.kind)
        steps, told = dict[Hashable, list[int]](), set[int]()
        for token in closers[place.matcher.among(closers)].tolist():
            text = spelled[token]
            number = None if alike is None or len(text) > 1 else alike[text[0]]
            if number in told:
                continue
            kind = self._kind(place.kind, text)
            if kind is not None and number is not None:
                told.add(number)
            steps.setdefault(token if kind is None else (kind,), [token])
        return list(steps.values())

    def _moved(self, place: Place, tokens: Sequence[int], *, valid: bool = False) -> Place | bool | None:
        """What is behind ``tokens``, as ``Place.next`` says it. ``valid``: whether it is known that they may follow."""
        self.size += _WAY
        if not valid and place.matcher.valid(tokens) < len(tokens):
            return None
        text = self.lexicon.text(tokens)
        kind, depth = self._kind(place.kind, text), place.depth + len(text)
        found = None if kind is None else self._places.get(kind)
        if found is not None and found.depth <= depth + _DEEPER:
            return found  # to ask whether the tokens may follow takes a fifth of moving a parser there
        matcher = after(place.matcher, tokens)
        if matcher is None:
            self._limited = True
            return False
        return self._of(kind, matcher, depth)

    def _of(self, kind: Hashable | None, matcher: Matcher, depth: int) -> Place:
        found = None if kind is None else self._places.get(kind)
        if found is None:
            found = Place(matcher, kind, depth)
            self.size += _PLACE + _BYTE * depth
            if kind is not None:
                self._places[kind] = found
        elif found.depth > depth + _DEEPER:
            self.size -= _BYTE * (found.depth - depth)
            found.matcher, found.depth = matcher, depth
        return found

    def _kind(self, kind: Hashable | None, text: bytes) -> Hashable | None:
        """The kind behind ``text``; None where that is not known."""
        if kind is None:
            return None
        try:
            return self._kinds.after(kind, text)
        except ValueError:
            return None


def _follows(matcher: Matcher) -> list[int]:
    """A token that may follow, if there is one."""
    found: list[int] = bitmask.ids(matcher.mask())[:1].tolist()
    return found
