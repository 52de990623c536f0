"""JSON schemas of many kinds, each with valid documents, for the benchmark of constraints.

Together they contain nesting, references and recursion, enumerations and constants, numbers with bounds, patterns and
formats, arrays and tuples, alternatives, maps, optional and dependent properties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_STRING, _INTEGER, _BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


@dataclass(frozen=True)
class Wanted:
    """A schema with its ``name``, and valid ``documents`` as a model might generate them."""

    name: str
    schema: dict[str, Any]
    documents: tuple[Any, ...]


def _exactly(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list(items: Any, low: int, high: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def _text(longest: int, **more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest, **more}


_TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {"node": _exactly(value=_INTEGER, children=_list({"$ref": "#/$defs/node"}, 0, 2))},
}
_EXPRESSION: dict[str, Any] = {
    "$ref": "#/$defs/term",
    "$defs": {
        "term": {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 999},
                _exactly(op={"enum": ["add", "mul"]}, left={"$ref": "#/$defs/term"}, right={"$ref": "#/$defs/term"}),
            ]
        }
    },
}

SCHEMAS: tuple[Wanted, ...] = (
    Wanted(
        "person",
        _exactly(name=_text(40), age={"type": "integer", "minimum": 0, "maximum": 150}, married=_BOOLEAN),
        ({"name": "Ada Lovelace", "age": 36, "married": True}, {"name": "Grace", "age": 85, "married": False}),
    ),
    Wanted(
        "shape",
        _exactly(
            kind={"enum": ["circle", "square", "triangle"]},
            color={"enum": ["red", "green", "blue", "yellow"]},
            at=_exactly(row={"type": "integer", "minimum": 0, "maximum": 9}, column=_INTEGER),
        ),
        ({"kind": "circle", "color": "red", "at": {"row": 2, "column": 14}},),
    ),
    Wanted(
        "order",
        _exactly(
            customer=_exactly(name=_text(30), city=_text(30)),
            items=_list(_exactly(article=_text(30), count={"type": "integer", "minimum": 1, "maximum": 99}), 1, 4),
            paid=_BOOLEAN,
        ),
        (
            {
                "customer": {"name": "Tom Brown", "city": "Oslo"},
                "items": [{"article": "green chair", "count": 4}, {"article": "small table", "count": 1}],
                "paid": False,
            },
        ),
    ),
    Wanted(
        "measurement",
        _exactly(
            celsius={"type": "number", "minimum": -90, "maximum": 60},
            share={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            step={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500},
        ),
        ({"celsius": -12.5, "share": 0.25, "step": 135},),
    ),
    Wanted(
        "ticket",
        _exactly(
            code=_text(12, pattern="^[A-Z]{2}-[0-9]{4}$"),
            seat=_text(4, pattern="^[1-9][0-9]?[A-F]$"),
            gate={"type": ["string", "null"], "maxLength": 3},
        ),
        ({"code": "LH-4711", "seat": "12A", "gate": "B7"}, {"code": "AF-0042", "seat": "7F", "gate": None}),
    ),
    Wanted(
        "meeting",
        _exactly(
            day={"type": "string", "format": "date"},
            begin={"type": "string", "format": "time"},
            organizer={"type": "string", "format": "email"},
        ),
        ({"day": "2024-02-29", "begin": "09:30:00Z", "organizer": "ada@example.org"},),
    ),
    Wanted(
        "host",
        _exactly(
            address={"type": "string", "format": "ipv4"},
            id={"type": "string", "format": "uuid"},
            port={"type": "integer", "minimum": 1, "maximum": 65535},
        ),
        ({"address": "192.168.0.17", "id": "123e4567-e89b-12d3-a456-426614174000", "port": 8080},),
    ),
    Wanted(
        "matrix",
        _list(_list({"type": "integer", "minimum": -9, "maximum": 9}, 3, 3), 3, 3),
        ([[1, 0, -2], [3, 4, 0], [0, -7, 5]],),
    ),
    Wanted(
        "tuple",
        {
            "type": "array",
            "prefixItems": [{"const": "move"}, {"type": "number"}, {"type": "number"}, _BOOLEAN],
            "items": False,
            "minItems": 4,
        },
        (["move", 3.5, -20, True],),
    ),
    Wanted("tree", _TREE, ({"value": 1, "children": [{"value": 12, "children": []}, {"value": 7, "children": []}]},)),
    Wanted("expression", _EXPRESSION, ({"op": "add", "left": 12, "right": {"op": "mul", "left": 3, "right": 140}},)),
    Wanted(
        "payment",
        {
            "oneOf": [
                _exactly(method={"const": "card"}, number=_text(16, pattern="^[0-9]{16}$")),
                _exactly(method={"const": "cash"}, change=_BOOLEAN),
                _exactly(method={"const": "transfer"}, bank=_text(30), reference=_text(20)),
            ]
        },
        ({"method": "transfer", "bank": "City Bank", "reference": "order 17"}, {"method": "cash", "change": True}),
    ),
    Wanted(
        "event",
        {
            "anyOf": [
                _exactly(type={"const": "click"}, x=_INTEGER, y=_INTEGER),
                _exactly(type={"const": "key"}, key=_text(8), held=_BOOLEAN),
            ]
        },
        ({"type": "click", "x": 640, "y": 12}, {"type": "key", "key": "enter", "held": False}),
    ),
    Wanted(
        "scores",
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 100}},
        ({"anna": 71, "bob": 9, "carol": 100},),
    ),
    Wanted(
        "product",
        {
            "type": "object",
            "properties": {
                "name": _text(40),
                "price": {"type": "number", "minimum": 0},
                "tags": _list({"enum": ["new", "sale", "used", "gift"]}, 0, 4),
                "note": _text(60),
            },
            "required": ["name", "price"],
            "additionalProperties": False,
        },
        ({"name": "red lamp", "price": 49.9, "tags": ["new", "gift"]}, {"name": "old clock", "price": 15}),
    ),
    Wanted(
        "account",
        {
            "type": "object",
            "properties": {"user": _text(20, minLength=3), "card": _text(20), "billing": _text(40)},
            "required": ["user"],
            "dependentRequired": {"card": ["billing"]},
            "additionalProperties": False,
        },
        ({"user": "linus", "card": "4711", "billing": "12 Main Street"}, {"user": "grace"}),
    ),
    Wanted(
        "book",
        _exactly(
            title=_text(60),
            authors=_list(_text(30), 1, 3),
            year={"type": "integer", "minimum": 1450, "maximum": 2100},
            language={"enum": ["en", "de", "fr", "es", None]},
        ),
        ({"title": "The Art of the Sea", "authors": ["Ann Lee", "Max Fish"], "year": 1987, "language": "en"},),
    ),
    Wanted(
        "settings",
        _exactly(
            window=_exactly(size=_exactly(width=_INTEGER, height=_INTEGER), title=_text(20)),
            colors=_exactly(front=_text(7, pattern="^#[0-9a-f]{6}$"), back=_text(7, pattern="^#[0-9a-f]{6}$")),
        ),
        (
            {
                "window": {"size": {"width": 800, "height": 600}, "title": "Editor"},
                "colors": {"front": "#00ff7f", "back": "#102030"},
            },
        ),
    ),
    Wanted(
        "link",
        _exactly(url={"type": "string", "format": "uri"}, text=_text(40), visited=_BOOLEAN),
        ({"url": "https://example.org/a/b", "text": "read more here", "visited": True},),
    ),
    Wanted(
        "choices",
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1, "maxItems": 3},
        (["b", "c"], ["c"]),
    ),
)
