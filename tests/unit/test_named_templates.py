"""Tokenizers with several chat templates by name, as Hermes 2 Pro and 3 have them: ``tool_use`` is for tools."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from llama_checkpoints import llama, load, save
from qwen_checkpoints import CHATML

from mmserve.capabilities import Capabilities
from mmserve.config import EngineConfig, MediaConfig
from mmserve.core.request import Message, Request, TextPart
from mmserve.core.tools import Tool, ToolUse
from mmserve.decode.policies import Offered
from mmserve.errors import InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.models.chat import prompt_ids, template_for

#: In the manner of NousResearch/Hermes-3-Llama-3.1-8B, with an option of its own.
TOOL_USE = (
    "{{ bos_token }}<|im_start|>system\nFunctions: <tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '</tools>\n<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
    "{% if brief %} Be brief.{% endif %}<|im_end|>\n"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def loaded(folder: Path, **templates: str) -> LoadedModel:
    save(llama(), folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    named = [{"name": name, "template": template} for name, template in templates.items()]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    return load(folder)


def capabilities(model: LoadedModel) -> Capabilities:
    return Capabilities(model, EngineConfig(), MediaConfig(), Offered.by(model))


def rendered(model: LoadedModel, chat: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    return str(model.tokenizer.decode(prompt_ids(model.tokenizer, chat, tools)))


def said(role: str, *texts: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts], **more}


def test_tools_have_the_template_for_them_and_its_format(tmp_path: Path) -> None:
    model = loaded(tmp_path, default=CHATML, tool_use=TOOL_USE)
    assert capabilities(model).describe({}).tool_format == "hermes"
    call = {"type": "function", "id": "1", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    chat = [said("user", "how is ", "it?"), said("assistant", tool_calls=[call]), said("tool", "sun")]
    text = rendered(model, chat, [WEATHER])
    assert '"name": "get_weather"' in text.split("</tools>")[0] and "how is it?" in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert "Functions" not in rendered(model, chat[:1], []) and "how is it?" in rendered(model, chat[:1], [])


def test_without_a_template_for_tools_the_default_has_them(tmp_path: Path) -> None:
    assert capabilities(loaded(tmp_path / "a", default=TOOL_USE.replace("in tools", "in tools or []"))).describe(
        {}
    ).tool_format == ("hermes")
    assert capabilities(loaded(tmp_path / "b", default=CHATML, other=TOOL_USE)).describe({}).tool_format == ""


def test_each_template_has_parts_joined_where_it_needs_that(tmp_path: Path) -> None:
    parts = "{% for part in message.content %}{{ part.text }}{% endfor %}"
    model = loaded(
        tmp_path,
        default=TOOL_USE.replace("in tools", "in tools or []").replace("{{ message.content }}", parts),
        tool_use=TOOL_USE,
    )
    for tools in ([], [WEATHER]):
        assert "<|im_start|>user\nhow is it?<|im_end|>" in rendered(model, [said("user", "how is ", "it?")], tools)


def test_a_template_for_tools_that_renders_no_message_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = loaded(tmp_path, default=CHATML, tool_use="{{ raise_exception('never') }}<tool_call> tools arguments")
    assert any("'tool_use'" in line for line in caplog.messages)
    assert capabilities(model).describe({}).tool_format == ""
    assert template_for(model.tokenizer, tools=True) == template_for(model.tokenizer, tools=False)


def test_options_are_those_of_the_template_that_a_request_has(tmp_path: Path) -> None:
    found = capabilities(loaded(tmp_path, default=CHATML, tool_use=TOOL_USE))
    request = Request(
        id="1",
        model="m",
        messages=(Message("user", (TextPart("a"),)),),
        template_options='{"brief": true}',
        tools=ToolUse(tools=(Tool("f"),)),
    )
    found._check_template_options(request)
    with pytest.raises(InvalidArgument, match="it reads none"):
        found._check_template_options(
            Request(id="1", model="m", messages=request.messages, template_options='{"brief": true}')
        )
