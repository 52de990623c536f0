"""What the decoder asks of a constraint: a language of token rows, read from left to right and forked at will."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np

from mmserve.constraint.search.prefix_equivalence import PrefixClasses


class Matcher(Protocol):
    """A state in a constraint's language: the tokens consumed so far, and what may follow them.

    Only tokens with bytes are spoken of here. The end of text is no token of the language: it may stand where the
    matcher is ``accepting``, and only more of it may follow.
    """

    def fork(self) -> Self:
        """A matcher at the same state that goes its own way."""
        ...

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens``, from the first on, may follow here one after another; consumes nothing."""
        ...

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` may follow here and the text may end after them; consumes nothing."""
        ...

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on by ``tokens``; ``ValueError`` if they may not follow here, after which the matcher is of no use."""
        ...

    def allowed(self) -> np.ndarray:
        """Ids (int64, ascending) of all tokens that may follow here."""
        ...

    def mask(self) -> np.ndarray:
        """Which tokens may follow here, as a ``bitmask``; the caller's own."""
        ...

    def among(self, tokens: np.ndarray) -> np.ndarray:
        """Bool, of the shape of ``tokens`` (int64): which of them may follow here."""
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
    """A compiled constraint over one model's tokens; it holds no state of a request."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes of each token id; empty for tokens that no text has, such as the end of text."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        ...

    def classes(self) -> PrefixClasses:
        """Classes of the beginnings of texts: what may follow one of a class may follow all of it."""
        ...

    def start(self) -> Matcher:
        """A matcher before the first token."""
        ...

    @property
    def weight(self) -> int:
        """Bytes of its text: about four microseconds each to compile it."""
        ...

    def apart(self) -> Self:
        """The same constraint with a parser of its own: what is done with one takes nothing from the other's limits."""
        ...
