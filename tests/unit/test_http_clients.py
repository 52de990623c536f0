"""Bodies as programs send them that were written for OpenAI's and Anthropic's own servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmserve.errors import InvalidArgument
from mmserve.http.chat import Chat
from mmserve.http.messages import Messages, read_counted
from mmserve.http.responses import Responses
from mmserve.v1 import generation_pb2 as pb

PNG = "data:image/png;base64,iVBORw0KGgo="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
USER = [{"role": "user", "content": "a"}]


def chat(*messages: dict[str, Any], **fields: Any) -> pb.GenerateRequest:
    return Chat().read({"model": "m", "messages": list(messages) or USER, **fields}).message


def said(request: pb.GenerateRequest) -> list[tuple[str, list[str]]]:
    """Role and parts of each message; of a part that is no text, its kind."""
    names = {pb.ROLE_SYSTEM: "system", pb.ROLE_USER: "user", pb.ROLE_ASSISTANT: "assistant", pb.ROLE_TOOL: "tool"}
    return [
        (
            names[each.role],
            [part.text if part.HasField("text") else str(part.WhichOneof("part")) for part in each.parts],
        )
        for each in request.messages
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_retention": "24h"},
        {"reasoning_effort": "medium", "verbosity": "low"},
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "b"}]}},
        {"max_tokens": 9, "max_completion_tokens": 9},
        {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"min_tokens": 0, "stop_token_ids": [], "bad_words": [], "length_penalty": 1.0, "priority": 0},
        {"skip_special_tokens": True, "spaces_between_special_tokens": True, "add_special_tokens": False},
        {"include_stop_str_in_output": False, "use_beam_search": False, "return_token_ids": False, "echo": False},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_changes_no_answer_is_taken(fields: dict[str, Any]) -> None:
    asked, plain = chat(**fields), chat()
    for each in (asked, plain):
        each.ClearField("sampling")
        each.ClearField("stream")
    assert asked == plain


def test_seeds_may_be_negative_and_top_k_that_of_vllm() -> None:
    sampling = chat(seed=-1, top_k=-1).sampling
    assert (sampling.seed, sampling.top_k) == ((1 << 64) - 1, 0)
    assert chat(seed=-(1 << 63)).sampling.seed == 1 << 63 and chat(seed=7, top_k=5).sampling.top_k == 5
    for name, value in {"seed": -(1 << 63) - 1, "top_k": -2}.items():
        with pytest.raises(InvalidArgument, match=f"{name}.*out of range"):
            chat(**{name: value})


def test_values_that_nobody_knows_are_refused_by_name() -> None:
    for name, value in {
        "reasoning_effort": "boundless",
        "verbosity": "loud",
        "store": "yes",
        "prediction": "a",
        "min_tokens": 4,
        "stop_token_ids": [7],
        "skip_special_tokens": False,
        "priority": 1,
    }.items():
        with pytest.raises(InvalidArgument, match=name):
            chat(**{name: value})
    with pytest.raises(InvalidArgument, match="set one of them"):
        chat(max_tokens=8, max_completion_tokens=9)


def test_turns_of_other_servers_come_back_as_they_were() -> None:
    """What clients keep of a stream, or of a model that reasons, and a refusal in place of an answer."""
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    request = chat(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "refusal": "No.", "reasoning_content": "Hm."},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Not that."}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "", "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "1", "content": "d"},
    )
    roles = ["system", "user", "assistant", "user", "assistant", "user", "assistant", "tool"]
    texts = [["Be brief."], ["a"], ["No."], ["b"], ["Not that."], ["c"], [], ["d"]]
    assert said(request) == list(zip(roles, texts, strict=True))
    assert request.messages[6].tool_calls[0].arguments == "{}"
    with pytest.raises(InvalidArgument, match="content"):
        chat({"role": "assistant", "content": None}, *USER)


@pytest.mark.parametrize("detail", ["auto", "low", "high", None])
def test_images_with_a_detail_or_by_their_url_alone(detail: str | None) -> None:
    for image in ({"url": PNG, "detail": detail}, PNG):
        request = chat({"role": "user", "content": [{"type": "image_url", "image_url": image}]})
        assert request.messages[0].parts[0].image.data
    response = {"role": "user", "content": [{"type": "input_image", "image_url": PNG, "detail": detail}]}
    assert Responses().read({"model": "m", "input": [response]}).message.messages[0].parts[0].image.data
    with pytest.raises(InvalidArgument, match=r"image_url\.detail"):
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG, "detail": "blurred"}}]})


#: A turn of Claude Code, shortened.
CODE = {
    "model": "m",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_1"},
    "temperature": 1,
    "tools": [
        {
            "name": "mcp__" + "x" * 90,
            "description": "Reads a file",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"file_path": {"type": "string"}},
                "required": ["file_path"],
                "additionalProperties": False,
            },
            "cache_control": {"type": "ephemeral"},
            "eager_input_streaming": True,
            "defer_loading": False,
            "input_examples": [{"file_path": "/a"}],
        }
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "text", "text": "I look.", "citations": []},
                {"type": "tool_use", "id": "1", "name": "Read", "input": {"file_path": "/a.png"}},
                {"type": "tool_use", "id": "2", "name": "Read", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]},
                {
                    "type": "tool_result",
                    "tool_use_id": "2",
                    "content": [{"type": "text", "text": "b"}],
                    "is_error": True,
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ],
}


def test_a_turn_of_claude_code() -> None:
    """Images in the results of tools go to the user's message after them: a tool's result is text."""
    request = Messages().read(CODE).message
    assert said(request) == [
        ("system", ["You write code.", "Be brief."]),
        ("user", ["look"]),
        ("assistant", ["I look."]),
        ("tool", [""]),
        ("tool", ["b"]),
        ("user", ["image", "and?"]),
    ]
    assert [each.tool_call_id for each in request.messages[3:5]] == ["1", "2"]
    assert [json.loads(call.arguments) for call in request.messages[2].tool_calls] == [{"file_path": "/a.png"}, {}]


def test_messages_without_anything_to_read_are_left_out() -> None:
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]}
    turns = [*USER, thought, *USER, {"role": "assistant", "content": []}, *USER]
    request = Messages().read({"model": "m", "max_tokens": 8, "system": [], "messages": turns}).message
    assert said(request) == [("user", ["a"])] * 3


def test_what_is_counted_is_the_prompt_of_the_message() -> None:
    unknown = ("max_tokens", "stream", "metadata", "temperature")
    counted, _places = read_counted({name: value for name, value in CODE.items() if name not in unknown})
    message = Messages().read(CODE).message
    assert (counted.messages, counted.tools) == (message.messages, message.tools)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        read_counted(CODE)
    none = {"model": "m", "messages": USER, "tools": CODE["tools"], "tool_choice": {"type": "none"}}
    assert not read_counted(none)[0].tools


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget": 1}}, "thinking.budget"),
        ({"output_config": {"effort": "boundless"}}, "output_config.effort"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            r"context_management.edits\[0\].type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type"),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        Messages().read({"model": "m", "messages": USER, "max_tokens": 8, **fields})


def test_a_turn_of_an_agent_over_responses() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "e"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": PNG}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "c"},
    ]
    fields = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "service_tier": "priority",
        "store": False,
        "prompt_cache_key": "k",
    }
    asked = Responses().read({"model": "m", "input": items, **fields})
    assert said(asked.message) == [
        ("system", ["Be brief."]),
        ("user", ["a"]),
        ("assistant", []),
        ("tool", [""]),
        ("user", ["image", "b"]),
        ("assistant", ["No."]),
        ("user", ["c"]),
    ]
    assert not asked.message.stream.tokens and asked.message.messages[2].tool_calls[0].arguments == "{}"
