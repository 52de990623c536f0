"""A cache of parser states: one state for all equivalent texts of a constraint, so that the parser is called once.

The search of a step mostly visits the same states as that of the previous step, and half of its parallel paths are
equivalent (``prefix_equivalence``): other words in a string, another digit. The cache changes the time of a search,
never its result, so all requests under a grammar can share it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mmserve.constraint.search.matcher import Grammar, Matcher, after
from mmserve.constraint.search.prefix_equivalence import PrefixClasses, Scalar
from mmserve.constraint.search.shortest_completion import Effort, find_completion, quick_completion
from mmserve.constraint.search.vocabulary import LONGEST, Lexicon, tokens_of
from mmserve.memory import resident

#: Bytes of states that one grammar's cache keeps between searches.
LIMIT = 16 << 20
#: Total bytes of the caches of all grammars; running requests keep theirs beyond this.
SHARED_LIMIT = 64 << 20
#: Bytes of one grammar's parser: a constant, and a factor of the bytes of its text. Measured, and rounded up.
_PARSER, _GRAMMAR_BYTE = 400_000, 50
#: Bytes of a state, of each byte of text before it (a parser keeps up to 190 for each), and of a cached transition
#: including the lexer's cache. Measured, and rounded up.
_STATE, _BYTE, _WAY = 8_000, 200, 500
#: Growth of the process during a search, in bytes, from which it is attributed to the search.
_NOTICED = 1 << 20
#: Maximum size of a lexer with all the states that ``PARSER_LIMITS`` allow. Measured, and rounded up.
_LEXER = 12 << 20
#: A state replaces its matcher by one that has read this many bytes less: the time of a fork grows with them.
_DEEPER = 500
#: States expanded to find an end that a walk did not find.
_FAR = 24
#: Limits of that search if no prefix classes are known.
EFFORT_WITHOUT_CLASSES = Effort(exact_tokens=200, patient_tokens=0, states=60, alternatives=4)


@dataclass(frozen=True, slots=True)
class Representative:
    """Representative of a class of equivalent states for the lookahead bound (``feasibility.LookaheadBound``)."""

    key: Hashable
    next: tuple[ParserState, ...] | None  # successor states; None if unknown
    tokens: tuple[int, ...]  # some tokens that lead to them


class ParserState:
    """The parser state after the texts of one class. ``matcher`` is after one of these texts, and is never advanced."""

    __slots__ = (
        "_completion",
        "accepting",
        "depth",
        "far_completion",
        "matcher",
        "next",
        "next_tokens",
        "prefix_class",
        "representative",
    )

    def __init__(self, matcher: Matcher, prefix_class: Hashable | None, depth: int) -> None:
        self.matcher, self.prefix_class, self.depth = matcher, prefix_class, depth  # bytes before the matcher
        self.accepting = matcher.accepting
        #: Cached transitions by one or several tokens: a state; None = not allowed; True = allowed; False = allowed,
        #: but beyond the parser's limits.
        self.next: dict[int | tuple[int, ...], ParserState | bool | None] = {}
        self._completion: tuple[int, ...] | bool | None = False  # False: not searched yet
        self.next_tokens: list[int] | None = None  # see ``Completions.next_tokens``
        self.far_completion: tuple[int, ...] | bool | None = False  # see ``ParserStateCache.far_completion``
        self.representative: Representative | None = None

    def completion(self, lexicon: Lexicon, states: int) -> tuple[int, ...] | None:
        """See ``quick_completion``."""
        if isinstance(self._completion, bool):
            self._completion = quick_completion(self.matcher, lexicon, states)
        return self._completion


class ParserBudgetExhausted(Exception):
    """The cache's own parser has used up its limits (see ``ParserStateCache.exhausted``)."""


class ParserStateCache:
    """The parser states of one constraint, by class of text. Searches use the cache that ``acquire`` yields.

    ``parser`` returns an initial matcher of a separate parser, so that searches do not use up a request's limits; it
    may take as long as compiling. Without it, searches use their request's parser.
    """

    def __init__(
        self,
        lexicon: Lexicon,
        classes: Callable[[], PrefixClasses] = PrefixClasses,
        parser: Callable[[], Matcher] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self.lexicon, self._make, self._parser = lexicon, classes, parser
        self._start: Matcher | None = None  # of that parser, with a token that may follow
        self._follows: list[int] = []
        self._limited, self._learned = False, 0
        self._built = 0  # growth of the process by creating that parser, in the current search
        self._lexer = 0  # growth of its lexer since
        self._discard()

    def _discard(self) -> None:
        if self._limited:  # otherwise the parser is kept: creating another can take half a second of a step
            self._start, self._lexer = None, 0
        elif self._start is not None:
            self._lexer = min(self._lexer + self._learned, _LEXER)
        self._learned = 0  # growth of the process in searches, besides the states
        self._classes, self._states = self._make(), dict[Hashable, ParserState]()
        self._root: tuple[Any, Hashable] = b"", self._classes.start()  # of the latest search (see ``_row``)
        self._limited = False
        #: For each request's parser that created states: one of its matchers, and a token allowed there.
        self._parsers: list[tuple[Matcher, list[int]]] = []
        #: States within a string or number, by the result of ``inside``.
        self.representatives: dict[Hashable, Representative] = {}
        self.explored = False  # whether the start of the text was explored (``feasibility.look_ahead``)
        self.size = self._lexer  # bytes, approximately

    @property
    def exhausted(self) -> bool:
        """Whether one of the parsers has used up its limits.

        All matchers of a parser share its lexer's states, whose number is limited. Beyond the limit they reject every
        token without an error.
        """
        own = [] if self._start is None else [(self._start, self._follows)]
        return any(matcher.valid(follows) < len(follows) for matcher, follows in (*own, *self._parsers))

    @property
    def fresh(self) -> bool:
        """Whether its own parser is not created yet: no other search can have used that parser's limits."""
        return self._parser is not None and self._start is None and not self._states

    @contextmanager
    def acquire(self) -> Iterator[ParserStateCache]:
        """The cache for one search: this one or, while another thread's search uses it, a new one, so that no search
        waits.

        Nothing is kept of a search in which a parser failed or reached its limits, nor more than ``LIMIT`` bytes.
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
            self._learned += learned  # mostly the parsers' lexers, which do not report their size
            self.size += learned
            if self._limited or self.size - self._lexer > LIMIT:
                self._discard()
            self._lock.release()

    def locate(self, before: Sequence[int], matcher: Callable[[], Matcher], follows: Sequence[int] = ()) -> ParserState:
        """The state after the tokens ``before``, where a search begins; ``matcher`` creates a matcher there.

        ``follows``: a token known to be allowed there.
        """
        text = self.lexicon.text(before)
        row = self._row(before, text)
        known, prefix_class = self._root
        if prefix_class is None or row[: len(known)] != known:
            known, prefix_class = row[:0], self._classes.start()
        prefix_class = self._class_after(prefix_class, row[len(known) :])
        self._root = row, prefix_class
        state = None if prefix_class is None else self._states.get(prefix_class)
        if state is None or state.depth > len(text) + _DEEPER:
            state = self._of(prefix_class, matcher(), len(text))
            if self._parser is None:
                self._parsers.append((state.matcher, list(follows) or _follows(state.matcher)))
        return state

    def own_matcher(self, before: Sequence[int]) -> Matcher | None:
        """A matcher of the cache's own parser after the tokens ``before``; None if it has none.

        Raises ``ParserBudgetExhausted``.
        """
        if self._parser is None:
            return None
        if self._start is None:  # takes up to half a second, so it is not dropped for its size
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
        """The state after ``token``; None if it is not allowed, or beyond the parser's limits."""
        found = state.next.get(token, True)
        if found is True or (isinstance(found, ParserState) and found.depth > state.depth + LONGEST + _DEEPER):
            asked = token in state.next
            found = state.next[token] = self._moved(state, [token], valid=asked)
        return found if isinstance(found, ParserState) else None

    def after_all(self, state: ParserState, tokens: Sequence[int]) -> ParserState | None:
        """The state after ``tokens``; None if they are not allowed."""
        key = tuple(tokens)
        found = state.next.get(key, True)
        if found is True or (
            isinstance(found, ParserState) and found.depth > state.depth + LONGEST * len(key) + _DEEPER
        ):
            found = state.next[key] = self._moved(state, key)
        return found if isinstance(found, ParserState) else None

    def reach(self, state: ParserState, tokens: list[int]) -> int:
        """Length of the longest allowed prefix of ``tokens``."""
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
        """See ``PrefixClasses.inside``."""
        return None if state.prefix_class is None else self._classes.inside(state.prefix_class)

    @property
    def known(self) -> bool:
        """Whether any texts are known to be equivalent."""
        return self._classes.known

    def far_completion(self, state: ParserState) -> tuple[int, ...] | None:
        """A completion found with more effort than ``ParserState.completion``, for texts where the first allowed bytes
        lead to a dead end, as in `a+b`; None if none is found."""
        if isinstance(state.far_completion, bool):
            if not self.known:
                found = find_completion(state.matcher, self.lexicon, EFFORT_WITHOUT_CLASSES)
                state.far_completion = None if found is None else found.tokens
            else:
                state.far_completion = self._nearest_end(state)
        return state.far_completion

    def _nearest_end(self, state: ParserState) -> tuple[int, ...] | None:
        """The fewest closers from ``state`` to the end, by breadth-first search over states."""
        ways: dict[ParserState, tuple[int, ...]] = {state: ()}
        queue = deque([state])
        for _ in range(_FAR):
            if not queue:
                break
            at = queue.popleft()
            forced = self.lexicon.cover(at.matcher.forced())
            for step in [forced] if forced else self._distinct_closers(at):
                next_state = self.after_all(at, step) if forced else self.after(at, step[0])
                if next_state is None or next_state in ways:
                    continue
                ways[next_state] = (*ways[at], *step)
                if next_state.accepting:
                    return ways[next_state]
                queue.append(next_state)
        return None

    def _distinct_closers(self, state: ParserState) -> list[list[int]]:
        """Closers allowed at ``state``, one for each prefix class after them."""
        closers, spelled = self.lexicon.closers, self.lexicon.spelled
        alike = None if state.prefix_class is None else self._classes.alike(state.prefix_class)
        steps, seen = dict[Hashable, list[int]](), set[int]()
        for token in closers[state.matcher.among(closers)].tolist():
            text = spelled[token]
            number = None if alike is None or len(text) > 1 else alike[text[0]]
            if number in seen:
                continue
            prefix_class = self._class_after(state.prefix_class, self._row([token], text))
            if prefix_class is not None and number is not None:
                seen.add(number)
            steps.setdefault(token if prefix_class is None else (prefix_class,), [token])
        return list(steps.values())

    def _moved(self, state: ParserState, tokens: Sequence[int], *, valid: bool = False) -> ParserState | bool | None:
        """The entry of ``ParserState.next`` for ``tokens``. ``valid``: whether they are known to be allowed."""
        self.size += _WAY
        if not valid and state.matcher.valid(tokens) < len(tokens):
            return None
        text = self.lexicon.text(tokens)
        prefix_class = self._class_after(state.prefix_class, self._row(tokens, text))
        depth = state.depth + len(text)
        found = None if prefix_class is None else self._states.get(prefix_class)
        if found is not None and found.depth <= depth + _DEEPER:
            return found  # validation takes a fifth of the time of a fork
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

    def _row(self, tokens: Sequence[int], text: bytes) -> Any:
        """The input of prefix classes: ``tokens``, or the ``text`` that they spell."""
        return tuple(tokens) if self._classes.by_tokens else text

    def _class_after(self, prefix_class: Hashable | None, row: Any) -> Hashable | None:
        """The class after ``row`` (of ``_row``); None if unknown."""
        if prefix_class is None:
            return None
        try:
            return self._classes.after(prefix_class, row)
        except ValueError:
            return None


def _follows(matcher: Matcher) -> list[int]:
    """A list with one allowed token; empty if there is none."""
    found: list[int] = tokens_of(matcher.mask())[:1].tolist()
    return found


class SharedParserStates:
    """LRU caches of states of grammars over one vocabulary; thread-safe."""

    def __init__(self, lexicon: Lexicon, limit: int = SHARED_LIMIT) -> None:
        self._lexicon, self._limit = lexicon, limit
        #: The cache, and the bytes of its parsers.
        self._states: OrderedDict[tuple[str, bytes], tuple[ParserStateCache, int]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, grammar: Grammar, cache: str = "") -> ParserStateCache:
        """The states of ``grammar``, shared by requests of the tenants of ``cache`` while they are cached."""
        key = cache, hashlib.sha256(grammar.source.encode()).digest()
        with self._lock:
            if key not in self._states:
                parsers = 2 * (_PARSER + _GRAMMAR_BYTE * len(grammar.source))  # one of them is the cache's own
                states = ParserStateCache(self._lexicon, grammar.classes, lambda: grammar.with_own_parser().start())
                self._states[key] = states, parsers
            self._states.move_to_end(key)
            while len(self._states) > 1 and self.used > self._limit:
                self._states.popitem(last=False)
            return self._states[key][0]

    @property
    def used(self) -> int:
        """Approximate size in bytes."""
        return sum(parser + states.size for states, parser in self._states.values())
