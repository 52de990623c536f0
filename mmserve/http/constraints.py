"""Constraints in bodies: OpenAI's response formats, and vLLM's structured outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mmserve.errors import InvalidArgument
from mmserve.http.api import Neutral, take_neutral
from mmserve.http.fields import Fields, typed
from mmserve.v1 import generation_pb2 as pb

_FORMAT = "response_format"
#: vLLM's options of ``structured_outputs`` with their default values.
_NEUTRAL: Neutral = dict.fromkeys(
    ("disable_any_whitespace", "disable_additional_properties", "disable_fallback"), ((False,), "is not supported")
)


def constrain(fields: Fields, message: pb.GenerateRequest) -> dict[str, str]:
    """Read the constraint of ``response_format``, vLLM's ``structured_outputs`` or its older ``guided_*`` fields.

    Returns the names in errors of fields of ``message``.
    """
    found = [*_response_format(fields), *_structured(fields), *_guided(fields)]
    if len(found) > 1:
        raise InvalidArgument.of(found[1][0], f"cannot be combined with {found[0][0]}")
    if not found:
        return {}
    [(name, constraint)] = found
    message.constraint.CopyFrom(constraint)
    kind = {} if name == _FORMAT else {f"constraint.{constraint.WhichOneof('kind')}": name}
    if constraint.WhichOneof("kind") == "choice":
        kind["constraint.choice.options"] = name
    return {**kind, "constraint": name}


def _response_format(fields: Fields) -> Iterator[tuple[str, pb.Constraint]]:
    given = fields.nested(_FORMAT)
    if given is None:
        return
    with given, given.within("json_schema") as described:
        constraint = format_of(given, described)
    if constraint is not None:
        yield _FORMAT, constraint


def format_of(given: Fields, described: Fields) -> pb.Constraint | None:
    """The constraint of a format: ``given`` has its ``type``, ``described`` the schema and its name; None = text."""
    kind = given.take("type", str, "")
    if kind == "text":
        return None
    if kind == "json_object":
        return pb.Constraint(json_schema='{"type": "object"}')
    if kind != "json_schema":
        raise InvalidArgument.of(given.path("type"), "must be 'text', 'json_object' or 'json_schema'")
    described.take("name", str)
    described.take("description", str)
    strict = described.take("strict", bool, True)
    mode = pb.CONSTRAINT_MODE_STRICT if strict else pb.CONSTRAINT_MODE_VALIDATE
    return pb.Constraint(json_schema=_schema(described.any("schema"), described.path("schema")), mode=mode)


def _structured(fields: Fields) -> Iterator[tuple[str, pb.Constraint]]:
    given = fields.nested("structured_outputs")
    if given is None:
        return
    for name in ("json", "json_object", "regex", "choice", "grammar"):
        value = given.any(name)
        if value is not None and not (name == "json_object" and value is False):
            yield f"structured_outputs.{name}", _vllm(name, value, f"structured_outputs.{name}")
    take_neutral(given, _NEUTRAL, ())
    given.end("is not supported")


def _guided(fields: Fields) -> Iterator[tuple[str, pb.Constraint]]:
    for name in ("json", "regex", "choice", "grammar"):
        value = fields.any(f"guided_{name}")
        if value is not None:
            yield f"guided_{name}", _vllm(name, value, f"guided_{name}")


def _vllm(name: str, value: Any, path: str) -> pb.Constraint:
    if name == "json":
        return pb.Constraint(json_schema=value if isinstance(value, str) else _schema(value, path))
    if name == "json_object":
        typed(value, bool, path)
        return pb.Constraint(json_schema='{"type": "object"}')
    if name == "regex":
        return pb.Constraint(regex=typed(value, str, path))
    if name == "choice":
        options = [typed(one, str, f"{path}[{i}]") for i, one in enumerate(typed(value, list, path))]
        return pb.Constraint(choice=pb.Choice(options=options))
    text = typed(value, str, path)
    return pb.Constraint(gbnf=text) if "::=" in text else pb.Constraint(lark=text)


def _schema(value: Any, path: str) -> str:
    if not isinstance(value, dict | bool):
        raise InvalidArgument.of(path, "must be a JSON schema")
    return json.dumps(value)
