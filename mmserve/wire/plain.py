"""Conversion of dataclasses to messages with the same fields, and back."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

from mmserve.errors import InvalidArgument

_T = TypeVar("_T")
_M = TypeVar("_M")


@dataclass(frozen=True)
class _Field:
    """A field of both a dataclass and a message: its name in each, and the type of its value, if that is a
    dataclass."""

    own: str
    name: str
    held: type[Any] | None
    several: bool
    mapping: bool
    presence: bool
    required: bool  # by the dataclass


def _shared(kind: Any, message: Any) -> tuple[_Field, ...]:
    types: tuple[Any, Any] = (kind, type(message))
    return _fields(*types)


@cache
def _fields(kind: Any, message: Any) -> tuple[_Field, ...]:
    """The common fields; a message's field may have a suffix with its unit, ``_ms`` or ``_seconds``. Without enums."""
    there, hints = message.DESCRIPTOR.fields_by_name, get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        name = next((n for n in (field.name, f"{field.name}_ms", f"{field.name}_seconds") if n in there), None)
        if name is None or there[name].enum_type is not None:
            continue
        held = [hint for hint in (hints[field.name], *get_args(hints[field.name])) if dataclasses.is_dataclass(hint)]
        found.append(
            _Field(
                own=field.name,
                name=name,
                held=cast(type[Any], held[0]) if held else None,
                several=there[name].is_repeated,
                mapping=there[name].message_type is not None and there[name].message_type.GetOptions().map_entry,
                presence=there[name].has_presence,
                required=field.default is MISSING and field.default_factory is MISSING,
            )
        )
    return tuple(found)


def to_message(value: Any, message: _M) -> _M:
    """``message`` with the common fields of the dataclass ``value``; None values stay unset."""
    for field in _shared(type(value), message):
        given, target = getattr(value, field.own), getattr(message, field.name)
        if given is None:
            continue
        if field.mapping:
            target.update(given)
        elif field.several and field.held is not None:
            for each in given:
                to_message(each, target.add())
        elif field.several:
            target.extend(given)
        elif field.held is not None:
            target.SetInParent()
            to_message(given, target)
        else:
            setattr(message, field.name, given)
    return message


def from_message(kind: type[_T], *messages: Any, **more: Any) -> _T:
    """The dataclass ``kind`` with the fields of ``messages``, and ``more``; unset fields have their default, or
    None."""
    found: dict[str, Any] = {}
    for message in messages:
        for field in _shared(kind, message):
            given = getattr(message, field.name)
            if field.mapping:
                found[field.own] = dict(given)
            elif field.several:
                found[field.own] = tuple(given if field.held is None else (from_message(field.held, m) for m in given))
            elif not field.presence or message.HasField(field.name):
                found[field.own] = given if field.held is None else from_message(field.held, given)
            elif field.required:
                found[field.own] = None if field.held is None else from_message(field.held, given)
    return kind(**{**found, **more})


def put(message: Any, path: str, **values: Any) -> None:
    """Set the fields of ``message`` that have a value; raises ``InvalidArgument`` naming a field with an invalid
    value."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument.of(f"{path}{name}", f"cannot be {value!r}: {error}") from error
