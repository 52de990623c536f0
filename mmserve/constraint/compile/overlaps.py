"""``patternProperties`` with patterns of which no two match the same name, as llguidance needs them.

Automata of all patterns run side by side. Each set of patterns that some name matches, and no others, has an expression
of its own, under which the schemas of all of the set hold.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from itertools import combinations
from typing import Any

from mmserve.constraint.compile.derivatives import DEAD, Automaton, as_expression, edges, overlap
from mmserve.constraint.compile.expression import BadPattern
from mmserve.constraint.compile.pattern import searched

_MOST_STATES = 200  # of two patterns together, to find a name that they share
_MOST_PATTERNS = 8
_TOO_LARGE = "some names match several patterns, which are too large to be separated; write patterns that share no name"


def separated(schemas: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """``schemas`` by expressions (of ``pattern.searched``) of which no two match one string, as far as is known.

    Raises ``BadPattern`` where some do, and expressions that do not would be too large.
    """
    if not any(_overlap(one, other) for one, other in combinations(schemas, 2)):
        return schemas
    together = _SideBySide(list(schemas))
    ways = edges(together) if len(schemas) <= _MOST_PATTERNS else None
    if ways is None:
        raise BadPattern(_TOO_LARGE)
    ends = defaultdict[tuple[str, ...], set[int]](set)
    for state in {state for pair in ways for state in pair}:
        ends[together.matching(state)].add(state)
    del ends[()]
    found = dict[str, list[Any]]()
    for expressions, states in ends.items():
        text = as_expression(ways, states)
        if text is None:
            raise BadPattern(_TOO_LARGE)
        found[searched(f"^(?:{text})$")] = [each for expression in expressions for each in schemas[expression]]
    return found


def _overlap(one: str, other: str) -> bool:
    """Whether some string is known to match both."""
    with suppress(BadPattern):
        return overlap(one, other, _MOST_STATES) is True
    return False


class _SideBySide:
    """The automata of several expressions, as one; 0 is the first state."""

    def __init__(self, expressions: list[str]) -> None:
        self._automata = {expression: Automaton(expression) for expression in expressions}
        self.bounds = sorted({bound for each in self._automata.values() for bound in each.bounds})
        self._states = [(0,) * len(expressions)]
        self._number = {self._states[0]: 0, (DEAD,) * len(expressions): DEAD}

    def after(self, state: int, char: str) -> int:
        """The state after ``char``. Raises ``BadPattern`` where that is too much to follow."""
        pairs = zip(self._automata.values(), self._states[state], strict=True)
        states = tuple(automaton.after(each, char) for automaton, each in pairs)
        found = self._number.setdefault(states, len(self._states))
        if found == len(self._states):
            self._states.append(states)
        return found

    def matching(self, state: int) -> tuple[str, ...]:
        """The expressions that match the strings that lead to ``state``."""
        if state == DEAD:
            return ()
        pairs = zip(self._automata.items(), self._states[state], strict=True)
        return tuple(expression for (expression, automaton), each in pairs if automaton.ends(each))

    def ends(self, state: int) -> bool:
        """Whether ``state`` is accepting."""
        return self.matching(state) != ()
