"""Constraints that are small to send but expensive, for benchmarks of their effect on other requests.

Each is ``(name, options)``, where ``options`` are keyword arguments of the SDK's ``generate``. A server may answer or
reject each one; it must end soon, and must not delay other requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from mmserve.bench.measures import Figures
from mmserve.client import Options

#: Token limit of the answers: less than most constraints need.
BUDGET = 32


@dataclass(frozen=True)
class Hostile:
    """A constraint by name, and whether it can be satisfied within ``max_new_tokens``; else it must be rejected."""

    name: str
    options: Options = field(repr=False)
    possible: bool


def hostile_constraints(salt: int = 0) -> list[Hostile]:
    """All hostile constraints. ``salt`` changes a letter in each, to avoid cache hits."""
    mark = "".join(chr(ord("a") + int(digit)) for digit in str(salt))
    return [*_expressions(mark), *_schemas(mark), *_grammars(mark)]


def _expressions(mark: str) -> list[Hostile]:
    several = [f"{mark}{i:04d}" + "qx" * 30 for i in range(950)]
    return [
        _regex("long_repeat", f"{mark}x{{90000}}", possible=False),
        _regex("long_repeat_of_letters", f"{mark}[a-p]{{90000}}", possible=False),
        _regex("long_repeat_of_words", f"{mark}(ab|cd|ef|gh){{10000}}", possible=False),
        _regex("nested_repeats", f"{mark}((x{{100}}){{100}}){{9}}", possible=False),
        _regex("optional_repeats", f"{mark}(a?){{1000}}b{{1000}}", possible=False),
        _regex("far_end", f"{mark}[\\s\\S]*[ab][\\s\\S]{{14}}", possible=True),
        Hostile("many_choices", _options(choices=[f"{mark}{i}" for i in range(9_000)]), True),
        Hostile("long_choices", _options(choices=several), False),
    ]


def _schemas(mark: str) -> list[Hostile]:
    names = [f"{mark}{i}" for i in range(5_000)]
    integer = {"type": "integer"}
    return [
        _object("many_properties", dict.fromkeys(names[:400], integer)),
        _object("too_many_properties", dict.fromkeys(names, integer)),
        _object("many_required", dict.fromkeys(names[:400], integer), required=names[:400], possible=False),
        _schema("long_string", {"type": "string", "title": mark, "minLength": 100_000}, possible=False),
        _schema("long_array", {"type": "array", "items": {"const": mark}, "minItems": 100_000}, possible=False),
        _schema("long_array_of_numbers", {"type": "array", "title": mark, "items": integer, "minItems": 3_000}),
        _schema("many_cases", {"anyOf": [_case(name, i) for i, name in enumerate(names[:500])]}, possible=True),
        _schema("many_open_cases", {"anyOf": [_open_case(name) for name in names[:500]]}, possible=True),
    ]


def _grammars(mark: str) -> list[Hostile]:
    return [
        Hostile("long_gbnf", _options(grammar=f'root ::= "{mark}" [a-z]{{50000}}'), False),
        Hostile("long_lark", _options(grammar=f'start: "{mark}" /[a-z]/~50000'), False),
        Hostile("ambiguous_lark", _options(grammar=f'start: "{mark}" a "!"\na: a a | "x" | ""'), True),
    ]


def _case(name: str, number: int) -> Figures:
    """A closed object of several properties that differs from the others in the value of one."""
    kind, rest = {"const": f"{name}_{number}"}, {"a": {"type": "string"}, "b": {"type": "integer"}}
    required = ["kind", name, "a", "b"]
    properties = {"kind": kind, name: {"type": "boolean"}, **rest}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _open_case(name: str) -> Figures:
    """An object with one required property, and any others."""
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}


def _object(name: str, properties: dict[str, Any], required: list[str] | None = None, possible: bool = True) -> Hostile:
    schema = {"type": "object", "properties": properties, "required": required or [], "additionalProperties": False}
    return _schema(name, schema, possible=possible)


def _regex(name: str, pattern: str, *, possible: bool) -> Hostile:
    return Hostile(name, _options(regex=pattern), possible)


def _schema(name: str, schema: dict[str, Any], *, possible: bool = False) -> Hostile:
    return Hostile(name, _options(schema=json.loads(json.dumps(schema))), possible)


def _options(**constraint: Any) -> Options:
    options: Options = {"max_new_tokens": BUDGET, **constraint}  # type: ignore[typeddict-item]
    return options
