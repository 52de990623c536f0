"""``patternProperties`` with patterns that do not overlap, as llguidance requires.

The product automaton of all patterns is built. Each set of patterns that some name matches, and no others, gets its own
expression, for which all schemas of the set hold. Patterns of different schemas that apply to the same object are
separated in the same way (``separated_within``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import combinations
from typing import Any

from mmserve.constraint.compile.derivatives import DEAD, Automaton, as_expression, edges, overlap
from mmserve.constraint.compile.expression import BadPattern, Ranges, union
from mmserve.constraint.compile.keywords import nodes, with_children
from mmserve.constraint.compile.negation import both
from mmserve.constraint.compile.pattern import searched
from mmserve.constraint.compile.scalars import anchored

_MOST_STATES = 200  # of two patterns together, to find a common name
_MOST_PATTERNS = 8
_MOST_COMPARED = 24  # patterns of a document
_TOO_LARGE = "some names match several patterns, which are too large to be separated; write patterns that share no name"


def separated(schemas: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """``schemas`` by expressions (of ``pattern.searched``) that do not overlap, as far as is known.

    Raises ``BadPattern`` if some overlap, and disjoint expressions would be too large.
    """
    if not any(_overlap(one, other) for one, other in combinations(schemas, 2)):
        return schemas
    product = _ProductAutomaton(list(schemas))
    transitions = edges(product) if len(schemas) <= _MOST_PATTERNS else None
    if transitions is None:
        raise BadPattern(_TOO_LARGE)
    transitions = minimal(transitions, product.matching)
    ends = defaultdict[tuple[str, ...], set[int]](set)
    for state in {state for pair in transitions for state in pair}:
        ends[product.matching(state)].add(state)
    del ends[()]
    found = dict[str, list[Any]]()
    for expressions, states in ends.items():
        text = as_expression(transitions, states)
        if text is None:
            raise BadPattern(_TOO_LARGE)
        found[searched(f"^(?:{text})$")] = [each for expression in expressions for each in schemas[expression]]
    return found


def separated_within(schema: Any) -> Any | None:
    """``schema`` (of ``compile.schema``) with the patterns of all its schemas made disjoint.

    None if no patterns of different schemas overlap, or if they are too many or too large.
    """
    patterns = {pattern for node in nodes(schema) for pattern in node.get("patternProperties", ())}
    if not 1 < len(patterns) <= _MOST_COMPARED:
        return None
    parts = {pattern: [pattern] for pattern in patterns}
    try:
        for group in _sharing(sorted(patterns)):
            for expression, found in separated({_bare(pattern): [pattern] for pattern in group}).items():
                for pattern in found:
                    parts[pattern].append(anchored(expression))
            for pattern in group:
                parts[pattern].remove(pattern)
    except BadPattern:
        return None
    return None if all(each == [pattern] for pattern, each in parts.items()) else _with_parts(schema, parts)


def _sharing(patterns: list[str]) -> list[set[str]]:
    """Groups of ``patterns`` that overlap, directly or through others of the group."""
    groups = [{pattern} for pattern in patterns]
    for one, other in combinations(patterns, 2):
        first, second = (next(group for group in groups if each in group) for each in (one, other))
        if first is not second and _overlap(_bare(one), _bare(other)):
            groups.remove(second)
            first |= second
    return [group for group in groups if len(group) > 1]


def _bare(pattern: str) -> str:
    """The expression from which ``scalars.anchored`` made ``pattern``."""
    return pattern.removeprefix("^").removesuffix("$")


def _with_parts(schema: Any, parts: dict[str, list[str]]) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = with_children(schema, lambda inner: _with_parts(inner, parts))
    if "patternProperties" in made:
        under = defaultdict[str, list[Any]](list)
        for pattern, each in made["patternProperties"].items():
            for part in parts[pattern]:
                under[part].append(each)
        made["patternProperties"] = {part: both(*found) for part, found in under.items()}
    return made


def minimal(
    transitions: dict[tuple[int, int], Ranges], label: Callable[[int], Hashable]
) -> dict[tuple[int, int], Ranges]:
    """The transitions of the minimal automaton with the same labels, by partition refinement (E. F. Moore,
    "Gedanken-experiments on sequential machines", 1956).

    Of equivalent states, 0 is kept, then ``DEAD``, then the one found first.
    """
    states = sorted(
        {0, DEAD, *(state for pair in transitions for state in pair)}, key=lambda state: (state != 0, state)
    )
    leading = defaultdict[int, dict[int, Ranges]](dict)
    for (source, target), ranges in transitions.items():
        leading[source][target] = ranges
    of: dict[int, Hashable] = {state: label(state) for state in states}
    while True:
        finer = {state: (of[state], _by_class(leading[state], of)) for state in states}
        first: dict[Hashable, int] = {}
        for state in states:
            first.setdefault(finer[state], state)
        if len(first) == len(set(of.values())):
            break
        of = {state: first[finer[state]] for state in states}
    found: dict[tuple[int, int], Ranges] = {}
    for (source, target), ranges in transitions.items():
        if first[finer[source]] == source:
            pair = source, first[finer[target]]
            found[pair] = union(found.get(pair, ()), ranges)
    return found


def _by_class(leading: dict[int, Ranges], of: dict[int, Hashable]) -> frozenset[tuple[Hashable, Ranges]]:
    """The characters of the transitions to each class of states."""
    found = defaultdict[Hashable, Ranges](tuple)
    for target, ranges in leading.items():
        found[of[target]] = union(found[of[target]], ranges)
    return frozenset(found.items())


def _overlap(one: str, other: str) -> bool:
    """Whether some string is known to match both."""
    with suppress(BadPattern):
        return overlap(one, other, _MOST_STATES) is True
    return False


class _ProductAutomaton:
    """The product automaton of several expressions; 0 is the start state."""

    def __init__(self, expressions: list[str]) -> None:
        self._automata = {expression: Automaton(expression) for expression in expressions}
        self.bounds = sorted({bound for each in self._automata.values() for bound in each.bounds})
        self._states = [(0,) * len(expressions)]
        self._number = {self._states[0]: 0, (DEAD,) * len(expressions): DEAD}

    def after(self, state: int, char: str) -> int:
        """The state after ``char``. Raises ``BadPattern`` if the automaton gets too large."""
        pairs = zip(self._automata.values(), self._states[state], strict=True)
        states = tuple(automaton.after(each, char) for automaton, each in pairs)
        found = self._number.setdefault(states, len(self._states))
        if found == len(self._states):
            self._states.append(states)
        return found

    def matching(self, state: int) -> tuple[str, ...]:
        """The expressions that accept in ``state``."""
        if state == DEAD:
            return ()
        pairs = zip(self._automata.items(), self._states[state], strict=True)
        return tuple(expression for (expression, automaton), each in pairs if automaton.ends(each))

    def ends(self, state: int) -> bool:
        """Whether ``state`` is accepting."""
        return self.matching(state) != ()
