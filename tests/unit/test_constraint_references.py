"""References by URI and by anchor within one document, as an independent judge follows them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammars import enforced

from mmserve.constraint.resources import located
from mmserve.constraint.scaffold import scaffold

DRAFT_4, DRAFT_7 = (f"http://json-schema.org/draft-0{n}/schema#" for n in (4, 7))
INTEGER, STRING = {"type": "integer"}, {"type": "string"}

#: Schema, values it takes, values it does not.
REFERENCES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "an_anchor": ({"$ref": "#n", "$defs": {"a": {"$anchor": "n", **INTEGER}}}, [1], ["a"]),
    "an_id": ({"items": {"$ref": "n"}, "$defs": {"a": {"$id": "n", **INTEGER}}}, [[1]], [["a"]]),
    "its_own_id": (
        {"$id": "http://a.b/c", "type": "object", "properties": {"next": {"$ref": "http://a.b/c"}}},
        [{}, {"next": {}}],
        [{"next": 1}],
    ),
    "relative_to_an_id": (
        {
            "$id": "http://a.b/c/d",
            "items": {"$ref": "e/f#x"},
            "$defs": {"a": {"$id": "/c/e/f", "$defs": {"x": {"$anchor": "x", **INTEGER}}}},
        },
        [[1]],
        [["a"]],
    ),
    "a_pointer_within_an_inner_root": (
        {
            "$defs": {"x": STRING, "a": {"$id": "n", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": INTEGER}}},
            "$ref": "n",
        },
        [[1]],
        [["a"]],
    ),
    "the_same_anchor_in_two_roots": (
        {
            "$ref": "one",
            "$defs": {
                "a": {"$id": "one", "items": {"$ref": "#x"}, "$defs": {"x": {"$anchor": "x", **INTEGER}}},
                "b": {"$id": "two", "$defs": {"x": {"$anchor": "x", **STRING}}},
            },
        },
        [[1]],
        [["a"]],
    ),
    "a_urn": (
        {
            "$id": "urn:uuid:deadbeef-1234-00ff-ff00-4321feebdaed",
            "items": {"$ref": "urn:uuid:deadbeef-1234-00ff-ff00-4321feebdaed#x"},
            "$defs": {"a": {"$anchor": "x", **INTEGER}},
        },
        [[1]],
        [["a"]],
    ),
    "names_that_only_look_like_ids": (
        {
            "properties": {"$id": STRING, "$ref": {"enum": ["x"]}, "v": {"const": {"$id": "n", "$ref": "#n"}}},
            "items": {"$ref": "n"},
            "$defs": {"a": {"$id": "n", **INTEGER}},
        },
        [{"$id": "n"}, {"$ref": "x"}, {"v": {"$id": "n", "$ref": "#n"}}, [1]],
        [{"$id": 1}, {"$ref": "n"}, {"v": {}}, ["a"]],
    ),
    "draft_4": (
        {
            "$schema": DRAFT_4,
            "items": {"$ref": "#n"},
            "additionalProperties": {"$ref": "x.json"},
            "definitions": {"a": {"id": "#n", **INTEGER}, "b": {"id": "x.json", **STRING}},
        },
        [[1], {"a": "b"}],
        [["a"], {"a": 1}],
    ),
    "draft_7": (
        {
            "$schema": DRAFT_7,
            "items": {"$ref": "#n"},
            "additionalProperties": {"$ref": "x.json#y"},
            "definitions": {
                "a": {"$id": "#n", **INTEGER},
                "b": {"$id": "x.json", "definitions": {"c": {"$id": "#y", **STRING}}},
            },
        },
        [[1], {"a": "b"}],
        [["a"], {"a": 1}],
    ),
    "an_id_beside_an_old_reference": (
        {
            "$schema": DRAFT_7,
            "$id": "http://a.b/c/",
            "definitions": {"a": {"$id": "http://a.b/c/s", **INTEGER}, "b": {"$id": "http://a.b/s", **STRING}},
            "allOf": [{"$id": "http://a.b/", "$ref": "s"}],
        },
        [1],
        ["a"],
    ),
    "a_dynamic_anchor": (
        {
            "$dynamicAnchor": "n",
            "type": "object",
            "properties": {"v": INTEGER, "kids": {"type": "array", "items": {"$dynamicRef": "#n"}}},
        },
        [{"kids": [{"v": 1}]}],
        [{"kids": [{"v": "a"}]}],
    ),
    "a_dynamic_reference_to_a_plain_anchor": (
        {"items": {"$dynamicRef": "#n"}, "$defs": {"a": {"$anchor": "n", **INTEGER}}},
        [[1]],
        [["a"]],
    ),
    "a_recursive_reference": (
        {
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "type": "object",
            "additionalProperties": {"$recursiveRef": "#"},
        },
        [{"a": {}}],
        [{"a": 1}],
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_lead_where_the_judge_says(name: str) -> None:
    enforced(*REFERENCES[name])


def test_documents_without_names_stay_as_they_are() -> None:
    schema = {"$id": "http://a.b/c", "$ref": "#/$defs/a", "$defs": {"a": {"$anchor": "n"}}}
    assert located(schema) is schema


def test_a_pointer_keeps_its_escapes() -> None:
    schema = {"$ref": "#x", "$defs": {"50%/~": {"$anchor": "x"}}}
    assert located(schema)["$ref"] == "#/$defs/50%25~1~0"


def test_a_scaffold_follows_anchors() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#flag"}},
        "required": ["a"],
        "$defs": {"f": {"$anchor": "flag", "type": "boolean"}},
    }
    text, hole, end = scaffold(json.dumps(schema))
    assert (text, end) == ('{"a":', "}") and "boolean" in repr(hole)
