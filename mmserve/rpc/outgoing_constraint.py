"""A client's constraint: what it may be given as, what of it goes into a message, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmserve.errors import InvalidArgument
from mmserve.v1 import generation_pb2 as pb

#: A JSON schema, or a class that has one and reads its instances from JSON, such as a pydantic model.
Schema = Mapping[str, Any] | type[Any]

_MODES = {
    "strict": pb.CONSTRAINT_MODE_STRICT,
    "validate": pb.CONSTRAINT_MODE_VALIDATE,
    "lenient": pb.CONSTRAINT_MODE_LENIENT,
}
_SAMPLINGS = {
    "mask": pb.CONSTRAINT_SAMPLING_MASK,
    "awrs": pb.CONSTRAINT_SAMPLING_AWRS,
    "asap": pb.CONSTRAINT_SAMPLING_ASAP,
}


def put_constraint(
    request: pb.GenerateRequest,
    *,
    schema: Schema | None,
    regex: str | None,
    choices: Sequence[str] | None,
    grammar: str | None,
    mode: str | None,
    sampling: str | None = None,
) -> None:
    """Put the one that is given into ``request``; ``grammar`` is GBNF where it defines rules with ``::=``, else Lark.

    Raises ``InvalidArgument`` for more than one, and for what cannot be put into a message.
    """
    given = {"schema": schema, "regex": regex, "choices": choices, "grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidArgument.of(names[1], f"cannot be given together with {names[0]}")
    for field, known, asked in (("mode", _MODES, mode), ("sampling", _SAMPLINGS, sampling)):
        if asked is None:
            continue
        if asked not in known:
            raise InvalidArgument.of(f"constraint_{field}", f"must be one of {', '.join(known)}, not {asked!r}")
        if not names:
            raise InvalidArgument.of(f"constraint_{field}", "needs a schema, regex, choices or grammar")
        setattr(request.constraint, field, known[asked])
    try:
        if schema is not None:
            request.constraint.json_schema = _schema_text(schema)
        elif regex is not None:
            request.constraint.regex = regex
        elif choices is not None:
            if isinstance(choices, str):
                raise TypeError("must be a list of strings")
            request.constraint.choice.options.extend(choices)
        elif grammar is not None:
            setattr(request.constraint, "gbnf" if "::=" in grammar else "lark", grammar)
    except (TypeError, ValueError) as error:
        raise InvalidArgument.of(names[0], f"cannot be sent: {error}") from error
    if choices is not None:
        request.constraint.choice.SetInParent()


def reader(schema: Schema | None) -> Callable[[str], Any] | None:
    """What makes a value, or an instance, of an answer to a request with ``schema``; None without one."""
    if schema is None:
        return None
    if isinstance(schema, type):
        read: Callable[[str], Any] = schema.model_validate_json
        return read
    return json.loads


def _schema_text(schema: Schema) -> str:
    if isinstance(schema, type):
        if not hasattr(schema, "model_json_schema"):
            raise TypeError("a class must have model_json_schema, as pydantic's models do")
        return json.dumps(schema.model_json_schema(), ensure_ascii=False)
    if not isinstance(schema, Mapping):
        raise TypeError("must be a mapping or a class")
    return json.dumps(schema, ensure_ascii=False, allow_nan=False)
