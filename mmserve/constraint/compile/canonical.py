"""A schema in the canonical form of jsonschema-rs: the same values, written without most of ``not`` and ``oneOf``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema_rs

from mmserve.constraint.compile.document import read_schema
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import MAX_SCHEMA_BYTES


def canonical(root: Any) -> Any | None:
    """The canonical form of ``root`` (of ``read_schema``), its properties in the order of ``root``.

    None where jsonschema-rs has none that is exact, or where it is too large. Runs native code whose time grows with
    the cases of the schema: for the child process only.
    """
    try:
        found = jsonschema_rs.canonicalize(root, validate_formats=True, offline=True)
        if found.kind == jsonschema_rs.canonical.CanonicalKind.RAW:
            return None
        text = json.dumps(found.to_json_schema(), default=_number)
        if len(text) > MAX_SCHEMA_BYTES:
            return None
        return _ordered(read_schema(text), Orders(root))
    except (ValueError, jsonschema_rs.ReferencingError, jsonschema_rs.ValidationError, Refused, RecursionError):
        return None


def _number(value: Any) -> float:
    """A number that jsonschema-rs gives as a ``Decimal``; raises ``ValueError`` where no double is it."""
    if not isinstance(value, Decimal):
        raise TypeError(f"no JSON: {value!r}")
    near = int(value) if value == value.to_integral_value() else float(value)
    if Decimal(repr(near)) != value:
        raise ValueError(f"{value} is no double")
    return near


class Orders:
    """The orders in which the schemas of a document list properties."""

    def __init__(self, root: Any) -> None:
        self._lists = [tuple(names) for names in _property_lists(root)]
        self._place = {name: i for i, name in enumerate(dict.fromkeys(n for names in self._lists for n in names))}

    def sorted(self, names: list[str]) -> list[str]:
        """``names`` in the order of the list that has most of them, and then of all lists together."""
        wanted = set(names)
        best = max(self._lists, key=lambda each: len(wanted & set(each)), default=())
        place = {name: i for i, name in enumerate(best)}
        late = len(place) + len(self._place)
        return sorted(names, key=lambda name: (place.get(name, late), self._place.get(name, late)))


def _property_lists(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for each in value:
            yield from _property_lists(each)
    elif isinstance(value, dict):
        if isinstance(found := value.get("properties"), dict):
            yield found
        for each in value.values():
            yield from _property_lists(each)


def _ordered(value: Any, orders: Orders) -> Any:
    if isinstance(value, list):
        return [_ordered(each, orders) for each in value]
    if not isinstance(value, dict):
        return value
    made = {name: _ordered(each, orders) for name, each in value.items()}
    if isinstance(found := made.get("properties"), dict):
        made["properties"] = {name: found[name] for name in orders.sorted(list(found))}
    return made
