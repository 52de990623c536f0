"""States of a constraint that searches have been at, so that the parser is asked once where texts are alike.

A step's search goes mostly where the step before it has gone, and half of the ways that it tries at once differ in
nothing that a constraint could tell (``prefix_equivalence``): other words in a string, another digit. What is kept
changes the time that a search takes, never what it finds, so that all requests under a grammar may share it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mmserve.constraint.search import bitmask
from mmserve.constraint.search.base import Matcher
from mmserve.constraint.search.completion import after
from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.prefix_equivalence import DistinctTexts, PrefixClasses, Scalar
from mmserve.constraint.search.shortest_completion import Effort, find_completion, quick_completion
from mmserve.constraint.search.vocabulary import LONGEST
from mmserve.memory import resident

#: Bytes that may be kept from one search to the next.
LIMIT = 16 << 20
#: Bytes of a state, of a byte of text before it (a parser keeps what it has read, up to 190 bytes for each), and
#: of a way that was asked for, with what the parser's lexer has learned on it. Measured, and rounded up.
_STATE, _BYTE, _WAY = 8_000, 200, 500
#: Bytes that a process grows by in a search, from which on they are taken for the search's own.
_NOTICED = 1 << 20
#: Most bytes that a lexer takes with all the states that ``PARSER_LIMITS`` allow it. Measured, and rounded up.
_LEXER = 12 << 20
#: A matcher is put in another's state where it has read so much less: to fork it takes time for all that it has read.
_DEEPER = 500
#: States gone on from in search of an end that a walk of the parser did not find.
_FAR = 24
#: The same for texts that are each of their own prefix_class.
BLIND = Effort(exact_tokens=200, patient_tokens=0, states=60, alternatives=4)


@dataclass(frozen=True, slots=True)
class Representative:
    """What stands for a state where it is asked how far the end is (``lookahead``): itself, or all that are alike."""

    key: Hashable
    next: tuple[ParserState, ...] | None  # one token farther on; None if they are not known
    tokens: tuple[int, ...]  # some that may lead there


class ParserState:
    """What may follow texts of one prefix_class. ``matcher`` stands after one of them, and is never moved."""

    __slots__ = ("_completion", "accepting", "depth", "far", "few", "matcher", "next", "prefix_class", "representative")

    def __init__(self, matcher: Matcher, prefix_class: Hashable | None, depth: int) -> None:
        self.matcher, self.prefix_class, self.depth = matcher, prefix_class, depth  # bytes before the matcher
        self.accepting = matcher.accepting
        #: What is after a token or a row of them, as far as it was asked: a state, None, that there is one (True), or
        #: that there is one which the parser does not reach within its limits (False).
        self.next: dict[int | tuple[int, ...], ParserState | bool | None] = {}
        self._completion: tuple[int, ...] | bool | None = False  # False: not looked for yet
        self.few: list[int] | None = None  # as ``Closing.next_tokens``
        self.far: tuple[int, ...] | bool | None = False  # as ``ParserStateCache.far_completion``
        self.representative: Representative | None = None

    def completion(self, lexicon: Lexicon, states: int) -> tuple[int, ...] | None:
        """As ``quick_completion``."""
        if isinstance(self._completion, bool):
            self._completion = quick_completion(self.matcher, lexicon, states)
        return self._completion


class ParserBudgetExhausted(Exception):
    """The states' own parser has come to its limits for good, as ``ParserStateCache.exhausted`` says."""


class ParserStateCache:
    """The states of one constraint, and the classes of its texts. Everything is asked of what ``acquire`` gives.

    ``parser`` gives a matcher before the first token, of a parser that no request has: what searches spend of its
    limits, requests keep. It may take as long as compiling. Without it, searches have their request's parser.
    """

    def __init__(
        self,
        lexicon: Lexicon,
        classes: Callable[[], PrefixClasses] = DistinctTexts,
        parser: Callable[[], Matcher] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self.lexicon, self._make, self._parser = lexicon, classes, parser
        self._start: Matcher | None = None  # of that parser, and a token that may follow there
        self._follows: list[int] = []
        self._limited, self._learned = False, 0
        self._built = 0  # bytes that the process has grown by while that parser was made, of the search under way
        self._lexer = 0  # bytes that its lexer has grown by since
        self._forget()

    def _forget(self) -> None:
        if self._limited:  # else the parser stays: to make it anew can take half a second of a step
            self._start, self._lexer = None, 0
        elif self._start is not None:
            self._lexer = min(self._lexer + self._learned, _LEXER)
        self._learned = 0  # bytes that the process has grown by in searches, beside what states count for
        self._classes, self._states = self._make(), dict[Hashable, ParserState]()
        self._root: tuple[bytes, Hashable] = b"", self._classes.start()  # where the latest search began
        self._limited = False
        #: Of each request's parser that states were made with, one of its matchers and a token that may follow there.
        self._parsers: list[tuple[Matcher, list[int]]] = []
        #: What stands for the states within a string or number, by what ``inside`` says of them.
        self.representatives: dict[Hashable, Representative] = {}
        self.ahead = False  # whether it was looked at what is after the start of a text (``lookahead``)
        self.size = self._lexer  # about so many bytes

    @property
    def exhausted(self) -> bool:
        """Whether one of the parsers has come to its limits for good.

        What its lexer has learned is shared by all matchers of a parser, and bounded. With the last of it they all deny
        whatever they are asked, and say of no error.
        """
        own = [] if self._start is None else [(self._start, self._follows)]
        return any(matcher.valid(follows) < len(follows) for matcher, follows in (*own, *self._parsers))

    @contextmanager
    def acquire(self) -> Iterator[ParserStateCache]:
        """For one search: these states, or new ones where another thread's search is at them, so that none waits.

        Nothing is kept of a search in which a parser has failed or come to its limits, nor more than ``LIMIT`` bytes.
        """
        if not self._lock.acquire(blocking=False):
            yield ParserStateCache(self.lexicon, self._make)
            return
        size, before, self._built = self.size, resident(), 0
        try:
            yield self
            self._limited |= self.exhausted
        except BaseException:
            self._limited = True
            raise
        finally:
            learned = resident() - before - max(0, self.size - size) - self._built
            learned = learned if learned > _NOTICED else 0
            self._learned += learned  # by the parsers' lexers, mostly, which no one else can tell
            self.size += learned
            if self._limited or self.size - self._lexer > LIMIT:
                self._forget()
            self._lock.release()

    def locate(self, text: bytes, matcher: Callable[[], Matcher], follows: Sequence[int] = ()) -> ParserState:
        """The state of ``text``, after which ``matcher`` gives one. A search begins with it.

        ``follows``: what is known to be able to follow, a token.
        """
        known, prefix_class = self._root
        if prefix_class is None or not text.startswith(known):
            known, prefix_class = b"", self._classes.start()
        prefix_class = self._class_after(prefix_class, text[len(known) :])
        self._root = text, prefix_class
        state = None if prefix_class is None else self._states.get(prefix_class)
        if state is None or state.depth > len(text) + _DEEPER:
            state = self._of(prefix_class, matcher(), len(text))
            if self._parser is None:
                self._parsers.append((state.matcher, list(follows) or _follows(state.matcher)))
        return state

    def own_matcher(self, before: Sequence[int]) -> Matcher | None:
        """A matcher after the tokens ``before`` of the parser that no request has; None if there is none.

        Raises ``ParserBudgetExhausted``.
        """
        if self._parser is None:
            return None
        if self._start is None:  # up to half a second, so what it takes is no reason to forget it
            smaller = resident()
            self._start = self._parser()
            self._follows = _follows(self._start)
            self._built += max(0, resident() - smaller)
        matcher = self._start.fork()
        try:
            matcher.consume(list(before))
        except ValueError as error:
            self._limited = True
            raise ParserBudgetExhausted from error
        return matcher

    def after(self, state: ParserState, token: int) -> ParserState | None:
        """The state after ``token``; None if it may not follow, or the parser has come to its limits with it."""
        found = state.next.get(token, True)
        if found is True or (isinstance(found, ParserState) and found.depth > state.depth + LONGEST + _DEEPER):
            asked = token in state.next
            found = state.next[token] = self._moved(state, [token], valid=asked)
        return found if isinstance(found, ParserState) else None

    def after_all(self, state: ParserState, tokens: Sequence[int]) -> ParserState | None:
        """The state after ``tokens``; None if they may not follow."""
        key = tuple(tokens)
        found = state.next.get(key, True)
        if found is True or (
            isinstance(found, ParserState) and found.depth > state.depth + LONGEST * len(key) + _DEEPER
        ):
            found = state.next[key] = self._moved(state, key)
        return found if isinstance(found, ParserState) else None

    def reach(self, state: ParserState, tokens: list[int]) -> int:
        """How many of ``tokens``, from the first on, may follow one another."""
        for i, token in enumerate(tokens):
            found = state.next.get(token, False)
            if found is None:
                return i
            if not isinstance(found, ParserState):
                far = state.matcher.valid(tokens[i:] if i else tokens)
                if token not in state.next:
                    state.next[token] = True if far else None
                    self.size += _WAY
                return i + far
            state = found
        return len(tokens)

    def inside(self, state: ParserState) -> tuple[Scalar, Hashable] | None:
        """As ``PrefixClasses.inside``."""
        return None if state.prefix_class is None else self._classes.inside(state.prefix_class)

    @property
    def known(self) -> bool:
        """Whether texts have classes."""
        return not isinstance(self._classes, DistinctTexts)

    def far_completion(self, state: ParserState) -> tuple[int, ...] | None:
        """A completion found with more effort than ``ParserState.completion``, where the first allowed bytes lead
        nowhere, as in `a+b`; None if there is none within that effort."""
        if isinstance(state.far, bool):
            if not self.known:
                found = find_completion(state.matcher, self.lexicon, BLIND)
                state.far = None if found is None else found.tokens
            else:
                state.far = self._nearest_end(state)
        return state.far

    def _nearest_end(self, state: ParserState) -> tuple[int, ...] | None:
        """The fewest closers that lead from ``state`` to the end; of ways to states that are alike one is gone on."""
        ways: dict[ParserState, tuple[int, ...]] = {state: ()}
        queue = deque([state])
        for _ in range(_FAR):
            if not queue:
                break
            at = queue.popleft()
            forced = self.lexicon.cover(at.matcher.forced())
            for step in [forced] if forced else self._apart(at):
                behind = self.after_all(at, step) if forced else self.after(at, step[0])
                if behind is None or behind in ways:
                    continue
                ways[behind] = (*ways[at], *step)
                if behind.accepting:
                    return ways[behind]
                queue.append(behind)
        return None

    def _apart(self, state: ParserState) -> list[list[int]]:
        """Closers that may follow ``state``, the first of those after which texts are alike."""
        closers, spelled = self.lexicon.closers, self.lexicon.spelled
        alike = None if state.prefix_class is None else self._classes.alike(state.prefix_class)
        steps, told = dict[Hashable, list[int]](), set[int]()
        for token in closers[state.matcher.among(closers)].tolist():
            text = spelled[token]
            number = None if alike is None or len(text) > 1 else alike[text[0]]
            if number in told:
                continue
            prefix_class = self._class_after(state.prefix_class, text)
            if prefix_class is not None and number is not None:
                told.add(number)
            steps.setdefault(token if prefix_class is None else (prefix_class,), [token])
        return list(steps.values())

    def _moved(self, state: ParserState, tokens: Sequence[int], *, valid: bool = False) -> ParserState | bool | None:
        """The entry of ``ParserState.next`` for ``tokens``. ``valid``: whether they are known to be allowed."""
        self.size += _WAY
        if not valid and state.matcher.valid(tokens) < len(tokens):
            return None
        text = self.lexicon.text(tokens)
        prefix_class, depth = self._class_after(state.prefix_class, text), state.depth + len(text)
        found = None if prefix_class is None else self._states.get(prefix_class)
        if found is not None and found.depth <= depth + _DEEPER:
            return found  # to ask whether the tokens may follow takes a fifth of moving a parser there
        matcher = after(state.matcher, tokens)
        if matcher is None:
            self._limited = True
            return False
        return self._of(prefix_class, matcher, depth)

    def _of(self, prefix_class: Hashable | None, matcher: Matcher, depth: int) -> ParserState:
        found = None if prefix_class is None else self._states.get(prefix_class)
        if found is None:
            found = ParserState(matcher, prefix_class, depth)
            self.size += _STATE + _BYTE * depth
            if prefix_class is not None:
                self._states[prefix_class] = found
        elif found.depth > depth + _DEEPER:
            self.size -= _BYTE * (found.depth - depth)
            found.matcher, found.depth = matcher, depth
        return found

    def _class_after(self, prefix_class: Hashable | None, text: bytes) -> Hashable | None:
        """The prefix_class after ``text``; None where that is not known."""
        if prefix_class is None:
            return None
        try:
            return self._classes.after(prefix_class, text)
        except ValueError:
            return None


def _follows(matcher: Matcher) -> list[int]:
    """A token that may follow, if there is one."""
    found: list[int] = bitmask.ids(matcher.mask())[:1].tolist()
    return found
