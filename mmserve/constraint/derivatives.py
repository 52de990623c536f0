"""What is left of a regular expression behind a text, by partial derivatives (Antimirov 1996).

Two texts behind which the same is left may be followed by the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

from mmserve.constraint.pattern import BadPattern, Chars, Group, Item, Repeat, parsed

#: Items that are still to be matched, one after another.
Row = tuple[Item, ...]
#: Rows of which one must match; none: nothing may follow.
Rest = frozenset[Row]

_MOST_ROWS = 64
_MOST_DERIVED = 4096
_WAYS = "has too many ways through it"
_EVERYTHING = (r"(?s:.)", r"[\u{0}-\u{10ffff}]")  # the one flag that ``pattern`` writes, and what it reads for it


#: The state behind which nothing matches, and a number for characters behind which there are too many ways.
DEAD, _TOO_MANY = -1, -2


class Automaton:
    """States of an expression, an output of ``pattern`` without anchors, made as they are asked for; 0 is the first.

    ``bounds``: code points, ascending; characters between two of them are followed by the same. Raises ``BadPattern``.
    """

    def __init__(self, expression: str) -> None:
        first: Rest = frozenset({(parsed(expression.replace(*_EVERYTHING)),)})
        self.bounds = sorted({bound for row in first for item in row for bound in _bounds(item)})
        self._number: dict[Rest, int] = {first: 0}
        self._rests = [first]
        self._moves: list[dict[int, int]] = [{}]
        self._begun: dict[tuple[Item, int], tuple[Row, ...]] = {}  # what may be left of an item, by kinds of characters

    def after(self, state: int, char: str) -> int:
        """The state behind ``char``; ``DEAD`` where nothing matches any more.

        Raises ``BadPattern`` where that is too much to follow.
        """
        if state == DEAD:
            return DEAD
        kind = bisect_right(self.bounds, ord(char))
        found = self._moves[state].get(kind)
        if found is None:
            try:
                found = self._of(self._behind(self._rests[state], kind, ord(char)))
            except BadPattern:
                found = _TOO_MANY
            self._moves[state][kind] = found
        if found == _TOO_MANY:
            raise BadPattern(_WAYS)
        return found

    def ends(self, state: int) -> bool:
        """Whether nothing more need follow."""
        return state != DEAD and any(all(map(_nullable, row)) for row in self._rests[state])

    def _of(self, rest: Rest) -> int:
        if not rest:
            return DEAD
        found = self._number.setdefault(rest, len(self._rests))
        if found == len(self._rests):
            self._rests.append(rest)
            self._moves.append({})
        return found

    def _behind(self, rest: Rest, kind: int, code: int) -> Rest:
        """What is left of ``rest`` behind the character ``code``. Raises ``BadPattern`` where that is too much."""
        found = frozenset(_few(each for row in rest for each in self._derived(row, kind, code)))
        if len(found) > _MOST_ROWS:
            raise BadPattern(_WAYS)
        return found

    def _derived(self, row: Row, kind: int, code: int) -> Iterator[Row]:
        for i, item in enumerate(row):
            for begun in self._left(item, kind, code):
                yield begun + row[i + 1 :]
            if not _nullable(item):
                return

    def _left(self, item: Item, kind: int, code: int) -> tuple[Row, ...]:
        """What may be left of ``item`` behind the character ``code``."""
        if isinstance(item, Chars):
            return ((),) if any(low <= code <= high for low, high in item.ranges) else ()
        found = self._begun.get((item, kind))
        if found is None:
            found = self._begun[item, kind] = _few(self._ways(item, kind, code))
        return found

    def _ways(self, item: Item, kind: int, code: int) -> Iterator[Row]:
        match item:
            case Group(branches):
                for branch in branches:
                    yield from self._derived(branch, kind, code)
            case Repeat(inner, low, high) if high != 0:
                again = Repeat(inner, max(0, low - 1), None if high is None else high - 1)
                for begun in self._left(inner, kind, code):
                    yield begun if again.high == 0 else (*begun, again)


def _few(rows: Iterator[Row]) -> tuple[Row, ...]:
    """All of ``rows``. Raises ``BadPattern`` where they are too many."""
    found = tuple(islice(rows, _MOST_DERIVED))
    if len(found) == _MOST_DERIVED:
        raise BadPattern(_WAYS)
    return found


def _nullable(item: Item) -> bool:
    match item:
        case Group(branches):
            return any(all(map(_nullable, branch)) for branch in branches)
        case Repeat(inner, low, _high):
            return low == 0 or _nullable(inner)
    return False


def _bounds(item: Item) -> Iterator[int]:
    """Where the sets of characters in ``item`` begin, and where what is behind them does."""
    match item:
        case Chars(ranges):
            for low, high in ranges:
                yield from (low, high + 1)
        case Group(branches):
            for branch in branches:
                for inner in branch:
                    yield from _bounds(inner)
        case Repeat(inner, _low, _high):
            yield from _bounds(inner)
