"""Completions of a text: greedy walks and best-first search over bytes, and the exact search over tokens.

``walk`` takes the first byte that closes a JSON value at each state. ``cheapest`` is a best-first search, for texts
that no walk completes. Both work on bytes, because most allowed bytes are equivalent; ``Lexicon.cover`` tokenises the
result with the fewest tokens. ``exact_completion`` is a breadth-first search over tokens: its result has minimum
length.

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

#: Costs of a search in tokens that a parser reads (about 0.3 microseconds each): copying a parser, a mask of all
#: tokens, and each byte of a text that is tokenised with the fewest tokens. Measured, and rounded up.
FORK, MASK, BYTE = 16, 100, 8


@dataclass
class Work:
    """The remaining work of a search; independent of the clock, so that results are reproducible.

    Limiting only parser states would not bound the time: at a single state of a long text, all the rest may be
    validated.
    """

    states: int
    reads: int = 4_000_000  # tokens that parsers read, and operations that take as long

    def spend(self, reads: int = 0) -> bool:
        """Spend one state and ``reads``. Returns False if nothing is left."""
        self.states -= 1
        self.reads -= reads
        return self.left

    def read(self, reads: int) -> None:
        """Spend ``reads`` at a state that is counted already."""
        self.reads -= reads

    @property
    def left(self) -> bool:
        """Whether any work is left."""
        return self.states >= 0 and self.reads >= 0


@dataclass(frozen=True)
class Walk:
    """A completion, and the states on it with several options."""

    tokens: tuple[int, ...]
    choices: tuple[int, ...] = field(repr=False)  # number of tokens before each state


#: Maximum length of a walk's completion, in tokens.
_LONGEST = 32_768
#: Maximum consecutive times that a walk takes the same closer.
_MAX_REPEATS = 8
#: Number of closers that are validated individually before a mask is computed.
_LIKELY = 8


def walk(matcher: Matcher, lexicon: Lexicon, work: Work, classes: PrefixClasses | None = None) -> Walk | None:
    """The greedy completion: at each state the bytes known to lead to the end, or else the first allowed closer.

    None if it does not reach an end. If one closer has been taken several times in a row without an end, such as zeros
    after ``0.``, the next one is taken.

    Args:
        classes: prefix classes of texts from that of ``matcher`` on; with them, each string is completed by the fewest
            characters.

    Raises:
        ValueError: the class of the completion so far is unknown.
    """
    at, tokens = matcher.fork(), list[int]()  # one copy, which advances: copying in each step would be slow
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
    """The next tokens of a walk after ``tokens``, and whether there were several options; empty if nothing may
    follow."""
    known = lexicon.cover(at.ahead())
    return (known, False) if known else (_first(at, lexicon, list(tokens[-_MAX_REPEATS:])), True)


def _first(at: Matcher, lexicon: Lexicon, latest: list[int]) -> list[int]:
    """The first closer that is allowed, except one that equals all of the ``latest`` tokens, if there is another.

    Likely closers are validated individually first: that takes a tenth of the time of a mask, and one of them is
    usually allowed.
    """
    repeated = latest[:1] if len(latest) == _MAX_REPEATS and len(set(latest)) == 1 else []
    for token in lexicon.closers[:_LIKELY].tolist():
        if token not in repeated and at.valid([token]):
            return [token]
    others = lexicon.closers[_LIKELY:]
    for token in others[at.among(others)].tolist():
        if token not in repeated:
            return [token]
    return repeated if at.valid(repeated) else []


def cheapest(matcher: Matcher, lexicon: Lexicon, work: Work, *, choices: int, similar: int) -> list[int] | None:
    """A completion of few bytes by search; None if ``work`` was exhausted.

    At most ``choices`` closers are tried at each state, and ``similar`` states of equal length with the same allowed
    bytes are expanded.
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
                serial -= 1  # newest first at equal length: depth-first is usually fastest
                heapq.heappush(queue, (length + len(step), serial, grown, fork))
    return None


_CHARACTERS = frozenset(bytes([code]) for code in range(0x20, 0x7F) if code != ord("\\"))


def _out_of_string(
    matcher: Matcher, prefix_class: Hashable, lexicon: Lexicon, classes: PrefixClasses, work: Work
) -> list[int]:
    """The fewest characters to the end of the string or text; empty if that is too far."""
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
    """A completion of minimum length, or None and a lower bound of the length.

    Tries at most ``most`` tokens, at ``states`` states; only completions shorter than ``bound`` and no longer than
    ``within`` tokens are searched.
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
            if at is None:  # beyond the parser's limits
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
