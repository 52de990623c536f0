"""The language of a constraint: token sequences that are consumed from left to right and can be forked.

``Constraint`` and ``Matcher`` are the interface for the search; ``Grammar`` implements it by llguidance's parser,
``Concatenation`` for a template as one language, for next-token models: fixed texts with other languages between
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from mmserve.constraint.search.prefix_equivalence import PrefixClasses, TokenRows, prefix_classes
from mmserve.constraint.search.vocabulary import Vocabulary, add_tokens, in_mask, mask_of, remove_tokens, tokens_of


class Matcher(Protocol):
    """A state in a constraint's language: the tokens consumed so far, and which may follow them.

    Only for tokens with bytes. The end of text is not a token of the language: it is allowed if the matcher is
    ``accepting``, and only end tokens may follow it.
    """

    __slots__ = ()

    def fork(self) -> Self:
        """An independent copy of the matcher."""

    def valid(self, tokens: Sequence[int]) -> int:
        """Length of the longest valid prefix of ``tokens``; does not consume them."""

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` are allowed here and the text may end after them; does not consume them."""
        fork = after(self, tokens)
        return fork is not None and fork.accepting

    def consume(self, tokens: Sequence[int]) -> None:
        """Consume ``tokens``; raises ``ValueError`` if they are not allowed here, after which the matcher is
        unusable."""

    def allowed(self) -> np.ndarray:
        """Ids (int64, ascending) of all tokens allowed here."""
        return tokens_of(self.mask())

    def mask(self) -> np.ndarray:
        """The tokens allowed here, as a new bitmask."""

    def among(self, tokens: np.ndarray) -> np.ndarray:
        """Bool, in the shape of ``tokens`` (int64): which of them are allowed here."""
        return in_mask(self.mask(), tokens)

    def forced(self) -> bytes:
        """The bytes that must follow here; empty if there are several options, or if the text may end."""

    def ahead(self) -> bytes:
        """Bytes that are known to lead towards the end: those of ``forced``, or a fixed choice of several options."""
        return self.forced()

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""


M = TypeVar("M", bound=Matcher)


def after(matcher: M, tokens: Sequence[int]) -> M | None:
    """A matcher after ``tokens``; None if they are not allowed, or exceed the parser's limits."""
    fork = matcher.fork()
    try:
        fork.consume(tokens)
    except ValueError:
        return None
    return fork


def completes(matcher: Matcher, tokens: Sequence[int]) -> bool:
    """As ``Matcher.ends``, but by consuming: the parser's limits may stop it on a path that it has reported as
    valid."""
    if matcher.valid(tokens) < len(tokens):
        return False
    fork = after(matcher, tokens)
    return fork is not None and fork.accepting


class Constraint(Protocol):
    """A compiled constraint over one model's tokens; has no state of a request."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens."""

    def classes(self) -> PrefixClasses:
        """Equivalence classes of prefixes: all prefixes of a class have the same continuations."""

    def start(self) -> Matcher:
        """A matcher before the first token."""

    @property
    def weight(self) -> int:
        """Size of its text in bytes: compiling takes about four microseconds per byte."""

    def with_own_parser(self) -> Self:
        """The same constraint with its own parser, so that parser limits are not shared."""


@dataclass(frozen=True)
class Grammar:
    """A compiled llguidance grammar (its JSON form, or Lark) over a vocabulary.

    Raises:
        ValueError: llguidance rejects the grammar; with its message.
    """

    source: str
    vocabulary: Vocabulary
    limits: LLParserLimits | None = None  # limits of the parser's work; None = llguidance's defaults
    _compiled: LLMatcher = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        compiled = LLMatcher(self.vocabulary.trie, self.source, log_level=0, limits=self.limits)
        if compiled.is_error():
            raise ValueError(compiled.get_error())
        object.__setattr__(self, "_compiled", compiled)

    @property
    def weight(self) -> int:
        return len(self.source)

    def classes(self) -> PrefixClasses:
        return prefix_classes(self.source)

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self._compiled.deep_copy(), self.vocabulary)

    def with_own_parser(self) -> Grammar:
        """The same grammar, compiled again; takes milliseconds.

        All matchers of a parser share its lexer's cached states, and the limit of these.
        """
        return replace(self)


class GrammarMatcher(Matcher):
    """A state in a grammar's language.

    A parser that fails (its work is limited) allows and accepts nothing afterwards.
    """

    __slots__ = ("_content", "_parser", "_vocabulary")

    def __init__(self, parser: LLMatcher, vocabulary: Vocabulary) -> None:
        self._parser, self._vocabulary, self._content = parser, vocabulary, vocabulary.content

    def fork(self) -> GrammarMatcher:
        return GrammarMatcher(self._parser.deep_copy(), self._vocabulary)

    def valid(self, tokens: Sequence[int]) -> int:
        """See ``Matcher.valid``; tokens without bytes are not valid. About 0.4 microseconds per token."""
        if not self._content.issuperset(tokens):
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token not in self._content)]

        if not tokens or self._parser.is_stopped():
            return 0
        return self._parser.validate_tokens(tokens if isinstance(tokens, list) else list(tokens))

    def ends(self, tokens: Sequence[int]) -> bool:
        """See ``Matcher.ends``. About 2 microseconds; consuming them takes 40, because a parser does more work at the
        end of a text."""
        if not tokens or self._parser.is_stopped():
            return not tokens and self.accepting
        end = min(self._vocabulary.end_ids)
        return self._content.issuperset(tokens) and self._parser.validate_tokens([*tokens, end]) > len(tokens)

    def consume(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        if not self._vocabulary.end_ids.isdisjoint(tokens) or not self._parser.consume_tokens(list(tokens)):
            raise ValueError("these tokens may not follow here")

    def allowed(self) -> np.ndarray:
        forced = self.forced()
        return np.array(sorted(set(self._spelling(forced))), np.int64) if forced else tokens_of(self._unforced_mask())

    def mask(self) -> np.ndarray:
        """See ``Matcher.mask``. About 30 microseconds for 126,000 tokens."""
        forced = self.forced()
        return mask_of(self._spelling(forced), len(self._vocabulary.token_bytes)) if forced else self._unforced_mask()

    def _unforced_mask(self) -> np.ndarray:
        """``mask``, if nothing is forced."""
        words = np.zeros((len(self._vocabulary.token_bytes) + 31) // 32, np.uint32)
        if not self._parser.is_stopped():
            self._parser.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            remove_tokens(words, self._vocabulary.end_ids)
        return words

    def _spelling(self, forced: bytes) -> list[int]:
        """Tokens that may follow if ``forced`` must: llguidance's mask has only one tokenisation of it.

        A vocabulary has thousands of tokens that begin with a given letter, and the forced text is usually a character
        or two.
        """
        candidates = self._vocabulary.beginning_with(forced, lambda tokens: self.valid(tokens) == len(tokens))
        longer = [token for token in candidates if self.valid([token])]
        return self._vocabulary.within(forced) + longer

    def forced(self) -> bytes:
        if self._parser.is_stopped() or self._parser.is_accepting():
            return b""
        return self._parser.compute_ff_bytes()

    @property
    def accepting(self) -> bool:
        return not self._parser.is_error() and self._parser.is_accepting()


@dataclass(frozen=True)
class BoundedHole:
    """A hole: at most ``most`` tokens of ``constraint``."""

    constraint: Constraint
    most: int


@dataclass(frozen=True)
class Concatenation:
    """``texts[0]``, the first hole, ``texts[1]``, …: one text more than holes; only the first and the last text may be
    empty. All holes are over ``vocabulary``.

    No token spans a boundary, and a hole ends where the text after it is first complete: so each token sequence has a
    unique assignment of tokens to holes.
    """

    texts: tuple[bytes, ...]
    holes: tuple[BoundedHole, ...]
    vocabulary: Vocabulary

    def classes(self) -> PrefixClasses:
        return TokenRows()

    def start(self) -> ConcatenationMatcher:
        before = ConcatenationState(-1, texts=((0, 0),))
        return ConcatenationMatcher(self, before if self.texts[0] else self._opened(before))

    @property
    def weight(self) -> int:
        return sum(hole.constraint.weight for hole in self.holes)

    def with_own_parser(self) -> Concatenation:
        return replace(
            self, holes=tuple(replace(hole, constraint=hole.constraint.with_own_parser()) for hole in self.holes)
        )

    def split(self, tokens: Sequence[int]) -> list[list[int]]:
        """The tokens of each hole, from those of a whole answer. Raises ``ValueError`` if they are not one."""
        matcher = self.start()
        matcher.consume(tokens)
        if not matcher.accepting:
            raise ValueError("these tokens are no whole answer")
        state = matcher.state
        spans = state.spans if state.hole is None else (*state.spans, (state.hole_start, state.tokens))
        return [list(tokens[start:end]) for start, end in spans]

    def text(self, state: ConcatenationState) -> bytes:
        """The next text; empty if there is none."""
        return self.texts[state.number + 1] if state.number + 1 < len(self.texts) else b""

    def partial_matches(self, state: ConcatenationState) -> tuple[tuple[int, int], ...]:
        """The partial matches of the next text: the number of its bytes matched, and the index of the first token."""
        ended = state.hole is not None and state.hole.accepting and self.text(state)
        return (*state.texts, (0, state.tokens)) if ended else state.texts

    def open_hole(self, state: ConcatenationState) -> Matcher | None:
        """The matcher of the open hole; None if it is full."""
        if state.hole is None or state.tokens - state.hole_start >= self.holes[state.number].most:
            return None
        return state.hole

    def step(self, state: ConcatenationState, token: int) -> ConcatenationState | None:
        """The state after ``token``; None if it is not allowed."""
        spelled, text = self.vocabulary.token_bytes[token], self.text(state)
        if not spelled:
            return None
        texts = tuple(
            (size + len(spelled), at) for size, at in self.partial_matches(state) if text.startswith(spelled, size)
        )
        for size, at in texts:
            if size == len(text):
                spans = (*state.spans, (state.hole_start, at)) if state.number >= 0 else ()
                return self._opened(replace(state, tokens=state.tokens + 1, spans=spans))
        before = self.open_hole(state)
        hole = None if before is None or not before.valid([token]) else after(before, [token])
        if hole is None and not texts:
            return None
        return replace(state, tokens=state.tokens + 1, hole=hole, texts=texts)

    def _opened(self, state: ConcatenationState) -> ConcatenationState:
        """``state`` at the next hole, or after the last text."""
        number = state.number + 1
        hole = self.holes[number].constraint.start() if number < len(self.holes) else None
        return replace(state, number=number, hole_start=state.tokens, hole=hole, texts=())


@dataclass(frozen=True)
class ConcatenationState:
    """A state of a concatenation; its matcher is shared and never advanced."""

    number: int  # of the current hole, -1 before the first
    tokens: int = 0  # consumed
    hole_start: int = 0  # of these, tokens before the hole
    hole: Matcher | None = None  # None if it is full
    texts: tuple[tuple[int, int], ...] = ()  # see ``Concatenation.partial_matches``, without a match that begins here
    spans: tuple[tuple[int, int], ...] = ()  # first token, and first after, of each hole that is filled


@dataclass
class ConcatenationMatcher(Matcher):
    """A state in a concatenation's language (see ``Matcher``)."""

    language: Concatenation
    state: ConcatenationState

    def fork(self) -> ConcatenationMatcher:
        return ConcatenationMatcher(self.language, self.state)

    def valid(self, tokens: Sequence[int]) -> int:
        state: ConcatenationState = self.state
        for count, token in enumerate(tokens):
            following = self._step(state, token)
            if following is None:
                return count
            state = following
        return len(tokens)

    def consume(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            following = self._step(self.state, token)
            if following is None:
                raise ValueError("these tokens may not follow here")
            self.state = following

    def _step(self, state: ConcatenationState, token: int) -> ConcatenationState | None:
        return self.language.step(state, token) if 0 <= token < len(self.language.vocabulary.token_bytes) else None

    def mask(self) -> np.ndarray:
        hole = self.language.open_hole(self.state)
        words = mask_of((), len(self.language.vocabulary.token_bytes)) if hole is None else hole.mask()
        text = self.language.text(self.state)
        for size, _at in self.language.partial_matches(self.state):
            add_tokens(words, self.language.vocabulary.within(text[size:], whole=True))
        return words

    def forced(self) -> bytes:
        matches, hole = self.language.partial_matches(self.state), self.language.open_hole(self.state)
        if hole is not None and not matches:
            return hole.forced()
        if len(matches) == 1 and (hole is None or not len(hole.allowed())):
            return self.language.text(self.state)[matches[0][0] :]
        return b""

    def ahead(self) -> bytes:
        """The rest of the text after the hole if the hole may end; else ``ahead`` of the hole."""
        matches, hole = self.language.partial_matches(self.state), self.language.open_hole(self.state)
        if matches:
            return self.language.text(self.state)[matches[0][0] :]
        return b"" if hole is None else hole.ahead()

    @property
    def accepting(self) -> bool:
        state = self.state
        if state.number == len(self.language.holes):
            return True
        last = state.number == len(self.language.holes) - 1 and not self.language.text(state)
        return last and state.hole is not None and state.hole.accepting
