"""The protocol between the server and its child processes: JSON after its length, over pipes.

A reply has a constraint's grammar and the shortest answers that were found under it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.derivation import Sketch
from mmserve.constraint.findings import Finding, Refused
from mmserve.constraint.limits import (
    FINDING_CHARS,
    IDLE_BYTES,
    REPLY_BYTES,
    START_SECONDS,
)
from mmserve.core.child_process import ChildProcess
from mmserve.core.constraint import Choice, ConstraintMode, ConstraintSpec, Gbnf, JsonSchema, Lark, Regex

_LONGEST_TOKEN = 32  # bytes; llguidance panics at much longer ones while it builds its trie


@dataclass(frozen=True)
class TokenTable:
    """A model's tokens as plain data."""

    tokens: tuple[bytes, ...]  # of each id; empty for ids without text
    end: int  # the id that ends an answer
    ends: tuple[int, ...] = ()  # all ids that do, where there are several

    def fingerprint(self) -> str:
        """SHA-256 of all fields, in hexadecimal."""
        digest = hashlib.sha256(str([self.end, *self.ends]).encode())
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "big") + token)
        return digest.hexdigest()

    def trie(self) -> Any:
        """llguidance's ``LLTokenizer``; it never allows tokens of more than 32 bytes."""
        from llguidance import LLTokenizer, TokenizerWrapper  # only the child process needs it

        return LLTokenizer(TokenizerWrapper(_Tokens(self)))


#: One token for each byte, and an end token.
BYTES = TokenTable((*(bytes([code]) for code in range(256)), b""), end=256)


class _Tokens:
    """A tokenizer in the form that llguidance's ``TokenizerWrapper`` takes."""

    bos_token_id = None

    def __init__(self, vocabulary: TokenTable) -> None:
        self.eos_token_id = vocabulary.end
        self.tokens: Sequence[bytes] = [
            b"\xff<end>" if index == vocabulary.end else token if len(token) <= _LONGEST_TOKEN else b""
            for index, token in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = [vocabulary.end]
        self._ids = {token: index for index, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._ids[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in self._ids]


@dataclass(frozen=True)
class Completion:
    """A completion: its tokens (no end token), and whether it is known that no shorter one exists."""

    tokens: tuple[int, ...]
    exact: bool


@dataclass(frozen=True)
class FirstAnswers:
    """The shortest answers found under a grammar.

    ``near``: by the search that every budget has. ``patient``: by the longer one, for budgets that ``near`` does not
    fit; None as long as ``asked`` is false, or where none was found. ``least``: tokens that every answer has at least.
    """

    near: Completion | None = None
    patient: Completion | None = None
    asked: bool = False
    least: int = 0
    late: bool = False  # a search was ended before it was over

    def covers(self, budget: int) -> bool:
        """Whether this result decides if an answer fits ``budget`` tokens."""
        fits = self.near is not None and (self.near.exact or len(self.near.tokens) <= budget)
        return fits or self.asked or self.hopeless(budget)

    def hopeless(self, budget: int) -> bool:
        """Whether no answer of ``budget`` tokens was looked for: all are known to be far longer."""
        return self.near is None and not self.asked and self.least > budget

    def close(self, budget: int) -> Completion | None:
        """The shortest answer found with room for ``budget`` tokens, be it longer."""
        near = self.near
        if near is not None and (near.exact or len(near.tokens) <= budget or self.patient is None):
            return near
        return self.patient


@dataclass(frozen=True)
class CompileReply:
    """A grammar or a refusal; the first answers, where a budget was given; and whether the outcome is reproducible."""

    outcome: Grammar | Refused
    first: FirstAnswers | None = None
    lasting: bool = True


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (JsonSchema, Regex, Choice, Lark, Gbnf)}
MOST_FINDINGS = 100  # of a constraint, that a reply has
HEADER = 8  # bytes of a message's length, big-endian


def packed(message: Any) -> bytes:
    """``message`` after its length; lone surrogates are kept, since the child refuses them."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(HEADER, "big") + body


def read(stream: BinaryIO) -> Any | None:
    """The next message of ``stream``, None at its end."""
    header = stream.read(HEADER)
    if len(header) < HEADER:
        return None
    body = stream.read(int.from_bytes(header, "big"))
    return json.loads(body)


def unpacked(body: bytes) -> Any:
    """The message that ``body``, without its length, is."""
    return json.loads(body)


def from_vocabulary(vocabulary: TokenTable) -> Any:
    """``vocabulary`` as JSON."""
    return {
        "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
        "end": vocabulary.end,
        "ends": vocabulary.ends,
    }


def to_vocabulary(message: Any) -> TokenTable:
    """The vocabulary that ``message`` holds."""
    return TokenTable(
        tuple(token.encode("latin-1") for token in message["tokens"]), message["end"], tuple(message["ends"])
    )


def from_spec(spec: ConstraintSpec) -> Any:
    """``spec`` as JSON."""
    return {"kind": type(spec.kind).__name__, "fields": asdict(spec.kind), "mode": spec.mode.value}


def to_spec(message: Any) -> ConstraintSpec:
    """The constraint that ``message`` holds."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in message["fields"].items()}
    return ConstraintSpec(_KINDS[message["kind"]](**fields), ConstraintMode(message["mode"]))


def from_outcome(outcome: Grammar | Refused) -> Any:
    """A grammar or a refusal as JSON; the texts of findings and warnings are truncated."""
    if isinstance(outcome, Refused):
        shown = [[f.pointer, f.keyword, f.reason] for f in outcome.findings[:MOST_FINDINGS]]
        return {"refused": [[_cut(text) for text in finding] for finding in shown]}
    warnings = [_cut(warning) for warning in outcome.warnings[:MOST_FINDINGS]]
    return {
        "text": outcome.text,
        "exact": outcome.exact,
        "warnings": warnings,
        "longest": outcome.longest,
        "shortest": outcome.shortest,
        "sketch": None if outcome.sketch is None else [outcome.sketch.words, outcome.sketch.gap],
    }


def to_outcome(message: Any) -> Grammar | Refused:
    """The grammar or refusal that ``message`` holds."""
    if "refused" in message:
        return Refused(*(Finding(*finding) for finding in message["refused"]))
    return to_grammar(message)


def to_grammar(message: Any) -> Grammar:
    """The grammar that ``message`` holds."""
    drawn = message["sketch"]
    sketch = None if drawn is None else Sketch(tuple(drawn[0]), drawn[1])
    warnings = tuple(message["warnings"])
    return Grammar(message["text"], message["exact"], warnings, message["longest"], message["shortest"], sketch)


def from_first(first: FirstAnswers | None) -> Any:
    """A first answer as JSON."""
    if first is None:
        return None
    near, patient = (None if close is None else [close.tokens, close.exact] for close in (first.near, first.patient))
    return [near, patient, first.asked, first.least, first.late]


def to_begun(message: Any) -> CompileReply:
    """A child's answer: a grammar or refusal, and the first answer."""
    outcome, found = to_outcome(message), message.get("first")
    if found is None:
        return CompileReply(outcome)
    near, patient = (None if close is None else Completion(tuple(close[0]), close[1]) for close in found[:2])
    first = FirstAnswers(near, patient, *found[2:])
    return CompileReply(outcome, first, lasting=not first.late)


def _cut(text: str) -> str:
    return text if len(text) <= FINDING_CHARS else f"{text[: FINDING_CHARS - 1]}…"


#: The program that compiles without searching.
PROGRAM = "mmserve.constraint.compile.worker"


class ReplyTooLong(Exception):
    """A reply of more bytes than the limit."""


class Child(ChildProcess):
    """``program``, a module that runs ``compile.worker.serve``, in a process of its own.

    A question may take ``seconds`` of processor time. Without its owner, the process ends after at most twice
    ``patience`` seconds of wall time.
    """

    def __init__(self, seconds: float, patience: float, program: str = PROGRAM) -> None:
        super().__init__(program, str(seconds), str(2 * patience), str(IDLE_BYTES))

    def read(self, vocabulary: TokenTable) -> None:
        """Send ``vocabulary``, the first message. Raises ``TimeoutError`` or ``ChildExited``."""
        self.ask(from_vocabulary(vocabulary), START_SECONDS)

    def ask(self, message: Any, seconds: float) -> Any:
        """The reply to ``message``; a child that raises is not usable any more.

        Raises ``TimeoutError`` after ``seconds`` of wall time, ``ChildExited`` where the child ends,
        ``ReplyTooLong`` for a reply above the limit.
        """
        deadline = time.monotonic() + seconds

        def check() -> None:
            if time.monotonic() >= deadline:
                raise TimeoutError

        self._write(packed(message), check)
        size = int.from_bytes(self._read(HEADER, check), "big")
        if size > 2 * REPLY_BYTES:
            raise ReplyTooLong
        return unpacked(self._read(size, check))
