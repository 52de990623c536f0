"""Schemas that cannot be enforced directly: an equivalent form in the mode ``strict``, a wider one in the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from constraint_bombs import SCHEMAS
from grammars import accepts, byte_trie, enforced, granted, schema_matcher
from llguidance import LLMatcher, LLParserLimits

from mmserve.constraint.compile.attempts import Grammar, attempts, widened
from mmserve.constraint.compile.service import Grammars
from mmserve.constraint.compile.wire import BYTES
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.session.validation import AnswerValidator, ValidatorProcess
from mmserve.core.constraint import ConstraintMode, ConstraintSpec, JsonSchema
from mmserve.errors import FailedPrecondition, InvalidArgument

VALIDATE, LENIENT = ConstraintMode.VALIDATE, ConstraintMode.LENIENT
_PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
#: More regular expressions at once than the engine can intersect.
_MANY_PATTERNS = {"allOf": [{"pattern": f"{a}.*{b}.*{a}"} for a in "abc" for b in "xyz"], "type": "string"}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(BYTES)
    yield made
    made.close()


def compiled(made: Grammar) -> LLMatcher:
    return LLMatcher(byte_trie(), made.text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))


def asked(schema: Any, mode: ConstraintMode) -> ConstraintSpec:
    return ConstraintSpec(JsonSchema(schema if isinstance(schema, str) else json.dumps(schema)), mode)


_OLD = {"not": {"required": ["name", "age"], "patternProperties": {"^x": True}}}
_OPEN = {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({**_PERSON, **_OLD}, [{"name": "a"}, {"age": 1}, {"x": 1}], [{"name": "a", "age": 1}, {"age": "1"}]),
        ({"not": {"type": "array", "items": {"type": "null"}}}, ["a", 1], [[], [None]]),
        (_OPEN, [{"a": 1}, {"c": 1}, {}], [{"a": 1, "b": 1}, {"c": 1, "d": 1}]),
        (
            {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "string", "minLength": 3}]},
            ["ab", "abcdef"],
            ["abc", 1],
        ),
    ],
)
def test_the_canonical_form_is_enforced_where_the_schema_as_it_stands_cannot_be(
    schema: Any, taken: list[Any], refused: list[Any]
) -> None:
    enforced(schema, taken, refused)


def test_members_of_the_canonical_form_keep_the_order_of_the_schema() -> None:
    properties = {"z": {"type": "string"}, "a": {"type": "integer"}, "b": {"type": "string"}}
    at = schema_matcher(
        {
            "type": "object",
            "properties": properties,
            "not": {"required": ["z", "b"], "title": "", "patternProperties": {"^x": True}},
        }
    )
    assert accepts(at, '{"z":"","a":1}') and accepts(at, '{"a":1,"b":""}')
    assert not accepts(at, '{"a":1,"z":""}') and not accepts(at, '{"z":"","b":""}')


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("too_new_for_its_dialect", LENIENT),
        ("pattern_repeats", LENIENT),
        ("huge_bound", VALIDATE),
        ("id_of_two", VALIDATE),
        ("cases_multiply", VALIDATE),
    ],
)
def test_what_passes_a_limit_is_left_out_in_modes_that_widen(
    grammars: Grammars, name: str, mode: ConstraintMode
) -> None:
    made = granted(grammars, asked(SCHEMAS[name][0], mode))
    assert not made.exact and made.warnings


@pytest.mark.parametrize("name", ["no_json", "wrong_type", "wrong_length", "wrong_required", "steps_0", "endless"])
def test_what_is_no_schema_or_has_no_value_is_refused_in_every_mode(grammars: Grammars, name: str) -> None:
    schema = {"steps_0": {"multipleOf": 0}}.get(name) or SCHEMAS[name][0]
    for mode in ConstraintMode:
        with pytest.raises(InvalidArgument):
            granted(grammars, asked(schema, mode))


def test_only_the_type_is_enforced_of_a_subschema_that_cannot_be(grammars: Grammars) -> None:
    odd = {"type": "string", "minLength": 10**6}
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "odd": odd}, "required": ["n", "odd"]}
    at = compiled(granted(grammars, asked(schema, VALIDATE)))
    assert accepts(at, '{"n":1,"odd":"x"}') and not accepts(at, '{"n":1,"odd":[]}')
    assert not accepts(at, '{"n":"1","odd":"x"}') and not accepts(at, '{"n":1}')


def test_what_the_engine_cannot_compile_is_enforced_in_part(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "text": _MANY_PATTERNS},
        "required": ["n", "text"],
        "additionalProperties": False,
    }
    with pytest.raises(InvalidArgument, match="regex"):
        granted(grammars, asked(schema, ConstraintMode.STRICT))
    made = granted(grammars, asked(schema, VALIDATE))
    at = compiled(made)
    assert not made.exact and "more than the grammar engine can take" in made.warnings[0]
    assert accepts(at, '{"n":1,"text":"axaaybz"}')
    assert not accepts(at, '{"n":"1","text":"a"}') and not accepts(at, '{"n":1,"text":1}') and not accepts(at, "{}")


def test_a_schema_that_ends_the_process_is_not_enforced_where_it_need_not_be() -> None:
    made = Grammars(BYTES, seconds=0.1)
    try:
        bomb = {"type": "object", "properties": {f"p{i}": {"pattern": "(a|b|cd*){1,300}x"} for i in range(400)}}
        with pytest.raises(InvalidArgument, match="processor time"):
            granted(made, asked(bomb, ConstraintMode.STRICT))
        found = granted(made, asked(bomb, VALIDATE))
        assert not found.exact and accepts(compiled(found), '{"p1":"acddx"}')
    finally:
        made.close()


def test_each_wider_schema_accepts_what_the_one_before_did() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"allOf": [{"type": "string", "pattern": "^x"}, {"minLength": 3}]},
            "b": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/r0"}]}},
        },
        "patternProperties": {"^c": {"type": "null"}},
        "additionalProperties": False,
        "required": ["a"],
        "$defs": {"r0": {"type": "object", "properties": {"d": {"type": "integer"}}}},
    }
    values = [{"a": "xab"}, {"a": "xab", "b": [1, {"d": 2}], "c1": None}, {"a": "x"}, {"a": 1}, {"d": 1}, 3, {"a": "y"}]
    before = jsonschema_rs.validator_for(schema)
    accepted = []
    for wider, _without in [(schema, ""), *widened(schema)]:
        judge = jsonschema_rs.validator_for(wider)
        assert all(judge.is_valid(value) for value in values if before.is_valid(value))
        accepted.append(sum(map(judge.is_valid, values)))
        before = judge
    assert accepted[0] == 2 and accepted[-1] == len(values) and accepted == sorted(accepted)


def test_distinct_items_at_the_depth_where_a_schema_is_cut_are_left_open() -> None:
    deep: Any = {"type": "array", "uniqueItems": True, "items": {"enum": list(range(8))}}
    for _ in range(7):
        deep = {"type": "object", "properties": {"a": deep}}
    found = [compiled(made) for made in attempts(JsonSchema(json.dumps(deep)), ConstraintMode.VALIDATE)]
    assert not any(at.is_error() for at in found)


def test_an_answer_that_is_nested_too_deep_is_no_valid_one() -> None:
    with pytest.raises(FailedPrecondition, match="nested too deep"):
        AnswerValidator('{"type": "array"}').check("[" * 5000 + "]" * 5000)


def test_a_check_that_takes_too_long_ends_and_the_next_one_is_answered() -> None:
    """A validator tries both branches of each definition: 2³⁰ times, which nothing could end in the server itself."""
    halves = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)}
    judge = AnswerValidator(json.dumps({"$ref": "#/$defs/a0", "$defs": halves | {"a30": {"type": "integer"}}}))
    judge.check("1")
    with pytest.raises(FailedPrecondition, match="cannot be checked against its schema in 1 s"):
        judge.check('"x"')
    judge.check("1")
    with pytest.raises(InvalidArgument, match="cannot be checked against"):
        AnswerValidator('{"type": "nothing"}')


def test_a_process_that_is_killed_from_outside_is_replaced() -> None:
    validator = ValidatorProcess()
    judge = AnswerValidator('{"type": "integer"}', process=validator)
    assert validator._child is not None
    validator._child.kill()
    with pytest.raises(FailedPrecondition, match="does not satisfy its schema at the root: type"):
        judge.check('"x"')
    validator.close()


def test_attempts_end_with_any_json_or_a_reason() -> None:
    schema = JsonSchema(json.dumps({"uniqueItems": True, "type": "array"}))
    made = list(attempts(schema, LENIENT))
    assert not any(grammar.exact for grammar in made) and made[-1].longest is None
    with pytest.raises(Refused, match="uniqueItems"):
        list(attempts(schema, ConstraintMode.STRICT))
