"""The regular expression of all strings that another one does not match.

The expression's automaton with its ends turned round is written as an expression again by the elimination of states
(J. A. Brzozowski and E. J. McCluskey, "Signal flow graph techniques for sequential circuit state diagrams", 1963).
"""

from __future__ import annotations

from mmserve.constraint import charsets
from mmserve.constraint.charsets import Ranges
from mmserve.constraint.derivatives import DEAD, Automaton

_MOST_STATES = 48
_LONGEST = 6_000  # characters of the result, and of every expression on the way to it
_FIRST, _LAST = -10, -11  # states that are added: one before the beginning, and one after every end
_ANYTHING = "[\\s\\S]"


def complement(expression: str) -> str | None:
    """A ``pattern``, anchored, of the strings that ``expression`` (of ``mmserve.constraint.pattern``) does not match.

    None where there are none, or where it would be too large. Raises ``BadPattern`` where ``expression`` is too much to
    follow.
    """
    automaton = Automaton(expression)
    ways = edges(automaton)
    if ways is None:
        return None
    found = as_expression(ways, {state for pair in ways for state in pair if not automaton.ends(state)})
    return None if found is None else f"^(?:{found})$"


def as_expression(ways: dict[tuple[int, int], Ranges], ends: set[int]) -> str | None:
    """The expression of the automaton with ``ways`` from state to state, of which 0 is the first; None where nothing
    leads to one of the ``ends``, or where it would be too large."""
    texts = {pair: _ANYTHING if ranges == charsets.EVERY else charsets.text_of(ranges) for pair, ranges in ways.items()}
    states = {0, *(state for pair in ways for state in pair)}
    texts[_FIRST, 0] = ""
    texts |= {(state, _LAST): "" for state in ends}
    while states:
        state = min(states, key=lambda each: (_cost(texts, each), -each))
        states.remove(state)
        if not _eliminate(texts, state):
            return None
    return texts.get((_FIRST, _LAST))


def edges(automaton: Automaton) -> dict[tuple[int, int], Ranges] | None:
    """The characters that lead from each state to each other one, ``DEAD`` among them; None for too many states."""
    starts = sorted({0, *(bound for bound in automaton.bounds if bound <= 0x10FFFF)})
    spans = list(zip(starts, [*(start - 1 for start in starts[1:]), 0x10FFFF], strict=True))
    found: dict[tuple[int, int], Ranges] = {(DEAD, DEAD): charsets.EVERY}
    seen, pending = {0, DEAD}, [0]
    while pending:
        state = pending.pop()
        leading: dict[int, list[tuple[int, int]]] = {}
        for span in spans:
            if charsets.union((span,)):  # surrogates are no characters
                leading.setdefault(automaton.after(state, chr(charsets.union((span,))[0][0])), []).append(span)
        for target, several in leading.items():
            found[state, target] = charsets.union(tuple(several))
            if target not in seen:
                seen.add(target)
                pending.append(target)
        if len(seen) > _MOST_STATES:
            return None
    return found


def is_everything(expression: str) -> bool:
    """True only if ``expression`` matches all strings. Raises ``BadPattern``."""
    automaton = Automaton(expression)
    ways = edges(automaton)
    return ways is not None and all(
        source == DEAD or (automaton.ends(source) and target != DEAD) for source, target in ways
    )


def _cost(texts: dict[tuple[int, int], str], state: int) -> int:
    into = sum(1 for source, target in texts if target == state and source != state)
    out = sum(1 for source, target in texts if source == state and target != state)
    return into * out


def _eliminate(texts: dict[tuple[int, int], str], state: int) -> bool:
    """Write the ways through ``state`` as edges between its neighbours; False where one becomes too long."""
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
