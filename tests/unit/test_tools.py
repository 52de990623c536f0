"""Tool calls: formats, the grammar that admits only valid calls, and the reading of answers in parts of any size."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
from grammars import accepts, grammar, matcher
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mmserve.config import ModelConfig
from mmserve.constraint.admission import Admission
from mmserve.constraint.findings import Refused, as_error
from mmserve.constraint.limits import MAX_GRAMMAR_BYTES
from mmserve.core.constraint import ConstraintMode, ConstraintSpec, JsonSchema, Lark
from mmserve.core.events import Delta, Event, Finished, StageTimes, ToolCallDelta, Usage
from mmserve.core.tools import Tool, ToolChoice, ToolUse
from mmserve.errors import InvalidArgument
from mmserve.models.chat import call_arguments, load_tokenizer, prompt_ids
from mmserve.models.registry import load_model, model_folder
from mmserve.reference.calls import CALLS, NO_TOOL
from mmserve.rpc.tool_messages import (
    MAX_CUT_CHARACTERS,
    MAX_LEVELS,
    MAX_TOOL_BYTES,
    MAX_TOOLS,
    named_tools,
    named_warnings,
    parse_tools,
    tool_constraint,
    wrong_tools,
)
from mmserve.rpc.violations import _wrong_template_options
from mmserve.tools.answer import ToolAnswers
from mmserve.tools.formats import FORMATS, HERMES, LLAMA3, ToolFormat, format_in
from mmserve.tools.grammar import _not_begun, _without, tool_grammar
from mmserve.tools.parse import CallPiece, CallReader, TextPiece, written
from mmserve.v1 import generation_pb2 as pb

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (Tool("get_weather", json.dumps(CITY), "Weather of a city"), Tool("now"))
CALLED = [("get_weather", '{"city": "Pa\\"}ris"}'), ("now", "{}")]


@pytest.mark.parametrize("mark", ["<ab>", "<b"])
def test_texts_without_a_mark_and_texts_that_do_not_begin_with_it(mark: str) -> None:
    without, not_begun = re.compile(_without(mark)), re.compile(_not_begun(mark))
    for size in range(1, 7):
        for chars in itertools.product("<ab>x", repeat=size):
            text = "".join(chars)
            assert bool(without.fullmatch(text)) == (mark not in text), text
            assert bool(not_begun.fullmatch(text)) == (not text.startswith(mark)), text
    assert not without.fullmatch("") and not not_begun.fullmatch("")


@pytest.fixture(scope="module")
def admission() -> Iterator[Admission]:
    found = Admission(load_model(ModelConfig(path="bundled")))
    yield found
    found.close()


def takes(admission: Admission, use: ToolUse, form: ToolFormat, text: str) -> bool:
    """Whether ``text`` is an answer under ``use``."""
    spec = ConstraintSpec(Lark(tool_grammar(use, form)), ConstraintMode.LENIENT)
    [session] = admission.admit(spec, 120)
    language = session.answer.witness.language
    assert language is not None
    matcher = language.start()
    tokens = admission._model.tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.ends(tokens))


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_the_grammar_takes_text_or_calls_as_asked(admission: Admission, form: ToolFormat) -> None:
    one, both = written(form, CALLED[1:]), written(form, CALLED)
    wrong = written(form, [("get_weather", '{"town": "Paris"}')])
    unknown = written(form, [("gone", "{}")])
    auto = ToolUse(tools=TOOLS)
    for text, right in (("It rains.", True), (one, True), (both, form.several), (wrong, False), (unknown, False)):
        assert takes(admission, auto, form, text) == right, text
    assert takes(admission, auto, form, f"Well: {one}")  # text and a call, or text alone
    [read] = [CallReader(form).feed(f"Well: {one}")]
    assert any(isinstance(piece, CallPiece) for piece in read) == form.after_text
    assert not takes(admission, auto, form, f"{one} done")
    assert not takes(admission, auto, form, f"Well: {wrong}") or not form.after_text
    for use in (ToolUse(tools=TOOLS, choice=ToolChoice.REQUIRED), ToolUse(tools=TOOLS, named="now")):
        assert takes(admission, use, form, one) and not takes(admission, use, form, "It rains.")
    assert not takes(admission, ToolUse(tools=TOOLS, named="get_weather"), form, one)
    assert not takes(admission, ToolUse(tools=TOOLS, parallel=False), form, both)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
@pytest.mark.parametrize("choice", [ToolChoice.AUTO, ToolChoice.REQUIRED])
def test_only_allowed_tools_are_called(admission: Admission, form: ToolFormat, choice: ToolChoice) -> None:
    use = ToolUse(tools=TOOLS, choice=choice, allowed=("now",))
    assert takes(admission, use, form, written(form, CALLED[1:]))
    assert not takes(admission, use, form, written(form, CALLED[:1]))
    assert takes(admission, use, form, "It rains.") == (choice is ToolChoice.AUTO)
    with_both = ToolUse(tools=TOOLS, choice=choice, allowed=("now", "get_weather"))
    assert takes(admission, with_both, form, written(form, CALLED[: 1 + form.several]))


def test_allowed_tools_are_some_of_the_tools() -> None:
    message = asked_with([{"name": "f"}, {"name": "g"}])
    message.allowed_tools.extend(["g", "h"])
    assert dict(wrong_tools(message)) == {"allowed_tools[1]": "must be the name of one of the tools"}
    del message.allowed_tools[1:]
    assert not list(wrong_tools(message))
    use = parse_tools(message)
    assert use is not None and [tool.name for tool in use.tools] == ["f", "g"], "the prompt has all of them"
    assert [tool.name for tool in use.callable] == ["g"] and "f" not in lark_of(message).partition("start:")[2]
    message.required_tool = "f"
    assert dict(wrong_tools(message)) == {"required_tool": "must be one of allowed_tools"}
    del message.tools[:]
    message.ClearField("required_tool")
    assert dict(wrong_tools(message)) == {"allowed_tools": "must not be set without tools"}


@pytest.mark.parametrize("beside_json", [False, True])
def test_a_refused_schema_is_that_of_its_tool(beside_json: bool) -> None:
    odd = json.dumps({"type": "object", "properties": {"a": {"type": "strange"}}})
    use = ToolUse(tools=(Tool("f"), Tool("g"), Tool("h", odd)), allowed=("g", "h"))
    text = ConstraintSpec(JsonSchema("{}")) if beside_json else None
    spec = tool_constraint(use, SimpleNamespace(tool_format="hermes"), text)  # type: ignore[arg-type]
    with pytest.raises(Refused) as refused:
        grammar(spec.kind)
    named = named_tools(as_error("json_schema" if beside_json else "lark", refused.value.findings), use)
    assert isinstance(named, InvalidArgument)
    assert [each.field for each in named.violations] == ["tools[2].parameters_json_schema#/properties/a/type"]
    assert "line" not in named.violations[0].description
    others = InvalidArgument.of("sampling.max_new_tokens", "must be at least 9")
    assert named_tools(others, use).violations == others.violations  # type: ignore[attr-defined]
    own = InvalidArgument.of("constraint.json_schema#/properties/3", "type: is odd")
    assert named_tools(own, use).violations == own.violations  # type: ignore[attr-defined]


A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANY = {"properties": {"a": {"type": "integer"}}}
OLD = "http://json-schema.org/draft-07/schema#"  # what is beside $ref has no effect there


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": {"a": {"type": "integer"}}},
        {"type": ["object", "string", "integer"]},
        {"anyOf": [A, {"type": "string"}, {"type": "integer"}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [A, {"type": ["string", "integer"]}]}}},
        {"$schema": OLD, "$ref": "#/definitions/x", "definitions": {"x": ANY}, "required": ["b"]},
        {"$schema": OLD, "$ref": "#/components/x", "components": {"x": ANY}, "allOf": 1},
    ],
    ids=lambda schema: next(iter(schema), "any"),
)
def test_arguments_are_an_object_also_where_their_schema_leaves_that_open(
    admission: Admission, schema: dict[str, Any]
) -> None:
    """Of anything else the reader finds no end."""
    message = pb.GenerateRequest(tool_choice=pb.TOOL_CHOICE_REQUIRED)
    message.tools.add(name="f", parameters_json_schema=json.dumps(schema), strict=False)
    assert not list(wrong_tools(message))
    use = parse_tools(message)
    assert use is not None
    assert takes(admission, use, HERMES, written(HERMES, [("f", '{"a": 1}')]))
    for other in ("5", '"x"'):
        assert not takes(admission, use, HERMES, written(HERMES, [("f", other)]))


def asked_with(tools: list[dict[str, Any]]) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    for tool in tools:
        message.tools.add(strict=False, **tool)
    return message


def lark_of(message: pb.GenerateRequest) -> str:
    use, info = parse_tools(message), SimpleNamespace(tool_format="hermes")
    assert use is not None
    kind = tool_constraint(use, info).kind  # type: ignore[arg-type]
    assert isinstance(kind, Lark)
    return kind.text


def test_texts_of_tools_are_for_the_prompt_alone(admission: Admission) -> None:
    """A coding agent's tools have some 100 KB of them; a property may have the name of such a keyword."""
    inner = {"type": "object", "properties": {"title": {"type": "string", "title": "x" * 900, "default": ""}}}
    schema = {
        "description": "d" * 2000,
        "properties": {
            "description": {"type": "string", "description": "e" * 900},
            "example": inner,
            "kind": {"enum": ["title"]},
        },
        "required": ["description"],
        "additionalProperties": False,
    }
    names = [f"{'n' * 125}{i:03}" for i in range(20)]
    tools = [{"name": n, "description": "f" * 6000, "parameters_json_schema": json.dumps(schema)} for n in names]
    message = asked_with(tools)
    assert not list(wrong_tools(message)) and len(str(message)) > 150_000
    use = parse_tools(message)
    assert use is not None and "d" * 2000 in use.tools[0].parameters, "the prompt has them"
    lark = lark_of(message)
    assert len(lark) < 16_000 and not re.search("xxx|ddd|eee|fff", lark)
    one = asked_with([{**tools[0], "name": "f"}])
    at = matcher(Lark(lark_of(one)), ConstraintMode.LENIENT)
    text = written(HERMES, [("f", '{"description": "a", "example": {"title": "b"}, "kind": "title"}')])
    assert accepts(at, text) and not accepts(at, written(HERMES, [("f", '{"title": "a"}')]))


@pytest.mark.parametrize("length", [3, 128])
def test_what_is_not_refused_makes_a_grammar_that_is_small_enough(length: int) -> None:
    def asked(count: int) -> pb.GenerateRequest:
        properties = {f"p{i}": {} for i in range(count)}
        last = {"name": "last", "parameters_json_schema": json.dumps({"type": "object", "properties": properties})}
        return asked_with([*({"name": f"{i:0{length}}"} for i in range(40)), last])

    most = max(count for count in range(0, 6000, 200) if not list(wrong_tools(asked(count))))
    assert MAX_GRAMMAR_BYTES - 4096 < len(lark_of(asked(most))) <= MAX_GRAMMAR_BYTES
    assert "texts do not count" in dict(wrong_tools(asked(most + 200)))["tools"]


def test_the_grammar_is_of_the_tools_that_can_be_called_alone_and_counted_in_bytes() -> None:
    def asked(values: int) -> pb.GenerateRequest:
        schema = {"type": "object", "properties": {"a": {"enum": ["\u65e5" * values]}}}
        return asked_with([{"name": "small"}, {"name": "large", "parameters_json_schema": json.dumps(schema)}])

    assert not list(wrong_tools(asked(20_000))) and len(lark_of(asked(20_000)).encode()) <= MAX_GRAMMAR_BYTES
    message = asked(24_000)
    assert "texts do not count" in dict(wrong_tools(message))["tools"]
    message.tool_choice = pb.TOOL_CHOICE_NONE
    assert not list(wrong_tools(message))
    message.required_tool = "small"
    assert not list(wrong_tools(message)) and len(lark_of(message)) < 1000
    message.required_tool = "large"
    assert [field for field, _ in wrong_tools(message)] == ["tools"]
    message.tool_choice = pb.TOOL_CHOICE_AUTO
    message.allowed_tools.append("small")
    assert not list(wrong_tools(message))


@pytest.mark.parametrize("text", ['{"a": NaN}', r'{"a": "\ud800"}', r'{"\udc00": 1}', "[1]", "{]", ""])
def test_what_a_template_writes_is_json(text: str) -> None:
    message = pb.GenerateRequest()
    message.messages.add(role=pb.ROLE_ASSISTANT).tool_calls.add(name="f", arguments=text)
    message.tools.add(name="f", parameters_json_schema=text)
    fields = ["messages[0].tool_calls[0].arguments", *(["tools[0].parameters_json_schema"] if text else [])]
    assert [field for field, _ in wrong_tools(message)] == fields
    assert not text or [*_wrong_template_options(text)]
    message.messages[0].tool_calls[0].arguments = r'{"a": "\ud83d\ude42"}'
    assert [field for field, _ in wrong_tools(message)] == fields[1:]


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ('{"city": "Pa', True),
        (' {"a": [1, {"b', True),
        ("{", True),
        ("[1", False),
        ("cut", False),
        ('{"a" 1, "b', False),
        ("{} {", False),
        ("{}}", False),
        (r'{"a": "\ud83d", "b', False),
        ('{"a":' * 300, False),
        ('{"a": "' + "x" * MAX_CUT_CHARACTERS, False),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_call_that_was_cut_may_be_sent_back(tokenizer: PreTrainedTokenizerFast, arguments: str, right: bool) -> None:
    """As the model wrote it: the beginning of an object. Everything else that is no object is refused."""
    message = pb.GenerateRequest()
    message.messages.add(role=pb.ROLE_ASSISTANT).tool_calls.add(name="f", arguments=arguments)
    field = "messages[0].tool_calls[0].arguments"
    assert [name for name, _ in wrong_tools(message)] == ([] if right else [field])
    if right:
        whole = {"id": "0", "type": "function", "function": {"name": "g", "arguments": call_arguments('{"a": 1}')}}
        cut = {"id": "1", "type": "function", "function": {"name": "f", "arguments": call_arguments(arguments)}}
        chat = [{"role": "assistant", "content": "<|eot_id|>", "tool_calls": [whole, cut]}]
        text = tokenizer.decode(prompt_ids(tokenizer, chat))
        for call in (("g", '{"a": 1}'), ("f", arguments)):
            assert written(HERMES, [call]) in text


def test_a_template_that_does_not_write_json_refuses_a_call_that_was_cut() -> None:
    kept = load_tokenizer(Path(model_folder("bundled")))
    kept.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>{{ v }}{% endfor %}{% endfor %}{% endfor %}"
    )

    def ids(arguments: str) -> list[int]:
        call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": call_arguments(arguments)}}
        return prompt_ids(kept, [{"role": "assistant", "content": "", "tool_calls": [call]}])

    assert ids('{"a": "b"}')
    with pytest.raises(InvalidArgument, match="no whole JSON"):
        ids('{"a": "b')


def test_tools_are_bounded() -> None:
    many = [{"name": f"{i:03}"} for i in range(MAX_TOOLS + 1)]
    assert not list(wrong_tools(asked_with(many[1:]))) and len(lark_of(asked_with(many[1:]))) <= MAX_GRAMMAR_BYTES
    assert "at most" in dict(wrong_tools(asked_with(many)))["tools"]
    wrong = dict(wrong_tools(asked_with([{"name": "f", "description": "d" * (MAX_TOOL_BYTES + 1)}])))
    assert "bytes together" in wrong["tools"]


@pytest.mark.parametrize(
    ("levels", "right"), [(MAX_LEVELS, True), (MAX_LEVELS + 1, False), (900, False), (9000, False)]
)
def test_what_a_template_writes_has_few_levels(tokenizer: PreTrainedTokenizerFast, levels: int, right: bool) -> None:
    text = '{"a":' * levels + "1" + "}" * levels
    message = pb.GenerateRequest()
    message.messages.add(role=pb.ROLE_ASSISTANT).tool_calls.add(name="f", arguments=text)
    message.tools.add(name="f", parameters_json_schema=text)
    fields = ["messages[0].tool_calls[0].arguments", "tools[0].parameters_json_schema"]
    assert [field for field, _ in wrong_tools(message)] == ([] if right else fields)
    assert bool([*_wrong_template_options(text)]) != right
    if right:
        call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": json.loads(text)}}
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": json.loads(text)}}
        chat = [{"role": "assistant", "content": "<|eot_id|>", "tool_calls": [call]}]
        assert len(prompt_ids(tokenizer, chat, [tool])) > levels


def test_tools_that_a_template_cannot_write_are_in_the_error(tokenizer: PreTrainedTokenizerFast) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"properties": 3}}}
    with pytest.raises(InvalidArgument, match="the model's chat template refuses them, or the tools: "):
        prompt_ids(tokenizer, [{"role": "user", "content": "a"}], [tool])


@pytest.mark.parametrize("part", [{"$ref": "#/components/schemas/X"}, {"enum": [0.12345678901234567]}])
def test_arguments_of_a_tool_that_is_not_strict_are_enforced_in_part(part: Any) -> None:
    schema = {"type": "object", "properties": {"a": part, "b": {"type": "integer"}}}
    use = ToolUse(tools=(Tool("f", json.dumps(schema), strict=False),), choice=ToolChoice.REQUIRED)
    text = Lark(tool_grammar(use, HERMES))
    made = grammar(text, ConstraintMode.LENIENT)
    assert made.warnings and "/properties/a" in made.warnings[0]
    both = replace(use, tools=(Tool("other"), *use.tools), allowed=("f",))
    [named, *others] = named_warnings(
        replace(finished(""), warnings=(made.warnings[0], "/1: a", "slow: /1/2")), both
    ).warnings
    assert named.startswith("tool 'f': /properties/a") and others == ["tool 'f': a", "slow: /1/2"]
    at = matcher(text, ConstraintMode.LENIENT)
    assert accepts(at, written(HERMES, [("f", '{"a": 1, "b": 2}')]))
    assert not accepts(at, written(HERMES, [("f", '{"a": 1, "b": "x"}')]))
    for mode in (ConstraintMode.STRICT, ConstraintMode.VALIDATE):
        with pytest.raises(Refused, match="/properties/a"):
            grammar(text, mode)


@pytest.mark.parametrize("part", [{"minProperties": 1 << 40}, {"allOf": [{"$ref": "#/gone"}]}, {"$schema": "x:/y"}])
def test_arguments_are_an_object_if_nothing_of_their_schema_is_enforced(part: Any) -> None:
    text = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, **part})
    use = ToolUse(tools=(Tool("f", text, strict=False),), choice=ToolChoice.REQUIRED)
    made = Lark(tool_grammar(use, HERMES))
    assert grammar(made, ConstraintMode.LENIENT).warnings
    at = matcher(made, ConstraintMode.LENIENT)
    assert accepts(at, written(HERMES, [("f", '{"b": 1}')])) and not accepts(at, written(HERMES, [("f", '"x"')]))


@pytest.mark.parametrize("strict", [True, False])
def test_null_is_no_keyword_in_a_schema_of_a_tool_that_is_not_strict(strict: bool) -> None:
    """Encoders of some languages write it for empty lists."""
    message = pb.GenerateRequest()
    part = {"type": "integer", "enum": None}
    schema = {"type": "object", "properties": {"a": part}, "required": None, "additionalProperties": False}
    message.tools.add(name="f", parameters_json_schema=json.dumps(schema), strict=strict)
    message.tool_choice = pb.TOOL_CHOICE_REQUIRED
    use = parse_tools(message)
    assert use is not None
    text = Lark(tool_grammar(use, HERMES), (1,) if strict else ())
    if strict:
        with pytest.raises(Refused, match="/required"):
            grammar(text, ConstraintMode.LENIENT)
        return
    assert not grammar(text, ConstraintMode.LENIENT).warnings
    at = matcher(text, ConstraintMode.LENIENT)
    assert accepts(at, written(HERMES, [("f", "{}")])) and accepts(at, written(HERMES, [("f", '{"a": 1}')]))
    assert not accepts(at, written(HERMES, [("f", '{"a": "x"}')]))


@pytest.mark.parametrize("part", [{"properties": {"a": "x"}}, {"properties": []}, {"required": "a"}])
def test_a_malformed_schema_of_a_tool_that_is_not_strict_is_refused(part: Any) -> None:
    use = ToolUse(tools=(Tool("f", json.dumps({"type": "object", **part}), strict=False),), choice=ToolChoice.REQUIRED)
    with pytest.raises(Refused, match=f"/{next(iter(part))}"):
        grammar(Lark(tool_grammar(use, HERMES)), ConstraintMode.LENIENT)


def test_a_strict_tool_is_enforced_completely_beside_one_that_is_not() -> None:
    """Each tool has its own ``strict``; a schema that cannot be enforced is refused by the name of the strict tool."""
    odd, plain = ({"type": "object", "properties": {"a": part}} for part in ({"$ref": "#/gone"}, {"type": "integer"}))
    message = pb.GenerateRequest()
    for name, schema, strict in (("loose", odd, False), ("plain", plain, True), ("strict", odd, True)):
        message.tools.add(name=name, parameters_json_schema=json.dumps(schema), strict=strict)
    use, info = parse_tools(message), SimpleNamespace(tool_format="hermes")
    assert use is not None
    spec = tool_constraint(use, info)  # type: ignore[arg-type]
    with pytest.raises(Refused) as refused:
        grammar(spec.kind, spec.mode)
    error = named_tools(as_error("lark", refused.value.findings), use)
    assert isinstance(error, InvalidArgument)
    assert [each.field for each in error.violations] == ["tools[2].parameters_json_schema#/properties/a/$ref"]
    fewer = tool_constraint(replace(use, tools=use.tools[:2]), info)  # type: ignore[arg-type]
    assert [each.startswith("/1/properties/a") for each in grammar(fewer.kind, fewer.mode).warnings] == [True]


@pytest.mark.parametrize("kind", ["string", ["array", "null"]])
def test_a_schema_of_arguments_that_takes_no_object_is_refused(kind: Any) -> None:
    message = pb.GenerateRequest()
    message.tools.add(name="f", parameters_json_schema=json.dumps({"type": kind}))
    [(field, why)] = wrong_tools(message)
    assert field == "tools[0].parameters_json_schema" and "must have the type object" in why


def test_a_schema_without_a_value_is_that_of_its_tool(admission: Admission) -> None:
    nothing = Tool("f", json.dumps({"type": "object", "allOf": [{"type": "object"}, {"type": "string"}]}))
    for use, field in (
        (ToolUse(tools=(Tool("g"), nothing), named="f"), "tools[1].parameters_json_schema"),
        (ToolUse(tools=(Tool("g"), nothing)), "tools"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            admission.admit(ConstraintSpec(Lark(tool_grammar(use, HERMES))), 120)
        [wrong] = named_tools(refused.value, use).violations  # type: ignore[attr-defined]
        assert wrong.field == field and wrong.description.startswith("failed to compile JSON schema: Unsatisfiable")


def test_the_shortest_answer_is_one_call(admission: Admission) -> None:
    use = ToolUse(tools=TOOLS, choice=ToolChoice.REQUIRED)
    with pytest.raises(InvalidArgument, match="must be at least") as refused:
        admission.admit(ConstraintSpec(Lark(tool_grammar(use, HERMES)), ConstraintMode.LENIENT), 8)
    shortest = len(admission._model.tokenizer.encode(written(HERMES, CALLED[1:]), add_special_tokens=False))
    needed = re.search(r"at least (\d+)", str(refused.value))
    assert needed is not None and int(needed[1]) <= shortest


TEXT = st.text(alphabet='<tol_ca>\n{"name: é', max_size=12)
VALUES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=6), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3).map(json.dumps)


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from([HERMES, LLAMA3]),
    text=TEXT,
    calls=st.lists(st.tuples(st.sampled_from(["now", "get_weather"]), ARGUMENTS), max_size=3),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_calls_are_read_whatever_parts_the_text_comes_in(
    form: ToolFormat, text: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    if "<tool_call>" in text or (calls and not form.after_text) or text.startswith(form.opening):
        text = ""
    whole = text + written(form, calls)
    reader, pieces, at = CallReader(form), list[TextPiece | CallPiece](), 0
    for size in itertools.cycle(cuts):
        pieces += reader.feed(whole[at : at + size])
        at += size
        if at >= len(whole):
            break
    pieces += reader.end()
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == text
    found: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            name_arguments = found.setdefault(piece.index, ["", ""])
            name_arguments[0] += piece.name
            name_arguments[1] += piece.arguments
    assert [tuple(each) for _, each in sorted(found.items())] == calls


def finished(text: str, reason: str = "end") -> Finished:
    return Finished(reason, text, Usage(1, 0, 1), 1, 1, StageTimes())


def sent(events: list[Event], *, streams: bool) -> list[Event]:
    answers = ToolAnswers(HERMES, streams=streams)
    return [event for each in events for event in answers.of(each)]


def test_events_of_an_answer_with_calls() -> None:
    text = f"Wait. {written(HERMES, CALLED)}"
    whole = sent([finished(text)], streams=False)
    streamed = sent([*(Delta(char) for char in text), finished(text)], streams=True)
    for events in (whole, streamed):
        last = events[-1]
        assert isinstance(last, Finished) and last.reason == "tool_calls" and last.text == "Wait. "
        assert [(call.name, call.arguments) for call in last.tool_calls] == CALLED
        ids = [call.id for call in last.tool_calls]
        assert len(set(ids)) == 2
    assert len(whole) == 1
    assert "".join(event.text for event in streamed if isinstance(event, Delta)) == "Wait. "
    deltas = [event for event in streamed if isinstance(event, ToolCallDelta)]
    assert [delta.id for delta in deltas if delta.id] == ids
    assert "".join(delta.arguments for delta in deltas if delta.index == 0) == CALLED[0][1]


def test_a_call_that_a_stop_string_cuts_is_none() -> None:
    text = written(HERMES, CALLED)
    [last] = sent([finished(text[: text.index("Pa")], "stop")], streams=False)
    assert isinstance(last, Finished) and last.tool_calls == () and last.reason == "stop" and last.text == ""
    assert last.cut_call is not None and (last.cut_call.name, last.cut_call.arguments) == ("get_weather", '{"city": "')
    [last] = sent([finished("a <tool", "stop")], streams=False)
    assert isinstance(last, Finished) and last.text == "a <tool"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(Path(model_folder("bundled")))


def test_a_template_shows_tools_calls_and_results(tokenizer: PreTrainedTokenizerFast) -> None:
    assert format_in(str(tokenizer.chat_template)) is HERMES
    box, question = CALLS.sample("result", random.Random(5))
    chat = [{"role": "user", "content": [{"type": "text", "text": question.text}]}, *question.turns]
    text = tokenizer.decode(prompt_ids(tokenizer, chat, list(question.tools)))
    for function in box.offered:
        assert f"{function.name}: {function.description}\n" in text
        for name, schema in function.properties.items():
            values = " / ".join(schema["enum"]) if "enum" in schema else schema["type"]
            assert f"\n {name}: {values}\n" in text
    call = question.turns[0]["tool_calls"][0]["function"]
    assert written(HERMES, [(call["name"], json.dumps(call["arguments"]))]) in text
    assert question.turns[1]["content"] in text
    both = [{"type": "function", "function": {"name": name, "arguments": json.loads(given)}} for name, given in CALLED]
    chat = [{"role": "assistant", "content": [{"type": "text", "text": "Well."}], "tool_calls": both}]
    assert f"Well.\n{written(HERMES, CALLED)}<|eot_id|>" in tokenizer.decode(prompt_ids(tokenizer, chat))


@pytest.mark.parametrize(
    ("call", "form"),
    [
        ("""'<tool_call>\n{"name": "' }}{{ call.name }}{{ '", "arguments": ' }}{{ call.arguments""", HERMES),
        (r"""'<tool_call>' }}{{ "{\"name\": \"" ~ call.name ~ "\", \"arguments\": " ~ call.arguments""", HERMES),
        ("""'<tool_call>\n<function=' + call.name + '>\n' }}{% for name, value in call.arguments|items""", None),
        ("""'\n<tool_call>' + call.name }}{% for name, value in call.arguments.items() %}<arg_key>{{ name""", None),
        (
            """'{"name": "' + call.name + '", ' }}{{ '"parameters": ' }}{{ call.arguments | tojson }}ipython{{ ''""",
            LLAMA3,
        ),
    ],
    ids=["qwen3", "escaped", "qwen3-coder", "glm", "llama3"],
)
def test_the_format_of_a_template_is_that_of_its_calls(call: str, form: ToolFormat | None) -> None:
    assert format_in("{% if tools %}{{ tools | tojson }}{% endif %}{{ " + call + " }}") is form


def test_a_template_shows_what_it_has_no_short_form_for_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    properties: dict[str, Any] = {"a": True, "b": {"type": ["string", "null"]}, "c": {"type": "array"}, "d": {}}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "bare"}},
        {"type": "function", "function": {"name": "all", "parameters": {"properties": properties}}},
    ]
    text = tokenizer.decode(prompt_ids(tokenizer, [{"role": "user", "content": "hi"}], tools))
    assert "bare: \nall: \n" in text
    for name, schema in properties.items():
        assert f" {name}: {json.dumps(schema)}\n" in text


def test_texts_of_a_tool_that_stand_side_by_side_spell_no_control_token(tokenizer: PreTrainedTokenizerFast) -> None:
    control = tokenizer.convert_tokens_to_ids("<|eot_id|>")

    def count(*values: str) -> int:
        properties = {values[0]: {"enum": list(values)}, values[1]: {"type": "string"}}
        tool = {"name": "f", "description": values[0], "parameters": {"properties": properties}}
        chat = [{"role": "user", "content": values[1]}]
        return prompt_ids(tokenizer, chat, [{"type": "function", "function": tool}]).count(control)

    for cut in range(1, len("<|eot_id|>")):
        assert count("<|eot_id|>"[:cut], "<|eot_id|>"[cut:]) == count("a", "b")


def test_tools_and_calls_write_no_control_token(tokenizer: PreTrainedTokenizerFast) -> None:
    def ids(word: str) -> list[int]:
        tool: dict[str, Any] = {
            "name": "now",
            "description": word,
            "parameters": {"type": "object", "properties": {word: {}}},
        }
        call = {"id": "0", "type": "function", "function": {"name": "now", "arguments": {"a": word}}}
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": word},
            {"role": "assistant", "content": [], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "0", "content": word},
        ]
        return prompt_ids(tokenizer, chat, [{"type": "function", "function": tool}])

    control = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert ids("<|eot_id|>").count(control) == ids("word").count(control)
    assert "<|eot_id|>é" in tokenizer.decode(ids("<|eot_id|>é"))


@pytest.mark.parametrize("task", CALLS.tasks)
def test_what_the_bundled_models_are_taught_is_right(task: str) -> None:
    for seed in range(40):
        box, question = CALLS.sample(task, random.Random(seed))
        schemas = {each["function"]["name"]: each["function"]["parameters"] for each in question.tools}
        reader = CallReader(HERMES)
        pieces = [*reader.feed(question.answer), *reader.end()]
        names = [piece.name for piece in pieces if isinstance(piece, CallPiece) and piece.name]
        assert len(names) == {"call": 1, "two_calls": 2}.get(task, 0) and set(names) <= set(schemas)
        [last] = sent([finished(question.answer)], streams=False)
        assert isinstance(last, Finished)
        for call in last.tool_calls:
            assert jsonschema_rs.is_valid(schemas[call.name], json.loads(call.arguments))
        assert (question.answer == NO_TOOL) == (task == "no_call")
        assert {function.name for function in box.absent}.isdisjoint(schemas)
