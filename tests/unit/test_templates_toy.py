"""Concatenations over a toy vocabulary: every row of tokens, against a reading of templates written for this test."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import product

import numpy as np
import pytest
from test_constraint_toy import Wanted

from mmserve.bench.copyist import blank, observed
from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.search.matcher import BoundedHole, Concatenation, Grammar
from mmserve.constraint.search.vocabulary import Lexicon, Vocabulary
from mmserve.constraint.search.witness import Infeasible, admit
from mmserve.constraint.session.answer import ConstrainedAnswer, splitter
from mmserve.constraint.session.session import Session
from mmserve.constraint.session.validation import AnswerValidator
from mmserve.errors import FailedPrecondition

END = 5
PIECES = ("a", "b", "c", "ab", "cc")
#: Texts (one more than holes), and of each hole its pattern and most tokens.
TOYS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, int], ...]]] = {
    "any text, then one of it": (("", "b"), (("[abc]*", 3),)),
    "seam within a token": (("a", "b"), (("[abc]+", 2),)),
    "text that begins like the hole": (("", "ab", ""), (("a*b?", 2), ("c+", 2))),
    "text that overlaps itself": (("c", "aba", ""), (("[ab]*", 3), ("[bc]?", 1))),
    "two of them": (("", "c", "c"), (("(ab)+", 2), ("a?", 1))),
    "no room but for the least": (
        (
            "b",
            "",
        ),
        (("cc", 1),),
    ),
}


@cache
def setting(name: str) -> tuple[Concatenation, Lexicon]:
    texts, holes = TOYS[name]
    vocabulary = Vocabulary.spelled([*(piece.encode() for piece in PIECES), b""], {END})
    bounded = tuple(BoundedHole(Grammar(f"start: /{pattern}/", vocabulary), most) for pattern, most in holes)
    made = Concatenation(tuple(text.encode() for text in texts), bounded, vocabulary)
    return made, Lexicon.of(vocabulary.token_bytes)


@cache
def spelled(tokens: tuple[int, ...]) -> str:
    return "".join(PIECES[token] for token in tokens)


def read(name: str, tokens: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """What fills each hole; None if ``tokens`` are no whole answer. Each hole ends where the text after it is first
    complete."""
    texts, holes = TOYS[name]
    at = next((n for n in range(len(tokens) + 1) if spelled(tokens[:n]) == texts[0]), -1)
    found: list[tuple[int, ...]] = []
    for (pattern, most), text in zip(holes, texts[1:], strict=True):
        if at < 0:
            return None
        ways = [
            (end, stop)
            for end in range(at, len(tokens) + 1)
            for stop in range(at, end + 1)
            if spelled(tokens[stop:end]) == text
            and stop - at <= most
            and re.fullmatch(pattern, spelled(tokens[at:stop]))
            and (text or end == len(tokens))
        ]
        if not ways:
            return None
        end, stop = min(ways)
        found.append(tokens[at:stop])
        at = end
    return found if at == len(tokens) else None


@cache
def answers(name: str, size: int) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """All whole answers of at most ``size`` tokens, and what fills their holes."""
    if size < 0:
        return {}
    longest = {row: filled for row in product(range(5), repeat=size) if (filled := read(name, row)) is not None}
    return answers(name, size - 1) | longest


@pytest.mark.parametrize("name", TOYS)
def test_every_row_is_taken_or_not_as_it_should_be(name: str) -> None:
    language, _lexicon = setting(name)
    valid = answers(name, 6)
    assert valid
    begun = {row[:n] for row in valid for n in range(len(row) + 1)}
    for n in range(5):
        for row in product(range(5), repeat=n):
            matcher = language.start()
            taken = matcher.valid(row)
            if row in begun:
                assert taken == n
            if taken < n:
                continue
            matcher.consume(row)
            assert matcher.accepting == (row in valid)
            following = [token for token in range(6) if matcher.valid([token])]
            assert matcher.allowed().tolist() == following
            assert matcher.among(np.arange(6)).tolist() == [token in following for token in range(6)]
            forced = matcher.forced()
            for token in following:
                assert forced.startswith(PIECES[token].encode()) or PIECES[token].encode().startswith(forced)
            if matcher.accepting:
                assert [tuple(hole) for hole in language.split(row)] == valid[row]


@pytest.mark.parametrize("name", TOYS)
def test_whole_canvases_filled_in_any_order_end_in_the_language(name: str) -> None:
    language, lexicon = setting(name)
    rng = random.Random(name)
    for size in (*range(1, 6), *[6] * 6):
        valid = answers(name, size)
        try:
            witness = admit(language, lexicon, size)
        except Infeasible as refused:
            assert not valid
            assert refused.needed is not None and answers(name, refused.needed)
            assert not answers(name, refused.needed - 1)
            continue
        session = Session(ConstrainedAnswer(witness, lexicon))
        canvas = blank(session, size)
        while canvas.masked.any():
            masked = canvas.block_masked()
            tokens = np.array([rng.sample(range(6), 4) for _ in masked])
            top = TopK(masked - 1, tokens, np.full(tokens.shape, -1.0, np.float32) - np.arange(4, dtype=np.float32))
            wanted = Wanted(frozenset(at for at in masked.tolist() if rng.random() < 0.3))
            final = session.choose(canvas, observed(session, canvas, top), wanted)
            canvas.commit(final.positions, final.tokens)
            session.sync(canvas)
            witness = session.answer.witness
            assert tuple(witness.tokens[: witness.length].tolist()) in valid
        assert tuple(canvas.answer({END})[0].tolist()) in valid


def test_how_a_text_is_split_into_tokens_decides_what_may_follow_it() -> None:
    """After "a" and "b" the text "bc" after the hole may be half there; after "ab" it cannot, as no token spans a seam.

    The search has looked at both before.
    """
    pieces = ("a", "b", "c", "ab", "bc")
    vocabulary = Vocabulary.spelled([*(piece.encode() for piece in pieces), b""], {END})
    hole = BoundedHole(Grammar("start: /[ab]*/", vocabulary), 4)
    language, lexicon = Concatenation((b"", b"bc"), (hole,), vocabulary), Lexicon.of(vocabulary.token_bytes)
    answer = ConstrainedAnswer(admit(language, lexicon, 6), lexicon)
    known = np.full(6, -1)
    steps = ([(2, -0.5), (0, -0.7), (3, -0.8)], [(1, -0.1), (0, -3.0)], [(2, -0.1), (0, -3.0)])  # tokens and scores
    for position, rows in enumerate(steps):
        tokens, scores = np.array([[token for token, _ in rows]]), np.array([[s for _, s in rows]], np.float32)
        answer.search(known, TopK(np.array([position]), tokens, scores), position + 1)
        known[position] = answer.witness.tokens[position]
        answer.advance(known)
    assert [pieces[token] for token in known[:3]] == ["a", "b", "c"]
    assert answer.witness.length == 3


class Listener(AnswerValidator):
    """Keeps what it is asked to check."""

    def __init__(self) -> None:
        self.asked = list[str]()

    def check(self, answer: str) -> None:
        self.asked.append(answer)


def test_holes_are_checked_also_where_the_parser_of_the_answer_has_failed() -> None:
    language, lexicon = setting("any text, then one of it")
    witness, judge = admit(language, lexicon, 4), Listener()
    split = splitter(witness)
    assert split is not None
    answer = ConstrainedAnswer(witness, lexicon, validators=(judge,), split=split, broken=True)
    answer.check("acb", np.array([0, 2, 1, END]))
    assert judge.asked == ["ac"]
    with pytest.raises(FailedPrecondition, match="cannot be checked"):
        answer.check("ac", np.array([0, 2, END, END]))  # no whole answer
