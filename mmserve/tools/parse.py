"""An incremental parser of tool calls in the text of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mmserve.tools.formats import ToolFormat


@dataclass(frozen=True)
class TextPiece:
    """Text of the answer outside of calls."""

    text: str


@dataclass(frozen=True)
class CallPiece:
    """A part of a call: its ``name`` in the first piece, then parts of its ``arguments``. ``index`` counts from 0."""

    index: int
    name: str = ""
    arguments: str = ""


Piece = TextPiece | CallPiece


@dataclass
class CallReader:
    """Parses the text of one answer in the language of ``tool_grammar`` for ``form``, in parts of any size.

    Text outside of that language, such as a truncated end, is returned as text. ``openings``: beginnings of calls
    (``grammar.openings``), which distinguish them from documents that look like calls of other tools.
    """

    form: ToolFormat
    openings: tuple[str, ...] = ()
    _held: str = ""  # text received but not returned yet
    _calls: int = 0
    _begun: bool = False  # whether text has begun
    _inside: bool = False  # whether inside a call's arguments
    _arguments: _Scan = field(default_factory=lambda: _Scan())

    @property
    def inside(self) -> bool:
        """Whether the latest call is incomplete."""
        return self._inside

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are complete after ``text``, in order."""
        self._held += text
        found: list[Piece] = []
        while (piece := self._next()) is not None:
            found.append(piece)
        return found

    def end(self) -> list[Piece]:
        """The remaining pieces, after the last text."""
        rest, self._held = self._held, ""
        return [TextPiece(rest)] if rest and not self._calls else []

    def _next(self) -> Piece | None:
        if self._inside:
            return self._more_arguments()
        return self._next_call() if self._calls or self._at_call() else self._text()

    def _at_call(self) -> bool:
        if self.form.after_text:
            return self._held.startswith(self.form.opening)
        return not self._begun and self._held.startswith(self._first_texts)

    @property
    def _first_texts(self) -> tuple[str, ...]:
        """The possible beginnings of an answer with calls, if calls must come first."""
        return self.openings or (self.form.opening,)

    def _text(self) -> Piece | None:
        """Text up to where a call begins, or may begin."""
        opening = self.form.opening
        if self.form.after_text:
            at = self._held.find(opening)
            size = at if at >= 0 else len(self._held) - _overlap(self._held, opening)
        else:
            may_begin = not self._begun and any(each.startswith(self._held) for each in self._first_texts)
            size = 0 if may_begin else len(self._held)
        text, self._held = self._held[:size], self._held[size:]
        self._begun = self._begun or size > 0
        return TextPiece(text) if text else None

    def _next_call(self) -> Piece | None:
        begin = (self.form.closing + self.form.separator if self._calls else "") + self.form.opening
        name, middle, rest = self._held[len(begin) :].partition(self.form.middle)
        if not self._held.startswith(begin) or not middle:
            return None
        self._held, self._inside, self._arguments = rest, True, _Scan()
        self._calls += 1
        return CallPiece(self._calls - 1, name=name)

    def _more_arguments(self) -> Piece | None:
        size = self._arguments.within(self._held)
        self._inside = not self._arguments.ended
        text, self._held = self._held[:size], self._held[size:]
        return CallPiece(self._calls - 1, arguments=text) if text else None


@dataclass
class _Scan:
    """Finds the end of a JSON object in text that arrives in parts."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False
    ended: bool = False

    def within(self, text: str) -> int:
        """Number of characters of ``text``, which follows the scanned text, that belong to the object."""
        for i, char in enumerate(text):
            if self.quoted:
                self.quoted = self.escaped or char != '"'
                self.escaped = char == "\\" and not self.escaped
            elif char == '"':
                self.quoted = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if not self.depth:
                    self.ended = True
                    return i + 1
        return len(text)


def _overlap(text: str, opening: str) -> int:
    """The length of the longest proper prefix of ``opening`` that is a suffix of ``text``."""
    return next((size for size in range(min(len(opening) - 1, len(text)), 0, -1) if text.endswith(opening[:size])), 0)


def written(form: ToolFormat, calls: Iterable[tuple[str, str]]) -> str:
    """The text of ``calls`` (names and arguments) in a model's format."""
    return form.separator.join(
        f"{form.opening}{name}{form.middle}{arguments}{form.closing}" for name, arguments in calls
    )
