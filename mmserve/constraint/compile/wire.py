"""What passes between the server and the child process: JSON after its length, over pipes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, BinaryIO

from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.begun import CompileReply, Completion, FirstAnswers
from mmserve.constraint.compile.cfg import Sketch
from mmserve.constraint.compile.vocabulary import Vocabulary
from mmserve.constraint.findings import Finding, Refused
from mmserve.constraint.limits import FINDING_CHARS
from mmserve.core.constraint import Choice, ConstraintMode, ConstraintSpec, Gbnf, JsonSchema, Lark, Regex

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (JsonSchema, Regex, Choice, Lark, Gbnf)}
MOST_FINDINGS = 100  # of a constraint, that are told
HEADER = 8  # bytes of a message's length, big-endian


def packed(message: Any) -> bytes:
    """``message`` with its length in front; lone surrogates pass, as the other side must refuse them."""
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


def from_vocabulary(vocabulary: Vocabulary) -> Any:
    """``vocabulary`` as JSON."""
    return {
        "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
        "end": vocabulary.end,
        "ends": vocabulary.ends,
    }


def to_vocabulary(message: Any) -> Vocabulary:
    """The vocabulary that ``message`` holds."""
    return Vocabulary(
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
    """A grammar or a refusal as JSON; what it says of the constraint is cut to what can be read."""
    if isinstance(outcome, Refused):
        told = [[f.pointer, f.keyword, f.reason] for f in outcome.findings[:MOST_FINDINGS]]
        return {"refused": [[_cut(text) for text in finding] for finding in told]}
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
