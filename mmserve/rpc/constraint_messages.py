"""Constraints in messages: validation of their sizes, and conversion to core types.

Only checks without parsing are done here; ``mmserve.constraint`` parses the text, in a separate process.
"""

from __future__ import annotations

from collections.abc import Iterator

from mmserve.constraint.limits import (
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_HOLES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
)
from mmserve.core.constraint import (
    Choice,
    ConstraintKind,
    ConstraintMode,
    ConstraintSampling,
    ConstraintSpec,
    Gbnf,
    Hole,
    JsonSchema,
    Lark,
    Regex,
    SchemaOption,
    Template,
)
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.enums import CONSTRAINT_MODES, CONSTRAINT_SAMPLINGS, SCHEMA_OPTIONS

#: Maximum number of texts and holes of a template.
MAX_TEMPLATE_PARTS = 1024
_MOST_BYTES = {
    "json_schema": MAX_SCHEMA_BYTES,
    "regex": MAX_REGEX_BYTES,
    "lark": MAX_GRAMMAR_BYTES,
    "gbnf": MAX_GRAMMAR_BYTES,
}


def wrong_constraint(message: pb.GenerateRequest, most_tokens: int) -> Iterator[tuple[str, str]]:
    """Yields the violations of the constraint of ``message`` that need no parsing: field and description.

    ``most_tokens``: maximum of one request to the model, which also limits holes of a template.
    """
    if message.HasField("constraint"):
        yield from _wrong(message.constraint, "constraint", most_tokens)


def _wrong(constraint: pb.Constraint, path: str, most_tokens: int) -> Iterator[tuple[str, str]]:
    if constraint.mode and constraint.mode not in CONSTRAINT_MODES:
        yield f"{path}.mode", "must be CONSTRAINT_MODE_STRICT, CONSTRAINT_MODE_VALIDATE or CONSTRAINT_MODE_LENIENT"
    if constraint.sampling and constraint.sampling not in CONSTRAINT_SAMPLINGS:
        yield f"{path}.sampling", "must be CONSTRAINT_SAMPLING_MASK, _AWRS or _ASAP"
    elif _sampling(constraint) is not ConstraintSampling.MASK and _placed(constraint):
        yield f"{path}.sampling", "must be CONSTRAINT_SAMPLING_MASK with a template"
    kind = constraint.WhichOneof("kind")
    if constraint.schema_options and kind != "json_schema":
        yield f"{path}.schema_options", "must be empty but with a json_schema"
    if not set(constraint.schema_options) <= SCHEMA_OPTIONS.keys():
        yield f"{path}.schema_options", "must be values of SchemaOption, and not SCHEMA_OPTION_UNSPECIFIED"
    match kind:
        case None:
            yield path, "must have exactly one of json_schema, regex, choice, lark, gbnf and template"
        case "choice":
            yield from _wrong_choice(constraint.choice, f"{path}.choice")
        case "template":
            if constraint.mode:
                yield f"{path}.mode", "must not be set with a template: each hole has its own"
            yield from _wrong_template(constraint.template, f"{path}.template", most_tokens)
        case _:
            text, most = getattr(constraint, kind), _MOST_BYTES[kind]
            if not text:
                yield f"{path}.{kind}", "must not be empty"
            elif (size := len(text.encode())) > most:
                yield f"{path}.{kind}", f"must be at most {most} bytes, not {size}"


def _wrong_choice(choice: pb.Choice, path: str) -> Iterator[tuple[str, str]]:
    if not choice.options:
        yield f"{path}.options", "must hold at least one option"
    elif len(choice.options) > MAX_CHOICES:
        yield f"{path}.options", f"must hold at most {MAX_CHOICES} options, not {len(choice.options)}"
    elif (size := sum(len(option.encode()) for option in choice.options)) > MAX_CHOICE_BYTES:
        yield f"{path}.options", f"must be at most {MAX_CHOICE_BYTES} bytes together, not {size}"


def _wrong_template(template: pb.Template, path: str, most_tokens: int) -> Iterator[tuple[str, str]]:
    if len(template.parts) > MAX_TEMPLATE_PARTS:
        yield f"{path}.parts", f"must hold at most {MAX_TEMPLATE_PARTS} parts, not {len(template.parts)}"
        return
    kinds = [part.WhichOneof("part") for part in template.parts]
    if not 1 <= kinds.count("hole") <= MAX_HOLES:
        yield f"{path}.parts", f"must hold from 1 to {MAX_HOLES} holes, not {kinds.count('hole')}"
        return
    if (size := sum(len(part.text.encode()) for part in template.parts)) > MAX_GRAMMAR_BYTES:
        yield f"{path}.parts", f"must have at most {MAX_GRAMMAR_BYTES} bytes of text, not {size}"
    for i, part in enumerate(template.parts):
        place = f"{path}.parts[{i}]"
        match kinds[i]:
            case None:
                yield place, "must have exactly one of text and hole"
            case "text" if not part.text:
                yield f"{place}.text", "must not be empty"
            case "hole":
                if i and kinds[i - 1] == "hole":
                    yield f"{place}.hole", "must not follow a hole: put text between the two"
                yield from _wrong_hole(part.hole, f"{place}.hole", most_tokens)


def _wrong_hole(hole: pb.Hole, path: str, most_tokens: int) -> Iterator[tuple[str, str]]:
    if not 1 <= hole.max_tokens <= most_tokens:
        yield f"{path}.max_tokens", f"must be in [1, {most_tokens}], not {hole.max_tokens}"
    if not hole.HasField("constraint"):
        return
    if hole.constraint.WhichOneof("kind") == "template":
        yield f"{path}.constraint.template", "must not be in a hole: write its parts into the outer template"
    else:
        yield from _wrong(hole.constraint, f"{path}.constraint", most_tokens)


def parse_constraint(message: pb.GenerateRequest) -> ConstraintSpec | None:
    """The core form of the valid constraint of ``message``; None if there is none."""
    if not message.HasField("constraint"):
        return None
    constraint = message.constraint
    if constraint.WhichOneof("kind") == "template":
        return ConstraintSpec(Template(tuple(map(_part, constraint.template.parts))))
    return ConstraintSpec(_kind(constraint), _mode(constraint), _sampling(constraint))


def _mode(constraint: pb.Constraint) -> ConstraintMode:
    return ConstraintMode(CONSTRAINT_MODES.get(constraint.mode, "strict"))


def _sampling(constraint: pb.Constraint) -> ConstraintSampling:
    return ConstraintSampling(CONSTRAINT_SAMPLINGS.get(constraint.sampling, "mask"))


def _placed(constraint: pb.Constraint) -> bool:
    """Whether part of the answer has a fixed position before decoding."""
    return constraint.WhichOneof("kind") == "template"


def _part(part: pb.TemplatePart) -> str | Hole:
    if part.WhichOneof("part") == "text":
        return part.text
    hole = part.hole
    if not hole.HasField("constraint"):
        return Hole(hole.max_tokens)
    return Hole(hole.max_tokens, _kind(hole.constraint), _mode(hole.constraint))


def _kind(constraint: pb.Constraint) -> ConstraintKind:
    match constraint.WhichOneof("kind"):
        case "json_schema":
            asked = {SchemaOption(SCHEMA_OPTIONS[option]) for option in constraint.schema_options}
            return JsonSchema(constraint.json_schema, tuple(sorted(asked)))
        case "regex":
            return Regex(constraint.regex)
        case "choice":
            return Choice(tuple(constraint.choice.options))
        case "lark":
            return Lark(constraint.lark)
    return Gbnf(constraint.gbnf)
