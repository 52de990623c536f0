"""Prefix equivalence: two texts are equivalent if they have the same continuations.

Whether a document is valid under a schema depends on its structure and on a few conditions on each string and number in
it. So two prefixes are equivalent if they have the same structure, and their strings and numbers satisfy the same
conditions of the schema. That is finer than the equivalence of parser states, and sound: searches
(``search.shortest_completion``) continue from one prefix of each class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Any

from mmserve.constraint.compile.derivatives import Automaton
from mmserve.constraint.compile.keywords import objects_within
from mmserve.constraint.compile.unordered import DISTINCT
from mmserve.constraint.search.scalar_equivalence import OVER, Conditions, Numbered, Numbers, Strings, character

_EXPRESSION = re.compile(r"start: TEXT\nTEXT: /(.*)/\n")
_LONGEST = 16 << 10  # maximum characters of a grammar: each may cost work for every character of a text
_QUOTE, _SPACE, _COLON, _OBJECT = b'" :{'
_SIGNS = frozenset(b"-0123456789")
_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz")


class Scalar(Enum):
    """Kinds of open scalar at the end of a prefix."""

    STRING = "string"
    NUMBER = "number"


class PrefixClasses:
    """Equivalence classes of prefixes. In this base class each text is its own class: no equivalences are known."""

    #: Whether any two texts are known to be equivalent.
    known = False
    #: Whether classes are of token sequences rather than of texts: ``after`` then takes tokens.
    by_tokens = False

    def start(self) -> Hashable:
        """The class of the empty text."""
        return b""

    def after(self, prefix_class: Any, text: bytes) -> Hashable:
        """The class of a text of class ``prefix_class`` followed by ``text``. Raises ``ValueError`` if unknown."""
        found: bytes = prefix_class + text
        return found

    def alike(self, prefix_class: Any) -> Sequence[int] | None:
        """A number for each byte: after a text of class ``prefix_class``, bytes with the same number lead to the same
        class. None if unknown."""
        return None

    def open(self, prefix_class: Any) -> bool:
        """Whether a text of class ``prefix_class`` is known to end in the middle of a string, or of an expression."""
        return False

    def inside(self, prefix_class: Any) -> tuple[Scalar, Hashable] | None:
        """The string or number in which a text of class ``prefix_class`` ends, and the class of the text outside of it:
        all texts with the same result that may end it are equivalent after its end. None if unknown."""
        return None


class TokenRows(PrefixClasses):
    """Each token sequence is its own class, because the tokenisation of a text decides what may follow it."""

    by_tokens = True

    def start(self) -> Hashable:
        return ()

    def after(self, prefix_class: Any, text: Sequence[int]) -> Hashable:
        return (*prefix_class, *text)


def prefix_classes(grammar: str) -> PrefixClasses:
    """Prefix classes of the sentences of ``grammar`` (of ``compile.grammar``)."""
    if len(grammar) > _LONGEST:
        return PrefixClasses()
    try:
        part = json.loads(grammar)["grammars"][0]
        schema = part.get("json_schema", part.get("documents"))
        if schema is not None:
            return PrefixClasses() if "whitespace_pattern" in schema.get("x-guidance", {}) else Documents(schema)
        if found := _EXPRESSION.fullmatch(part["lark_grammar"]):
            return Matches(found[1])
    except (ValueError, KeyError, TypeError):  # a grammar of a user
        return PrefixClasses()
    return PrefixClasses()


class Matches(PrefixClasses):
    """Prefix classes of a regular expression: texts with the same derivative are equivalent."""

    known = True

    def __init__(self, expression: str) -> None:
        self._expression = Automaton(expression)
        self._numbered = Numbered()  # by the bytes of an incomplete character, and the state before it
        self._start = self._numbered.of((b"", 0))

    def start(self) -> int:
        return self._start

    def after(self, prefix_class: int, text: bytes) -> int:
        tail, state = self._numbered.keys[prefix_class]
        for i in range(len(text)):
            tail += text[i : i + 1]
            char = character(tail)
            if char is not None:
                tail, state = b"", self._expression.after(state, char)
        return self._numbered.of((tail, state))

    def open(self, prefix_class: int) -> bool:
        return True  # the expression covers the whole text


#: The state at the end of a prefix: the number of its open containers (``_Open``), the kind of value in which it ends,
#: and the class of the current scalar.
_Place = tuple[int, int, int]
_BETWEEN, _STRING, _NUMBER, _LITERAL = range(4)
#: An open array or object: the number of the surrounding containers, its bracket, the number of its content so far, its
#: latest delimiter, and whether the last character is a space.
_Open = tuple[int, int, int, int, bool]


class Documents(PrefixClasses):
    """Prefix classes of documents under a schema, as ``compile.schema`` writes it."""

    known = True

    def __init__(self, schema: Any) -> None:
        conditions = Conditions.of(schema)
        self._strings, self._numbers = Strings(conditions), Numbers(conditions)
        # The content of a complete value matters only if it decides which of several schemas applies.
        self._distinguishing = any(
            "anyOf" in node or node.get(DISTINCT) or _has_containers(node.get("enum"))
            for node in objects_within(schema)
        )
        self._places, self._opened, self._histories, self._literals = (Numbered() for _ in range(4))
        self._start = self._places.of((self._open(-1, 0), _BETWEEN, 0))

    def start(self) -> int:
        return self._start

    def after(self, prefix_class: int, text: bytes) -> int:
        state: _Place = self._places.keys[prefix_class]
        for byte in text:
            state = self._next(state, byte)
        return self._places.of(state)

    def alike(self, prefix_class: int) -> Sequence[int] | None:
        _around, mode, scalar = self._places.keys[prefix_class]
        return self._strings.alike(scalar) if mode == _STRING else None

    def open(self, prefix_class: int) -> bool:
        mode: int = self._places.keys[prefix_class][1]
        return mode == _STRING

    def inside(self, prefix_class: int) -> tuple[Scalar, int] | None:
        around, mode, _scalar = self._places.keys[prefix_class]
        if self._distinguishing or mode not in (_STRING, _NUMBER):
            return None
        if mode == _NUMBER:
            return Scalar.NUMBER, around
        return None if self._names(around) else (Scalar.STRING, around)

    def _next(self, state: _Place, byte: int) -> _Place:
        around, mode, scalar = state
        if mode == _STRING:
            string = self._strings.after(scalar, byte)
            if string != OVER:
                return around, _STRING, string
            closed = self._strings.closed(scalar)
            around = self._noted(around, closed, 0) if self._names(around) else self._valued(around, closed)
            return around, _BETWEEN, 0
        if mode == _NUMBER:
            number = self._numbers.after(scalar, byte)
            if number != OVER:
                return around, _NUMBER, number
            around = self._valued(around, (_NUMBER, scalar))
        elif mode == _LITERAL:
            if byte in _LETTERS:
                return around, _LITERAL, self._literals.of((scalar, byte))
            around = self._valued(around, (_LITERAL, scalar))
        if byte == _SPACE:
            return self._spaced(around, space=True), _BETWEEN, 0
        around = self._spaced(around, space=False)
        if byte == _QUOTE:
            return around, _STRING, 0
        if byte in _SIGNS:
            return around, _NUMBER, self._numbers.after(0, byte)
        if byte in _LETTERS:
            return around, _LITERAL, self._literals.of((-1, byte))
        if byte in b"[{":
            return self._open(around, byte), _BETWEEN, 0
        outer, _bracket, history, _sign, _space = self._opened.keys[around]
        if byte in b"]}" and outer >= 0:
            return self._valued(outer, (byte, history)), _BETWEEN, 0
        return self._noted(around, byte, byte), _BETWEEN, 0

    def _names(self, around: int) -> bool:
        """Whether a string there is a member name."""
        _outer, bracket, _history, sign, _space = self._opened.keys[around]
        return bracket == _OBJECT and sign != _COLON

    def _valued(self, around: int, prefix_class: Hashable) -> int:
        """The open containers after a value of class ``prefix_class``."""
        return self._noted(around, ("value", prefix_class if self._distinguishing else None), 0)

    def _noted(self, around: int, more: Hashable, sign: int) -> int:
        outer, bracket, history, _sign, _space = self._opened.keys[around]
        return self._opened.of((outer, bracket, self._histories.of((history, more)), sign, False))

    def _spaced(self, around: int, *, space: bool) -> int:
        *before, spaced = self._opened.keys[around]
        return around if spaced == space else self._opened.of((*before, space))

    def _open(self, around: int, bracket: int) -> int:
        return self._opened.of((around, bracket, self._histories.of((-1, bracket)), 0, False))


def _has_containers(values: Any) -> bool:
    return isinstance(values, list) and any(isinstance(value, list | dict) for value in values)
