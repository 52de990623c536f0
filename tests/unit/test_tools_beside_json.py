"""Answers that are calls of tools, or a document under a schema: their grammar, and how they are read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from grammars import accepts, grammar, matcher

from mmserve.constraint.compile import wire
from mmserve.constraint.findings import Refused
from mmserve.constraint.session.validation import validator_of
from mmserve.core.constraint import CallsOrJson, ConstraintMode, ConstraintSpec, JsonSchema, Lark, SchemaOption
from mmserve.core.events import Delta, Event, Finished, StageTimes, Usage
from mmserve.core.tools import Tool, ToolChoice, ToolUse
from mmserve.errors import FailedPrecondition
from mmserve.rpc.tool_messages import tool_constraint, wrong_tools
from mmserve.tools.answer import ToolAnswers
from mmserve.tools.formats import FORMATS, HERMES, LLAMA3, ToolFormat
from mmserve.tools.grammar import openings
from mmserve.tools.parse import written
from mmserve.v1 import generation_pb2 as pb

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USE = ToolUse(tools=(Tool("get_weather", json.dumps(CITY)), Tool("now")))
CALLED = [("get_weather", '{"city": "Oslo"}'), ("now", "{}")]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": "integer"}},
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
COUNT = {
    "type": "object",
    "properties": {"count": {"type": "integer"}},
    "required": ["count"],
    "additionalProperties": False,
}


def spec(form: ToolFormat, schema: Any, use: ToolUse = USE, mode: ConstraintMode = ConstraintMode.STRICT) -> Any:
    text = ConstraintSpec(JsonSchema(json.dumps(schema)), mode)
    return tool_constraint(use, SimpleNamespace(tool_format=form.name), text)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
@pytest.mark.parametrize("schema", [COUNT, {"type": "array", "items": COUNT}, {"enum": [1, "<tool_call>"]}], ids=str)
def test_an_answer_is_calls_or_a_document(form: ToolFormat, schema: Any) -> None:
    at = matcher(spec(form, schema).kind)
    documents = {
        "object": ['{"count": 3}', '{"count":-1}'],
        "array": ['[{"count": 3}]', "[]"],
    }.get(schema.get("type"), ["1", '"<tool_call>"'])
    for text in (*documents, written(form, CALLED[: 1 + form.several]), written(form, CALLED[1:])):
        assert accepts(at, text), text
    wrong = written(form, [("get_weather", '{"town": "Oslo"}')])
    unknown = written(form, [("gone", "{}")])
    both = written(form, CALLED[:1])
    for text in ("It rains.", '{"count": "x"}', wrong, unknown, f"{documents[0]}{both}", f"{both}{documents[0]}", ""):
        assert not accepts(at, text), text
    assert not accepts(at, f"Well: {both}")
    single = matcher(spec(form, schema, ToolUse(tools=USE.tools, parallel=False)).kind)
    assert accepts(single, both) and not accepts(single, written(form, CALLED))


def test_a_document_of_members_with_the_names_of_a_call() -> None:
    """Llama 3's calls are JSON: the two have the same beginning, and only one of them may be meant."""
    at = matcher(spec(HERMES, PERSON).kind)
    assert accepts(at, '{"name": "now", "parameters": 1}') and accepts(at, written(HERMES, CALLED))
    with pytest.raises(Refused, match=r"begin as a call of a tool does.*get_weather"):
        grammar(spec(LLAMA3, PERSON).kind)
    with pytest.raises(Refused, match="begin as a call"):
        grammar(spec(LLAMA3, {"type": "object"}).kind)
    named = {**PERSON, "properties": {**PERSON["properties"], "name": {"enum": ["nowhere", "no", "get"]}}}
    at = matcher(spec(LLAMA3, named).kind)
    for text in ('{"name": "nowhere", "parameters": 1}', '{"name": "no","parameters": 1}', written(LLAMA3, CALLED[1:])):
        assert accepts(at, text), text
    assert not accepts(at, '{"name": "now", "parameters": 1}')


@pytest.mark.parametrize(
    "use", [ToolUse(tools=USE.tools, choice=ToolChoice.REQUIRED), ToolUse(tools=USE.tools, named="now")]
)
def test_where_a_tool_must_be_called_the_schema_has_no_effect(use: ToolUse) -> None:
    kind = spec(HERMES, COUNT, use).kind
    assert isinstance(kind, Lark) and accepts(matcher(kind), written(HERMES, CALLED[1:]))
    assert not accepts(matcher(kind), '{"count": 3}')


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
@pytest.mark.parametrize("streams", [True, False])
def test_calls_and_documents_are_read_for_what_they_are(form: ToolFormat, streams: bool) -> None:
    def read(text: str) -> tuple[str, list[tuple[str, str]], str]:
        answers = ToolAnswers(form, openings(USE, form), streams=streams)
        end = Finished("end", text, Usage(1, 0, 1), 1, 1, StageTimes())
        events: list[Event] = [*(Delta(char) for char in text)] if streams else []
        sent = [event for each in [*events, end] for event in answers.of(each)]
        if streams:
            assert "".join(event.text for event in sent if isinstance(event, Delta)) == sent[-1].text  # type: ignore[union-attr]
        last = sent[-1]
        assert isinstance(last, Finished)
        return last.text, [(call.name, call.arguments) for call in last.tool_calls], last.reason

    for document in ('{"count": 3}', '{"name": "nowhere", "parameters": {}}', '{"name": "no"}', '{"', "[1]"):
        assert read(document) == (document, [], "end")
    assert read(written(form, CALLED)) == ("", CALLED, "tool_calls")


def test_what_a_grammar_cannot_enforce_of_a_document_is_checked_unless_it_is_a_call() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    loose = spec(HERMES, schema, mode=ConstraintMode.VALIDATE)
    made = grammar(loose.kind, ConstraintMode.VALIDATE)
    assert not made.exact and made.warnings
    judge = validator_of(loose, exact=made.exact)
    assert judge is not None
    for text in ("[1, 2]", written(HERMES, CALLED)):
        judge.check(text)
    with pytest.raises(FailedPrecondition, match="uniqueItems"):
        judge.check("[1, 1]")
    with pytest.raises(Refused, match="uniqueItems"):
        grammar(loose.kind)


def test_a_strict_document_beside_a_tool_that_is_not() -> None:
    odd = {"type": "object", "properties": {"a": {"$ref": "#/components/schemas/X"}}}
    use = ToolUse(tools=(Tool("f", json.dumps(odd), strict=False),))
    made = grammar(spec(HERMES, COUNT, use).kind)
    assert made.exact and any("/properties/a" in each for each in made.warnings)
    strict = ToolUse(tools=(Tool("g", json.dumps(odd), strict=False), Tool("f", json.dumps(odd))))
    with pytest.raises(Refused, match="/2/properties/a"):
        grammar(spec(HERMES, COUNT, strict).kind)


def test_the_constraint_goes_to_the_process_that_compiles_it_and_back() -> None:
    kind = CallsOrJson('start: "a"', ("a", "b"), "{}", (SchemaOption.EXPONENTS,), (1, 3))
    for mode in ConstraintMode:
        asked = ConstraintSpec(kind, mode)
        assert wire.to_spec(json.loads(json.dumps(wire.from_spec(asked)))) == asked


def test_constraints_that_are_no_schema_are_refused_beside_tools() -> None:
    message = pb.GenerateRequest(constraint=pb.Constraint(regex="a"))
    message.tools.add(name="f")
    [(field, why)] = wrong_tools(message)
    assert field == "constraint.regex" and "json_schema" in why
    message.tool_choice = pb.TOOL_CHOICE_NONE
    assert not list(wrong_tools(message))
    message = pb.GenerateRequest(constraint=pb.Constraint(json_schema="{}"))
    message.tools.add(name="f")
    assert not list(wrong_tools(message))
