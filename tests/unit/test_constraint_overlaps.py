"""``patternProperties`` of several schemas that apply to the same object, and whose patterns match the same names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from grammars import byte_trie, enforced_among, schema_text

from mmserve.constraint.findings import Refused
from mmserve.constraint.search import worker
from mmserve.core.constraint import ConstraintSpec, JsonSchema

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
#: Names that begin with "a", and names that end with "b".
BEGUN, ENDED = {"patternProperties": {"^a": INTEGER}}, {"patternProperties": {"b$": {"maximum": 5}}}
CLOSED = {"additionalProperties": False}

TOGETHER: dict[str, Any] = {
    "all_of": {"allOf": [BEGUN, ENDED]},
    "all_of_closed": {"allOf": [{**BEGUN, **CLOSED}, {**ENDED, **CLOSED}]},
    "all_of_with_rests": {
        "allOf": [{**BEGUN, "additionalProperties": STRING}, {**ENDED, "additionalProperties": {"maxLength": 1}}]
    },
    "additional_properties_elsewhere": {"allOf": [BEGUN, {"additionalProperties": {"maximum": 5}}]},
    "closed_elsewhere": {"allOf": [BEGUN, CLOSED]},
    "reference": {"$defs": {"begun": BEGUN}, "$ref": "#/$defs/begun", **ENDED},
    "alternatives": {**BEGUN, "anyOf": [ENDED, {"required": ["x"]}]},
    "names": {"allOf": [{"propertyNames": {"pattern": "^a"}}, {"propertyNames": {"maxLength": 1}, **BEGUN}]},
    "properties_of_one": {
        "allOf": [
            {"properties": {"a": INTEGER}, "patternProperties": {"^x": STRING}, **CLOSED},
            {"patternProperties": {"^a": {"maximum": 5}, "b$": {"maxLength": 1}}},
        ]
    },
}
NAMES, VALUES = ["a", "ab", "ax", "xb", "x"], [1, 9, "s", "ss"]
DOCUMENTS = [
    {},
    *({name: value} for name in NAMES for value in VALUES),
    *({a: v, b: w} for a, b in itertools.combinations(NAMES, 2) for v in VALUES[:3] for w in VALUES[:3]),
]


@pytest.mark.parametrize("name", TOGETHER)
def test_patterns_of_several_schemas_hold_together(name: str) -> None:
    taken, refused = enforced_among({"type": "object", **TOGETHER[name]}, DOCUMENTS)
    assert taken and refused


def test_patterns_in_one_schema_have_few_states() -> None:
    schema = {"type": "object", "patternProperties": {"[0-9]{2,}": INTEGER, "X_": STRING}}
    names = ["12", "X_", "X_12", "1X_", "1"]
    assert enforced_among(schema, [{name: value} for name in names for value in (1, "s", None)]) == (6, 9)


def test_patterns_that_are_too_large_to_be_separated_are_refused_with_the_reason() -> None:
    parts = [{"patternProperties": {f"^[a-m]{{{i},40}}[n-z]{{2,{i}}}": {"minimum": i}}} for i in range(9, 12)]
    spec = ConstraintSpec(JsonSchema(schema_text({"type": "object", "allOf": parts})))
    outcome, broken = worker._outcome(spec, byte_trie())
    assert isinstance(outcome, Refused) and not broken
    assert "patterns that match the same names" in str(outcome)
