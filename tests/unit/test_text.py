"""Final tokens to final text: whole characters, stop strings held back, and nothing ever taken back."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from helpers import ask, blank, tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mmserve.core.constraint import Choice, ConstraintSpec
from mmserve.decode.text import MASK_GLYPH, TextStream, canvas_text
from mmserve.decode.token_texts import token_bytes
from mmserve.reference.tokenizer import EOS, EOT, HEADER, IMAGE

TOKENIZER = tokenizer()
VOCABULARY = TOKENIZER.get_vocab()
SPECIALS = [TOKENIZER.convert_tokens_to_ids(t) for t in (EOS, EOT, HEADER, IMAGE)]
BROKEN = "\N{REPLACEMENT CHARACTER}"

#: Letters that make stop strings likely, combining marks, and characters of two, three and four bytes and more.
PIECES = [
    "a",
    "b",
    "ab",
    "aab",
    " ",
    "\n",
    "é",
    "e\u0301",
    "ß",
    "€",
    "한",
    "😀",
    "👩‍👩‍👧",
    "🇩🇪",
    "\u0301",
    "the circle is red",
]
texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.text(st.characters(codec="utf-8", exclude_characters=BROKEN), max_size=20),
)
stops = st.lists(
    st.one_of(
        st.sampled_from(["a", "ab", "ba", "aab", "abab", "€", "😀", "\u0301", "is r", "\u200d"]), texts.filter(len)
    ),
    max_size=3,
).map(tuple)
cuts = st.lists(st.integers(1, 6), min_size=1, max_size=60)


def decode(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def stream(tokens: list[int], stop: tuple[str, ...], chunks: list[int]) -> tuple[TextStream, list[str], str]:
    """Push ever longer prefixes of ``tokens``; the deltas, and what ``finish`` gave."""
    text = TextStream(TOKENIZER, stop)
    deltas, at, turn = [], 0, 0
    while at < len(tokens):
        at += chunks[turn % len(chunks)]
        turn += 1
        deltas.append(text.push(np.array(tokens[:at])))
    return text, deltas, text.finish()


def earliest(text: str, stop: tuple[str, ...]) -> int | None:
    return min((text.find(s) for s in stop if s in text), default=None)


def expected(tokens: list[int], stop: tuple[str, ...]) -> str:
    """The text when generation ends with the token that completes the first stop string."""
    for size in range(len(tokens) + 1):
        text = decode(tokens[:size])
        whole = text if size == len(tokens) else text.rstrip(BROKEN)
        if (at := earliest(whole, stop)) is not None:
            return whole[:at]
    return decode(tokens)


def byte_tokens(text: str) -> list[int]:
    """``text`` with every byte a token of its own, as an untrained model may put it."""
    return [token for char in text for token in _bytes_of(char)]


@cache
def _bytes_of(char: str) -> list[int]:
    return [VOCABULARY[_printable(byte)] for byte in char.encode()]


@cache
def _printable(byte: int) -> str:
    """The character by which byte-level BPE writes a byte in its vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in kept else chr(256 + [b for b in range(256) if b not in kept].index(byte))


def test_long_stop_strings_take_no_time_at_each_token() -> None:
    """Every prefix of every stop string was compared with the text at each token: 0.1 s where these are."""
    tokens = np.array(TOKENIZER.encode("abcdefgh " * 1200, add_special_tokens=False))
    text = TextStream(TOKENIZER, tuple("z" * 30_000 + str(i) for i in range(16)))
    text.push(tokens[:-40])
    began = time.thread_time()
    for end in range(len(tokens) - 40, len(tokens)):
        text.push(tokens[: end + 1])
    assert time.thread_time() - began < 1.0


@given(texts, stops, cuts, st.booleans())
@settings(max_examples=150)
@example("ab", ("abc", "b"), [1], True)
@example("x👩‍👩‍👧y", ("\u200d",), [1], True)
def test_deltas_and_finish_are_the_text_before_the_first_stop(
    content: str, stop: tuple[str, ...], chunks: list[int], split: bool
) -> None:
    tokens = byte_tokens(content) if split else TOKENIZER.encode(content)
    assert decode(tokens) == content
    text, deltas, rest = stream(tokens, stop, chunks)
    assert "".join(deltas) + rest == text.text == expected(tokens, stop)
    assert text.stopped == (earliest(content, stop) is not None)
    nested = any(a != b and a in b[:-1] for a in stop for b in stop)
    if not nested:
        at = earliest(content, stop)
        assert text.text == (content if at is None else content[:at])


@given(texts, stops, cuts, st.booleans())
@settings(max_examples=100)
def test_a_delta_holds_no_part_of_a_character_and_is_never_taken_back(
    content: str, stop: tuple[str, ...], chunks: list[int], split: bool
) -> None:
    tokens = byte_tokens(content) if split else TOKENIZER.encode(content)
    text, deltas, rest = stream(tokens, stop, chunks)
    sent = ""
    for delta in [*deltas, rest]:
        assert BROKEN not in delta
        sent += delta
        assert content.startswith(sent)
        assert text.text.startswith(sent)
        assert not any(s in sent for s in stop)


@given(st.lists(st.one_of(st.integers(0, len(TOKENIZER) - 1), st.sampled_from(SPECIALS)), max_size=40), stops, cuts)
@settings(max_examples=150)
def test_any_tokens_at_all_stream_to_their_decoding(
    tokens: list[int], stop: tuple[str, ...], chunks: list[int]
) -> None:
    """Broken byte sequences and special tokens too: what a model draws at a high temperature."""
    text, deltas, rest = stream(tokens, stop, chunks)
    assert "".join(deltas) + rest == text.text == expected(tokens, stop)


@given(texts, stops, cuts, cuts)
def test_how_the_tokens_arrive_changes_nothing(
    content: str, stop: tuple[str, ...], chunks: list[int], other: list[int]
) -> None:
    tokens = byte_tokens(content)
    one, _deltas, _rest = stream(tokens, stop, chunks)
    two, _deltas, _rest = stream(tokens, stop, other)
    assert (one.text, one.stopped, one.tokens) == (two.text, two.stopped, two.tokens)


@given(texts, stops, cuts, st.booleans())
@example("xaab", ("b",), [1], False)
@example("a€b", ("€",), [2], True)
def test_the_tokens_shown_are_those_that_the_text_goes_to(
    content: str, stop: tuple[str, ...], chunks: list[int], split: bool
) -> None:
    tokens = byte_tokens(content) if split else TOKENIZER.encode(content)
    text, _deltas, _rest = stream(tokens, stop, chunks)
    pieces = [piece for [piece] in token_bytes(TOKENIZER, np.array(tokens, np.int64)[:, None])]
    written = text.text.encode()
    assert b"".join(pieces[: text.covered_tokens]).startswith(written)
    assert len(b"".join(pieces[: max(0, text.covered_tokens - 1)])) < max(1, len(written))
    moved = TextStream.restored(TOKENIZER, stop, text.state())
    assert (moved.text, moved.tokens, moved.covered_tokens) == (text.text, text.tokens, text.covered_tokens)


def test_nothing_comes_after_a_stop() -> None:
    tokens = byte_tokens("red. blue. green")
    text = TextStream(TOKENIZER, (".",))
    assert text.push(np.array(tokens[:3])) == "red"
    assert text.push(np.array(tokens[:4])) == ""
    assert text.stopped
    assert text.push(np.array(tokens)) == ""
    assert text.finish() == ""
    assert text.text == "red"
    assert text.tokens == 4, "tokens past the stop are not counted"
    assert text.covered_tokens == 3, "those of the stop string are not shown"


def test_the_stop_string_that_came_first_is_reported() -> None:
    text = TextStream(TOKENIZER, ("green", "lu", "blue", "."))
    text.push(np.array(byte_tokens("red blue. green")))
    assert (text.text, text.stop) == ("red b", "lu")
    unstopped = TextStream(TOKENIZER, (".",))
    unstopped.push(np.array(byte_tokens("red")))
    assert unstopped.stop == ""


def test_what_may_begin_a_stop_is_held_until_it_is_sure() -> None:
    tokens = byte_tokens("ab<en<end>x")
    text = TextStream(TOKENIZER, ("<end>",))
    sizes = [len(text.push(np.array(tokens[:n]))) for n in range(1, 11)]
    assert sizes == [1, 1, 0, 0, 0, 3, 0, 0, 0, 0]
    assert text.stopped
    assert text.text == "ab<en"


def test_finish_gives_what_was_held_for_a_stop_that_never_came() -> None:
    text = TextStream(TOKENIZER, ("<end>",))
    assert text.push(np.array(byte_tokens("red<en"))) == "red"
    assert text.finish() == "<en"
    assert text.finish() == "", "once"
    assert not text.stopped


def test_a_character_is_sent_when_its_last_byte_is_there() -> None:
    tokens = byte_tokens("a😀b")
    text = TextStream(TOKENIZER, ())
    assert [text.push(np.array(tokens[:n])) for n in range(1, 7)] == ["a", "", "", "", "😀", "b"]


def test_a_character_that_is_never_completed_shows_as_broken_only_at_the_end() -> None:
    tokens = byte_tokens("a😀")[:-1]
    text = TextStream(TOKENIZER, ())
    assert text.push(np.array(tokens)) == "a"
    assert text.finish() == decode(tokens).removeprefix("a")
    assert BROKEN in text.text


def test_special_tokens_are_no_text() -> None:
    tokens = [*byte_tokens("a"), *SPECIALS, *byte_tokens("b")]
    text = TextStream(TOKENIZER, ())
    assert text.push(np.array(tokens)) + text.finish() == "ab"


def test_an_empty_answer_is_an_empty_text() -> None:
    text = TextStream(TOKENIZER, ("x",))
    assert text.push(np.array([], np.int64)) == text.finish() == text.text == ""
    assert text.tokens == 0


@pytest.mark.parametrize("end_at", [None, 0, 3, 7])
def test_a_canvas_shows_a_glyph_for_each_mask_and_ends_at_its_end_token(end_at: int | None) -> None:
    end = TOKENIZER.convert_tokens_to_ids(EOS)
    canvas = blank(3, 8, 8)
    known = {1: "x", 2: "y", 5: "z"}
    canvas.commit(np.array([p + 3 for p in known]), np.array([byte_tokens(c)[0] for c in known.values()]))
    if end_at is not None:
        canvas.commit(np.array([end_at + 3]), np.array([end]))
    row = "".join(known.get(i, MASK_GLYPH) for i in range(8))
    assert row == "▒xy▒▒z▒▒"
    assert canvas_text(canvas, TOKENIZER, frozenset({end})) == row[:end_at]


@given(texts.filter(len), st.data())
def test_a_full_canvas_shows_the_text_and_an_empty_one_only_glyphs(content: str, data: st.DataObject) -> None:
    tokens = byte_tokens(content)
    canvas = blank(2, len(tokens), data.draw(st.integers(1, 9)))
    assert canvas_text(canvas, TOKENIZER, frozenset()) == MASK_GLYPH * len(tokens)
    canvas.commit(np.arange(2, 2 + len(tokens)), np.array(tokens))
    assert canvas_text(canvas, TOKENIZER, frozenset()) == content


def test_a_masked_position_is_no_end_even_where_the_mask_is_an_end_token() -> None:
    canvas = blank(2, 4, 4, mask_id=1)
    assert canvas_text(canvas, TOKENIZER, frozenset({1})) == MASK_GLYPH * 4


def byte_fallback() -> PreTrainedTokenizerFast:
    """Some words and every byte, as of Llama 2 and Gemma."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁▁"]
    made = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xc3\xa9\xa9", f"aé{BROKEN}"),
        (b"\n\xe2", f"a\n{BROKEN}"),
        (b"\n\xf0\x9f\x98\n", f"a\n{BROKEN * 4}"),
        (b"\xc3\xa9\xa9\xc3\xa9\xa9", f"aé{BROKEN * 4}"),
    ],
)
def test_broken_bytes_after_a_character_that_was_sent(data: bytes, text: str) -> None:
    """A byte fallback decodes a run of bytes as one: with them it is no longer the character that was sent."""
    made = byte_fallback()
    tokens = made.convert_tokens_to_ids(["▁a", *(f"<0x{byte:02X}>" for byte in data), "b"])
    for end, expected in ((len(tokens), f"{text}b"), (len(tokens) - 1, text)):
        for cut in range(end + 1):
            stream = TextStream(made, ())
            deltas = [stream.push(np.array(tokens[: i + 1])) for i in range(cut)]
            stream = TextStream.restored(made, (), stream.state())
            deltas += [stream.push(np.array(tokens[: i + 1])) for i in range(cut, end)]
            assert "".join([*deltas, stream.finish()]) == stream.text == expected


@pytest.mark.parametrize(("first", "text"), [("▁a", " ab"), ("b", "bb"), ("▁▁", "  b"), ("<0x20>", " b")])
def test_a_text_that_continues_another_keeps_the_space_before_its_first_word(first: str, text: str) -> None:
    made = byte_fallback()
    tokens = np.array(made.convert_tokens_to_ids([first, "b"]))
    for within in (False, True):
        expected = text if within else text.removeprefix(" ")
        for cut in range(3):
            stream = TextStream(made, (), within=within)
            deltas = [stream.push(tokens[: i + 1]) for i in range(cut)]
            stream = TextStream.restored(made, (), stream.state(), within=within)
            deltas += [stream.push(tokens[: i + 1]) for i in range(cut, 2)]
            assert "".join([*deltas, stream.finish()]) == stream.text == expected
    stopped = TextStream(made, (" a",), within=True)
    assert stopped.push(tokens) + stopped.finish() == text.replace(" ab", "")


def test_a_constraint_counts_the_space_before_the_first_word() -> None:
    """ " a" is one of its texts and "a" is none."""
    plain = ask("a")
    assert not plain.keeps_space and replace(plain, raw=True).keeps_space
    assert replace(plain, constraint=ConstraintSpec(Choice((" a", " b")))).keeps_space
