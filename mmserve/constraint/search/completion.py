"""Completions of a text: greedy walks and best-first search over bytes, and the exact search over tokens.

``walk`` takes the first byte that closes a JSON value at each state. ``cheapest`` is a best-first search, for texts
that no walk completes. Both work on bytes, since most allowed bytes are equivalent; ``Lexicon.cover`` spells the result
in the fewest tokens. ``exact_completion`` is a breadth-first search over tokens: its result has the least length.

With prefix classes, a walk also leaves strings that no closer ends, such as those that must contain a given word: the
nearest end is searched over ASCII characters, with one state per prefix class (``prefix_equivalence``).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmserve.constraint.search.matcher import Matcher, after, completes
from mmserve.constraint.search.prefix_equivalence import PrefixClasses
from mmserve.constraint.search.vocabulary import Lexicon

#: What a search costs, in tokens that a parser reads (about 0.3 microseconds each): a copy of a parser, a mask of all
#: tokens, and a byte of a text that is spelled in the fewest tokens. Measured, and rounded up.
FORK, MASK, BYTE = 16, 100, 8


@dataclass
class Work:
    """The work that is left to a search; it does not depend on the clock, so that results are reproducible.

    A limit on parser states alone bounds no time: at a single state of a long text, all the rest may be validated.
    """

    states: int
    reads: int = 4_000_000  # tokens that parsers read, and what takes as long

    def spend(self, reads: int = 0) -> bool:
        """Spend one state and ``reads``; False when nothing is left."""
        self.states -= 1
        self.reads -= reads
        return self.left

    def read(self, reads: int) -> None:
        """Spend ``reads`` at a state already counted."""
        self.reads -= reads

    @property
    def left(self) -> bool:
        """Whether anything may still be done."""
        return self.states >= 0 and self.reads >= 0


@dataclass(frozen=True)
class Walk:
    """A completion and the states on its way where there was a choice."""

    tokens: tuple[int, ...]
    choices: tuple[int, ...] = field(repr=False)  # tokens before the state; a parser for each would take megabytes


#: Longest completion, in tokens, that a walk looks for.
_LONGEST = 32_768
#: Times in a row that a walk may take the same closer.
_TIRED = 8
#: Number of closers that are validated one by one before a mask is computed.
_LIKELY = 8


def walk(matcher: Matcher, lexicon: Lexicon, work: Work, classes: PrefixClasses | None = None) -> Walk | None:
    """The greedy completion: at each state the bytes known to lead to the end, or else the first allowed closer.

    None if it reaches no end. Where one closer has been taken several times in a row without an end, as zeros after
    ``0.`` are, the next one is taken.

    Args:
        classes: of texts from the one of ``matcher`` on; with them, each string is left by the fewest characters.

    Raises:
        ValueError: the class of the completion so far is unknown.
    """
    at, tokens = matcher.fork(), list[int]()  # one copy that advances: a copy at each step would make long answers slow
    choices, prefix_class = list[int](), None if classes is None else classes.start()
    while work.spend(MASK) and len(tokens) < _LONGEST:
        if at.accepting:
            return Walk(tuple(tokens), tuple(choices))
        step, chosen = onward(at, lexicon, tokens)
        if chosen and classes is not None and classes.open(prefix_class):
            step = _out_of_string(at, prefix_class, lexicon, classes, work)
        if not step:
            return None
        if chosen:
            choices.append(len(tokens))
        try:
            at.consume(step)
        except ValueError:
            return None
        if classes is not None:
            prefix_class = classes.after(prefix_class, lexicon.text(step))
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
                serial -= 1  # of equal length the newest first: depth-first is mostly fastest
                heapq.heappush(queue, (length + len(step), serial, grown, fork))
    return None


_CHARACTERS = frozenset(bytes([code]) for code in range(0x20, 0x7F) if code != ord("\\"))


def _out_of_string(
    matcher: Matcher, prefix_class: Hashable, lexicon: Lexicon, classes: PrefixClasses, work: Work
) -> list[int]:
    """The fewest characters to the end of the string or of the text; none where that is too far."""
    plain = np.array([token for token in lexicon.closers.tolist() if lexicon.text([token]) in _CHARACTERS], np.int64)
    queue: deque[tuple[Hashable, Matcher, tuple[int, ...]]] = deque([(prefix_class, matcher, ())])
    seen = {prefix_class}
    while queue and work.spend(MASK):
        prefix_class, at, tokens = queue.popleft()
        for token in plain[at.among(plain)].tolist():
            try:
                next_class = classes.after(prefix_class, lexicon.text([token]))
            except ValueError:
                continue
            if next_class in seen:
                continue
            seen.add(next_class)
            work.read(FORK)
            fork = after(at, [token])
            if fork is None:
                continue
            if fork.accepting or not classes.open(next_class):
                return [*tokens, token]
            queue.append((next_class, fork, (*tokens, token)))
    return []


def exact_completion(
    matcher: Matcher,
    lexicon: Lexicon,
    classes: PrefixClasses,
    most: int,
    states: int,
    bound: tuple[int, ...] | None = None,
    *,
    within: int | None = None,
) -> tuple[tuple[int, ...] | None, int]:
    """A completion of the least length, or None and a length below which there is none.

    ``most`` tokens are tried, at ``states``; none farther on than would be shorter than the completion ``bound``, and
    none longer than ``within`` tokens.
    """
    if matcher.accepting:
        return (), 0
    level: list[tuple[Hashable, Matcher, tuple[int, ...]]] = [(classes.start(), matcher, ())]
    seen = {classes.start()}
    depth = 0
    while level:
        if bound is not None and depth + 1 == len(bound):
            return bound, depth + 1
        if depth == within:
            return None, depth + 1
        reached = list[tuple[Hashable, Matcher, tuple[int, ...], list[int]]]()
        for prefix_class, before, tokens in level:
            at = after(before, tokens[-1:])
            if at is None:  # the parser's limits: nothing is known beyond
                return None, depth
            allowed = at.allowed()
            most -= len(allowed)
            if most < 0:
                return None, depth + 1
            reached.append((prefix_class, at, tokens, allowed.tolist()))
        level, depth = [], depth + 1
        for prefix_class, at, tokens, follow in reached:
            if len(seen) > states:
                return None, depth
            for token in follow:
                grown = classes.after(prefix_class, lexicon.spelled[token])
                if grown not in seen:
                    seen.add(grown)
                    level.append((grown, at, (*tokens, token)))
        for _class_after, before, tokens in level:
            if before.ends(tokens[-1:]):  # a fork for each would take ten times as long
                return (tokens, depth) if completes(before, tokens[-1:]) else (None, depth)
    return None, 0
