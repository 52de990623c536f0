"""The language of a constraint: token rows that are read from left to right and forked at will.

``Constraint`` and ``Matcher`` are all that the search needs; ``Grammar`` is the implementation by llguidance's parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from mmserve.constraint.search import bitmask
from mmserve.constraint.search.prefix_equivalence import PrefixClasses, prefix_classes
from mmserve.constraint.search.vocabulary import Vocabulary


class Matcher(Protocol):
    """A state in a constraint's language: the tokens consumed so far, and what may follow them.

    It covers tokens with bytes only. The end of text is no token of the language: it is allowed where the matcher is
    ``accepting``, and only end tokens may follow it.
    """

    def fork(self) -> Self:
        """An independent copy of the matcher."""
        ...

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens``, from the first on, are allowed one after another; consumes nothing."""
        ...

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` are allowed here and the text may end after them; consumes nothing."""
        ...

    def consume(self, tokens: Sequence[int]) -> None:
        """Consume ``tokens``; ``ValueError`` if they are not allowed here, after which the matcher is of no use."""
        ...

    def allowed(self) -> np.ndarray:
        """Ids (int64, ascending) of all tokens allowed here."""
        ...

    def mask(self) -> np.ndarray:
        """The tokens allowed here, as a ``bitmask``; the caller's own."""
        ...

    def among(self, tokens: np.ndarray) -> np.ndarray:
        """Bool, of the shape of ``tokens`` (int64): which of them are allowed here."""
        ...

    def forced(self) -> bytes:
        """The bytes that must follow here; empty where there is a choice, or where the text may end."""
        ...

    def ahead(self) -> bytes:
        """Bytes that are known to lead on towards the end: those of ``forced``, or of a choice that is made for it."""
        ...

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        ...


class Constraint(Protocol):
    """A compiled constraint over one model's tokens; it has no state of a request."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens."""
        ...

    def classes(self) -> PrefixClasses:
        """Equivalence classes of prefixes: all texts of a class have the same continuations."""
        ...

    def start(self) -> Matcher:
        """A matcher before the first token."""
        ...

    @property
    def weight(self) -> int:
        """Bytes of its text: about four microseconds each to compile it."""
        ...

    def apart(self) -> Self:
        """The same constraint with a parser of its own: the two share no parser limits."""
        ...


@dataclass(frozen=True)
class Grammar:
    """A compiled llguidance grammar (its own JSON, or Lark) over a vocabulary.

    Raises:
        ValueError: llguidance refuses the grammar; the message is its own.
    """

    source: str
    vocabulary: Vocabulary
    limits: LLParserLimits | None = None  # on the parser's work; llguidance's own without
    _compiled: LLMatcher = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        compiled = LLMatcher(self.vocabulary.trie, self.source, log_level=0, limits=self.limits)
        if compiled.is_error():
            raise ValueError(compiled.get_error())
        object.__setattr__(self, "_compiled", compiled)

    @property
    def weight(self) -> int:
        """Bytes of its text."""
        return len(self.source)

    def classes(self) -> PrefixClasses:
        """Equivalence classes of prefixes under the grammar."""
        return prefix_classes(self.source)

    def start(self) -> GrammarMatcher:
        """A matcher before the first token."""
        return GrammarMatcher(self._compiled.deep_copy(), self.vocabulary)

    def apart(self) -> Grammar:
        """The same grammar, compiled anew: takes milliseconds.

        All matchers of a parser share what its lexer has learned, and the limit on that.
        """
        return replace(self)


class GrammarMatcher:
    """A state in a grammar's language.

    A parser that fails in the middle (it has limits on its work) allows and accepts nothing from there on.
    """

    __slots__ = ("_content", "_parser", "_vocabulary")

    def __init__(self, parser: LLMatcher, vocabulary: Vocabulary) -> None:
        self._parser, self._vocabulary, self._content = parser, vocabulary, vocabulary.content

    def fork(self) -> GrammarMatcher:
        """A matcher at the same state; takes about a microsecond."""
        return GrammarMatcher(self._parser.deep_copy(), self._vocabulary)

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` may follow here; those without bytes may not. About 0.4 microseconds a token."""
        if not self._content.issuperset(tokens):
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token not in self._content)]
        # a parser at the end of its language, or in error, allows nothing
        if not tokens or self._parser.is_stopped():
            return 0
        return self._parser.validate_tokens(tokens if isinstance(tokens, list) else list(tokens))

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` are allowed here and the text may end after them.

        About 2 microseconds; consuming them takes 40, since a parser does more work at the end of its text.
        """
        if not tokens or self._parser.is_stopped():
            return not tokens and self.accepting
        end = min(self._vocabulary.end_ids)
        return self._content.issuperset(tokens) and self._parser.validate_tokens([*tokens, end]) > len(tokens)

    def consume(self, tokens: Sequence[int]) -> None:
        """Consume ``tokens``; ``ValueError`` if they are not allowed here."""
        if not tokens:
            return
        if not self._vocabulary.end_ids.isdisjoint(tokens) or not self._parser.consume_tokens(list(tokens)):
            raise ValueError("these tokens may not follow here")

    def allowed(self) -> np.ndarray:
        """Ids (int64, ascending) of all tokens allowed here."""
        forced = self.forced()
        return np.array(sorted(set(self._spelling(forced))), np.int64) if forced else bitmask.ids(self._wide())

    def mask(self) -> np.ndarray:
        """The tokens allowed here, as a ``bitmask``. About 30 microseconds of 126,000 tokens."""
        forced = self.forced()
        return bitmask.of(self._spelling(forced), len(self._vocabulary.token_bytes)) if forced else self._wide()

    def _wide(self) -> np.ndarray:
        """``mask``, where nothing is forced."""
        words = np.zeros((len(self._vocabulary.token_bytes) + 31) // 32, np.uint32)
        if not self._parser.is_stopped():
            self._parser.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            bitmask.remove(words, self._vocabulary.end_ids)
        return words

    def among(self, tokens: np.ndarray) -> np.ndarray:
        """Bool, of the shape of ``tokens`` (int64): which of them are allowed here."""
        return bitmask.has(self.mask(), tokens)

    def _spelling(self, forced: bytes) -> list[int]:
        """Tokens that may follow where ``forced`` must: llguidance's mask holds one spelling of it only.

        A vocabulary has thousands of tokens that begin with a letter, and what may follow is mostly a sign or two.
        """
        begun = self._vocabulary.beginning_with(forced, lambda tokens: self.valid(tokens) == len(tokens))
        longer = [token for token in begun if self.valid([token])]
        return self._vocabulary.within(forced) + longer

    def forced(self) -> bytes:
        """The bytes that must follow here; empty where there is a choice, or where the text may end."""
        if self._parser.is_stopped() or self._parser.is_accepting():
            return b""
        return self._parser.compute_ff_bytes()

    def ahead(self) -> bytes:
        """The bytes that must follow here; nothing more is known."""
        return self.forced()

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return not self._parser.is_error() and self._parser.is_accepting()
