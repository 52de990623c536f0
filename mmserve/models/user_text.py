"""Prompts in which texts of a request never become control tokens, whatever they contain.

Texts without the spelling of a control token need no treatment. Otherwise the chat is rendered with a mark inside each
such spelling, to distinguish those that the chat template wrote itself; these are replaced by aliases that users cannot
guess, and a copy of the tokenizer that knows control tokens only by these aliases encodes the whole. It tokenises all
other text identically.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

#: Control tokens that a tokenizer does not mark as special.
_CONTROL = re.compile(r"<\|.+\|>")
#: Names of single bytes, for parts of a text without longer tokens in the vocabulary.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
#: Private-use characters; one that a chat does not contain is its mark.
_MARKS = range(0x100000, 0x10FFFE)

Chat = list[dict[str, Any]]
#: Members of messages, besides the content, that contain texts of the caller.
_CALLS = ("tool_calls", "tool_call_id")


@dataclass(frozen=True)
class _Control:
    """The control tokens of one tokenizer; ``aliased`` is created on demand."""

    ids: dict[str, int]  # by their spelling
    written: re.Pattern[str]  # matches any of them, longest first
    nonce: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> _Control:
        added = tokenizer.added_tokens_decoder.items()
        names = {t.content: i for i, t in added if t.special or _CONTROL.fullmatch(t.content)}
        ids = {name: i for name, i in names.items() if name.strip() and not _BYTE.fullmatch(name)}
        longest = sorted(ids, key=len, reverse=True)
        # without control tokens, a pattern that matches nothing
        return cls(ids, re.compile("|".join(map(re.escape, longest)) or r"(?!)"), secrets.token_hex(8))

    def alias(self, token: str) -> str:
        """The alias of a control token in the copy."""
        return f"\U0010fffc{self.nonce}.{self.ids[token]}\U0010fffd"

    def aliased(self, tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
        """A copy of ``tokenizer`` whose control tokens are spelled as their aliases."""
        plain: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        for token in plain["added_tokens"]:
            if token["content"] in self.ids:
                token["content"] = self.alias(token["content"])
        model = plain["model"]
        if isinstance(model.get("vocab"), dict):  # the vocabulary must have an entry for the id of each added token
            renamed = {self.alias(t) if t in self.ids else t: i for t, i in model["vocab"].items()}
            model["vocab"] = renamed
            if model.get("unk_token") in self.ids:
                model["unk_token"] = self.alias(model["unk_token"])
        elif isinstance(model.get("vocab"), list):
            model["vocab"] = [[self.alias(t) if t in self.ids else t, score] for t, score in model["vocab"]]
        copy = Tokenizer.from_str(json.dumps(plain))
        copy.no_truncation()
        copy.no_padding()
        return copy


_controls: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, _Control]] = WeakKeyDictionary()
_copies: WeakKeyDictionary[PreTrainedTokenizerBase, Tokenizer] = WeakKeyDictionary()


def encoded(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    tools: Chat,
    render: Callable[[Chat, Chat], str],
    *,
    special_tokens: bool,
) -> list[int]:
    """Ids of ``chat`` and ``tools`` as ``render`` writes them; no text of either becomes a control token.

    ``special_tokens``: see ``chat.prompt_ids``.
    """
    control = _control_of(tokenizer)
    texts = [*_texts(chat), *([text] for text in _strings(tools))]
    if not any(control.written.search("".join(each)) for each in texts):
        text = render(chat, tools)
        return list(tokenizer.encode(text, add_special_tokens=special_tokens and not _begun(tokenizer, text)))
    mark = _mark(texts)

    def within(text: str) -> str:
        return control.written.sub(lambda found: found[0][:1] + mark + mark.join(found[0][1:]), text)

    text = render([_marked(message, within, mark) for message in chat], _mapped(tools, within))
    begun = _begun(tokenizer, text)
    named = control.written.sub(lambda found: control.alias(found[0]), text).replace(mark, "")
    ids: list[int] = _copy(tokenizer, control).encode(named, add_special_tokens=special_tokens and not begun).ids
    return ids


def _begun(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    return tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)


def _control_of(tokenizer: PreTrainedTokenizerBase) -> _Control:
    size, known = _controls.get(tokenizer, (-1, None))
    if known is None or size != len(tokenizer):  # tokens may have been added after the first use
        size, known = len(tokenizer), _Control.of(tokenizer)
        _controls[tokenizer] = size, known
        _copies.pop(tokenizer, None)
    return known


def _copy(tokenizer: PreTrainedTokenizerBase, control: _Control) -> Tokenizer:
    if tokenizer not in _copies:
        _copies[tokenizer] = control.aliased(tokenizer)
    return _copies[tokenizer]


def _texts(chat: Chat) -> Iterator[list[str]]:
    """The texts of each message: adjacent ones may form a control token together."""
    for message in chat:
        content = message["content"]
        yield [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
        yield from ([text] for text in _strings([message.get(name) for name in _CALLS]))


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, including member names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The JSON ``value`` with ``change`` applied to every string in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(inner, change) for name, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, list) else value


def _mark(texts: Iterable[list[str]]) -> str:
    """A character that none of ``texts`` contains."""
    held = {char for each in texts for text in each for char in text}
    return next(chr(code) for code in _MARKS if chr(code) not in held)


def _marked(message: dict[str, Any], within: Callable[[str], str], mark: str) -> dict[str, Any]:
    """``message`` with a mark inserted by ``within`` into every spelling of a control token, and between texts; never
    at the ends of the message's text, where templates trim spaces."""
    content = message["content"]
    message = message | {name: _mapped(message[name], within) for name in _CALLS if name in message}
    if isinstance(content, str):
        return {**message, "content": within(content)}
    parts, before = [], False
    for part in content:
        if part["type"] != "text":
            parts.append(part)
            continue
        text = within(part["text"])
        if before:
            bare = text.lstrip()
            text = text[: len(text) - len(bare)] + (mark + bare if bare else "")
        before = True
        parts.append({**part, "text": text})
    return {**message, "content": parts}
