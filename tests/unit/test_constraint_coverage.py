"""Keywords as published schemas use them: rewritten for the grammar, and judged independently."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from grammars import accepts, compact, enforced, grammar, schema_matcher, sentence

from mmserve.constraint.compile import derivatives, one_of
from mmserve.constraint.compile.negation import Scope
from mmserve.constraint.findings import Refused
from mmserve.core.constraint import JsonSchema

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
    "one_more_than_required": (
        {**OPEN, "required": ["a"], "minProperties": 2},
        [{"a": 1, "b": 2}, {"a": 1, "c": 2}],
        [{"a": 1}, {"b": 1, "c": 1}],
    ),
    "at_least_one_of_an_open_object": ({**OPEN, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"c": 1}], [{}]),
    "names_by_length": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
        [{}, {"ab": 1}, {"éèê": 1}],
        [{"a": 1}, {"abcd": 1}],
    ),
    "names_by_reference": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "string", "pattern": "^x"}}},
        [{"x": 1}],
        [{"y": 1}],
    ),
    "names_but_some": (
        {"type": "object", "propertyNames": {"not": {"enum": ["a", "bc"]}}},
        [{"b": 1}, {"bcd": 1}],
        [{"a": 1}, {"bc": 1}],
    ),
    "names_beside_named_properties": (
        {**OPEN, "propertyNames": {"pattern": "^[ac]"}, "required": ["a"]},
        [{"a": 1}, {"a": 1, "c": ""}],
        [{"a": 1, "b": 1}, {"a": 1, "d": 1}, {"a": ""}],
    ),
    "names_of_a_closed_object": (
        {**OPEN, "propertyNames": {"pattern": "^a"}, "additionalProperties": False},
        [{}, {"a": 1}],
        [{"b": 1}, {"ab": 1}],
    ),
    "one_of_by_pattern": (
        {"type": "string", "oneOf": [{"pattern": "^https?://"}, {"pattern": "^\\./"}]},
        ["http://", "./a"],
        ["a", "/"],
    ),
    "one_of_beside_references_of_old_drafts": (
        {
            "$schema": DRAFT_7,
            "oneOf": [
                {"$ref": "#/definitions/s", "allOf": [{"type": "null"}]},
                {"type": "string", "minLength": 2},
            ],
            "definitions": {"s": {"type": "string", "maxLength": 3}},
        },
        ["a", "abcd"],
        ["ab", "abc", None],
    ),
    "one_of_within_its_parents_type": (
        {"type": "integer", "oneOf": [{"type": "number", "maximum": -1}, {}]},
        [0, 1],
        [-1, -2, 0.5, "a"],
    ),
    "one_of_by_length": ({"type": "string", "oneOf": [{"maxLength": 1}, {"minLength": 2}]}, ["", "a", "ab"], [1]),
    "one_of_by_text": ({"oneOf": [{"const": ""}, {"type": "string", "minLength": 3}]}, ["", "abc"], ["a"]),
    "one_of_within_another": (
        {**OPEN, "oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]},
        [{"a": 1}],
        [{}, {"b": 1}, {"a": 1, "b": 1}],
    ),
    "one_of_by_references": (
        {
            "type": "object",
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": {"required": ["a"]}, "b": {"required": ["b"]}},
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "not_a_reference": ({"not": {"$ref": "#/$defs/s"}, "$defs": {"s": {"type": "string"}}}, [1, {}], ["a"]),
    "contains": (
        {"contains": {"type": "integer"}, "maxItems": 3},
        [[1], ["a", 1], ["a", "b", 1], [1, 2], {}],
        [[], ["a"], ["a", "b", "c"], ["a", "b", "c", 1]],
    ),
    "contains_in_old_drafts": (
        {"$schema": DRAFT_7, "items": [{"type": "string"}], "contains": {"const": 3}, "maxItems": 2},
        [["a", 3]],
        [[], ["a"], [3, 3], ["a", 3, 1]],
    ),
    "one_of_rows_in_old_drafts": (
        {
            "$schema": DRAFT_7,
            "type": "object",
            "oneOf": [{"$ref": "#/definitions/a"}, {"$ref": "#/definitions/b"}],
            "definitions": {
                "a": {"required": ["a"], "properties": {"a": {"items": [{"type": "string"}]}}},
                "b": {"required": ["b"], "dependencies": {"b": ["a"]}, "properties": {"a": {"type": "null"}}},
            },
        },
        [{"a": ["x"]}],
        [{"a": None, "b": 1}, {"b": 1}, {"a": [1]}],
    ),
    "contains_beside_rows": (
        {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "contains": {"const": 3}, "maxItems": 4},
        [["a", 3], ["a", 1, 3, 2]],
        [["a"], [3], ["a", 1]],
    ),
    "contains_none": (
        {"contains": {"type": "string"}, "minContains": 0, "maxContains": 0},
        [[], [1, 2.5]],
        [["a"], [1, "a"]],
    ),
    "contains_what_it_likes": ({"contains": {"type": "integer"}, "minContains": 0}, [[], ["a"]], []),
    "contains_nothing": ({"type": ["array", "null"], "contains": False, "maxItems": 2}, [None], [[], [1]]),
    "contains_one_of_none": ({"type": ["array", "null"], "contains": True, "maxItems": 0}, [None], [[], [1]]),
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


TAGS = ["a", "b", "c", "d", "e", "f"]
#: Schemas whose branches overlap: the grammar leaves out some of what is valid, and takes the values here.
OVERLAPPING: dict[str, tuple[Any, list[Any]]] = {
    "by_what_others_require": (
        {
            "type": "object",
            "oneOf": [
                {"properties": {tag: {"type": "string", "pattern": "x"}, "n": {"type": "integer"}}, "required": [tag]}
                for tag in TAGS
            ],
        },
        [{tag: "x", "n": 1} for tag in TAGS],
    ),
    "by_what_others_do_not_know": (
        {
            "oneOf": [
                {"properties": {"n": {"pattern": "x"}, "k": True}, "required": ["n"], "additionalProperties": False},
                {"properties": {"n": {"pattern": "x"}, "m": True}, "required": ["n"], "additionalProperties": False},
            ],
            "type": "object",
        },
        [{"n": "x", "m": 1}, {"n": "x", "k": 1}],
    ),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_branches_that_overlap_are_told_apart(name: str) -> None:
    schema, taken = OVERLAPPING[name]
    judge, at = jsonschema_rs.validator_for(schema), schema_matcher(schema)
    assert any("overlap" in warning for warning in grammar(JsonSchema(json.dumps(schema))).warnings)
    assert all(accepts(at, compact(value)) for value in taken)
    chance = random.Random(0)
    said = {sentence(at, chance) for _ in range(40)}
    said |= {compact(value | other) for value in taken for other in taken}
    for text in said - {None}:
        if accepts(at, text):
            assert judge.is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (  # what is asked of all items is asked of the one that must be among them, too
            {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "maxItems": 1},
            [[5]],
            [["a"], [1], []],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "string"}], "contains": {"type": "string"}}
            | {"minContains": 0, "maxContains": 0},
            [[]],
            [["a"]],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
            | {"propertyNames": {"enum": ["a", "b"]}, "minProperties": 1},
            [{"a": 1}],
            [{"b": 1}, {"a": "x"}, {}],
        ),
        ({"type": "number", "maximum": 1 << 60}, [1, 0.5], [(1 << 60) + 1]),
        ({"maximum": 1 << 60}, [1, "x"], [(1 << 60) + 1]),
        ({"type": "integer", "maximum": 1 << 60}, [1, 1 << 60], [(1 << 60) + 1]),
    ],
)
def test_what_stands_beside_a_keyword_is_judged_beside_it(schema: Any, good: list[Any], bad: list[Any]) -> None:
    at = schema_matcher(schema)
    judge = jsonschema_rs.validator_for(schema)
    for value in (*good, *bad):
        assert judge.is_valid(value) is (value in good), "the test is wrong"
        assert accepts(at, compact(value)) is (value in good), value


def test_a_number_beyond_all_that_doubles_tell_apart_is_refused() -> None:
    with pytest.raises(Refused, match="minimum"):
        schema_matcher({"type": "number", "minimum": 1 << 60})


def test_branches_that_constants_tell_apart_are_not_told_apart_by_their_patterns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = list[str]()
    monkeypatch.setattr(one_of, "_disjoint", lambda one, other: compared.extend([one, other]))
    patterns = [f"^[a-z][a-z0-9_.-]{{0,20}}-{'xyz'[i % 3]}{i}[A-Z]{{1,10}}$" for i in range(40)]
    branches = [
        {"properties": {"name": {"type": "string", "pattern": patterns[i]}, "kind": {"const": f"k{i}"}}}
        for i in range(len(patterns))
    ]
    schema = {"type": "object", "oneOf": [branch | {"required": ["name", "kind"]} for branch in branches]}
    made = grammar(JsonSchema(json.dumps(schema)))
    assert not compared and not made.warnings


def test_no_more_patterns_are_compared_than_a_document_may_have_compared() -> None:
    scope, effort = Scope(2020, dict[str, Any]().__getitem__), one_of.Effort(left=100)
    a, b = {"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}
    proofs = [one_of.exclude(a, b, scope, effort) for _ in range(20)]
    assert proofs[0] and not proofs[-1] and proofs == sorted(proofs, reverse=True)


def test_large_enums_that_overlap_everywhere_are_told_apart_by_their_canonical_form() -> None:
    enums = [[f"v{i}_{j}" for j in range(65)] + ["same"] for i in range(40)]
    branches = [{"type": "string", "enum": values} for values in enums]
    enforced({"oneOf": branches}, ["v0_0", "v39_64"], ["same", "v40_0"])


def test_nothing_is_remembered_of_a_schema_that_was_read() -> None:
    """Tenants share the process that compiles: what one asked for must not make another's schema faster."""
    branches = [{"type": "string", "pattern": pattern} for pattern in ("^a[0-9]+$", "^b[0-9]+$")]
    grammar(JsonSchema(json.dumps({"oneOf": branches})))
    caches = (one_of._searched, one_of._disjoint, derivatives.automaton_of)
    assert [cache.cache_info().currsize for cache in caches] == [0, 0, 0]
    assert one_of._disjoint("a[0-9]+", "b[0-9]+") and one_of._disjoint.cache_info().currsize
    one_of.clear_caches()
