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
#: Rows of which one must match; none: nothing may follow.
Rest = frozenset[Row]

_MOST_ROWS = 64
_MOST_DERIVED = 4096
_WAYS = "has too many ways through it"
_EVERYTHING = (r"(?s:.)", r"[\u{0}-\u{10ffff}]")  # the one flag that ``pattern`` writes, and what it reads for it


#: A state's number for characters behind which there are too many ways.
_TOO_MANY = -1


class Automaton:
    """States of an expression, an output of ``pattern`` without anchors, made as they are asked for; 0 is the first.

    ``bounds``: code points, ascending; characters between two of them are followed by the same. Raises ``BadPattern``.
    """

    def __init__(self, expression: str) -> None:
        first = beginning(expression)
        self.bounds = sorted({bound for row in first for item in row for bound in _bounds(item)})
        self._number: dict[Rest, int] = {first: 0}
        self._rests = [first]
        self._moves: list[dict[int, int]] = [{}]

    def after(self, state: int, char: str) -> int:
        """The state behind ``char``. Raises ``BadPattern`` where that is too much to follow."""
        kind = bisect_right(self.bounds, ord(char))
        found = self._moves[state].get(kind)
        if found is None:
            try:
                found = self._of(behind(self._rests[state], char))
            except BadPattern:
                found = _TOO_MANY
            self._moves[state][kind] = found
        if found == _TOO_MANY:
            raise BadPattern(_WAYS)
        return found

    def ends(self, state: int) -> bool:
        """Whether nothing more need follow."""
        return ends(self._rests[state])

    def over(self, state: int) -> bool:
        """Whether nothing may follow, and nothing may end either."""
        return not self._rests[state]

    def _of(self, rest: Rest) -> int:
        found = self._number.setdefault(rest, len(self._rests))
        if found == len(self._rests):
            self._rests.append(rest)
            self._moves.append({})
        return found


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
            if following not in seen and not mine.over(following[0]) and not theirs.over(following[1]):
                seen.add(following)
                pending.append(following)
    return not pending


@lru_cache(maxsize=256)
def _automaton(expression: str) -> Automaton:
    return Automaton(expression)


def beginning(expression: str) -> Rest:
    """What is left in front of the first character of ``expression``, an output of ``pattern`` without anchors.

    Raises ``BadPattern``.
    """
    return frozenset({(parsed(expression.replace(*_EVERYTHING)),)})


def behind(rest: Rest, char: str) -> Rest:
    """What is left of ``rest`` behind ``char``. Raises ``BadPattern`` where that is too much to follow."""
    derived = list(islice((each for row in rest for each in _derived(row, ord(char))), _MOST_DERIVED))
    found = frozenset(derived)
    if len(found) > _MOST_ROWS or len(derived) == _MOST_DERIVED:
        raise BadPattern(_WAYS)
    return found


def ends(rest: Rest) -> bool:
    """Whether nothing more need follow."""
    return any(all(map(_nullable, row)) for row in rest)


def _derived(row: Row, code: int) -> Iterator[Row]:
    for i, item in enumerate(row):
        for begun in _begun(item, code):
            yield begun + row[i + 1 :]
        if not _nullable(item):
            return


def _begun(item: Item, code: int) -> Iterator[Row]:
    """What may be left of ``item`` behind the character ``code``."""
    match item:
        case Chars(ranges) if any(low <= code <= high for low, high in ranges):
            yield ()
        case Group(branches):
            for branch in branches:
                yield from _derived(branch, code)
        case Repeat(inner, low, high) if high != 0:
            again = Repeat(inner, max(0, low - 1), None if high is None else high - 1)
            for begun in _begun(inner, code):
                yield begun if again.high == 0 else (*begun, again)


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
