"""Short completions of a text, found by byte rather than by token: most bytes that may follow are alike.

``walk`` takes the first byte that closes something, everywhere; ``local_search.shorten`` shortens what it finds;
``cheapest`` searches where a walk does not arrive. A completion is bytes, which ``Lexicon.cover`` spells in the fewest
tokens.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmserve.constraint.search.base import Matcher
from mmserve.constraint.search.lexicon import Lexicon

#: What a search costs, in tokens that a parser reads (about 0.3 microseconds each): a copy of a parser, a mask of all
#: tokens, and a byte of a text that is spelled in the fewest tokens. Measured, and rounded up.
FORK, MASK, BYTE = 16, 100, 8


@dataclass
class Work:
    """What a search may still do: the same for the same text, whatever the clock says.

    States of the parser alone bound no time: of a long text, a single one may be asked for all that is after it.
    """

    states: int
    reads: int = 4_000_000  # tokens that parsers read, and what takes as long

    def spend(self, reads: int = 0) -> bool:
        """Take one state, and what was read there; False when nothing is left."""
        self.states -= 1
        self.reads -= reads
        return self.left

    def read(self, reads: int) -> None:
        """Take what was read at a state that is paid for."""
        self.reads -= reads

    @property
    def left(self) -> bool:
        """Whether anything may still be done."""
        return self.states >= 0 and self.reads >= 0


def after(matcher: Matcher, tokens: Sequence[int]) -> Matcher | None:
    """A matcher after ``tokens``; None if they may not follow, or the parser has come to its limits with them."""
    fork = matcher.fork()
    try:
        fork.consume(tokens)
    except ValueError:
        return None
    return fork


def completes(matcher: Matcher, tokens: Sequence[int]) -> bool:
    """As ``Matcher.ends``, by going there: a parser's limits may stop it on a way that it has called valid."""
    if matcher.valid(tokens) < len(tokens):
        return False
    fork = after(matcher, tokens)
    return fork is not None and fork.accepting


@dataclass(frozen=True)
class Walk:
    """A completion and the states on its way where there was a choice."""

    tokens: tuple[int, ...]
    choices: tuple[int, ...] = field(repr=False)  # tokens before the state; a parser for each would take megabytes


#: Longest completion, in tokens, that a walk looks for.
_LONGEST = 32_768
#: Times in a row that a walk takes the same closer.
_TIRED = 8
#: Closers that are asked for one by one, before all of them are.
_LIKELY = 8


def walk(matcher: Matcher, lexicon: Lexicon, work: Work) -> Walk | None:
    """The completion that takes the way known, or else the first closer that may follow, everywhere.

    None if it does not arrive.

    Where one closer has led nowhere several times in a row, as zeros after ``0.`` do, the next one is taken.
    """
    at, tokens = matcher.fork(), list[int]()  # one copy, that moves: one a step would make long answers dear
    choices: list[int] = []
    while work.spend(MASK) and len(tokens) < _LONGEST:
        if at.accepting:
            return Walk(tuple(tokens), tuple(choices))
        step, chosen = onward(at, lexicon, tokens)
        if not step:
            return None
        if chosen:
            choices.append(len(tokens))
        try:
            at.consume(step)
        except ValueError:
            return None
        tokens += step
    return None


def onward(at: Matcher, lexicon: Lexicon, tokens: Sequence[int]) -> tuple[list[int], bool]:
    """The next tokens of a walk after ``tokens``, and whether there was a choice; none where nothing may follow."""
    known = lexicon.cover(at.ahead())
    return (known, False) if known else (_first(at, lexicon, list(tokens[-_TIRED:])), True)


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


def cheapest(matcher: Matcher, lexicon: Lexicon, work: Work, *, choices: int, similar: int) -> list[int] | None:
    """A completion of few bytes by search; None if the work was not enough.

    At a state at most ``choices`` closers are tried, and of the states at one length where the same bytes may follow
    ``similar`` are looked at.
    """
    serial = 0
    queue: list[tuple[int, int, bytes, Matcher]] = [(0, 0, b"", matcher)]
    seen = {b""}
    alike: Counter[tuple[int, bytes]] = Counter()
    while queue and work.spend(MASK):
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
                work.read(FORK + len(grown))
                fork = after(at, step)
                if fork is None:
                    continue
                serial -= 1  # of equals the newest first: the way to the end is mostly straight
                heapq.heappush(queue, (length + len(step), serial, grown, fork))
    return None
