"""The matcher over llguidance: tokens as bytes, the end of text, tokens that no constrained text may hold."""

from __future__ import annotations

import re

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mmserve.constraint.search.matcher import Grammar
from mmserve.constraint.search.vocabulary import LONGEST, Vocabulary, flags_of, spell, tokens_of

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"enum": ["élan", "x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TEXT = '{"a":"naïve ☃","b":"élan"}'


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<end>", "<mask>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT, "a circle left of a square", '{"a":"","b":"x"}'] * 20, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    tokens = spell(tokenizer)
    return Vocabulary.spelled(tokens + [b""] * (512 - len(tokens)), {0}, tokenizer)


def json_grammar(vocabulary: Vocabulary) -> Grammar:
    compact = {"whitespace_flexible": False}
    return Grammar(LLMatcher.grammar_from_json_schema(SCHEMA, overrides=compact), vocabulary)


def test_tokens_are_spelled_as_the_tokenizer_decodes_them(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    for text in (TEXT, "\x00\x7f tabs\t", "日本"):
        ids = tokenizer.encode(text).ids
        assert b"".join(vocabulary.token_bytes[i] for i in ids) == text.encode()
    assert vocabulary.token_bytes[0] == vocabulary.token_bytes[1] == b""
    assert len(vocabulary.token_bytes) == 512


def test_byte_fallback_vocabularies_are_spelled() -> None:
    pieces = ["<end>", "▁a", "b", *(f"<0x{b:02X}>" for b in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<end>"])
    spelled = spell(tokenizer)
    assert spelled[:3] == [b"", b" a", b"b"]
    assert spelled[3:] == [bytes([b]) for b in range(256)]
    assert Grammar('start: " a" "b"', Vocabulary.spelled(spelled, {0}, tokenizer)).start().valid([1, 2]) == 2


def test_other_tokenizers_are_refused() -> None:
    with pytest.raises(ValueError, match="byte-level"):
        spell(Tokenizer(models.WordLevel({"a": 0})))


def test_a_vocabulary_needs_an_end() -> None:
    with pytest.raises(ValueError, match="ends the text"):
        Vocabulary.spelled([b"a"], set())


def test_a_refused_grammar_says_why(vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="Expected token"):
        Grammar("start: (", vocabulary)


def test_a_text_is_followed_to_its_end(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    matcher = json_grammar(vocabulary).start()
    ids = tokenizer.encode(TEXT).ids
    for i, token in enumerate(ids):
        assert not matcher.accepting
        assert token in matcher.allowed()
        assert matcher.valid(ids[i:]) == len(ids) - i
        matcher.consume([token])
    assert matcher.accepting
    assert len(matcher.allowed()) == 0
    assert matcher.valid(ids[:1]) == 0


def test_valid_counts_up_to_the_first_token_that_may_not_follow(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    matcher = json_grammar(vocabulary).start()
    ids = tokenizer.encode('{"a":"x","c').ids
    spelled = [vocabulary.token_bytes[i] for i in ids]
    good = next(n for n in range(len(ids)) if b"c" in spelled[n])
    assert matcher.valid(ids) == good
    assert matcher.valid([]) == matcher.valid([511]) == matcher.valid([9999]) == matcher.valid([-1]) == 0


def test_end_tokens_and_special_tokens_are_no_part_of_a_text(vocabulary: Vocabulary) -> None:
    matcher = Grammar("start: /.*/", vocabulary).start()
    assert matcher.accepting
    assert not np.isin(matcher.allowed(), [0, 1]).any()
    assert matcher.valid([0]) == matcher.valid([1]) == 0
    assert not matcher.among(np.array([0, 1])).any()
    with pytest.raises(ValueError, match="may not follow"):
        matcher.fork().consume([0])


def test_the_name_of_a_special_token_is_spelled_in_bytes(vocabulary: Vocabulary) -> None:
    matcher = Grammar('start: "<end>"', vocabulary).start()
    by_byte = [vocabulary.token_bytes.index(bytes([b])) for b in b"<end>"]
    assert matcher.forced() == b"<end>"
    assert matcher.valid(by_byte) == len(by_byte)


def test_a_fork_goes_its_own_way(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    matcher = json_grammar(vocabulary).start()
    fork = matcher.fork()
    fork.consume(tokenizer.encode('{"a":"').ids)
    assert matcher.valid(tokenizer.encode(TEXT).ids) == len(tokenizer.encode(TEXT).ids)
    assert len(fork.allowed()) > 1 == len(matcher.fork().allowed()) - len(matcher.allowed()) + 1


def test_among_agrees_with_allowed(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    matcher = json_grammar(vocabulary).start()
    every = np.arange(512)
    for token in tokenizer.encode(TEXT).ids:
        np.testing.assert_array_equal(every[matcher.among(every)], matcher.allowed())
        np.testing.assert_array_equal(every[flags_of(matcher.mask(), len(every))], matcher.allowed())
        matcher.consume([token])


@pytest.mark.parametrize(
    "pattern", ["[a-z0-9]{1,6}(-[A-Z]+)?", "[a-z]+@[a-z]+", "[0-9]{3,4}", "[a-zQ][a-z0-9]{0,9}", "(.{1,5}|[^a]{9})s"]
)
def test_masks_hold_what_may_follow_one_by_one(pattern: str) -> None:
    """Words, too, which the parser decides on all at once where a text may hold any."""
    pieces = [bytes([b]) for b in range(128)]
    pieces += [
        f"{a}{b}".encode() for a in ("lamp", "a", "B", "7", "42", "x-", "é") for b in ("", "s", "ing", "0", "-Q")
    ]
    vocabulary = Vocabulary.spelled([*dict.fromkeys(pieces), b""], {len(dict.fromkeys(pieces))})
    matcher = Grammar(f"start: /{pattern}/", vocabulary).start()
    for token in b"12a-Q":
        expected = [matcher.valid([i]) == 1 for i in range(len(vocabulary.token_bytes))]
        assert flags_of(matcher.mask(), len(expected)).tolist() == expected
        if not expected[token]:
            break
        matcher.consume([token])


def test_forced_bytes_stop_where_the_text_may_end(vocabulary: Vocabulary) -> None:
    matcher = Grammar('start: "ab" "cd"?', vocabulary).start()
    matcher.consume([vocabulary.token_bytes.index(b"a")])
    assert matcher.forced() == b"b"
    matcher.consume([vocabulary.token_bytes.index(b"b")])
    assert matcher.accepting
    assert matcher.forced() == b""


def test_very_long_tokens_are_left_out() -> None:
    singles = [bytes([b]) for b in range(128)]
    vocabulary = Vocabulary.spelled([*singles, b" " * LONGEST, b" " * (LONGEST + 1), b" " * 70_000, b""], {131})
    matcher = Grammar("start: / */", vocabulary).start()
    assert matcher.allowed().tolist() == [32, 128]


def test_a_parser_at_its_limits_is_at_an_end() -> None:
    vocabulary = Vocabulary.spelled([*(bytes([b]) for b in range(128)), b""], {128})
    matcher = Grammar('start: "(" start ")" | ""', vocabulary).start()
    depth = 0
    while matcher.valid([40]) and depth < 3000:
        matcher.consume([40])
        depth += 1
    assert re.fullmatch(rb"\(*", b"(" * depth)
    assert depth == 3000 or not matcher.accepting


def test_forced_text_with_many_tokens_is_asked_about_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {f"e{a}{b}".encode() for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"}
    texts = [b"", *(bytes([b]) for b in range(256)), b"true", b"e,", b"e]", b"e],", b"\xff\xff", *sorted(words)]
    vocabulary = Vocabulary.spelled(texts, {0})
    items = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}
    compact = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    at = Grammar(LLMatcher.grammar_from_json_schema(items, overrides=compact), vocabulary).start()
    at.consume([texts.index(bytes([b])) for b in b"[tru"])
    asked, valid = [], type(at).valid
    monkeypatch.setattr(type(at), "valid", lambda self, tokens: asked.append(tokens) or valid(self, tokens))
    assert {texts[token] for token in tokens_of(at.mask())} == {b"e", b"e,", b"e]"}
    assert len(asked) < 40
    assert {texts[token] for token in at.allowed()} == {b"e", b"e,", b"e]"}
