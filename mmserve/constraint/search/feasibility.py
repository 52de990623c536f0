"""Whether a parser state can still end within the token budget: a lower bound of the tokens needed, and completions.

``LookaheadBound`` gives the minimum number of tokens from a state to the end of the text; states that need more than
the remaining budget are dropped. It is computed by breadth-first search over all allowed tokens from the root of a
search. The content of a string or number has no effect after its end (``prefix_equivalence``), so one state represents
all states within it that may end it, with any bytes that a token of the vocabulary has after such an end.

``Completions`` has the completions of one search.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from mmserve.constraint.search.matcher import Constraint
from mmserve.constraint.search.parser_states import (
    EFFORT_WITHOUT_CLASSES,
    ParserBudgetExhausted,
    ParserState,
    ParserStateCache,
    Representative,
)
from mmserve.constraint.search.prefix_equivalence import Scalar
from mmserve.constraint.search.shortest_completion import find_completion
from mmserve.constraint.search.vocabulary import Lexicon, few_tokens_of, tokens_of

#: Number of allowed tokens above which a state's successors are not expanded.
_MAX_BRANCHES = 64
#: Maximum number of states expanded from the root of a search.
_STATES = 300
#: Tokens left in the budget besides those of the old witness, up to which a search uses the bound.
SPARE = 4
#: States for which one search computes a representative. The maximum observed was 1,431; the limit is the same on every
#: machine, whatever earlier searches have cached.
_MAX_QUERIES = 2_000
#: Maximum wall time (seconds) of ``look_ahead``; searches compute the rest.
_SECONDS = 0.1


class SearchTimeout(Exception):
    """A search exceeded the work or time limit of a decode step."""


class LookaheadBound:
    """A lower bound of the tokens from a state to the end, for states after ``root`` with ``size`` tokens left."""

    def __init__(self, root: ParserState, size: int, states: ParserStateCache, in_time: Callable[[], bool]) -> None:
        self.size, self._in_time = size, in_time
        self._visited = set[ParserState]()
        self._states, self._lexicon = states, states.lexicon
        self._least = self._measured(root)

    def least(self, state: ParserState) -> int:
        """The lower bound of the number of tokens from ``state`` to its end."""
        return 0 if state.accepting else self._least.get(self._representative_of(state).key, 1)

    def fits(self, state: ParserState, position: int) -> bool:
        """Whether the bound of ``state``, reached after ``position`` tokens, fits in the size."""
        return position + self.least(state) <= self.size

    def fitting_tokens(self, state: ParserState, position: int, most: int) -> list[int]:
        """Up to ``most`` tokens allowed at ``state`` whose bounds fit in the size, in ascending order of their
        bounds."""
        found = []
        for token in self._representative_of(state).tokens:
            next_state = self._states.after(state, token)
            if next_state is not None and self.fits(next_state, position + 1):
                found.append((self.least(next_state), token))
        return [token for _least, token in sorted(found)[:most]]

    def _measured(self, root: ParserState) -> dict[Hashable, int]:
        """The bound of each representative, by key."""
        first = self._representative_of(root).key
        level, before, least = {first: 0}, dict[Hashable, list[Hashable]]({first: []}), dict[Hashable, int]()
        queue = deque([root])
        while queue:
            state = queue.popleft()
            representative = self._representative_of(state)
            key = representative.key
            if state.accepting:
                least[key] = 0
            elif representative.next is None or level[key] >= self.size or len(level) >= _STATES:
                least[key] = 1  # not an end; nothing else is known
            else:
                farther = level[key] + 1
                for next_state in representative.next:
                    other = self._representative_of(next_state).key
                    if other not in level:
                        level[other], before[other] = farther, [key]
                        queue.append(next_state)
                    else:
                        before[other].append(key)
        ordered = deque(sorted(least, key=least.__getitem__))
        while ordered:
            key = ordered.popleft()
            needed = least[key] + 1
            for other in before[key]:
                if other not in least:
                    least[other] = needed
                    ordered.append(other)
        return least

    def _representative_of(self, state: ParserState) -> Representative:
        if state not in self._visited:
            self._visited.add(state)
            if len(self._visited) > _MAX_QUERIES or not self._in_time():
                raise SearchTimeout
        if state.representative is None:
            inside = self._states.inside(state)
            state.representative = (None if inside is None else self._within(state, inside)) or self._alone(state)
        return state.representative

    def _alone(self, state: ParserState) -> Representative:
        """``state`` as its own representative."""
        words = state.matcher.mask()
        tokens = few_tokens_of(words, _MAX_BRANCHES)
        if tokens is None:
            tokens = few_tokens_of(self._leading(state, words), _MAX_BRANCHES)
        if tokens is None:
            return Representative(state, None, ())
        found = [self._states.after(state, token) for token in tokens.tolist()]
        return Representative(state, None if None in found else _distinct(found), tuple(tokens.tolist()))

    def _leading(self, state: ParserState, words: np.ndarray) -> np.ndarray:
        """The set ``words`` without tokens that enter a string or number that a shorter one enters too."""
        of = self._lexicon.scalars
        for scalar, shorter, longer in (
            (Scalar.STRING, of.quotes[:1], of.opening),
            (Scalar.NUMBER, of.digits, of.numeric),
        ):
            if any(self._enters(state, token, scalar) for token in shorter):
                words = words & ~longer
        return words

    def _enters(self, state: ParserState, token: int, scalar: Scalar) -> bool:
        """Whether ``token`` enters, from ``state``, a ``scalar`` whose states have one representative."""
        next_state = self._states.after(state, token)
        inside = None if next_state is None else self._states.inside(next_state)
        if next_state is None or inside is None or inside[0] is not scalar:
            return False
        return self._within(next_state, inside) is not None

    def _within(self, state: ParserState, inside: tuple[Scalar, Hashable]) -> Representative | None:
        """The representative of all states within the same string or number; None if it cannot end at ``state``."""
        known = self._states.representatives.get(inside)
        if inside[0] is Scalar.NUMBER:
            if known is not None:
                return known if state.matcher.valid(known.tokens[:1]) else None
            found = self._number(state, inside)
        else:
            quote = self._lexicon.ids.get(b'"')
            closed = None if quote is None else self._states.after(state, quote)
            if closed is None or known is not None:
                return None if closed is None else known
            of = self._lexicon.scalars
            tails = self._tails(closed, of.after_strings, tokens_of(closed.matcher.mask()).tolist())
            found = None if tails is None else Representative(inside, _distinct([closed, *tails]), of.quotes)
        if found is not None:
            self._states.representatives[inside] = found
        return found

    def _number(self, state: ParserState, inside: Hashable) -> Representative | None:
        of = self._lexicon.scalars
        allowed = tokens_of(state.matcher.mask())
        ends = allowed[~of.counting[allowed]].tolist()
        tails = self._tails(state, of.after_numbers, ends)
        if not ends or tails is None:
            return None
        return Representative(
            inside, _distinct([*(self._states.after(state, token) for token in ends), *tails]), tuple(ends)
        )

    def _tails(self, state: ParserState, tails: Sequence[bytes], begins: list[int]) -> list[ParserState | None] | None:
        """The states after those ``tails`` that are prefixed by one of the tokens ``begins``; None if unknown."""
        first = {self._lexicon.spelled[token][0] for token in begins}
        spelled = [self._lexicon.cover(tail) for tail in tails if tail[0] in first]
        return None if None in spelled else [self._states.after_all(state, tokens) for tokens in spelled if tokens]


def look_ahead(constraint: Constraint, follows: Sequence[int], size: int, states: ParserStateCache) -> None:
    """Fill the cache, before the first step, with states that searches for answers of up to ``size`` tokens need.

    ``follows``: tokens allowed at the start. Done once for a grammar; results of searches do not depend on it.
    """
    deadline = time.perf_counter() + _SECONDS
    with states.acquire() as cache, contextlib.suppress(SearchTimeout, ParserBudgetExhausted):
        if cache is not states or cache.explored:
            return
        cache.explored = True
        if not cache.known:
            cache.own_matcher(())  # compile here rather than in a decode step
        else:
            root = cache.locate((), lambda: cache.own_matcher(()) or constraint.start(), follows)
            LookaheadBound(root, size, cache, lambda: time.perf_counter() < deadline)


def _distinct(found: Sequence[ParserState | None]) -> tuple[ParserState, ...]:
    return tuple(state for state in dict.fromkeys(found) if state is not None)


@dataclass
class Completions:
    """The completions of one search: from the old witness, from earlier searches, and new short ones."""

    witness: Sequence[int]  # the old witness up to its end
    size: int  # positions of the answer
    lexicon: Lexicon
    remembered: tuple[tuple[int, ...], ...] = ()
    states: int = 60  # visited for a new completion
    shift: int = 6  # positions by which the old witness's end may be shifted
    searches: int = 6  # states from which a new completion is searched
    thorough: int = 1  # of these, with more effort: if the first closers lead to dead ends, as in `a+b`
    patient: bool = False  # whether another completion is searched if a known one is too long
    #: A longer search over cached states; None = search with the parser alone.
    far_completion: Callable[[ParserState], tuple[int, ...] | None] | None = None
    found: list[tuple[int, ...]] = field(default_factory=list)
    asked: set[ParserState] = field(default_factory=set)  # states from which new completions were searched
    too_long: bool = False  # a completion that is too long was found
    cut: bool = False  # a better path than the chosen one was too long

    def tail(
        self, state: ParserState, position: int, agrees: Callable[[Sequence[int]], bool] = lambda tokens: True
    ) -> tuple[int, ...] | None:
        """Tokens from ``state``, at ``position`` of the answer, to its end within the budget; None if none is found.

        ``agrees``: whether tokens are consistent with committed ones.
        """
        if state.accepting and agrees(()):
            return ()
        matcher = state.matcher
        room, too_long = self.size - position, False
        for completion in self._known(position):
            if len(completion) > room:
                too_long = too_long or matcher.ends(completion)
            elif agrees(completion) and matcher.ends(completion):
                return completion
        self.too_long |= too_long
        if not self._may_ask(state) or (too_long and not self.patient):  # a completion is known, but is too long
            return None
        new = self.shortest(state)
        if (new is None or (self.patient and len(new) > room)) and self.thorough:
            self.thorough -= 1
            if self.far_completion is None:
                found = find_completion(matcher, self.lexicon, EFFORT_WITHOUT_CLASSES, within=room)
                new = (found and found.tokens) or new
            else:
                new = self.far_completion(state) or new
        if new is None:
            return None
        self.found.append(new)
        self.too_long |= len(new) > room
        return new if len(new) <= room and agrees(new) else None

    def shortest(self, state: ParserState) -> tuple[int, ...] | None:
        """A short completion from ``state``, if one is known or may still be searched."""
        if not self._may_ask(state):
            return None
        self.asked.add(state)
        return state.completion(self.lexicon, self.states)

    def _may_ask(self, state: ParserState) -> bool:
        """Whether a completion from ``state`` may be searched. Known ones count as well, so that results do not depend
        on other searches."""
        return state in self.asked or len(self.asked) < self.searches

    def next_tokens(self, state: ParserState) -> list[int]:
        """One or two allowed tokens for a fork after which none of the model's candidates is allowed."""
        if state.next_tokens is None:
            matcher = state.matcher
            forced = self.lexicon.cover(matcher.forced())
            closers = (token for token in self.lexicon.closers.tolist() if matcher.valid([token]))
            state.next_tokens = forced[:1] if forced else list(islice(closers, 2))
        return state.next_tokens

    def _known(self, position: int) -> Iterator[tuple[int, ...]]:
        """The old witness's end from this position, then from a few positions to either side, then earlier
        completions."""
        for distance in range(self.shift + 1):
            for begin in {position + distance, position - distance}:
                if 0 <= begin < len(self.witness):
                    yield tuple(self.witness[begin:])
        yield from self.found
        yield from self.remembered
