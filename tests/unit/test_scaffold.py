"""Scaffolds: what a schema's documents must hold, and how a canvas is shared among the holes."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.constraint.limits import MAX_HOLES
from mmserve.constraint.scaffold import scaffold
from mmserve.core.constraint import Choice, JsonSchema, Regex
from mmserve.decode.constrained.allot import allotted

INTEGER = {"type": "integer"}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def sketch(schema: Any) -> str:
    """The scaffold with ``_`` for each hole."""
    return "".join(part if isinstance(part, str) else "_" for part in scaffold(json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (of(a=INTEGER, b={"type": "string"}), '{"a":_,"b":"_"}'),
        (of(a=INTEGER, **{'q"': {"const": "x"}, "n": {"type": "null", "const": None}}), '{"a":_,"q\\"":"x","n":null}'),
        (of(kind={"enum": ["dot", "box"]}, k={"enum": [1, None]}, f={"enum": [0.5, 1]}), '{"kind":"_","k":_,"f":_}'),
        (of(deep=of(deeper=of(on={"type": "boolean"}))), '{"deep":{"deeper":{"on":_}}}'),
        ({"type": "array", "items": of(a=INTEGER), "minItems": 2, "maxItems": 2}, '[{"a":_},{"a":_}]'),
        ({"type": "array", "prefixItems": [{"const": 1}, INTEGER], "minItems": 2, "maxItems": 2}, "[1,_]"),
        (of(pair={"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}), '{"pair":_}'),
        (of(s={"type": "string", "maxLength": 3}, title={"title": "T", "type": "boolean"}), '{"s":_,"title":_}'),
        (of(o={**of(a=INTEGER, b=INTEGER), "required": ["a"]}), '{"o":_}'),
        (of(o={**of(a=INTEGER), "minProperties": 1}), '{"o":_}'),
        ({"$defs": {"p": of(x=INTEGER)}, **of(at={"$ref": "#/$defs/p"})}, '{"at":{"x":_}}'),
        (
            {"$defs": {"t": of(t={"$ref": "#/$defs/t"}, n=INTEGER)}, **of(at={"$ref": "#/$defs/t"})},
            '{"at":{"t":_,"n":_}}',
        ),
    ],
)
def test_what_is_sure_is_written(schema: dict[str, Any], expected: str) -> None:
    assert sketch(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        INTEGER,
        {"type": "object"},
        {"anyOf": [of(a=INTEGER), of(b=INTEGER)]},
        {"properties": {"a": INTEGER}, "required": ["a"]},  # it need not be an object
        of(a={"const": 1}),  # nothing is left to fill in
        of(**{f"p{i}": INTEGER for i in range(MAX_HOLES + 1)}),
    ],
)
def test_without_a_scaffold(schema: Any) -> None:
    assert scaffold(json.dumps(schema)) == ()


@pytest.mark.parametrize("leaf", [{"const": 1}, INTEGER])
def test_references_that_multiply_are_left(leaf: dict[str, Any]) -> None:
    """Twenty lines that stand for a million values, and two hundred that stand for one within two hundred."""
    twice = {f"d{i}": of(a={"$ref": f"#/$defs/d{i + 1}"}, b={"$ref": f"#/$defs/d{i + 1}"}) for i in range(20)}
    assert scaffold(json.dumps({"$defs": {**twice, "d20": leaf}, "$ref": "#/$defs/d0"})) == ()
    nested = {f"d{i}": of(a={"$ref": f"#/$defs/d{i + 1}"}, b=INTEGER) for i in range(200)}
    assert scaffold(json.dumps({"$defs": {**nested, "d200": leaf}, "$ref": "#/$defs/d0"})) != ()


LEAVES: list[tuple[dict[str, Any], list[Any]]] = [
    (INTEGER, [0, -17]),
    ({"enum": ["red", 'a "b" \\ é', "ab"]}, ["red", 'a "b" \\ é', "ab"]),
    ({"enum": [None, "x", 3, True]}, [None, "x", 3, True]),
    ({"const": "é\n"}, ["é\n"]),
    ({"type": "boolean"}, [True, False]),
    ({"type": "string"}, ["", "two words", '"\\']),
]


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves = st.sampled_from([schema for schema, _values in LEAVES])
    names = st.sampled_from(["a", "b b", 'c"', "é"])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(names, inner, min_size=1, max_size=3).map(lambda found: of(**found)),
            st.tuples(inner, st.integers(1, 2)).map(
                lambda found: {"type": "array", "items": found[0], "minItems": found[1], "maxItems": found[1]}
            ),
        ),
        max_leaves=6,
    )


@given(schema=schemas(), pick=st.integers(0, 5))
def test_filled_scaffolds_are_valid_documents(schema: dict[str, Any], pick: int) -> None:
    """Whatever each hole's own constraint allows, the document is valid."""
    text = ""
    for part in scaffold(json.dumps(schema)):
        match part:
            case str():
                text += part
            case Choice(options):
                text += options[pick % len(options)]
            case Regex(pattern):
                inner = ("", "two words", '\\"\\\\')[pick % 3]
                assert re.fullmatch(pattern, inner)
                text += inner
            case JsonSchema(hole):
                text += next(json.dumps(v) for v in (0, -17, True, "x") if jsonschema_rs.is_valid(json.loads(hole), v))
            case _:
                raise AssertionError(part)
    assert not text or jsonschema_rs.is_valid(schema, json.loads(text))


def test_references_go_along() -> None:
    schema = {
        "$defs": {"n": {"type": "integer", "minimum": 3}},
        **of(a={"type": "array", "items": {"$ref": "#/$defs/n"}}),
    }
    [_before, hole, _behind] = scaffold(json.dumps(schema))
    assert isinstance(hole, JsonSchema)
    assert jsonschema_rs.is_valid(json.loads(hole.text), [3, 4])
    assert not jsonschema_rs.is_valid(json.loads(hole.text), [2])


@given(
    holes=st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 12)), min_size=1, max_size=6),
    room=st.integers(-3, 80),
)
def test_room_is_shared_evenly(holes: list[tuple[int, int | None]], room: int) -> None:
    least = [n for n, _most in holes]
    most = [None if most is None else max(n, most) for n, most in holes]
    given = allotted(least, most, room)
    if sum(least) > room:
        assert given is None
        return
    assert given is not None and sum(given) <= room
    for got, low, high in zip(given, least, most, strict=True):
        assert low <= got and (high is None or got <= high)
    growing = [i for i, high in enumerate(most) if high is None or given[i] < high]
    assert not growing or sum(given) == room
    for a, b in itertools.product(growing, range(len(given))):
        assert given[b] <= max(given[a] + 1, least[b]), "nobody gets more while another has less"
