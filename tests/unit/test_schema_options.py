"""How a JSON schema is read on request: each option changes what is accepted, and the result says what was changed."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import jsonschema_rs
import pytest
from grammars import accepts, byte_trie, sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from mmserve.client import Hole
from mmserve.client.outgoing import build_request
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.grammar import grammar_of
from mmserve.constraint.compile.wire import from_spec, to_spec
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.session.validation import validator_of
from mmserve.core.constraint import ConstraintMode, ConstraintSpec, JsonSchema, SchemaOption
from mmserve.errors import FailedPrecondition, InvalidArgument
from mmserve.rpc.constraint_messages import parse_constraint, wrong_constraint
from mmserve.v1 import generation_pb2 as pb

STRICT = ConstraintMode.STRICT


def spec(schema: Any, *options: str, mode: ConstraintMode = STRICT) -> ConstraintSpec:
    return ConstraintSpec(JsonSchema(json.dumps(schema), tuple(map(SchemaOption, options))), mode)


def grammar(schema: Any, *options: str, mode: ConstraintMode = STRICT) -> tuple[Grammar, LLMatcher]:
    made = grammar_of(spec(schema, *options, mode=mode))
    at = LLMatcher(byte_trie(), made.text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    assert not at.is_error()
    return made, at


def test_unknown_formats_have_no_effect_on_request() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "mine"}, "format": {"const": "b"}}}
    with pytest.raises(Refused, match="mine"):
        grammar(schema)
    made, at = grammar(schema, "unknown_formats")
    assert made.exact and made.warnings == ("format is unknown and has no effect, as asked: at /properties/a",)
    assert accepts(at, '{"a":"x","format":"b"}') and not accepts(at, '{"a":1}')
    known, at = grammar({"format": "date", "type": "string"}, "unknown_formats")
    assert not known.warnings and not accepts(at, '"x"')


def test_one_of_is_any_of_on_request_also_where_it_is_checked() -> None:
    overlapping = [{"type": "integer", "multipleOf": 4}, {"type": "integer", "multipleOf": 6}]
    schema = {"type": "object", "properties": {"n": {"oneOf": overlapping}}, "required": ["n"]}
    with pytest.raises(Refused, match="oneOf"):
        grammar(schema)
    made, at = grammar(schema, "one_of_as_any_of")
    assert made.warnings == ("oneOf is read as anyOf, as asked: at /properties/n",)
    assert accepts(at, '{"n":12}') and accepts(at, '{"n":6}') and not accepts(at, '{"n":5}')

    schema = {**schema, "properties": {**schema["properties"], "u": {"uniqueItems": True}}}  # type: ignore[dict-item]
    judges = [
        validator_of(spec(schema, *options, mode=ConstraintMode.VALIDATE), exact=False)
        for options in ((), ("one_of_as_any_of",))
    ]
    assert judges[0] is not None and judges[1] is not None
    judges[1].check('{"n":12}')
    for judge, answer in ((judges[0], '{"n":12}'), (judges[1], '{"n":12,"u":[1,1]}')):
        with pytest.raises(FailedPrecondition):
            judge.check(answer)


def test_objects_are_closed_on_request_but_those_that_are_joined() -> None:
    schema = {
        "properties": {
            "plain": {"type": "object", "properties": {"x": {}}},
            "joined": {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"r": {"type": "integer"}}}]},
            "map": {"type": "object"},
            "open": {"properties": {"x": {}}, "additionalProperties": {"type": "null"}},
            "either": {"anyOf": [{"properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}, "l": {}}}]},
        },
        "type": "object",
        "$defs": {"base": {"properties": {"q": {"type": "integer"}}}},
    }
    made, at = grammar(schema, "closed_objects")
    for text in ['{"plain":{"x":1}}', '{"joined":{"q":1,"r":2,"s":3}}', '{"map":{"a":1}}', '{"either":{"k":2,"l":1}}']:
        assert accepts(at, text), text
    assert accepts(at, '{"open":{"y":null}}')
    for text in ['{"plain":{"y":1}}', '{"other":1}', '{"either":{"k":1,"l":1}}', '{"either":{"k":1,"m":1}}']:
        assert not accepts(at, text), text
    assert "at the root, /properties/plain, /properties/either/anyOf/0, /properties/either/anyOf/1" in made.warnings[0]


_Q, _R = {"properties": {"q": {"type": "integer"}}}, {"properties": {"r": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("reference", "defs"),
    [
        ("#/$defs/b", {"b": {"$ref": "#/$defs/c"}, "c": _Q}),
        ("#/$defs/b", {"b": {"anyOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}]}, "c": _Q, "d": _R}),
        ("#/$defs/b", {"b": {"allOf": [{"$ref": "#/$defs/c"}]}, "c": _Q}),
        ("#base", {"c": {**_Q, "$anchor": "base"}}),
        ("#/$defs/my%20c", {"my c": _Q}),
        ("#/$defs/a~1c", {"a/c": _Q}),
    ],
    ids=["reference", "alternatives", "parts", "anchor", "escape", "slash"],
)
def test_objects_that_are_joined_by_way_of_others_stay_open(reference: str, defs: Any) -> None:
    schema = {"type": "object", "allOf": [{"$ref": reference}, _R], "$defs": defs}
    made, at = grammar(schema, "closed_objects")
    assert accepts(at, '{"q":1,"r":2}') and not accepts(at, '{"q":1,"r":"x"}') and not made.warnings


def test_closed_objects_of_an_unknown_draft_are_not_enforced_in_the_mode_lenient() -> None:
    schema = {"$schema": "https://example.com/draft", "type": "object", "properties": {"a": {}}}
    made, _at = grammar(schema, "closed_objects", mode=ConstraintMode.LENIENT)
    assert not made.exact and "$schema" in "".join(made.warnings)


def test_white_space_on_request_lets_indented_documents_through_and_is_bounded() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"items": {"type": "integer"}}}}
    value = {"a": 1.5, "b": [1, {"c": []}], "d": {"e": None}}
    schema["properties"]["b"] = {"type": "array"}  # type: ignore[index]
    indented = json.dumps(value, indent=2)
    assert not accepts(grammar(schema)[1], indented)
    made, at = grammar(schema, "white_space")
    assert accepts(at, indented) and accepts(at, json.dumps(value)) and accepts(at, json.dumps(value, indent="\t"))
    assert not accepts(at, '{"a":' + " " * 33 + "1}") and made.longest is None


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_numbers_with_exponents_are_valid(chance: Any) -> None:
    properties = {"n": {"type": "number"}, "low": {"type": "number", "minimum": 3}, "i": {"type": "integer"}, "any": {}}
    schema = {"type": "object", "properties": properties, "required": ["n", "low"]}
    _made, at = grammar(schema, "exponents")
    said = sentence(at, chance)
    if said is not None:
        assert jsonschema_rs.validator_for(schema).is_valid(json.loads(said, parse_float=Decimal)), said


def test_exponents_on_request_where_there_are_no_bounds() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "number"}, "i": {"type": "integer"}, "any": {}}}
    assert not accepts(grammar(schema)[1], '{"n":8.854e-12}')
    at = grammar(schema, "exponents")[1]
    assert accepts(at, '{"n":8.854e-12,"any":[1E5]}') and not accepts(at, '{"i":1e5}')


def test_options_pass_messages_and_processes() -> None:
    asked = ["closed_objects", "white_space", "closed_objects"]
    request = build_request("hi", (), deltas=False, snapshots=False, schema={}, schema_options=asked)
    assert not list(wrong_constraint(request, 100))
    made = parse_constraint(request)
    assert made is not None and made.kind == JsonSchema("{}", (SchemaOption.CLOSED_OBJECTS, SchemaOption.WHITE_SPACE))
    assert to_spec(json.loads(json.dumps(from_spec(made)))) == made
    template = ["a", Hole(schema={}, schema_options=["exponents"])]
    request = build_request("hi", (), deltas=False, snapshots=False, template=template)
    assert request.constraint.template.parts[1].hole.constraint.schema_options == [pb.SCHEMA_OPTION_EXPONENTS]


@pytest.mark.parametrize("given", [{"schema": {}, "schema_options": ["closed"]}, {"schema_options": ["exponents"]},
                                   {"schema": {}, "schema_options": "exponents"},
                                   {"regex": "a", "schema_options": ["exponents"]}])  # fmt: skip
def test_options_that_cannot_be_sent(given: Any) -> None:
    with pytest.raises(InvalidArgument, match="schema_options"):
        build_request("hi", (), deltas=False, snapshots=False, **given)


@pytest.mark.parametrize("constraint", [pb.Constraint(regex="a", schema_options=[1]),
                                        pb.Constraint(json_schema="{}", schema_options=[0]),
                                        pb.Constraint(json_schema="{}", schema_options=[99])])  # fmt: skip
def test_options_that_are_refused(constraint: pb.Constraint) -> None:
    [(field, _why)] = wrong_constraint(pb.GenerateRequest(constraint=constraint), 100)
    assert field == "constraint.schema_options"
