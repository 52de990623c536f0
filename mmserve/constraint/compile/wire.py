"""The protocol between the server and its child processes: length-prefixed JSON over pipes.

A reply has a constraint's grammar and the shortest answers found under it.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, astuple, dataclass
from typing import Any, BinaryIO, NamedTuple

from mmserve.constraint.compile.attempts import Grammar, Sketch
from mmserve.constraint.findings import Finding, Refused
from mmserve.constraint.limits import FINDING_CHARS, IDLE_BYTES, REPLY_BYTES, START_SECONDS
from mmserve.core.child_process import ChildProcess
from mmserve.core.constraint import CallsOrJson, Choice, ConstraintMode, ConstraintSpec, Gbnf, JsonSchema, Lark, Regex


@dataclass(frozen=True)
class TokenTable:
    """A model's tokens as plain data."""

    tokens: tuple[bytes, ...]  # by id; empty for ids without text
    ends: tuple[int, ...]  # ids of end tokens, ascending; at least one

    def fingerprint(self) -> str:
        """SHA-256 of all fields, in hexadecimal."""
        digest = hashlib.sha256(str(self.ends).encode())
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "big") + token)
        return digest.hexdigest()


#: One token for each byte, and an end token.
BYTES = TokenTable((*(bytes([code]) for code in range(256)), b""), ends=(256,))


@dataclass(frozen=True)
class Completion:
    """A completion: its tokens (no end token), and whether it is known that no shorter one exists."""

    tokens: tuple[int, ...]
    exact: bool


@dataclass(frozen=True)
class FirstAnswers:
    """The shortest answers found under a grammar.

    ``near``: by the search for every budget. ``patient``: by the longer search, for budgets that ``near`` exceeds; None
    if ``asked`` is false, or if none was found. ``least``: minimum number of tokens of every answer.
    """

    near: Completion | None = None
    patient: Completion | None = None
    asked: bool = False
    least: int = 0
    late: bool = False  # a search hit its time limit

    def covers(self, budget: int) -> bool:
        """Whether this result decides if an answer fits ``budget`` tokens."""
        fits = self.near is not None and (self.near.exact or len(self.near.tokens) <= budget)
        return fits or self.asked or self.too_long(budget)

    def too_long(self, budget: int) -> bool:
        """Whether no answer of ``budget`` tokens was searched, because all are known to be far longer."""
        return self.near is None and not self.asked and self.least > budget

    def shortest(self, budget: int) -> Completion | None:
        """The shortest answer found by the searches for ``budget`` tokens; it may be longer."""
        near = self.near
        if near is not None and (near.exact or len(near.tokens) <= budget or self.patient is None):
            return near
        return self.patient


class CompileReply(NamedTuple):
    """A grammar or a refusal; whether the outcome is reproducible; the first answers, if a budget was given; and the
    CPU seconds of the child."""

    outcome: Grammar | Refused
    lasting: bool = True
    first: FirstAnswers | None = None
    seconds: float = 0.0


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (JsonSchema, Regex, Choice, Lark, Gbnf, CallsOrJson)}
MOST_FINDINGS = 100  # maximum findings in a reply
HEADER = 8  # bytes of a message's length prefix, big-endian


def packed(message: Any) -> bytes:
    """``message`` with its length prefix; lone surrogates are kept, because the child must refuse them."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(HEADER, "big") + body


def read(stream: BinaryIO) -> Any | None:
    """The next message of ``stream``, None at its end."""
    header = stream.read(HEADER)
    return json.loads(stream.read(int.from_bytes(header, "big"))) if len(header) == HEADER else None


def from_vocabulary(vocabulary: TokenTable) -> Any:
    """``vocabulary`` as JSON."""
    return {"tokens": [token.decode("latin-1") for token in vocabulary.tokens], "ends": vocabulary.ends}


def to_vocabulary(message: Any) -> TokenTable:
    """The vocabulary in ``message``."""
    return TokenTable(tuple(token.encode("latin-1") for token in message["tokens"]), tuple(message["ends"]))


def from_spec(spec: ConstraintSpec) -> Any:
    """``spec`` as JSON."""
    return {"kind": type(spec.kind).__name__, "fields": asdict(spec.kind), "mode": spec.mode.value}


def to_spec(message: Any) -> ConstraintSpec:
    """The constraint in ``message``."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in message["fields"].items()}
    return ConstraintSpec(_KINDS[message["kind"]](**fields), ConstraintMode(message["mode"]))


def from_outcome(outcome: Grammar | Refused) -> dict[str, Any]:
    """A grammar or a refusal as JSON; the texts of findings and warnings are truncated."""
    if isinstance(outcome, Refused):
        return {"refused": [[_cut(text) for text in astuple(found)] for found in outcome.findings[:MOST_FINDINGS]]}
    return {"grammar": asdict(outcome) | {"warnings": [_cut(each) for each in outcome.warnings[:MOST_FINDINGS]]}}


def to_outcome(message: Any) -> Grammar | Refused:
    """The grammar or refusal in ``message``."""
    if "refused" in message:
        return Refused(*(Finding(*finding) for finding in message["refused"]))
    fields = message["grammar"]
    drawn = fields["sketch"]
    sketch = None if drawn is None else Sketch(tuple(drawn["words"]), drawn["gap"])
    return Grammar(**(fields | {"warnings": tuple(fields["warnings"]), "sketch": sketch}))


def to_reply(message: Any) -> CompileReply:
    """A child's reply: a grammar or refusal, and the first answers (as from ``asdict``), if any."""
    outcome, found, seconds = to_outcome(message), message.get("first"), message["seconds"]
    if found is None:
        return CompileReply(outcome, seconds=seconds)
    ways = (found["near"], found["patient"])
    near, patient = (None if way is None else Completion(tuple(way["tokens"]), way["exact"]) for way in ways)
    first = FirstAnswers(near, patient, found["asked"], found["least"], found["late"])
    return CompileReply(outcome, not first.late, first, seconds)


def _cut(text: str) -> str:
    return text if len(text) <= FINDING_CHARS else f"{text[: FINDING_CHARS - 1]}…"


#: The child's program.
PROGRAM = "mmserve.constraint.search.worker"


class ReplyTooLong(Exception):
    """A reply larger than the limit."""


class JsonChild(ChildProcess):
    """A process that answers each JSON message with a JSON message."""

    def ask(self, message: Any, seconds: float) -> Any:
        """The reply to ``message``; after an exception the child cannot be used again.

        Raises ``TimeoutError`` after ``seconds`` of wall time, ``ChildExited`` if the child exits, ``ReplyTooLong`` for
        a reply above the limit.
        """
        deadline = time.monotonic() + seconds

        def check() -> None:
            if time.monotonic() >= deadline:
                raise TimeoutError

        self._write(packed(message), check)
        size = int.from_bytes(self._read(HEADER, check), "big")
        if size > 2 * REPLY_BYTES:
            raise ReplyTooLong
        return json.loads(self._read(size, check))


class Child(JsonChild):
    """A process that compiles and searches (``search.worker``).

    A question may take ``seconds`` of CPU time. If its owner is gone, the process exits after at most twice
    ``patience`` seconds of wall time.
    """

    def __init__(self, seconds: float, patience: float) -> None:
        super().__init__(PROGRAM, str(seconds), str(2 * patience), str(IDLE_BYTES))

    def read(self, vocabulary: TokenTable) -> None:
        """Send ``vocabulary``, the first message. Raises ``TimeoutError`` or ``ChildExited``."""
        self.ask(from_vocabulary(vocabulary), START_SECONDS)
