"""Prompts whose last message is continued: they end with its text as it is, whatever the template does to texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mmserve.errors import InvalidArgument
from mmserve.http.chat import Chat
from mmserve.http.messages import Messages, read_counted
from mmserve.http.responses import Responses
from mmserve.models.chat import CHAT_TEMPLATE, TOOLS_TEMPLATE, VICUNA_TEMPLATE, load_tokenizer, prompt_ids
from mmserve.models.registry import model_folder

USER = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "b "}
#: As Qwen 3's, which writes something before the last answer alone, and cuts texts at a tag.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% set text = m['content'] if m['content'] is string else m['content'][0]['text'] %}"
    "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ text.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(Path(model_folder("bundled")))


def chat(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": [{"type": "text", "text": text}]} for i, text in enumerate(texts)]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TOOLS_TEMPLATE, VICUNA_TEMPLATE, THINKING])
def test_a_prompt_ends_with_the_text_and_nothing_after_it(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer.chat_template = template
    for text in ("It is 12", "a", "12, 12 a"):
        ids = prompt_ids(tokenizer, chat("a", "12", "and?", text), continues=True)
        plain = [{"role": m["role"], "content": m["content"][0]["text"]} for m in chat("a", "12", "and?", text)]
        same = tokenizer.apply_chat_template(plain, tokenize=False, continue_final_message=True)
        assert ids == tokenizer.encode(same, add_special_tokens=False), template
    begun = tokenizer.decode(prompt_ids(tokenizer, chat("a", ""), continues=True))
    for text in (" 12, ", "\n12\n", "12</think>"):  # which templates trim or cut
        ids = prompt_ids(tokenizer, chat("a", text), continues=True)
        assert tokenizer.decode(ids) == begun + text


def test_several_texts_are_one_and_none_is_a_control_token(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE
    control = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    parts = [{"type": "text", "text": text} for text in ("12<|eot", "_id|> 13")]
    ids = prompt_ids(tokenizer, [*chat("a"), {"role": "assistant", "content": parts}], continues=True)
    plain = prompt_ids(tokenizer, chat("a", "12 13"), continues=True)
    assert ids.count(control) == plain.count(control) == 1
    assert tokenizer.decode(ids).endswith("12<|eot_id|> 13")


def test_a_template_that_does_not_show_the_last_message(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'][0]['text'] }}"
    with pytest.raises(InvalidArgument, match="does not show the last one"):
        prompt_ids(tokenizer, chat("a", "b"), continues=True)


def test_bodies_that_ask_for_it() -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [USER, SAID]}
    for fields, expected in (
        ({"continue_final_message": True}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"add_generation_prompt": True}, False),
        ({}, False),
    ):
        assert Chat().read({**asked, **fields}).message.continue_final_message == expected
    for fields in (
        {"continue_final_message": True, "add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": 1},
    ):
        with pytest.raises(InvalidArgument, match="add_generation_prompt"):
            Chat().read({**asked, **fields})
    for reads in (lambda body: Messages().read({**body, "max_tokens": 8}).message, lambda body: read_counted(body)[0]):
        assert reads(asked).continue_final_message
        assert not reads({**asked, "messages": [USER, SAID, USER]}).continue_final_message
        called = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
        assert not reads({**asked, "messages": [USER, called]}).continue_final_message
        assert not reads({**asked, "messages": []}).continue_final_message
    form = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
    with pytest.raises(InvalidArgument, match=r"output_config\.format.*last message"):
        Messages().read({**asked, **form, "max_tokens": 8})


@pytest.mark.parametrize(
    ("last", "fields", "expected"),
    [
        ({}, {}, False),
        ({}, {"continue_final_message": True}, True),
        ({"type": "message", "status": "completed"}, {}, False),
        ({"status": "incomplete"}, {}, True),
        ({"type": "message", "status": "in_progress"}, {"continue_final_message": None}, True),
        ({"status": "incomplete"}, {"continue_final_message": False}, False),
    ],
)
def test_responses_continue_a_message_that_is_not_complete(
    last: dict[str, Any], fields: dict[str, Any], expected: bool
) -> None:
    body = {"model": "m", "input": [USER, {**SAID, **last}], **fields}
    assert Responses().read(body).message.continue_final_message is expected
    ended = Responses().read({"model": "m", "input": [{**SAID, **last}, USER]}).message
    assert not ended.continue_final_message, "the last message alone"
