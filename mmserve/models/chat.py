"""Tokenizers and chat templates of LLaDA-family checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mmserve.errors import ConfigError

IMAGE, VIDEO = "<image>", "<video>"
#: LLaDA's chat format. Content is text, or a list of parts; an image becomes ``<image>`` and a line break (LLaVA), a
#: video ``<video>`` and one.
CHAT_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{% set text = namespace(value='') %}"
    "{% if message['content'] is string %}{% set text.value = message['content'] %}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{% set text.value = text.value + '<image>\n' %}"
    "{% elif part['type'] == 'video' %}{% set text.value = text.value + '<video>\n' %}"
    "{% elif part['type'] == 'text' %}{% set text.value = text.value + part['text'] %}{% endif %}"
    "{% endfor %}{% endif %}{{ text.value | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in ``folder``, from its ``tokenizer.json`` alone: no remote code, no network."""
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer.json")
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder}: the tokenizer cannot be read: {error}") from error


def prompt_ids(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]]) -> list[int]:
    """Token ids of a chat up to where the answer begins; ``chat`` holds role and content, text or a list of parts."""
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def ensure_chat_template(tokenizer: PreTrainedTokenizerFast, *, images: bool, videos: bool = False) -> None:
    """Give ``tokenizer`` LLaDA's chat template where it has none, or one that cannot render message parts.

    The template of LLaDA-V's checkpoint takes plain text only: it prints a list of parts as Python would.
    """
    if tokenizer.chat_template is None or not _renders_parts(tokenizer, images, videos):
        tokenizer.chat_template = CHAT_TEMPLATE


def _renders_parts(tokenizer: PreTrainedTokenizerFast, images: bool, videos: bool) -> bool:
    media = [{"type": kind} for kind, taken in (("image", images), ("video", videos)) if taken]
    content = [*media, {"type": "text", "text": "probe"}]
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    except (TemplateError, TypeError, ValueError):
        return False
    if not isinstance(text, str) or "probe" not in text or "'type'" in text:
        return False
    return text.count(IMAGE) == images and text.count(VIDEO) == videos
