"""What is left of a regular expression behind a text, by partial derivatives (Antimirov 1996).

Two texts behind which the same is left may be followed by the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

from mmserve.constraint.pattern import BadPattern, Chars, Group, Item, Repeat, parsed

#: Items that are still to be matched, one after another.
Row = tuple[Item, ...]

_MOST_ROWS = 64
_MOST_DERIVED = 4096
_WAYS = "has too many ways through it"

#: The state behind which nothing matches, and a number for characters behind which there are too many ways.
DEAD, _TOO_MANY = -1, -2
#: The number of the row without items.
_NOTHING = 0


class Automaton:
    """States of an expression, an output of ``pattern`` without anchors, made as they are asked for; 0 is the first.

    A state is the set of rows of which one must still match. Rows are numbered, by their first item and the row behind
    it, so that what is left of each is found once.

    ``bounds``: code points, ascending; characters between two of them are followed by the same. Raises ``BadPattern``.
    """

    def __init__(self, expression: str) -> None:
        whole = parsed(expression)
        self.bounds = sorted(set(_bounds(whole)))
        self._rows: list[tuple[Item, int]] = [(whole, _NOTHING)]  # the first is never looked at
        self._nullable = [True]  # whether each row may match nothing
        self._left: list[dict[int, frozenset[int]]] = [{}]  # rows left behind each kind of characters
        self._number: dict[tuple[Item, int], int] = {}
        self._begun: dict[tuple[Item, int], tuple[Row, ...]] = {}  # what may be left of an item, by kinds of characters
        self._states = [frozenset({self._row((whole,), _NOTHING)})]
        self._state = {self._states[0]: 0}
        self._moves: list[dict[int, int]] = [{}]

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
                found = self._behind(state, kind, ord(char))
            except BadPattern:
                found = _TOO_MANY
            self._moves[state][kind] = found
        if found == _TOO_MANY:
            raise BadPattern(_WAYS)
        return found

    def ends(self, state: int) -> bool:
        """Whether nothing more need follow."""
        return state != DEAD and any(self._nullable[row] for row in self._states[state])

    def _behind(self, state: int, kind: int, code: int) -> int:
        rows = frozenset().union(*(self._derived(row, kind, code) for row in self._states[state]))
        if len(rows) > _MOST_ROWS:
            raise BadPattern(_WAYS)
        if not rows:
            return DEAD
        found = self._state.setdefault(rows, len(self._states))
        if found == len(self._states):
            self._states.append(rows)
            self._moves.append({})
        return found

    def _row(self, items: Row, behind: int) -> int:
        """The number of the row of ``items`` and that of number ``behind``."""
        for item in reversed(items):
            key = item, behind
            found = self._number.get(key)
            if found is None:
                found = self._number[key] = len(self._rows)
                self._rows.append(key)
                self._nullable.append(self._nullable[behind] and _nullable(item))
                self._left.append({})
            behind = found
        return behind

    def _derived(self, row: int, kind: int, code: int) -> frozenset[int]:
        """The rows left of one behind the character ``code``."""
        found = self._left[row].get(kind)
        if found is None:
            left, at = set[int](), row
            while at != _NOTHING:
                item, behind = self._rows[at]
                left.update(self._row(begun, behind) for begun in self._ways(item, kind, code))
                at = behind if _nullable(item) else _NOTHING
            if len(left) > _MOST_ROWS:
                raise BadPattern(_WAYS)
            found = self._left[row][kind] = frozenset(left)
        return found

    def _ways(self, item: Item, kind: int, code: int) -> tuple[Row, ...]:
        """What may be left of ``item`` behind the character ``code``."""
        if isinstance(item, Chars):
            return ((),) if any(low <= code <= high for low, high in item.ranges) else ()
        found = self._begun.get((item, kind))
        if found is None:
            all_of_them = tuple(islice(self._entered(item, kind, code), _MOST_DERIVED))
            found = tuple(dict.fromkeys(all_of_them))
            if len(all_of_them) == _MOST_DERIVED or len(found) > _MOST_ROWS:
                raise BadPattern(_WAYS)
            self._begun[item, kind] = found
        return found

    def _entered(self, item: Item, kind: int, code: int) -> Iterator[Row]:
        match item:
            case Group(branches):
                for branch in branches:
                    for i, inner in enumerate(branch):
                        for begun in self._ways(inner, kind, code):
                            yield begun + branch[i + 1 :]
                        if not _nullable(inner):
                            break
            case Repeat(inner, low, high) if high != 0:
                again = Repeat(inner, max(0, low - 1), None if high is None else high - 1)
                for begun in self._ways(inner, kind, code):
                    yield begun if again.high == 0 else (*begun, again)


def matches(expression: str, text: str) -> bool:
    """Whether ``expression`` (of ``pattern``, without anchors) matches the whole ``text``. Raises ``BadPattern``."""
    automaton, state = _automaton(expression), 0
    for char in text:
        state = automaton.after(state, char)
    return automaton.ends(state)


def disjoint(one: str, other: str, states: int) -> bool:
    """True only if no string matches both expressions; ``states`` of the two together are looked at.

    Raises ``BadPattern``.
    """
    mine, theirs = _automaton(one), _automaton(other)
    chars = [chr(bound) for bound in sorted({0, *mine.bounds, *theirs.bounds}) if bound <= 0x10FFFF]
    seen, pending = {(0, 0)}, [(0, 0)]
    while pending and len(seen) <= states:
        a, b = pending.pop()
        if mine.ends(a) and theirs.ends(b):
            return False
        for char in chars:
            following = mine.after(a, char), theirs.after(b, char)
            if following not in seen and DEAD not in following:
                seen.add(following)
                pending.append(following)
    return not pending


@lru_cache(maxsize=256)
def _automaton(expression: str) -> Automaton:
    return Automaton(expression)


def forget() -> None:
    """Keep nothing of the expressions asked about so far."""
    _automaton.cache_clear()


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
