"""Constraints as messages carry them: their sizes, and the core form of an acceptable one.

Only what needs no parsing is judged here; ``mmserve.constraint`` reads the text itself, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from mmserve.constraint.limits import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, MAX_SCHEMA_BYTES
from mmserve.core.constraint import (
    Choice,
    ConstraintKind,
    ConstraintMode,
    ConstraintSampling,
    ConstraintSpec,
    Gbnf,
    JsonSchema,
    Lark,
    Regex,
)
from mmserve.v1 import generation_pb2 as pb

_MODES = {
    pb.CONSTRAINT_MODE_UNSPECIFIED: ConstraintMode.STRICT,
    pb.CONSTRAINT_MODE_STRICT: ConstraintMode.STRICT,
    pb.CONSTRAINT_MODE_VALIDATE: ConstraintMode.VALIDATE,
    pb.CONSTRAINT_MODE_LENIENT: ConstraintMode.LENIENT,
}
_SAMPLINGS = {
    pb.CONSTRAINT_SAMPLING_UNSPECIFIED: ConstraintSampling.MASK,
    pb.CONSTRAINT_SAMPLING_MASK: ConstraintSampling.MASK,
    pb.CONSTRAINT_SAMPLING_AWRS: ConstraintSampling.AWRS,
    pb.CONSTRAINT_SAMPLING_ASAP: ConstraintSampling.ASAP,
}
_MOST_BYTES = {
    "json_schema": MAX_SCHEMA_BYTES,
    "regex": MAX_REGEX_BYTES,
    "lark": MAX_GRAMMAR_BYTES,
    "gbnf": MAX_GRAMMAR_BYTES,
}


def wrong_constraint(message: pb.GenerateRequest) -> Iterator[tuple[str, str]]:
    """What is wrong with the constraint of ``message`` at first sight: field and description."""
    if not message.HasField("constraint"):
        return
    constraint = message.constraint
    if constraint.mode not in _MODES:
        yield "constraint.mode", "must be CONSTRAINT_MODE_STRICT, CONSTRAINT_MODE_VALIDATE or CONSTRAINT_MODE_LENIENT"
    if constraint.sampling not in _SAMPLINGS:
        yield "constraint.sampling", "must be CONSTRAINT_SAMPLING_MASK, _AWRS or _ASAP"
    kind = constraint.WhichOneof("kind")
    match kind:
        case None:
            yield "constraint", "must have exactly one of json_schema, regex, choice, lark and gbnf"
        case "choice":
            yield from _wrong_choice(constraint.choice)
        case _:
            text, most = getattr(constraint, kind), _MOST_BYTES[kind]
            if not text:
                yield f"constraint.{kind}", "must not be empty"
            elif (size := len(text.encode())) > most:
                yield f"constraint.{kind}", f"must be at most {most} bytes, not {size}"


def _wrong_choice(choice: pb.Choice) -> Iterator[tuple[str, str]]:
    if not choice.options:
        yield "constraint.choice.options", "must hold at least one option"
    elif len(choice.options) > MAX_CHOICES:
        yield "constraint.choice.options", f"must hold at most {MAX_CHOICES} options, not {len(choice.options)}"
    elif (size := sum(len(option.encode()) for option in choice.options)) > MAX_GRAMMAR_BYTES:
        yield "constraint.choice.options", f"must be at most {MAX_GRAMMAR_BYTES} bytes together, not {size}"


def asked_constraint(message: pb.GenerateRequest) -> ConstraintSpec | None:
    """The core form of the constraint of ``message``, in which ``wrong_constraint`` found nothing; None for none."""
    if not message.HasField("constraint"):
        return None
    constraint = message.constraint
    return ConstraintSpec(_asked_kind(constraint), _MODES[constraint.mode], _SAMPLINGS[constraint.sampling])


def _asked_kind(constraint: pb.Constraint) -> ConstraintKind:
    match constraint.WhichOneof("kind"):
        case "json_schema":
            return JsonSchema(constraint.json_schema)
        case "regex":
            return Regex(constraint.regex)
        case "choice":
            return Choice(tuple(constraint.choice.options))
        case "lark":
            return Lark(constraint.lark)
    return Gbnf(constraint.gbnf)
