"""Short completions of a text, found by byte rather than by token: most bytes that may follow are alike.

``walk`` goes straight for the end, ``improve`` makes a completion shorter by changing one choice of it at a time, and
``cheapest`` searches where going straight does not arrive. A completion is bytes; ``Lexicon.cover`` spells it in the
fewest tokens.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from mmserve.decode.constraint.base import Matcher
from mmserve.decode.paths.lexicon import Lexicon


@dataclass
class Work:
    """Places of the parser that a search may still look at: the same for the same text, whatever the clock says."""

    places: int

    def spend(self) -> bool:
        """Take one place; False when none is left."""
        self.places -= 1
        return self.places >= 0


def after(matcher: Matcher, tokens: Sequence[int]) -> Matcher | None:
    """A matcher behind ``tokens``; None if they may not follow, or the parser has come to its limits with them."""
    fork = matcher.fork()
    try:
        fork.consume(tokens)
    except ValueError:
        return None
    return fork


def completes(matcher: Matcher, tokens: Sequence[int]) -> bool:
    """Whether ``tokens`` may follow and the text may end behind them."""
    if matcher.valid(tokens) < len(tokens):
        return False
    fork = after(matcher, tokens)
    return fork is not None and fork.accepting


@dataclass(frozen=True)
class Walk:
    """A completion and the places on its way where there was a choice."""

    tokens: tuple[int, ...]
    choices: tuple[tuple[int, Matcher], ...] = field(repr=False)  # tokens before the place, and the matcher there


@dataclass(frozen=True)
class _Detour:
    """Another completion, and what makes a walk of it: a place of the parser for each choice, which few are worth."""

    tokens: tuple[int, ...]
    walk: Callable[[], Walk] = field(repr=False)


#: Longest completion, in tokens, that a walk looks for.
_LONGEST = 4096
#: Times in a row that a walk takes the same closer.
_TIRED = 8
#: How much farther on, in tokens, a detour is expected to join the old way.
_NEAR = 12
#: Long tokens tried at a choice.
_FILLERS = 3


def walk(matcher: Matcher, lexicon: Lexicon, work: Work, *, keep: bool = False) -> Walk | None:
    """The completion that takes the way known, or else the first closer that may follow, everywhere.

    None if it does not arrive.

    Where one closer has led nowhere several times in a row, as zeros behind ``0.`` do, the next one is taken.
    ``keep``: whether the choices are to be kept.
    """
    at, tokens = matcher, list[int]()
    choices: list[tuple[int, Matcher]] = []
    while work.spend() and len(tokens) < _LONGEST:
        if at.accepting:
            return Walk(tuple(tokens), tuple(choices))
        step = lexicon.cover(at.ahead()) or []
        if not step:
            step = _first(at, lexicon, tokens[-_TIRED:])
            if not step:
                return None
            if keep:
                choices.append((len(tokens), at))
        behind = after(at, step)
        if behind is None:
            return None
        at = behind
        tokens += step
    return None


def _first(at: Matcher, lexicon: Lexicon, latest: list[int]) -> list[int]:
    """The first closer that may follow, but for one that is all of the ``latest`` tokens, if there is another.

    Asked one by one: mostly one of the first may follow, and a mask of all tokens takes longer by far.
    """
    tired = latest[:1] if len(latest) == _TIRED and len(set(latest)) == 1 else []
    others = (token for token in lexicon.closers.tolist() if token not in tired)
    return next(([token] for token in others if at.valid([token])), tired if at.valid(tired) else [])


def improve(begun: Walk, lexicon: Lexicon, work: Work, *, alternatives: int) -> list[int]:
    """Fewest tokens found for ``begun``, or for a way that differs from it: its choices are gone through once."""
    best, spelling = begun, lexicon.cover(lexicon.text(begun.tokens)) or list(begun.tokens)
    tried: set[bytes] = set()
    n = 0
    while n < len(best.choices) and work.places > 0:
        for other in _detours(best, n, lexicon, work, tried, alternatives):
            shorter = lexicon.cover(lexicon.text(other.tokens))
            if shorter is not None and len(shorter) < len(spelling):
                best, spelling = other.walk(), shorter
                break
        else:
            n += 1
    return spelling


def _detours(
    best: Walk, n: int, lexicon: Lexicon, work: Work, tried: set[bytes], alternatives: int
) -> Iterator[_Detour]:
    """Completions that leave ``best`` at its choice ``n``; ``tried`` holds the texts up to there that were seen."""
    place, at = best.choices[n]
    for token in _others(at, lexicon, best.tokens[place:], alternatives):
        before = (*best.tokens[:place], token)
        text = lexicon.text(before)
        if text in tried or not work.spend():
            continue
        tried.add(text)
        fork = after(at, [token])
        if fork is None:
            continue
        # mostly it joins the old way again, a little farther on: that costs no masks
        for joined in range(min(place + _NEAR, len(best.tokens)), place - 1, -1):
            if completes(fork, best.tokens[joined:]):
                tokens = (*before, *best.tokens[joined:])
                yield _Detour(tokens, partial(_joined, best, n, before, joined, fork))
                break
        else:
            walked = walk(fork, lexicon, work, keep=True)
            if walked is not None:
                later = tuple((len(before) + i, m) for i, m in walked.choices)
                tokens = (*before, *walked.tokens)
                yield _Detour(tokens, partial(Walk, tokens, best.choices[: n + 1] + later))


def _joined(best: Walk, n: int, before: tuple[int, ...], joined: int, at: Matcher) -> Walk:
    """The way of tokens ``before``, that leaves ``best`` at its choice ``n`` and then joins it at its token ``joined``.

    ``at``: the matcher behind ``before``.
    """
    moved, choices, done = len(before) - joined, list(best.choices[: n + 1]), joined
    for place, _matcher in best.choices[n + 1 :]:
        if place >= joined:
            at = at.fork()
            at.consume(best.tokens[done:place])
            choices.append((place + moved, at))
            done = place
    return Walk((*before, *best.tokens[joined:]), tuple(choices))


def _others(at: Matcher, lexicon: Lexicon, rest: tuple[int, ...], count: int) -> list[int]:
    """Up to ``count`` tokens besides the one taken, and a few long ones.

    A byte behind which the rest of the way is still open has led no farther: more of a string, mostly. One is enough.
    """
    found: list[int] = []
    idle = 0
    for token in lexicon.closers[at.among(lexicon.closers)].tolist():
        if token == rest[0] or len(found) == count:
            continue
        if at.valid([token, *rest]) == len(rest) + 1:
            idle += 1
            if idle > 1:
                continue
        found.append(token)
    return found + lexicon.fillers[at.among(lexicon.fillers)][:_FILLERS].tolist()


def cheapest(matcher: Matcher, lexicon: Lexicon, work: Work, *, choices: int, similar: int) -> list[int] | None:
    """A completion of few bytes by search; None if the work was not enough.

    At a place at most ``choices`` closers are tried, and of the places at one length where the same bytes may follow
    ``similar`` are looked at.
    """
    serial = 0
    queue: list[tuple[int, int, bytes, Matcher]] = [(0, 0, b"", matcher)]
    seen = {b""}
    alike: Counter[tuple[int, bytes]] = Counter()
    while queue and work.spend():
        length, _serial, text, at = heapq.heappop(queue)
        if at.accepting:
            return lexicon.cover(text)
        steps = [lexicon.cover(at.forced()) or []]
        if not steps[0]:
            following = at.among(lexicon.closers)
            alike[length, following.tobytes()] += 1
            if alike[length, following.tobytes()] > similar:
                continue
            steps = [[token] for token in lexicon.closers[following][:choices].tolist()]
        for step in steps:
            grown = text + lexicon.text(step)
            if grown not in seen:
                seen.add(grown)
                fork = after(at, step)
                if fork is None:
                    continue
                serial -= 1  # of equals the newest first: the way to the end is mostly straight
                heapq.heappush(queue, (length + len(step), serial, grown, fork))
    return None
