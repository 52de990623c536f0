"""A request's messages as the ids of its prompt, by the model's chat template."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mmserve.core.request import ImagePart, Message, Part, Request, TextPart, TokensPart, VideoPart
from mmserve.core.tools import Tool
from mmserve.models.base import EncoderModel
from mmserve.models.chat import call_arguments, plain_ids, prompt_ids, text_ids
from mmserve.models.decisions import shared_prompt


def prompt_of(
    model: EncoderModel, request: Request, *, special_tokens: bool = True, generation_prompt: bool = True
) -> np.ndarray:
    """The chat's ids (int64), with one placeholder for each image and video; for typed questions, their shared
    prefix.

    ``special_tokens``: whether a raw text has those of the tokenizer; ``generation_prompt``: whether a chat ends with
    the beginning of an answer.
    """
    if request.raw:
        return _raw_prompt(model, request.messages[0], special_tokens=special_tokens)
    chat = [_chat_message(message) for message in request.messages]
    tools = [_function(tool) for tool in request.tools.tools] if request.tools is not None else []
    options = json.loads(request.template_options or "{}")
    options |= {} if generation_prompt else {"add_generation_prompt": False}
    special = model.spec.special_tokens
    ids = prompt_ids(model.tokenizer, chat, tools, options=options, special_tokens=special, continues=request.continues)
    if request.decisions:
        ids = shared_prompt(model.tokenizer, ids, special_tokens=special)
    return np.asarray(ids, dtype=np.int64)


def _raw_prompt(model: EncoderModel, message: Message, *, special_tokens: bool) -> np.ndarray:
    """Ids (int64) of a message's token ids, or of its text."""
    match message.parts:
        case (TokensPart(ids),):
            return np.asarray(ids, dtype=np.int64)
    tokenized = text_ids if special_tokens else plain_ids
    return np.asarray(tokenized(model.tokenizer, _text_of(message)), dtype=np.int64)


def _text_of(message: Message) -> str:
    """The text of a message without media."""
    return "".join(part.text for part in message.parts if isinstance(part, TextPart))


def _chat_message(message: Message) -> dict[str, Any]:
    """A message in the form expected by chat templates."""
    found: dict[str, Any] = {"role": message.role, "content": [_content(part) for part in message.parts]}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": call_arguments(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _function(tool: Tool) -> dict[str, Any]:
    """A tool in the form expected by chat templates."""
    described = {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
    return {"type": "function", "function": described}


def _content(part: Part) -> dict[str, str]:
    """A part in the form expected by chat templates; raises ``TypeError`` for token ids, which they do not support."""
    match part:
        case TokensPart():
            raise TypeError("a chat template takes no token ids")
        case TextPart(text):
            return {"type": "text", "text": text}
        case ImagePart():
            return {"type": "image"}
        case VideoPart():
            return {"type": "video"}
