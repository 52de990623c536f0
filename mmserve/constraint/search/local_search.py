"""A completion made shorter by changing one choice of it at a time.

Long answers are mostly repetitions: what was tried at a state is not tried again where the same tokens stand around
another, and a change that helps is made at once wherever the same tokens may be replaced. An array is so brought to its
least by its first items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mmserve.constraint.search import bitmask
from mmserve.constraint.search.base import Matcher
from mmserve.constraint.search.completion import BYTE, FORK, MASK, Walk, Work, after, onward, walk
from mmserve.constraint.search.lexicon import Lexicon

#: Long tokens tried at a choice.
_FILLERS = 3
#: Tokens that a detour may skip of the old way, and steps that it may take, until it joins that again.
_NEAR, _STEPS = 48, 12
#: Tokens around a state that say whether another is like it, and that a joined way is tried with before all of it is.
_AROUND = 16
#: Tokens beside a change that may be joined with it into longer ones.
_SEAM = 6


@dataclass(frozen=True)
class _Detour:
    """Tokens instead of those of a walk from a choice to ``end``."""

    tokens: tuple[int, ...]
    choices: tuple[int, ...]  # among them
    end: int
    saved: int  # tokens, one at least


def shorten(begun: Walk, matcher: Matcher, lexicon: Lexicon, work: Work, *, alternatives: int) -> list[int]:
    """Fewest tokens found for ``begun``, or for a way that differs from it: its choices are gone through, first for
    ways that soon join the old one again, then for any.

    ``matcher``: where ``begun`` begins. ``alternatives``: tokens tried at a choice.
    """
    best = _by_detours(begun, matcher, lexicon, work, alternatives)
    best = _by_walks(best, matcher, lexicon, work, alternatives)
    return min((_fewest(way, lexicon) for way in (best, begun)), key=len)


def _fewest(way: Walk, lexicon: Lexicon) -> list[int]:
    return lexicon.cover(lexicon.text(way.tokens)) or list(way.tokens)


@dataclass
class _Along:
    """Goes along a way, which may change after the choice that it is at, from choice to choice unlike those before."""

    at: Matcher  # before token ``done``
    work: Work
    n: int = 0  # the choice to go to
    done: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def state(self, way: Walk) -> int | None:
        """Where choice ``n`` or the next that is unlike is, and ``at`` then; None after the last of them, or where the
        work or the parser's limits are at their end."""
        while self.n < len(way.choices) and self.work.left:
            state = way.choices[self.n]
            if not self._known(way.tokens, state):
                moved = after(self.at, way.tokens[self.done : state])
                if moved is None:
                    return None
                self.work.read(state - self.done)
                self.at, self.done = moved, state
                return state
            self.n += 1
        return None

    def _known(self, tokens: tuple[int, ...], state: int) -> bool:
        around = (*tokens[max(0, state - _AROUND) : state], -1, *tokens[state : state + _AROUND])
        known = around in self.seen
        self.seen.add(around)
        return known


def _by_detours(best: Walk, matcher: Matcher, lexicon: Lexicon, work: Work, alternatives: int) -> Walk:
    along = _Along(matcher.fork(), work)
    while (state := along.state(best)) is not None:
        others = _others(along.at, lexicon, best.tokens[state:], alternatives, work)
        detours = [_near(best, state, along.at, token, lexicon, work) for token in others]
        most = max((detour for detour in detours if detour is not None), key=lambda each: each.saved, default=None)
        if most is None:
            along.n += 1
        else:
            best = _everywhere(best, along.n, most, along.at, work)
    return best


def _near(best: Walk, state: int, at: Matcher, token: int, lexicon: Lexicon, work: Work) -> _Detour | None:
    """A shorter way that leaves ``best`` at ``state``, where ``at`` is, by ``token``, and soon joins it again."""
    fork = after(at, [token])
    tokens, choices = [token], [0]
    for _ in range(_STEPS):
        if fork is None or not work.spend(FORK + MASK):
            return None
        ends = _joins(fork, best.tokens, state, work)
        if ends:
            way = _Detour(tuple(tokens), tuple(choices), state, 0)
            return _farthest(fork, best.tokens, way, ends, lexicon, work)
        step, chosen = onward(fork, lexicon, tokens)
        if not step:
            return None
        if chosen:
            choices.append(len(tokens))
        fork = after(fork, step)
        tokens += step
    return None


def _joins(fork: Matcher, tokens: tuple[int, ...], state: int, work: Work) -> list[int]:
    """The positions of the old way, after ``state`` and near it, from which on its next tokens may follow ``fork``."""
    near = tokens[state + 1 : state + _NEAR + 1]
    follow = {token for token in set(near) if fork.valid([token])}  # a mask of all tokens takes longer, or far longer
    found = list[int]()
    for end, token in enumerate(near, state + 1):
        if token in follow:
            rest = list(tokens[end : end + _AROUND])
            reach = fork.valid(rest)
            work.read(reach)
            if reach == len(rest):
                found.append(end)
    if state + _NEAR >= len(tokens) and fork.accepting:
        found.append(len(tokens))
    return found


def _farthest(
    fork: Matcher, old: tuple[int, ...], way: _Detour, ends: list[int], lexicon: Lexicon, work: Work
) -> _Detour | None:
    """``way``, which ends where it begins, up to one of ``ends``, which ascend: all of the ``old`` way may follow
    ``fork`` from there on, and something is saved.

    It is looked for by halves: the farther, the more is saved, and from some end on too much is left out, as where
    items are counted.
    """
    state, found = way.end, None
    low, high = 0, len(ends)
    while low < high and work.left:
        middle = (low + high) // 2 if high < len(ends) else high - 1
        end = ends[middle]
        saved = _saved(old, state, end, way.tokens, lexicon, work)
        if saved > 0 and _follows(fork, old[end:], work):
            found = replace(way, end=end, saved=saved)
        if saved > 0 and (found is None or found.end < end):
            high = middle
        else:
            low = middle + 1
    return found


def _follows(fork: Matcher, tokens: tuple[int, ...], work: Work) -> bool:
    """As ``completes``."""
    reach = fork.valid(tokens)
    work.read(FORK + reach)
    if reach < len(tokens):
        return False
    work.read(reach)
    behind = after(fork, tokens)
    return behind is not None and behind.accepting


def _saved(old: tuple[int, ...], state: int, end: int, new: tuple[int, ...], lexicon: Lexicon, work: Work) -> int:
    """How many tokens fewer spell the text with ``new`` than the one with what stands from ``state`` to ``end``."""
    left, right = old[max(0, state - _SEAM) : state], old[end : end + _SEAM]
    texts = [lexicon.text((*left, *middle, *right)) for middle in (old[state:end], new)]
    work.read(BYTE * sum(map(len, texts)))
    before, now = map(lexicon.cover, texts)
    return 0 if before is None or now is None else len(before) - len(now)


def _everywhere(best: Walk, n: int, detour: _Detour, at: Matcher, work: Work) -> Walk:
    """``best`` with ``detour`` at its choice ``n``, where ``at`` is, and wherever else it may be, if it may there."""
    state = best.choices[n]
    for beside in (0, 1):
        states = _alike(best.tokens, state, detour.end, beside)
        if len(states) > 1 and work.left:
            found = _replaced(best, states, detour)
            if _follows(at, found.tokens[state:], work):
                return found
    return _replaced(best, [state], detour)


def _alike(tokens: tuple[int, ...], state: int, end: int, beside: int) -> list[int]:
    """``state``, and where else the tokens from there to ``end`` stand, with the same next one and as many the same
    ``beside`` them to the left."""
    size, left = end - state, max(0, state - beside)
    wanted = tokens[left : end + 1]
    states, i = [state], end
    while i < len(tokens):
        if tokens[i] == tokens[state] and tokens[i - (state - left) : i + len(wanted) - (state - left)] == wanted:
            states.append(i)
            i += size
        else:
            i += 1
    return states


def _replaced(best: Walk, states: list[int], detour: _Detour) -> Walk:
    """``best`` with ``detour``, which begins at the first of ``states``, at each of them; they ascend."""
    size = detour.end - states[0]
    tokens, choices = list[int](), list[int]()
    done, old = 0, iter((*best.choices, len(best.tokens)))
    choice = next(old)
    for state in (*states, len(best.tokens)):
        while choice < state:
            if choice >= done:
                choices.append(choice - done + len(tokens))
            choice = next(old)
        tokens += best.tokens[done:state]
        if state < len(best.tokens):
            choices += [len(tokens) + i for i in detour.choices]
            tokens += detour.tokens
            done = state + size
    return Walk(tuple(tokens), tuple(choices))


def _by_walks(best: Walk, matcher: Matcher, lexicon: Lexicon, work: Work, alternatives: int) -> Walk:
    """The same with ways that go to the end by themselves."""
    length, along = len(_fewest(best, lexicon)), _Along(matcher.fork(), work)
    while along.state(best) is not None:
        for other in _walked(best, along.n, along.at, lexicon, work, alternatives):
            work.read(BYTE * len(lexicon.text(other.tokens)))
            size = len(_fewest(other, lexicon))
            if size < length:
                best, length = other, size
                break
        else:
            along.n += 1
    return best


def _walked(best: Walk, n: int, at: Matcher, lexicon: Lexicon, work: Work, alternatives: int) -> Iterator[Walk]:
    state = best.choices[n]
    for token in _others(at, lexicon, best.tokens[state:], alternatives, work):
        if not work.spend(FORK):
            return
        fork = after(at, [token])
        way = None if fork is None else walk(fork, lexicon, work)
        if way is not None:
            before = (*best.tokens[:state], token)
            later = tuple(len(before) + i for i in way.choices)
            yield Walk((*before, *way.tokens), best.choices[: n + 1] + later)


def _others(at: Matcher, lexicon: Lexicon, rest: tuple[int, ...], count: int, work: Work) -> list[int]:
    """Up to ``count`` tokens besides the one taken, and a few long ones.

    A byte after which the rest of the way is still open has led no farther: more of a string, mostly. One is enough.
    """
    found: list[int] = []
    idle, ahead = 0, list(rest[:_AROUND])
    mask = at.mask()
    work.read(MASK)
    for token in lexicon.closers[bitmask.has(mask, lexicon.closers)].tolist():
        if token == rest[0] or len(found) == count or not work.left:
            continue
        reach = at.valid([token, *ahead])
        work.read(reach)
        if reach == len(ahead) + 1:
            idle += 1
            if idle > 1:
                continue
        found.append(token)
    return found + lexicon.fillers[bitmask.has(mask, lexicon.fillers)][:_FILLERS].tolist()
