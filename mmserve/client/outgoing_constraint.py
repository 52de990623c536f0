"""Conversion of a client's constraint arguments to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmserve.client.schemas import Schema, schema_text
from mmserve.errors import InvalidArgument
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.enums import CONSTRAINT_MODES, CONSTRAINT_SAMPLINGS, SCHEMA_OPTIONS, number_of

#: The treatment of parts of a constraint that no grammar can express.
ConstraintMode = Literal["strict", "validate", "lenient"]

#: Options for reading a JSON schema, and for writing its documents.
SchemaOption = Literal["unknown_formats", "one_of_as_any_of", "closed_objects", "white_space", "exponents", "any_order"]


@dataclass(frozen=True, kw_only=True)
class Hole:
    """A hole of a template: at most ``max_tokens`` tokens that satisfy the given constraint, or any text."""

    max_tokens: int = 16
    schema: Schema | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None
    constraint_mode: ConstraintMode | None = None
    schema_options: Sequence[SchemaOption] = ()


#: Texts and holes, with text between any two holes.
Template = Sequence[str | Hole]


def put_constraint(
    request: pb.GenerateRequest,
    given: Mapping[str, Any],
    *,
    mode: str | None,
    sampling: str | None = None,
    schema_options: Sequence[str] = (),
) -> None:
    """Set the one constraint that is ``given`` in ``request``: ``schema``, ``regex``, ``choices``, ``template`` or
    ``grammar``, which is GBNF if it defines rules with ``::=``, else Lark.

    Raises ``InvalidArgument`` for more than one, and for invalid values.
    """
    made = _constraint(given, mode, sampling, schema_options)
    if made is not None:
        request.constraint.CopyFrom(made)


def _constraint(
    given: Mapping[str, Any], mode: str | None, sampling: str | None = None, schema_options: Sequence[str] = ()
) -> pb.Constraint | None:
    """The message for the constraint that is not None; None if there is none."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidArgument.of(names[1], f"cannot be given together with {names[0]}")
    numbers = {}
    for field, known, asked in (("mode", CONSTRAINT_MODES, mode), ("sampling", CONSTRAINT_SAMPLINGS, sampling)):
        if asked is None:
            continue
        numbers[field] = number_of(known, asked, f"constraint_{field}")
        if not names:
            raise InvalidArgument.of(f"constraint_{field}", "needs a schema, regex, choices, grammar or template")
    if schema_options and names != ["schema"]:
        raise InvalidArgument.of("schema_options", "needs a schema")
    if not names:
        return None
    made = pb.Constraint(schema_options=_options(schema_options), **numbers)
    try:
        _put(made, names[0], given[names[0]])
    except (TypeError, ValueError) as error:
        raise InvalidArgument.of(names[0], f"cannot be sent: {error}") from error
    return made


def _options(names: Sequence[str]) -> list[pb.SchemaOption]:
    known = SCHEMA_OPTIONS.values()
    if isinstance(names, str) or not set(names) <= set(known):
        raise InvalidArgument.of("schema_options", f"must be a list of {', '.join(known)}, not {names!r}")
    return [number_of(SCHEMA_OPTIONS, name, "schema_options") for name in dict.fromkeys(names)]


def _put(message: pb.Constraint, name: str, value: Any) -> None:
    match name:
        case "schema":
            message.json_schema = schema_text(value)
        case "regex":
            message.regex = value
        case "choices":
            if isinstance(value, str):
                raise TypeError("must be a list of strings")
            message.choice.options.extend(value)
            message.choice.SetInParent()
        case "grammar":
            setattr(message, "gbnf" if "::=" in value else "lark", value)
        case "template":
            if isinstance(value, str):
                raise TypeError("must be a list of strings and holes")
            message.template.parts.extend(map(_part, value))
            message.template.SetInParent()


def _part(part: str | Hole) -> pb.TemplatePart:
    if isinstance(part, str):
        return pb.TemplatePart(text=part)
    if not isinstance(part, Hole):
        raise TypeError(f"a template holds strings and Hole(…), not {part!r}")
    given = {"schema": part.schema, "regex": part.regex, "choices": part.choices, "grammar": part.grammar}
    return pb.TemplatePart(
        hole=pb.Hole(
            constraint=_constraint(given, part.constraint_mode, schema_options=part.schema_options),
            max_tokens=part.max_tokens,
        )
    )
