"""The bytes of tokens are those that the tokenizer's own decoder makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from mmserve.models.spelling import Spelling

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _sentence_pieces() -> Tokenizer:
    """As Gemma's: runs of spaces are tokens that were added to the vocabulary."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "a", "▁", "▁a", "▁▁", *_BYTES])}
    made = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_tokens([AddedToken(token, normalized=False) for token in ("▁▁", "\n\n", "<table>", "a▁b")])
    return made


def _byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE({"a": 0, "Ġ": 1, "Ġa": 2}, [("Ġ", "a")]))
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(token) for token in ("<|im_end|>", "Ġx", "two words", "日本", "\n")])
    return made


@pytest.mark.parametrize("make", [_sentence_pieces, _byte_level])
def test_tokens_spell_what_their_decoder_makes_of_them(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    spelling, added = Spelling.of(tokenizer), tokenizer.get_added_tokens_decoder()
    for token, i in tokenizer.get_vocab(with_added_tokens=True).items():
        if token in ("<unk>", *_BYTES[128:]):  # a part of a character is no text by itself
            continue
        spelled = spelling.bytes_of(token, added=i in added)
        assert spelled is not None and spelled.decode() == tokenizer.decode([i], skip_special_tokens=False), token
