"""Each token has the bytes that it adds to the answer: together they are the text, and HTTP answers show them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import blank
from helpers import tokenizer as trained
from test_text import BROKEN, byte_tokens
from test_user_text import byte_fallback, unigram
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mmserve.core.candidates import Alternatives
from mmserve.core.events import Alternative, CommittedToken, Finished, StageTimes, Usage
from mmserve.decode.text import committed_tokens
from mmserve.decode.token_texts import token_texts
from mmserve.http.chat import Chat
from mmserve.http.completions import Completions
from mmserve.reference.tokenizer import EOT

TEXTS = ["the circle is red", "naïve 円 👍", "👩‍👩‍👧", "  a \n b", "한"]


def stripped() -> PreTrainedTokenizerFast:
    """As of Llama 2: the text's first space is dropped."""
    made = byte_fallback(None)
    made.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def words() -> PreTrainedTokenizerFast:
    """Words with a mark for the space in front, and no bytes."""
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "▁the": 1, "▁circle": 2, "▁is": 3, "▁red": 4}, unk_token="<unk>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


def committed(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], others: list[list[int]] | None = None
) -> tuple[CommittedToken, ...]:
    canvas = blank(1, len(ids), len(ids))
    canvas.commit(np.arange(1, len(ids) + 1), np.array(ids))
    beside = None
    if others is not None:
        beside = Alternatives(np.array(others), np.full((len(ids), len(others[0])), -0.5, np.float32))
    return committed_tokens(canvas, len(ids), np.zeros(len(ids) + 1, np.float32), beside, tokenizer, frozenset())


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (trained, TEXTS),
        (lambda: byte_fallback("first"), TEXTS),
        (stripped, TEXTS),
        (unigram, TEXTS),
        (words, TEXTS[:1]),
    ],
    ids=["byte_level", "byte_fallback", "stripped", "unigram", "words"],
)
def test_the_bytes_of_all_tokens_are_the_text(make: Callable[[], PreTrainedTokenizerBase], texts: list[str]) -> None:
    tokenizer = make()
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = committed(tokenizer, ids, [[i] for i in ids])
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert b"".join(token.text_bytes for token in found) == whole.encode()
        assert [token.alternatives[0].text_bytes for token in found] == [token.text_bytes for token in found]
        assert all(token.text == token.text_bytes.decode(errors="replace") for token in found)


def test_a_token_of_a_part_of_a_character_has_its_bytes_and_no_text() -> None:
    tokenizer = trained()
    first, *rest = committed(tokenizer, byte_tokens("é€"))
    assert (first.text, first.text_bytes) == (BROKEN, b"\xc3")
    assert [token.text_bytes for token in rest] == [b"\xa9", b"\xe2", b"\x82", b"\xac"]


def test_a_word_keeps_its_space_and_a_special_token_its_name() -> None:
    tokenizer = words()
    assert [token.text for token in committed(tokenizer, [1, 2])] == ["the", " circle"]
    assert token_texts(tokenizer, np.array([[1, 2, 99]])) == [[" the", " circle", ""]]
    end = trained().convert_tokens_to_ids(EOT)
    [token] = committed(trained(), [end])
    assert token.text == EOT and token.text_bytes == EOT.encode()


def answered(api: Any, body: dict[str, Any], tokens: tuple[CommittedToken, ...], text: str) -> dict[str, Any]:
    """The choice of an answer with ``tokens``."""
    one = Finished("end", text, Usage(1, 0, len(tokens)), 1, 0, StageTimes(), tokens=tokens)
    choice: dict[str, Any] = api.read({"model": "m", **body}).reply.whole([one])["choices"][0]
    return choice


def test_chat_completions_have_true_bytes_and_name_what_is_no_character_by_them() -> None:
    ids = byte_tokens("a€")
    tokens = committed(trained(), ids, [ids[:2]] * len(ids))
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    content = answered(Chat(), body, tokens, "a€")["logprobs"]["content"]
    assert [one["bytes"] for one in content] == [[0x61], [0xE2], [0x82], [0xAC]]
    assert [one["token"] for one in content] == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac"]
    assert [one["token"] for one in content[1]["top_logprobs"]] == ["a", r"bytes:\xe2"]
    assert content[1]["top_logprobs"][1]["bytes"] == [0xE2]


def test_offsets_of_completions_count_characters() -> None:
    ids = byte_tokens("a€b👍c")
    tokens = committed(trained(), ids, [ids[1:3]] * len(ids))
    found = answered(Completions(), {"prompt": "a", "logprobs": 2}, tokens, "a€b👍c")["logprobs"]
    assert found["text_offset"] == [0, 1, 1, 1, 2, 3, 3, 3, 3, 4]
    assert found["tokens"][1:3] == [r"bytes:\xe2", r"bytes:\x82"]
    assert list(found["top_logprobs"][0]) == ["a", r"bytes:\xe2", r"bytes:\x82"]
    assert list(found["top_logprobs"][1]) == [r"bytes:\xe2", r"bytes:\x82"], "the chosen one is one of them"


@pytest.mark.parametrize(("api", "prompt"), [(Chat(), "messages"), (Completions(), "prompt")])
def test_log_probabilities_are_numbers_of_json(api: Any, prompt: str) -> None:
    least = CommittedToken(1, "a", -math.inf, 1, (Alternative(2, "b", -math.inf, b"b"),), b"a")
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True} if prompt == "messages" else None
    choice = answered(api, body or {"prompt": "a", "logprobs": 1}, (least,), "a")
    text = json.dumps(choice["logprobs"], allow_nan=False)
    assert text.count("-9999.0") == (2 if body else 3)
