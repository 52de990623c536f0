"""The shortest completion of a text, in tokens.

``find_completion`` runs the exact search first (``completion.exact_completion``). If its work is exhausted, the
shortest completion found over bytes is an upper bound; local search (``shorten``) shortens it by changing one choice at
a time. Long answers are repetitive: a state whose surrounding tokens occurred before is skipped, and a change that
saves tokens is applied to all its occurrences at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mmserve.constraint.compile.wire import Completion
from mmserve.constraint.search.completion import BYTE, FORK, MASK, Walk, Work, cheapest, exact_completion, onward, walk
from mmserve.constraint.search.matcher import Matcher, after, completes
from mmserve.constraint.search.prefix_equivalence import PrefixClasses
from mmserve.constraint.search.vocabulary import Lexicon, in_mask


@dataclass(frozen=True)
class Effort:
    """The work limits of a search, in parser states and in tokens tried."""

    exact_tokens: int = 2000
    patient_tokens: int = 200_000  # if the exact number matters; a microsecond each
    patient_places: int = 3000
    walked: int = 40_000  # states of the first walk, about 10 microseconds each
    states: int = 4000  # states of a search, the same
    alternatives: int = 12
    similar: int = 3


def find_completion(
    matcher: Matcher,
    lexicon: Lexicon,
    effort: Effort | None = None,
    *,
    classes: Callable[[], PrefixClasses] = PrefixClasses,
    room: int = 0,
    within: int | None = None,
    bound: tuple[int, ...] | None = None,
    searched: bool = False,
    begun: Walk | None = None,
) -> Completion | None:
    """The shortest completion found from ``matcher`` on; None if none was found.

    Args:
        classes: creates prefix classes of texts from the one after ``matcher`` on; by default every text is its own
            class.
        room: number of tokens that is short enough: for longer results, the exact search runs far longer.
        within: number of tokens above which a completion is useless; returns None if all are known to be longer.
        bound: the completion found by an earlier search with the same effort, if any.
        searched: whether there was such a search; it is not repeated if it found none.
        begun: a known completion, to be shortened instead of one found by a walk.
    """
    effort = effort or Effort()
    exact, at_least = exact_completion(
        matcher, lexicon, PrefixClasses(), effort.exact_tokens, effort.exact_tokens, within=within
    )
    if exact is not None:
        return Completion(exact, True)
    if within is not None and at_least > within:
        return None
    if bound is None and not searched:
        bound = _bound(matcher, lexicon, effort, classes, begun)
    if bound is not None and len(bound) <= max(at_least, room):
        return Completion(bound, len(bound) <= at_least)
    try:
        exact, far = exact_completion(matcher, lexicon, classes(), effort.patient_tokens, effort.patient_places, bound)
    except ValueError:  # too large for the classes
        far = at_least
    at_least = max(at_least, far)
    if exact is not None:
        return Completion(exact, True)
    return None if bound is None else Completion(bound, len(bound) <= at_least)


def _bound(
    matcher: Matcher, lexicon: Lexicon, effort: Effort, classes: Callable[[], PrefixClasses], begun: Walk | None
) -> tuple[int, ...] | None:
    """A short completion found over bytes, starting from ``begun`` if given."""
    begun = begun or walk(matcher, lexicon, Work(effort.walked))
    if begun is None:
        with suppress(ValueError):  # too large for the classes
            begun = walk(matcher, lexicon, Work(effort.states), classes())
    found = (
        _searched(matcher, lexicon, effort)
        if begun is None
        else shorten(begun, matcher, lexicon, Work(effort.states), alternatives=effort.alternatives)
    )
    if found is not None and completes(matcher, found):
        return tuple(found)
    # A grammar over tokens rather than bytes may not allow another tokenisation of the same text.
    return None if begun is None else begun.tokens


def quick_completion(matcher: Matcher, lexicon: Lexicon, states: int) -> tuple[int, ...] | None:
    """A short completion, not necessarily the shortest, within ``states`` states; None if none is found."""
    begun: Walk | None = walk(matcher, lexicon, Work(states))
    if begun is None:
        return None
    cover = lexicon.cover(lexicon.text(begun.tokens))
    return begun.tokens if cover is None or not matcher.ends(cover) else tuple(cover)


def _searched(matcher: Matcher, lexicon: Lexicon, effort: Effort) -> list[int] | None:
    """A completion found by search, first among few bytes at each state, then among all."""
    for choices in (effort.alternatives, 256):
        found = cheapest(matcher, lexicon, Work(effort.states), choices=choices, similar=effort.similar)
        if found is not None:
            return found
    return None


#: Long tokens tried at a choice.
_FILLERS = 3
#: Maximum tokens of the old completion that a detour may skip, and maximum steps before it rejoins it.
_NEAR, _STEPS = 48, 12
#: Number of tokens around a state that identify similar states, and with which a rejoined completion is tested first.
_AROUND = 16
#: Number of tokens next to a change that may merge with it into longer ones.
_SEAM = 6


@dataclass(frozen=True)
class _Detour:
    """Tokens that replace those of a walk from a choice to ``end``."""

    tokens: tuple[int, ...]
    choices: tuple[int, ...]  # number of tokens before each choice among them
    end: int
    saved: int  # number of tokens saved, at least one


def shorten(begun: Walk, matcher: Matcher, lexicon: Lexicon, work: Work, *, alternatives: int) -> list[int]:
    """The fewest tokens found by changing choices of ``begun``: first by detours that soon rejoin it, then by any
    completion.

    ``matcher``: the state where ``begun`` begins. ``alternatives``: tokens tried at a choice.
    """
    best = _by_detours(begun, matcher, lexicon, work, alternatives)
    best = _by_walks(best, matcher, lexicon, work, alternatives)
    return min((_fewest(way, lexicon) for way in (best, begun)), key=len)


def _fewest(way: Walk, lexicon: Lexicon) -> list[int]:
    return lexicon.cover(lexicon.text(way.tokens)) or list(way.tokens)


@dataclass
class _Cursor:
    """A cursor over the choices of a walk that skips choices with known surroundings; the walk may change after it."""

    at: Matcher  # before token ``done``
    work: Work
    n: int = 0  # the next choice
    done: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def state(self, way: Walk) -> int | None:
        """Advance to choice ``n`` or the next one with new surroundings. Returns its token index; None at the end of
        the walk, of the work or of the parser's limits."""
        while self.n < len(way.choices) and self.work.left:
            state = way.choices[self.n]
            around = (*way.tokens[max(0, state - _AROUND) : state], -1, *way.tokens[state : state + _AROUND])
            if around not in self.seen:
                self.seen.add(around)
                moved = after(self.at, way.tokens[self.done : state])
                if moved is None:
                    return None
                self.work.read(state - self.done)
                self.at, self.done = moved, state
                return state
            self.n += 1
        return None


def _by_detours(best: Walk, matcher: Matcher, lexicon: Lexicon, work: Work, alternatives: int) -> Walk:
    along = _Cursor(matcher.fork(), work)
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
    """A detour that leaves ``best`` at ``state``, the state of ``at``, by ``token``, and soon rejoins it with fewer
    tokens."""
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
    """The positions of the old completion, shortly after ``state``, from which its next tokens may follow ``fork``."""
    near = tokens[state + 1 : state + _NEAR + 1]
    follow = {token for token in set(near) if fork.valid([token])}  # a mask of all tokens takes longer
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
    """``way`` extended to one of ``ends`` (ascending): from there on, all of the ``old`` completion may follow
    ``fork``, and tokens are saved.

    Found by bisection: a later end saves more, and from some end on too much is skipped, for example if items are
    counted.
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
    """See ``completes``."""
    reach = fork.valid(tokens)
    work.read(FORK + reach)
    if reach < len(tokens):
        return False
    work.read(reach)
    end = after(fork, tokens)
    return end is not None and end.accepting


def _saved(old: tuple[int, ...], state: int, end: int, new: tuple[int, ...], lexicon: Lexicon, work: Work) -> int:
    """Number of tokens saved by ``new`` instead of those from ``state`` to ``end``."""
    left, right = old[max(0, state - _SEAM) : state], old[end : end + _SEAM]
    texts = [lexicon.text((*left, *middle, *right)) for middle in (old[state:end], new)]
    work.read(BYTE * sum(map(len, texts)))
    before, now = map(lexicon.cover, texts)
    return 0 if before is None or now is None else len(before) - len(now)


def _everywhere(best: Walk, n: int, detour: _Detour, at: Matcher, work: Work) -> Walk:
    """``best`` with ``detour`` at its choice ``n``, the state of ``at``, and at all other occurrences where it is
    allowed."""
    state = best.choices[n]
    for context in (0, 1):
        states = _alike(best.tokens, state, detour.end, context)
        if len(states) > 1 and work.left:
            found = _replaced(best, states, detour)
            if _follows(at, found.tokens[state:], work):
                return found
    return _replaced(best, [state], detour)


def _alike(tokens: tuple[int, ...], state: int, end: int, context: int) -> list[int]:
    """``state``, and all later occurrences of the tokens from there to ``end``, followed by the same token and preceded
    by the same ``context`` tokens."""
    size, left = end - state, max(0, state - context)
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
    """``best`` with ``detour`` at each of ``states`` (ascending), the first of which is its own."""
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
    """``best``, shortened by completions that do not rejoin it."""
    length, along = len(_fewest(best, lexicon)), _Cursor(matcher.fork(), work)
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

    A byte after which the rest of the completion is still allowed made no progress: usually it only extends a string.
    One of these is enough.
    """
    found: list[int] = []
    idle, ahead = 0, list(rest[:_AROUND])
    mask = at.mask()
    work.read(MASK)
    for token in lexicon.closers[in_mask(mask, lexicon.closers)].tolist():
        if token == rest[0] or len(found) == count or not work.left:
            continue
        reach = at.valid([token, *ahead])
        work.read(reach)
        if reach == len(ahead) + 1:
            idle += 1
            if idle > 1:
                continue
        found.append(token)
    return found + lexicon.fillers[in_mask(mask, lexicon.fillers)][:_FILLERS].tolist()
