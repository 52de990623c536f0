"""Keywords as published schemas use them: rewritten for the grammar, and judged independently."""

from __future__ import annotations

from typing import Any

import pytest
from grammars import accepts, compact, enforced, schema_matcher

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}

#: Schema, values it takes, values it does not.
EXACT: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "base64_of_old_drafts": (
        {"$schema": DRAFT_7, "type": "string", "contentEncoding": "base64"},
        ["", "QUJD", "QUI=", "QQ=="],
        ["é", "QQ", "QR==", "QUJ="],
    ),
    "content_that_only_describes": (
        {"type": "string", "contentEncoding": "base64", "contentMediaType": "application/json"},
        ["{", "QR=="],
        [1],
    ),
    "pictures_of_old_drafts": ({"$schema": DRAFT_7, "type": "string", "contentMediaType": "image/png"}, ["{"], [1]),
    "sizes_that_nothing_has": (
        {"items": {"maxLength": 2**31}, "maxItems": 2**40, "maxProperties": 2**40, "properties": {}},
        [["a"], {"a": 1}],
        [],
    ),
    "bounds_of_unsigned_integers": ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 9 * 10**18], [-1]),
    "bounds_beyond_doubles": ({"type": "integer", "maximum": 2**53 + 2}, [2**53, 2**53 + 2], [2**53 + 3, 2**53 + 4]),
    "bounds_above_the_last_exact_integer": ({"type": "integer", "exclusiveMinimum": 2**53}, [2**53 + 2], [2**53]),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_schema_is_enforced_exactly(name: str) -> None:
    enforced(*EXACT[name])


#: Formats that the judge takes for annotations: schema, values the grammar takes, values it does not.
REGISTERED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "int32": ({"type": "integer", "format": "int32"}, [2**31 - 1, -(2**31)], [2**31]),
    "int32_of_numbers": ({"type": "number", "format": "int32"}, [1], [1.5]),
    "int64": ({"type": "integer", "format": "int64", "minimum": 1}, [1, 9 * 10**18], [0]),
    "int64_as_text": ({"type": "string", "format": "int64"}, ["0", "-12"], ["a", "", "01", "1.5"]),
    "double": ({"type": "number", "format": "double"}, [1.5], ["1.5"]),
    "byte": ({"type": "string", "format": "byte"}, ["QUI="], ["QUI", "é"]),
    "password": ({"type": "string", "format": "password"}, ["x"], [1]),
    "url": ({"type": "string", "format": "url"}, ["http://a.b/c"], ["a b"]),
}


@pytest.mark.parametrize("name", REGISTERED)
def test_registered_formats_are_enforced(name: str) -> None:
    schema, taken, refused = REGISTERED[name]
    at = schema_matcher(schema)
    assert all(accepts(at, compact(value)) for value in taken)
    assert not any(accepts(at, compact(value)) for value in refused)
