"""Tokenizers and chat templates of LLaMA-family checkpoints."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mmserve.errors import ConfigError, InvalidArgument
from mmserve.models.user_text import encoded

logger = logging.getLogger("mmserve.models")

IMAGE, VIDEO = "<image>", "<video>"
#: Names of chat templates, if a tokenizer has several: for any chat, and for chats with tools.
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
#: A tool with which a template for tools is tested.
_PROBE = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
#: Joins a message's parts to one text: an image becomes ``<image>`` and a line break (LLaVA), a video ``<video>`` and a
#: line break.
JOIN_PARTS = (
    "{% set text = namespace(value='') %}"
    "{% if message['content'] is string %}{% set text.value = message['content'] %}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{% set text.value = text.value + '<image>\n' %}"
    "{% elif part['type'] == 'video' %}{% set text.value = text.value + '<video>\n' %}"
    "{% elif part['type'] == 'text' %}{% set text.value = text.value + part['text'] %}{% endif %}"
    "{% endfor %}{% endif %}"
)
#: LLaDA's chat format, which is Llama 3's. Content is text, or a list of parts.
CHAT_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    f"{JOIN_PARTS}{{{{ text.value | trim }}}}<|eot_id|>{{% endfor %}}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
#: One tool in few tokens: its name, its description, and a line for each argument, with its values, its type, or else
#: its schema. Texts of the caller are always separated, so that they cannot form a control token together.
_TOOL = (
    "{% set function = tool['function'] %}{{ function['name'] }}: {{ function['description'] or '' }}\n"
    "{% for name, schema in ((function['parameters'] or {})['properties'] or {}).items() %}"
    " {{ name }}: {% if schema is mapping and schema['enum'] %}{{ schema['enum'] | join(' / ') }}"
    "{% elif schema is mapping and schema['type'] is string and schema['type'] not in ('object', 'array') %}"
    "{{ schema['type'] }}{% else %}{{ schema | tojson }}{% endif %}{{ '\n' }}{% endfor %}"
)
#: The same with tools: described in the first message, called in Hermes' format (``tools.formats``).
TOOLS_TEMPLATE = (
    "{{ bos_token or '' }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    f"{{% for tool in tools %}}{_TOOL}{{% endfor %}}<|eot_id|>{{% endif %}}"
    "{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    f"{JOIN_PARTS}{{{{ text.value | trim }}}}"
    "{% for call in message['tool_calls'] or [] %}{% if text.value or not loop.first %}{{ '\n' }}{% endif %}"
    "<tool_call>\n{\"name\": \"{{ call['function']['name'] }}\", "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}\n</tool_call>{% endfor %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
#: LLaVA-1.5's chat format (``conv_vicuna_v1`` in its llava/conversation.py), system message included.
VICUNA_TEMPLATE = (
    "{{ bos_token or '' }}{% if messages[0]['role'] != 'system' %}"
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. {% endif %}"
    f"{{% for message in messages %}}{JOIN_PARTS}"
    "{% if message['role'] == 'system' %}{{ text.value | trim }} "
    "{% elif message['role'] == 'assistant' %}ASSISTANT: {{ text.value | trim }}{{ eos_token or '' }}"
    "{% else %}USER: {{ text.value | trim }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
#: Prepended to a template that takes plain text only, so that it gets each message's parts joined.
_JOINED_MESSAGES = (
    "{% set joined = namespace(messages=[]) %}{% for message in messages %}"
    f"{JOIN_PARTS}"
    "{% set joined.messages = joined.messages + [dict(message, content=text.value)] %}{% endfor %}"
    "{% set messages = joined.messages %}"
)
#: Name of the only member of the arguments of a call that was cut, whose value is their text: it is written unchanged.
#: Callers cannot guess it.
_CUT = secrets.token_hex(16)
_CUT_MEMBER = re.compile(rf'\{{\s*"{_CUT}"\s*:\s*')
_DECODER = json.JSONDecoder()
_QWEN_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")
_HEADERS = frozenset({"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"})


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in ``folder``, from its ``tokenizer.json``: without remote code and network.

    Qwen's family may have ``vocab.json`` and ``merges.txt`` instead, which its own tokenizer class reads. Raises
    ``ConfigError`` if there is neither, or if it cannot be read.
    """
    kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    if not (folder / "tokenizer.json").is_file():
        if not all((folder / name).is_file() for name in _QWEN_FILES):
            raise ConfigError(f"{folder} has no tokenizer.json")
        from transformers import Qwen2Tokenizer  # takes half a second; not needed to list models

        kind = Qwen2Tokenizer
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises no narrower error
        raise ConfigError(f"{folder}: the tokenizer cannot be read: {error}") from error


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    special_tokens: bool = False,
    continues: bool = False,
) -> list[int]:
    """Token ids of a chat up to where the answer begins. ``chat``: messages with role and content (text or a list of
    parts) and ``tool_calls``. ``options``: additional variables of the template, as JSON values. Texts of the caller
    never become control tokens (``models.user_text``).

    ``special_tokens``: the tokenizer's special tokens are added unless the text begins with the start of text already,
    as in transformers' processors. ``continues``: the answer continues the last message, which has only text: the ids
    end with that text unchanged. Raises ``InvalidArgument`` if the template rejects the chat, for example because of
    the order of roles.
    """

    def written(messages: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
        return _with_cut_calls(templated(messages, others))

    def templated(messages: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
        *tools, options = others
        begins = {"add_generation_prompt": not continues}
        given: dict[str, Any] = {"tools": tools or None, "tokenize": False, **begins, **options}
        try:
            return str(tokenizer.apply_chat_template(messages, **given))
        except TypeError:  # a template that adds a text to a message's parts, for example Pixtral's to the system's
            return str(tokenizer.apply_chat_template([_text_alone(message) for message in messages], **given))

    def render(messages: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
        if not continues:
            return written(messages, others)
        *before, last = messages  # templates trim texts and close messages: it is inserted at a mark
        mark = secrets.token_hex(8)
        begun, found, _ = written([*before, {**last, "content": _one_text(mark)}], others).rpartition(mark)
        if not found:
            raise InvalidArgument.of("messages", "the model's chat template does not show the last one")
        return begun + "".join(part["text"] for part in last["content"])

    try:
        return encoded(tokenizer, chat, [*tools, dict(options)], render, special_tokens=special_tokens)
    except (TemplateError, TypeError) as error:  # a template that adds strings to a message's list of parts
        what = "them, or the tools" if tools else "them"
        raise InvalidArgument.of("messages", f"the model's chat template refuses {what}: {error}") from error


def call_arguments(text: str) -> Any:
    """The ``arguments`` of a call in a chat, from their JSON text or the beginning of it, which ``prompt_ids`` writes
    unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return {_CUT: text}


def _with_cut_calls(text: str) -> str:
    """``text`` of a chat template with the arguments of calls that were cut. Raises ``InvalidArgument`` if the template
    does not write arguments as JSON."""
    parts, at = list[str](), 0
    while (found := _CUT_MEMBER.search(text, at)) is not None:
        given, end = _DECODER.raw_decode(text, found.end())
        parts += text[at : found.start()], given
        at = text.index("}", end) + 1
    whole = "".join([*parts, text[at:]])
    if _CUT in whole:
        why = "has a call whose arguments are no whole JSON, which the model's chat template cannot write"
        raise InvalidArgument.of("messages", why)
    return whole


def _one_text(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _text_alone(message: dict[str, Any]) -> dict[str, Any]:
    """A message with only text parts, with its content as one text; any other message unchanged."""
    parts = message["content"]
    if isinstance(parts, str) or any(part["type"] != "text" for part in parts):
        return message
    return {**message, "content": "".join(part["text"] for part in parts)}


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text alone, without special tokens. No part of the text becomes a control token."""
    chat = [{"role": "user", "content": text}]
    return encoded(tokenizer, chat, [], lambda messages, _tools: str(messages[0]["content"]), special_tokens=False)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that an answer continues, with the tokenizer's special tokens except for the one at the end.
    No part of the text becomes a control token."""
    chat = [{"role": "user", "content": text}]
    ids = encoded(tokenizer, chat, [], lambda messages, _tools: str(messages[0]["content"]), special_tokens=True)
    return ids[:-1] if ids and ids[-1] in {tokenizer.eos_token_id, tokenizer.sep_token_id} else ids


def ensure_chat_template(tokenizer: PreTrainedTokenizerFast, *, images: bool, videos: bool = False) -> None:
    """Give ``tokenizer`` LLaDA's chat template if it has none, or one that cannot render message parts.

    The template of LLaDA-V's checkpoint takes plain text only: it would print a list of parts as Python code.
    """
    template = template_for(tokenizer, tools=False)
    if not (template and _renders_parts(tokenizer, template, images, videos)):
        tokenizer.chat_template = CHAT_TEMPLATE


def adapt_chat_template(
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    images: bool,
    videos: bool,
    vicuna: bool,
    image: str = IMAGE,
    video: str = VIDEO,
) -> None:
    """Ensure that ``tokenizer`` has a chat template that renders message parts; never uses another model's format.

    The checkpoint's own template is kept; if it takes plain text only, parts are joined first. Without a template, a
    tokenizer with Llama 3's header tokens gets Llama 3's format, and ``vicuna`` checkpoints get that of LLaVA-1.5,
    which is published only in code. Otherwise the format is unknown: raises ``ConfigError``. ``image`` and ``video``:
    the placeholders in a text.
    """
    own = tokenizer.chat_template
    if own is None:
        if tokenizer.get_vocab().keys() >= _HEADERS:
            tokenizer.chat_template = CHAT_TEMPLATE
        elif vicuna:
            tokenizer.chat_template = VICUNA_TEMPLATE
        else:
            raise ConfigError(f"{folder}: the tokenizer has no chat template; put one into chat_template.jinja")
        return
    joined = _JOINED_MESSAGES.replace(IMAGE, image).replace(VIDEO, video)

    def adapted(template: str, tools: list[dict[str, Any]] | None = None) -> str | None:
        """``template``, preceded by the joining of parts if necessary; None if it renders no message."""
        found = (template, joined + template)
        return next((one for one in found if _renders_parts(tokenizer, one, images, videos, image, video, tools)), None)

    if (default := adapted(template_for(tokenizer, tools=False))) is None:
        raise ConfigError(f"{folder}: the chat template cannot render a user's message")
    if isinstance(own, str):
        tokenizer.chat_template = default
        return
    named = {**own, _DEFAULT: default}
    if _WITH_TOOLS in own:
        if (with_tools := adapted(own[_WITH_TOOLS], [_PROBE])) is None:
            logger.warning(
                "%s: the chat template %r cannot render a user's message, and is not used", folder, _WITH_TOOLS
            )
            del named[_WITH_TOOLS]
        else:
            named[_WITH_TOOLS] = with_tools
    tokenizer.chat_template = named


def template_for(tokenizer: PreTrainedTokenizerBase, *, tools: bool) -> str:
    """The chat template for chats with ``tools``, or without, selected among named templates as in transformers; empty
    if there is none."""
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own[_WITH_TOOLS] if tools and _WITH_TOOLS in own else own.get(_DEFAULT)
    return own or ""


def change_templates(tokenizer: PreTrainedTokenizerBase, change: Callable[[str], str]) -> None:
    """Apply ``change`` to each chat template of ``tokenizer``."""
    own = tokenizer.chat_template
    if isinstance(own, str):
        tokenizer.chat_template = change(own)
    elif own is not None:
        tokenizer.chat_template = {name: change(template) for name, template in own.items()}


def _renders_parts(
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    images: bool,
    videos: bool,
    image: str = IMAGE,
    video: str = VIDEO,
    tools: list[dict[str, Any]] | None = None,
) -> bool:
    media = [{"type": kind} for kind, taken in (("image", images), ("video", videos)) if taken]
    chat = [{"role": "user", "content": [*media, {"type": "text", "text": "probe"}]}]
    try:
        text = tokenizer.apply_chat_template(chat, tools=tools, chat_template=template, tokenize=False)
    except (TemplateError, TypeError, ValueError):
        return False
    if not isinstance(text, str) or "probe" not in text or "'text'" in text:
        return False
    return text.count(image) == images and text.count(video) == videos
