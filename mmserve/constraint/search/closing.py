"""How a fork of the parser is brought to its end after the part of the canvas that is searched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.parser_states import BLIND, ParserState
from mmserve.constraint.search.shortest_completion import find_completion


@dataclass
class Closing:
    """Ways to the end for one search: the old witness's own, those seen before, and new short ones."""

    witness: Sequence[int]  # the old witness up to its end
    size: int  # positions of the answer
    lexicon: Lexicon
    remembered: tuple[tuple[int, ...], ...] = ()
    states: int = 60  # of the parser, for a new way
    shift: int = 6  # positions that the old witness's own way may be moved
    searches: int = 6  # states from which a new way is looked for in one search
    thorough: int = 1  # of these, with more effort: where what comes first leads nowhere, as in `a+b`
    patient: bool = False  # whether another way is looked for where one that is known is too long
    far: Callable[[ParserState], tuple[int, ...] | None] | None = None  # how, if not by asking the parser alone
    found: list[tuple[int, ...]] = field(default_factory=list)
    asked: set[ParserState] = field(default_factory=set)  # from where new ways were looked for
    cramped: bool = False  # a new way was found, and there was no room for it
    cut: bool = False  # a better path than the one taken was given up for want of room

    def tail(
        self, state: ParserState, position: int, agrees: Callable[[Sequence[int]], bool] = lambda way: True
    ) -> tuple[int, ...] | None:
        """Tokens that lead from ``state``, at ``position`` of the answer, to its end within the budget; None if none.

        ``agrees``: whether such tokens agree with what is committed.
        """
        if state.accepting and agrees(()):
            return ()
        matcher = state.matcher
        room, cramped = self.size - position, False
        for way in self._known(position):
            if len(way) > room:
                cramped = cramped or matcher.ends(way)
            elif agrees(way) and matcher.ends(way):
                return way
        self.cramped |= cramped
        if not self._may_ask(state) or (cramped and not self.patient):  # a way to the end is known, and too long
            return None
        new = self.shortest(state)
        if (new is None or (self.patient and len(new) > room)) and self.thorough:
            self.thorough -= 1
            new = (self._blindly(state, room) if self.far is None else self.far(state)) or new
        if new is None:
            return None
        self.found.append(new)
        self.cramped |= len(new) > room
        return new if len(new) <= room and agrees(new) else None

    def shortest(self, state: ParserState) -> tuple[int, ...] | None:
        """A short way from ``state`` to the end, if one is known or may still be looked for."""
        if not self._may_ask(state):
            return None
        self.asked.add(state)
        return state.completion(self.lexicon, self.states)

    def _blindly(self, state: ParserState, room: int) -> tuple[int, ...] | None:
        """A way found with more effort; None where all are known to be longer than ``room``, too."""
        close = find_completion(state.matcher, self.lexicon, BLIND, within=room)
        return None if close is None else close.tokens

    def _may_ask(self, state: ParserState) -> bool:
        """Whether a way from ``state`` may be looked for; it counts even if it is known, so that no result depends on
        what other searches have asked."""
        return state in self.asked or len(self.asked) < self.searches

    def next_tokens(self, state: ParserState) -> list[int]:
        """A token or two for a fork that none of the model's candidates may follow."""
        if state.few is None:
            matcher = state.matcher
            forced = self.lexicon.cover(matcher.forced())
            closers = (token for token in self.lexicon.closers.tolist() if matcher.valid([token]))
            state.few = forced[:1] if forced else list(islice(closers, 2))
        return state.few

    def _known(self, position: int) -> Iterator[tuple[int, ...]]:
        """The old witness's way from here, then as if it were a little farther on or back, then those seen before."""
        for distance in range(self.shift + 1):
            for begin in {position + distance, position - distance}:
                if 0 <= begin < len(self.witness):
                    yield tuple(self.witness[begin:])
        yield from self.found
        yield from self.remembered
