"""Automata of regular expressions, by partial derivatives (Antimirov 1996), and complements of expressions.

Two texts with the same derivative have the same continuations. The complement is the automaton with accepting and other
states exchanged, converted to an expression by state elimination (J. A. Brzozowski and E. J. McCluskey, "Signal flow
graph techniques for sequential circuit state diagrams", 1963).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Protocol

from mmserve.constraint.compile.expression import (
    EVERY,
    BadPattern,
    Chars,
    Group,
    Item,
    Ranges,
    Repeat,
    class_text,
    inverse,
    items_of,
    single,
    union,
)
from mmserve.constraint.compile.pattern import parsed

#: Items that are still to be matched, in sequence.
Row = tuple[Item, ...]

_MOST_ROWS = 64
_MOST_DERIVED = 4096
_TOO_MANY_ROWS = "has too many ways through it"

#: The dead state, and the number that replaces it for characters with too many derivatives.
DEAD, _TOO_MANY = -1, -2
#: The number of the row without items.
_NOTHING = 0


class Automaton:
    """States of an expression, an output of ``pattern`` without anchors, computed on demand; 0 is the start state.

    A state is a set of rows, one of which must still match. A row is numbered by its first item and the row after it,
    so that its derivatives are computed once.

    ``bounds``: code points, ascending; all characters between two of them have the same transitions. Raises
    ``BadPattern``.
    """

    def __init__(self, expression: str) -> None:
        whole = parsed(expression)
        sets = [item.ranges for item in items_of(whole) if isinstance(item, Chars)]
        self.bounds = sorted({bound for ranges in sets for low, high in ranges for bound in (low, high + 1)})
        self._rows: list[tuple[Item, int]] = [(whole, _NOTHING)]  # row 0 is never used
        self._nullable = [True]  # whether each row matches the empty string
        self._left: list[dict[int, frozenset[int]]] = [{}]  # derivatives of each row, by character class
        self._number: dict[tuple[Item, int], int] = {}
        self._begun: dict[tuple[Item, int], tuple[Row, ...]] = {}  # derivatives of an item, by character class
        self._states = [frozenset({self._row((whole,), _NOTHING)})]
        self._state = {self._states[0]: 0}
        self._moves: list[dict[int, int]] = [{}]

    def after(self, state: int, char: str) -> int:
        """The state after ``char``; ``DEAD`` if nothing matches.

        Raises ``BadPattern`` if the automaton gets too large.
        """
        if state == DEAD:
            return DEAD
        kind = bisect_right(self.bounds, ord(char))
        found = self._moves[state].get(kind)
        if found is None:
            try:
                found = self._next_state(state, kind, ord(char))
            except BadPattern:
                found = _TOO_MANY
            self._moves[state][kind] = found
        if found == _TOO_MANY:
            raise BadPattern(_TOO_MANY_ROWS)
        return found

    def ends(self, state: int) -> bool:
        """Whether ``state`` is accepting."""
        return state != DEAD and any(self._nullable[row] for row in self._states[state])

    def _next_state(self, state: int, kind: int, code: int) -> int:
        rows = frozenset().union(*(self._derived(row, kind, code) for row in self._states[state]))
        if len(rows) > _MOST_ROWS:
            raise BadPattern(_TOO_MANY_ROWS)
        if not rows:
            return DEAD
        found = self._state.setdefault(rows, len(self._states))
        if found == len(self._states):
            self._states.append(rows)
            self._moves.append({})
        return found

    def _row(self, items: Row, rest: int) -> int:
        """The number of the row that consists of ``items`` followed by row ``rest``."""
        for item in reversed(items):
            key = item, rest
            found = self._number.get(key)
            if found is None:
                found = self._number[key] = len(self._rows)
                self._rows.append(key)
                self._nullable.append(self._nullable[rest] and _nullable(item))
                self._left.append({})
            rest = found
        return rest

    def _derived(self, row: int, kind: int, code: int) -> frozenset[int]:
        """The derivatives of ``row`` by the character ``code``: a set of rows."""
        found = self._left[row].get(kind)
        if found is None:
            left, at = set[int](), row
            while at != _NOTHING:
                item, rest = self._rows[at]
                left.update(self._row(begun, rest) for begun in self._item_derivatives(item, kind, code))
                at = rest if _nullable(item) else _NOTHING
            if len(left) > _MOST_ROWS:
                raise BadPattern(_TOO_MANY_ROWS)
            found = self._left[row][kind] = frozenset(left)
        return found

    def _item_derivatives(self, item: Item, kind: int, code: int) -> tuple[Row, ...]:
        """The derivatives of ``item`` by the character ``code``: rows that remain to be matched."""
        if isinstance(item, Chars):
            return ((),) if any(low <= code <= high for low, high in item.ranges) else ()
        found = self._begun.get((item, kind))
        if found is None:
            all_of_them = tuple(islice(self._entered(item, kind, code), _MOST_DERIVED))
            found = tuple(dict.fromkeys(all_of_them))
            if len(all_of_them) == _MOST_DERIVED or len(found) > _MOST_ROWS:
                raise BadPattern(_TOO_MANY_ROWS)
            self._begun[item, kind] = found
        return found

    def _entered(self, item: Item, kind: int, code: int) -> Iterator[Row]:
        match item:
            case Group(branches):
                for branch in branches:
                    for i, inner in enumerate(branch):
                        for begun in self._item_derivatives(inner, kind, code):
                            yield begun + branch[i + 1 :]
                        if not _nullable(inner):
                            break
            case Repeat(inner, low, high) if high != 0:
                again = Repeat(inner, max(0, low - 1), None if high is None else high - 1)
                for begun in self._item_derivatives(inner, kind, code):
                    yield begun if again.high == 0 else (*begun, again)


def matches(expression: str, text: str) -> bool:
    """Whether ``expression`` (of ``pattern``, without anchors) matches the whole ``text``. Raises ``BadPattern``."""
    automaton, state = automaton_of(expression), 0
    for char in text:
        state = automaton.after(state, char)
    return automaton.ends(state)


def disjoint(one: str, other: str, states: int) -> bool:
    """True only if no string matches both expressions; as ``overlap``."""
    return overlap(one, other, states) is False


def overlap(one: str, other: str, states: int) -> bool | None:
    """Whether some string matches both expressions; None if that is not decided within ``states`` states.

    Raises ``BadPattern``.
    """
    first, second = automaton_of(one), automaton_of(other)
    chars = [chr(bound) for bound in sorted({0, *first.bounds, *second.bounds}) if bound <= 0x10FFFF]
    seen, pending = {(0, 0)}, [(0, 0)]
    while pending and len(seen) <= states:
        a, b = pending.pop()
        if first.ends(a) and second.ends(b):
            return True
        for char in chars:
            following = first.after(a, char), second.after(b, char)
            if following not in seen and DEAD not in following:
                seen.add(following)
                pending.append(following)
    return None if pending else False


@lru_cache(maxsize=256)
def automaton_of(expression: str) -> Automaton:
    """The automaton of ``expression``; its cache is cleared by ``one_of.clear_caches``."""
    return Automaton(expression)


def _nullable(item: Item) -> bool:
    match item:
        case Group(branches):
            return any(all(map(_nullable, branch)) for branch in branches)
        case Repeat(inner, low, _high):
            return low == 0 or _nullable(inner)
    return False


_MOST_STATES = 48
_LONGEST = 6_000  # characters of the result, and of every expression on the way to it
_FIRST, _LAST = -10, -11  # added states: a new start, and a single accepting one
_ANYTHING = "[\\s\\S]"


def complement(expression: str) -> str | None:
    """An anchored ``pattern`` of the strings that ``expression`` (of ``compile.pattern``) does not match.

    None if there are none, or if it would be too large. Raises ``BadPattern`` if the automaton gets too large.
    """
    automaton = Automaton(expression)
    transitions = edges(automaton)
    if transitions is None:
        return None
    found = as_expression(transitions, {state for pair in transitions for state in pair if not automaton.ends(state)})
    return None if found is None else f"^(?:{found})$"


def as_expression(transitions: dict[tuple[int, int], Ranges], ends: set[int]) -> str | None:
    """The expression of the automaton with these ``transitions`` between states, of which 0 is the start state; None if
    no state of ``ends`` is reachable, or if it would be too large."""
    texts = {pair: _ANYTHING if ranges == EVERY else class_text(ranges) for pair, ranges in transitions.items()}
    states = {0, *(state for pair in transitions for state in pair)}
    texts[_FIRST, 0] = ""
    texts |= {(state, _LAST): "" for state in ends}
    while states:
        state = min(states, key=lambda each: (_cost(texts, each), -each))
        states.remove(state)
        if not _eliminate(texts, state):
            return None
    return texts.get((_FIRST, _LAST))


class States(Protocol):
    """The states of an automaton (see ``Automaton``)."""

    bounds: list[int]

    def after(self, state: int, char: str) -> int:
        """The state after ``char``."""

    def ends(self, state: int) -> bool:
        """Whether ``state`` is accepting."""


def edges(automaton: States) -> dict[tuple[int, int], Ranges] | None:
    """The characters of the transitions between each two states, including ``DEAD``; None if there are too many
    states."""
    starts = sorted({0, *(bound for bound in automaton.bounds if bound <= 0x10FFFF)})
    spans = list(zip(starts, [*(start - 1 for start in starts[1:]), 0x10FFFF], strict=True))
    found: dict[tuple[int, int], Ranges] = {(DEAD, DEAD): EVERY}
    seen, pending = {0, DEAD}, [0]
    while pending:
        state = pending.pop()
        leading: dict[int, list[tuple[int, int]]] = {}
        for span in spans:
            if union((span,)):  # surrogates are no characters
                leading.setdefault(automaton.after(state, chr(union((span,))[0][0])), []).append(span)
        for target, several in leading.items():
            found[state, target] = union(tuple(several))
            if target not in seen:
                seen.add(target)
                pending.append(target)
        if len(seen) > _MOST_STATES:
            return None
    return found


def is_everything(expression: str) -> bool:
    """True only if ``expression`` matches all strings. Raises ``BadPattern``."""
    automaton = Automaton(expression)
    transitions = edges(automaton)
    return transitions is not None and all(
        source == DEAD or (automaton.ends(source) and target != DEAD) for source, target in transitions
    )


def _cost(texts: dict[tuple[int, int], str], state: int) -> int:
    into = sum(1 for source, target in texts if target == state and source != state)
    out = sum(1 for source, target in texts if source == state and target != state)
    return into * out


def _eliminate(texts: dict[tuple[int, int], str], state: int) -> bool:
    """Eliminate ``state``: its paths become edges between its neighbours. Returns False if one becomes too long."""
    loop = texts.pop((state, state), None)
    into = [(source, text) for (source, target), text in texts.items() if target == state]
    out = [(target, text) for (source, target), text in texts.items() if source == state]
    for source, _text in into:
        del texts[source, state]
    for target, _text in out:
        del texts[state, target]
    again = "" if loop is None else f"(?:{loop})*"
    for source, before in into:
        for target, after in out:
            way = f"{before}{again}{after}"
            known = texts.get((source, target))
            made = way if known is None or known == way else f"(?:{known}|{way})"
            if len(made) > _LONGEST:
                return False
            texts[source, target] = made
    return True


def all_but(words: Iterable[str]) -> str:
    r"""An anchored ``pattern`` of every string that is not one of ``words``.

    The inverted trie of the words: at each node a string may end unless a word does, may leave the trie by any other
    character and continue with any text, or may follow the trie.
    """
    return f"^{_node(sorted(set(words)), 0)}$"


def _node(words: list[str], depth: int) -> str:
    """The expression of what may follow the first ``depth`` characters, which all ``words`` share."""
    ends = any(len(word) == depth for word in words)
    branches: dict[str, list[str]] = {}
    for word in words:
        if len(word) > depth:
            branches.setdefault(word[depth], []).append(word)
    leave = class_text(inverse(union(*(single(ord(c)) for c in branches))))
    options = [] if ends else [""]
    options.append(f"{leave}[\\s\\S]*")
    for char, inside in branches.items():
        options.append(class_text(single(ord(char))) + _node(inside, depth + 1))
    return "(?:" + "|".join(options) + ")"
