"""How many tokens a place needs at least to come to its end: what needs more than are left is not gone on.

A bound from below, by looking at all that may follow, level by level, from where a search begins. Places are few: what
a string or number holds makes no difference behind it (``constraint.likeness``), so that of all places within one that
may end there, one is looked at, and it is taken to end with whatever any token holds behind an end.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from mmserve.constraint.likeness import Scalar
from mmserve.decode.constraint.base import Constraint
from mmserve.decode.paths import bitmask
from mmserve.decode.paths.places import Around, Place, Places, Spent

#: Tokens that may follow a place, above which they are not looked at.
_WIDE = 64
#: Places looked at from where a search begins.
_PLACES = 300


#: Tokens more than an old witness takes, up to which a search asks what places need.
SPARE = 4
#: Seconds for a look ahead: what it leaves out, searches look at themselves.
_SECONDS = 0.1


class OutOfTime(Exception):
    """The step's time was over before the search was."""


class Room:
    """What places behind ``root`` need, behind which ``size`` tokens may stand."""

    def __init__(self, root: Place, size: int, places: Places, in_time: Callable[[], bool]) -> None:
        self.size, self._in_time = size, in_time
        self._places, self._lexicon = places, places.lexicon
        self._least = self._measured(root)

    def least(self, place: Place) -> int:
        """Tokens, fewer than which do not bring ``place`` to its end."""
        return 0 if place.accepting else self._least.get(self._around(place).key, 1)

    def fits(self, place: Place, position: int) -> bool:
        """Whether ``place``, behind ``position`` tokens, may come to its end in time, for all that is known."""
        return position + self.least(place) <= self.size

    def ways(self, place: Place, position: int, most: int) -> list[int]:
        """Up to ``most`` tokens that may follow ``place`` in time, those first that leave the most room."""
        found = []
        for token in self._around(place).tokens:
            behind = self._places.after(place, token)
            if behind is not None and self.fits(behind, position + 1):
                found.append((self.least(behind), token))
        return [token for _least, token in sorted(found)[:most]]

    def _measured(self, root: Place) -> dict[Hashable, int]:
        """Tokens needed by what stands for each place."""
        first = self._around(root).key
        level, before, least = {first: 0}, dict[Hashable, list[Hashable]]({first: []}), dict[Hashable, int]()
        queue = deque([root])
        while queue:
            place = queue.popleft()
            around = place.around or self._around(place)
            key = around.key
            if place.accepting:
                least[key] = 0
            elif around.next is None or level[key] >= self.size or len(level) >= _PLACES:
                least[key] = 1  # that it is not the end is all that is known
            else:
                farther = level[key] + 1
                for behind in around.next:
                    other = (behind.around or self._around(behind)).key
                    if other not in level:
                        level[other], before[other] = farther, [key]
                        queue.append(behind)
                    else:
                        before[other].append(key)
        ordered = deque(sorted(least, key=least.__getitem__))
        while ordered:
            key = ordered.popleft()
            needed = least[key] + 1
            for other in before[key]:
                if other not in least:
                    least[other] = needed
                    ordered.append(other)
        return least

    def _around(self, place: Place) -> Around:
        if place.around is None:
            if not self._in_time():
                raise OutOfTime
            inside = self._places.inside(place)
            place.around = (None if inside is None else self._within(place, inside)) or self._alone(place)
        return place.around

    def _alone(self, place: Place) -> Around:
        """``place`` by itself."""
        words = place.matcher.mask()
        tokens = bitmask.few(words, _WIDE)
        if tokens is None:
            tokens = bitmask.few(self._leading(place, words), _WIDE)
        if tokens is None:
            return Around(place, None, ())
        found = [self._places.after(place, token) for token in tokens.tolist()]
        return Around(place, None if None in found else _distinct(found), tuple(tokens.tolist()))

    def _leading(self, place: Place, words: np.ndarray) -> np.ndarray:
        """The set ``words`` but for tokens that lead into a string or number into which a shorter one does, too."""
        of = self._lexicon.scalars
        for scalar, shorter, longer in (
            (Scalar.STRING, of.quotes[:1], of.opening),
            (Scalar.NUMBER, of.digits, of.numeric),
        ):
            if any(self._leads(place, token, scalar) for token in shorter):
                words = words & ~longer
        return words

    def _leads(self, place: Place, token: int, scalar: Scalar) -> bool:
        """Whether ``token`` leads from ``place`` to what stands for all places within a ``scalar``."""
        behind = self._places.after(place, token)
        inside = None if behind is None else self._places.inside(behind)
        if behind is None or inside is None or inside[0] is not scalar:
            return False
        return self._within(behind, inside) is not None

    def _within(self, place: Place, inside: tuple[Scalar, Hashable]) -> Around | None:
        """What stands for all places within the same string or number; None if ``place`` may not end it, yet."""
        known = self._places.around.get(inside)
        if inside[0] is Scalar.NUMBER:
            if known is not None:
                return known if place.matcher.valid(known.tokens[:1]) else None
            found = self._number(place, inside)
        else:
            quote = self._lexicon.ids.get(b'"')
            closed = None if quote is None else self._places.after(place, quote)
            if closed is None or known is not None:
                return None if closed is None else known
            found = self._string(closed, inside)
        if found is not None:
            self._places.around[inside] = found
        return found

    def _number(self, place: Place, inside: Hashable) -> Around | None:
        of = self._lexicon.scalars
        allowed = bitmask.ids(place.matcher.mask())
        ends = allowed[~of.counting[allowed]].tolist()
        tails = self._tails(place, of.behind_numbers, ends)
        if not ends or tails is None:
            return None
        return Around(inside, _distinct([*(self._places.after(place, token) for token in ends), *tails]), tuple(ends))

    def _string(self, closed: Place, inside: Hashable) -> Around | None:
        of = self._lexicon.scalars
        begins = bitmask.ids(closed.matcher.mask()).tolist()
        tails = self._tails(closed, of.behind_strings, begins)
        return None if tails is None else Around(inside, _distinct([closed, *tails]), of.quotes)

    def _tails(self, place: Place, tails: Sequence[bytes], begins: list[int]) -> list[Place | None] | None:
        """The places behind those of ``tails`` that begin as one of the tokens ``begins`` does; None if not known."""
        first = {self._lexicon.spelled[token][0] for token in begins}
        spelled = [self._lexicon.cover(tail) for tail in tails if tail[0] in first]
        return None if None in spelled else [self._places.through(place, tokens) for tokens in spelled if tokens]


def look_ahead(constraint: Constraint, follows: Sequence[int], size: int, places: Places) -> None:
    """Ask the parser what searches would ask it, of answers of up to ``size`` tokens: in steps it would take too long.

    ``follows`` may follow in front of the first token. Once is enough, and nothing depends on it.
    """
    deadline = time.perf_counter() + _SECONDS
    with places.lent() as mine, contextlib.suppress(OutOfTime, Spent):
        if mine is not places or mine.ahead:
            return
        mine.ahead = True
        if not mine.known:
            mine.own(())  # compiled here, and not in some request's step
        else:
            root = mine.behind(b"", lambda: mine.own(()) or constraint.start(), follows)
            Room(root, size, mine, lambda: time.perf_counter() < deadline)


def _distinct(found: Sequence[Place | None]) -> tuple[Place, ...]:
    return tuple(place for place in dict.fromkeys(found) if place is not None)
