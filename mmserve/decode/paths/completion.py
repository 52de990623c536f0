"""Short completions of a text, found by byte rather than by token: most bytes that may follow are alike.

``walk`` goes straight for the end, ``improve`` makes a completion shorter by changing one choice of it at a time, and
``cheapest`` searches where going straight does not arrive. A completion is bytes; ``Lexicon.cover`` spells it in the
fewest tokens.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mmserve.decode.constraint.base import Matcher
from mmserve.decode.paths import bitmask
from mmserve.decode.paths.lexicon import Lexicon

#: What a search costs, in tokens that a parser reads (about 0.3 microseconds each): a copy of a parser, a mask of all
#: tokens, and a byte of a text that is spelled in the fewest tokens. Measured, and rounded up.
_FORK, _MASK, _BYTE = 16, 100, 8


@dataclass
class Work:
    """What a search may still do: the same for the same text, whatever the clock says.

    Places of the parser alone bound no time: of a long text, a single one may be asked for all that is behind it.
    """

    places: int
    reads: int = 4_000_000  # tokens that parsers read, and what takes as long

    def spend(self, reads: int = 0) -> bool:
        """Take one place, and what was read there; False when nothing is left."""
        self.places -= 1
        self.reads -= reads
        return self.left

    def read(self, reads: int) -> None:
        """Take what was read at a place that is paid for."""
        self.reads -= reads

    @property
    def left(self) -> bool:
        """Whether anything may still be done."""
        return self.places >= 0 and self.reads >= 0


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
    choices: tuple[int, ...] = field(repr=False)  # tokens before the place; a parser for each would take megabytes


#: Longest completion, in tokens, that a walk looks for.
_LONGEST = 4096
#: Times in a row that a walk takes the same closer.
_TIRED = 8
#: How much farther on, in tokens, a detour is expected to join the old way.
_NEAR = 12
#: Long tokens tried at a choice.
_FILLERS = 3
#: Closers that are asked for one by one, before all of them are.
_LIKELY = 8


def walk(matcher: Matcher, lexicon: Lexicon, work: Work) -> Walk | None:
    """The completion that takes the way known, or else the first closer that may follow, everywhere.

    None if it does not arrive.

    Where one closer has led nowhere several times in a row, as zeros behind ``0.`` do, the next one is taken.
    """
    at, tokens = matcher, list[int]()
    choices: list[int] = []
    while work.spend(_MASK) and len(tokens) < _LONGEST:
        if at.accepting:
            return Walk(tuple(tokens), tuple(choices))
        step = lexicon.cover(at.ahead()) or []
        if not step:
            step = _first(at, lexicon, tokens[-_TIRED:])
            if not step:
                return None
            choices.append(len(tokens))
        behind = after(at, step)
        if behind is None:
            return None
        at = behind
        tokens += step
    return None


def _first(at: Matcher, lexicon: Lexicon, latest: list[int]) -> list[int]:
    """The first closer that may follow, but for one that is all of the ``latest`` tokens, if there is another.

    The likely ones are asked for one by one: that takes a tenth of the time of a mask, and mostly one of them may
    follow.
    """
    tired = latest[:1] if len(latest) == _TIRED and len(set(latest)) == 1 else []
    for token in lexicon.closers[:_LIKELY].tolist():
        if token not in tired and at.valid([token]):
            return [token]
    others = lexicon.closers[_LIKELY:]
    for token in others[at.among(others)].tolist():
        if token not in tired:
            return [token]
    return tired if at.valid(tired) else []


def improve(begun: Walk, matcher: Matcher, lexicon: Lexicon, work: Work, *, alternatives: int) -> list[int]:
    """Fewest tokens found for ``begun``, or for a way that differs from it: its choices are gone through once.

    ``matcher``: where ``begun`` begins.
    """
    best, spelling = begun, lexicon.cover(lexicon.text(begun.tokens)) or list(begun.tokens)
    tried: set[bytes] = set()
    n, at, done = 0, matcher, 0
    while n < len(best.choices) and work.left:
        place = best.choices[n]
        if place > done:
            at = at.fork()
            at.consume(best.tokens[done:place])
            work.read(_FORK + place - done)
            done = place
        for other in _detours(best, n, at, lexicon, work, tried, alternatives):
            text = lexicon.text(other.tokens)
            work.read(_BYTE * len(text) + len(other.choices))
            shorter = lexicon.cover(text)
            if shorter is not None and len(shorter) < len(spelling):
                best, spelling = other, shorter
                break
        else:
            n += 1
    return spelling


def _detours(
    best: Walk, n: int, at: Matcher, lexicon: Lexicon, work: Work, tried: set[bytes], alternatives: int
) -> Iterator[Walk]:
    """Completions that leave ``best`` at its choice ``n``, where ``at`` is; ``tried`` holds the texts up to there that
    were seen."""
    place = best.choices[n]
    for token in _others(at, lexicon, best.tokens[place:], alternatives, work):
        before = (*best.tokens[:place], token)
        text = lexicon.text(before)
        if text in tried or not work.spend(_FORK + len(before)):
            continue
        tried.add(text)
        fork = after(at, [token])
        if fork is None:
            continue
        # mostly it joins the old way again, a little farther on: that costs no masks
        for joined in range(min(place + _NEAR, len(best.tokens)), place - 1, -1):
            rest = best.tokens[joined:]
            work.read(_FORK + 2 * len(rest))
            if completes(fork, rest):
                moved = len(before) - joined
                later = tuple(i + moved for i in best.choices[n + 1 :] if i >= joined)
                yield Walk((*before, *rest), best.choices[: n + 1] + later)
                break
        else:
            walked = walk(fork, lexicon, work)
            if walked is not None:
                later = tuple(len(before) + i for i in walked.choices)
                yield Walk((*before, *walked.tokens), best.choices[: n + 1] + later)


def _others(at: Matcher, lexicon: Lexicon, rest: tuple[int, ...], count: int, work: Work) -> list[int]:
    """Up to ``count`` tokens besides the one taken, and a few long ones.

    A byte behind which the rest of the way is still open has led no farther: more of a string, mostly. One is enough.
    """
    found: list[int] = []
    idle = 0
    mask = at.mask()
    work.read(_MASK)
    for token in lexicon.closers[bitmask.has(mask, lexicon.closers)].tolist():
        if token == rest[0] or len(found) == count or not work.left:
            continue
        reach = at.valid([token, *rest])
        work.read(reach)
        if reach == len(rest) + 1:
            idle += 1
            if idle > 1:
                continue
        found.append(token)
    return found + lexicon.fillers[bitmask.has(mask, lexicon.fillers)][:_FILLERS].tolist()


def cheapest(matcher: Matcher, lexicon: Lexicon, work: Work, *, choices: int, similar: int) -> list[int] | None:
    """A completion of few bytes by search; None if the work was not enough.

    At a place at most ``choices`` closers are tried, and of the places at one length where the same bytes may follow
    ``similar`` are looked at.
    """
    serial = 0
    queue: list[tuple[int, int, bytes, Matcher]] = [(0, 0, b"", matcher)]
    seen = {b""}
    alike: Counter[tuple[int, bytes]] = Counter()
    while queue and work.spend(_MASK):
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
                work.read(_FORK + len(grown))
                fork = after(at, step)
                if fork is None:
                    continue
                serial -= 1  # of equals the newest first: the way to the end is mostly straight
                heapq.heappush(queue, (length + len(step), serial, grown, fork))
    return None
