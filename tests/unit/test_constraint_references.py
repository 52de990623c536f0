"""References by URI and by anchor within one document, as an independent judge follows them."""

from __future__ import annotations

from typing import Any

import pytest
from grammars import accepts, enforced, schema_matcher

from mmserve.constraint.compile.references import located, resolved
from mmserve.constraint.findings import Refused

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
    "another_spelling_of_an_id": (
        {
            "$id": "http://A.b:80/c/",
            "items": {"$ref": "http://a.B/c/x/../%7ez"},
            "$defs": {"a": {"$id": "./~z", **INTEGER}},
        },
        [[1]],
        [["a"]],
    ),
    "a_pointer_with_a_quoted_percent_sign": (
        {"items": {"$ref": "#/$defs/a%2525b"}, "$defs": {"a%b": STRING, "a%25b": INTEGER}},
        [[1]],
        [["a"]],
    ),
    "an_unknown_keyword_without_names": (
        {
            "$id": "http://a.b/",
            "items": {"$ref": "#/foo/z"},
            "foo": {"z": {"$ref": "#/$defs/y"}},
            "$defs": {"y": INTEGER},
        },
        [[1]],
        [["a"]],
    ),
    "an_id_of_draft_4": (
        {"$schema": DRAFT_4, "items": {"$ref": "n"}, "definitions": {"a": {"id": "n", **INTEGER}}},
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


def _within(keyword: str, dialect: str = "", **inner: Any) -> Any:
    """References to ``keyword`` of a resource, and on to its definitions, which the root has too."""
    known = "definitions" if dialect else "$defs"
    resource = {"$id": "http://a.b/r", known: {"y": INTEGER}, **inner, keyword: {"z": {"$ref": f"#/{known}/y"}}}
    root = {"items": {"$ref": f"#/{known}/r/{keyword}/z"}, known: {"y": STRING, "r": resource}}
    return {"$schema": dialect, **root} if dialect else root


#: References that readers follow to different places, or to none.
UNCLEAR: dict[str, Any] = {
    "no_uri": {"$ref": "http://[#a"},
    "no_host": {"$ref": "//[x#"},
    "no_ascii": {"$ref": "http://\u2100/#a"},
    "no_dynamic_uri": {"$dynamicRef": "http://[#a"},
    "an_id_that_is_no_uri": {"$ref": "a", "$defs": {"a": {"$id": "http://[#a", "items": {"$ref": "b"}}}},
    "through_an_unknown_keyword": _within("foo"),
    "through_a_later_keyword": _within("$defs", DRAFT_7),
    "through_a_name_in_no_schema": {
        "items": {"$ref": "#/foo/z"},
        "foo": {"$id": "http://a.b/r", "$defs": {"y": STRING}, "z": {"$ref": "#/$defs/y"}},
        "$defs": {"y": INTEGER},
    },
    "a_name_in_no_schema_of_draft_4": {
        "$schema": DRAFT_4,
        "items": {"$ref": "#/foo"},
        "foo": {"items": {"id": "http://a.b/r", "items": {"$ref": "#/definitions/y"}}},
        "definitions": {"y": INTEGER},
    },
    "a_map_with_a_name": {
        "items": {"$ref": "#/$defs/z"},
        "$defs": {"$id": "http://a.b/r", "z": {"$ref": "#/$defs/y"}, "y": INTEGER},
    },
    "the_id_of_a_meta_schema": {
        "$ref": "#/$defs/r",
        "$defs": {"r": {"$id": "https://json-schema.org/draft/2020-12/schema", "items": {"$ref": "#/$defs/a"}}},
    },
}
for _one, _other in (("a", "/a"), ("a", "./a"), ("http://a.b", "HTTP://A.B:80/"), ("c/../b", "b"), ("~", "%7E")):
    UNCLEAR[f"{_one} and {_other}"] = {
        "$ref": _one,
        "$defs": {"x": {"$id": _one, "type": "string"}, "y": {"$id": _other, "type": "integer"}},
    }


@pytest.mark.parametrize("name", UNCLEAR)
def test_unclear_references_are_refused(name: str) -> None:
    with pytest.raises(Refused):
        schema_matcher(UNCLEAR[name])


def test_a_name_that_is_no_uri_is_none() -> None:
    at = schema_matcher({"$id": "http://[#a", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": INTEGER}})
    assert accepts(at, "[1]") and not accepts(at, '["a"]')


@pytest.mark.parametrize(
    ("reference", "uri"),
    [
        ("g", "http://a/b/c/g"),
        ("/g", "http://a/g"),
        ("//g", "http://g/"),
        ("?y", "http://a/b/c/d;p?y"),
        ("..", "http://a/b/"),
        ("../../../g", "http://a/g"),
        ("./g/.", "http://a/b/c/g/"),
        ("g;x=1/../y", "http://a/b/c/y"),
        ("urn:g:%7e%c3", "urn:g:~%C3"),
        ("g:h/:", "g:h/:"),
        ("1:g", None),
        ("g h", None),
    ],
)
def test_uris_are_resolved_as_the_standard_says(reference: str, uri: str | None) -> None:
    assert resolved("http://a/b/c/d;p?q", reference) == uri


def test_documents_without_names_stay_as_they_are() -> None:
    schema = {"$id": "http://a.b/c", "$ref": "#/$defs/a", "$defs": {"a": {"$anchor": "n"}}}
    assert located(schema) is schema


def test_a_pointer_keeps_its_escapes() -> None:
    schema = {"$ref": "#x", "$defs": {"50%/~": {"$anchor": "x"}}}
    assert located(schema)["$ref"] == "#/$defs/50%25~1~0"


def test_a_uri_of_two_schemas_harms_nothing_where_no_reference_depends_on_it() -> None:
    named = {"$id": "http://a.b/r", "type": "integer"}
    schema = {"type": "object", "properties": {"p": named, "q": named}, "required": ["p"]}
    at = schema_matcher(schema)
    assert accepts(at, '{"p":1,"q":2}') and not accepts(at, '{"p":"1"}')
    inner = {"$id": "http://a.b/r", "items": {"$ref": "#/$defs/y"}, "$defs": {"y": INTEGER}}
    with pytest.raises(Refused, match="another schema's URI"):
        schema_matcher({"properties": {"p": inner, "q": inner}})


@pytest.mark.parametrize("index", ["01", "0000001", "2", "-1", "٠"])
def test_an_index_is_one_of_the_array_without_zeros_in_front(index: str) -> None:
    row = {"type": "array", "prefixItems": [INTEGER, STRING]}
    with pytest.raises(Refused, match="names nothing in the schema"):
        schema_matcher({**row, "items": {"$ref": f"#/prefixItems/{index}"}})
    enforced({**row, "items": {"$ref": "#/prefixItems/1"}}, [[1, "a", "b"]], [[1, "a", 2]])
