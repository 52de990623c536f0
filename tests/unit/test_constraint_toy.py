"""Every canvas that can be reached over a toy vocabulary, against an independent brute-force oracle."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from mmserve.bench.copyist import blank, observed
from mmserve.constraint.search.beam import Beam
from mmserve.constraint.search.lattice import TopK, build_lattice
from mmserve.constraint.search.matcher import Grammar
from mmserve.constraint.search.parser_states import ParserStateCache
from mmserve.constraint.search.vocabulary import Lexicon, Vocabulary
from mmserve.constraint.search.witness import Infeasible, Witness, admit, improve
from mmserve.constraint.session.answer import ConstrainedAnswer
from mmserve.constraint.session.session import Session, known_tokens
from mmserve.core.candidates import Candidates
from mmserve.core.canvas import Canvas
from mmserve.decode.commit.base import BlockWise

END = 5


def balanced(text: str) -> bool:
    depth = 0
    for c in text:
        depth += 1 if c == "(" else -1
        if depth < 0:
            return False
    return depth == 0 and len(text) > 0


def doubled(text: str) -> bool:
    """a^n b^n, n at least 1."""
    n = len(text) // 2
    return n > 0 and text == "a" * n + "b" * n


def matching(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


#: Grammar, what it means in plain Python, and the five tokens with bytes.
TOYS: dict[str, tuple[str, Callable[[str], bool], tuple[str, ...]]] = {
    "pairs": ("start: /(ab)*c/", matching("(ab)*c"), ("a", "b", "c", "ab", "ba")),
    "counted": ("start: /a{2,4}b?c{2}/", matching("a{2,4}b?c{2}"), ("a", "b", "c", "aa", "cc")),
    "either": ("start: /(aab|abb|b+c)/", matching("aab|abb|b+c"), ("a", "b", "c", "ab", "bb")),
    "balanced": ('start: "(" start? ")" start?', balanced, ("(", ")", "()", "((", "))")),
    "doubled": ('start: "a" start? "b"', doubled, ("a", "b", "ab", "aa", "bb")),
    "string": ('start: /"[ab]*"/', matching('"[ab]*"'), ('"', "a", "b", '""', 'a"')),
}


@cache
def setting(name: str) -> tuple[Grammar, Lexicon]:
    source, _means, pieces = TOYS[name]
    vocabulary = Vocabulary.spelled([*(piece.encode() for piece in pieces), b""], {END})
    return Grammar(source, vocabulary), Lexicon.of(vocabulary.token_bytes)


@cache
def answers(name: str, length: int) -> list[tuple[int, ...]]:
    """All valid answers of ``length`` tokens."""
    _source, means, pieces = TOYS[name]
    return [row for row in product(range(5), repeat=length) if means("".join([pieces[t] for t in row]))]


@cache
def valid_rows(name: str, size: int) -> np.ndarray:
    """All valid canvases of ``size`` positions (int64 ``[n, size]``): an answer, and the end of text after it."""
    rows = [[*row, *[END] * (size - n)] for n in range(size + 1) for row in answers(name, n)]
    return np.array(rows, np.int64).reshape(-1, size)


def completable(name: str, known: np.ndarray) -> bool:
    rows = valid_rows(name, len(known))
    return bool(((known < 0) | (rows == known)).all(1).any())


def drawn(rng: random.Random, positions: np.ndarray, k: int) -> TopK:
    """Candidates of a model that knows nothing, surer at some positions than at others."""
    tokens = np.array([rng.sample(range(6), k) for _ in positions], np.int64).reshape(-1, k)
    weights = np.array([sorted((rng.random() ** 3 + 1e-3 for _ in range(k)), reverse=True) for _ in positions])
    return TopK(positions, tokens, np.log(weights / weights.sum(1, keepdims=True)).astype(np.float32).reshape(-1, k))


def check(name: str, witness: Witness, known: np.ndarray) -> None:
    rows = valid_rows(name, len(known))
    assert (rows == witness.tokens).all(1).any(), "the witness is no valid canvas"
    assert ((known < 0) | (known == witness.tokens)).all(), "the witness disagrees with what is committed"
    assert completable(name, known)


@dataclass(frozen=True)
class Wanted(BlockWise):
    """A commit policy that takes what stands at given positions of the canvas, whatever it is."""

    positions: frozenset[int]

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        return np.isin(candidates.positions, list(self.positions))


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("size", range(1, 9))
def test_a_budget_is_refused_exactly_where_no_answer_fits(name: str, size: int) -> None:
    grammar, lexicon = setting(name)
    feasible = len(valid_rows(name, min(size, 6))) > 0
    try:
        witness = admit(grammar, lexicon, size)
    except Infeasible as refused:
        assert not feasible
        assert refused.needed is not None
        assert len(valid_rows(name, refused.needed)) > 0
        assert len(valid_rows(name, refused.needed - 1)) == 0
    else:
        assert feasible
        assert witness.length <= size


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize(("size", "block"), [(4, 2), (5, 5), (6, 3)])
@pytest.mark.parametrize("most", [150, pytest.param(6_000, marks=pytest.mark.slow)])
def test_every_subset_of_every_witness_can_be_committed(name: str, size: int, block: int, most: int) -> None:
    """Of the canvases reachable from the empty one ``most`` are visited, by any part of any witness on the way."""
    grammar, lexicon = setting(name)
    if not len(valid_rows(name, size)):
        with pytest.raises(Infeasible):
            admit(grammar, lexicon, size)
        return
    rng = random.Random(f"{name} {size}")
    first = replace(admit(grammar, lexicon, size), states=ParserStateCache(lexicon, grammar.classes))
    begun = Session(ConstrainedAnswer(first, lexicon))
    stack = [(begun, blank(begun, block))]
    seen = {(tuple(known_tokens(stack[0][1])), tuple(begun.answer.witness.tokens))}
    ended, asked_for = 0, set[tuple[int, ...]]()
    while stack and len(seen) < most:
        old, canvas = stack.pop()
        check(name, old.answer.witness, known_tokens(canvas))
        here = canvas.block_masked()
        if not len(here):
            ended += 1
            continue
        for k in (1, 3):
            top = drawn(rng, here - 1, k)
            for subset in range(1, 1 << len(here)):
                part = here[[bool(subset >> i & 1) for i in range(len(here))]]
                session, grown = Session(replace(old.answer)), deepcopy(canvas)
                final = session.choose(grown, observed(session, grown, top), Wanted(frozenset(part.tolist())))
                assert len(final.positions)
                grown.commit(final.positions, final.tokens)
                session.sync(grown)
                asked_for.add(tuple(final.positions))
                key = (tuple(known_tokens(grown)), tuple(session.answer.witness.tokens))
                if key not in seen:
                    seen.add(key)
                    stack.append((session, grown))
    assert ended
    assert len(asked_for) > size  # by far not one position a time


@pytest.mark.parametrize("name", TOYS)
def test_whole_canvases_filled_in_any_order_end_in_the_language(name: str) -> None:
    grammar, lexicon = setting(name)
    rng = random.Random(name)
    for _ in range(12):
        size = rng.randint(5, 7)
        session = Session(ConstrainedAnswer(admit(grammar, lexicon, size), lexicon))
        canvas = blank(session, size)
        while canvas.masked.any():
            masked = canvas.block_masked()
            proposed = observed(session, canvas, drawn(rng, masked - 1, rng.randint(1, 5)))
            wanted = Wanted(frozenset(at for at in masked.tolist() if rng.random() < 0.3))
            final = session.choose(canvas, proposed, wanted)
            assert len(final.positions)
            canvas.commit(final.positions, final.tokens)
            session.sync(canvas)
            check(name, session.answer.witness, known_tokens(canvas))


@pytest.mark.parametrize("name", TOYS)
def test_the_best_path_is_found_where_the_beam_is_wide(name: str) -> None:
    """With candidates for every token, and room for every fork, the search finds what brute force finds."""
    grammar, lexicon = setting(name)
    rng, size = random.Random(name), 5
    for _ in range(20):
        top = drawn(rng, np.arange(size), 6)
        scores = np.zeros((size, 6))
        np.put_along_axis(scores, top.tokens, top.log_probabilities.astype(float), 1)
        begun = admit(grammar, lexicon, size)
        wide = Beam(width=1000, margin=100.0)
        witness, _outcome = improve(begun, np.full(size, -1), top, size, lexicon, beam=wide, seconds=60)
        best = scores[np.arange(size), valid_rows(name, size)].sum(-1).max()
        assert scores[np.arange(size), witness.tokens].sum() == pytest.approx(best, abs=1e-4)


def test_a_token_that_a_verifier_has_chosen_is_preferred_to_the_old_witness() -> None:
    """It becomes the most likely one, though only just: the old witness holds what was the most likely before."""
    grammar, lexicon = setting("either")
    begun = admit(grammar, lexicon, 3)
    tokens = np.array([[0, 1], [0, 1], [1, 2]])  # a, then a or b, then b
    top = TopK(np.arange(3), tokens, np.full((3, 2), [-0.1, -3.0], np.float32))
    session = Session(ConstrainedAnswer(begun, lexicon))
    session.answer.search(np.full(3, -1), top, 3)
    assert session.answer.witness.tokens.tolist() == [0, 0, 1]
    canvas = blank(session, 3)
    proposed = replace(observed(session, canvas, top), tokens=np.array([0, 1, 1]))
    final = session.choose(canvas, proposed, Wanted(frozenset({1, 2, 3})), verified=True)
    assert final.tokens.tolist() == [0, 1, 1]


def test_whether_a_row_agrees_is_decided_at_committed_positions_alone() -> None:
    """A search asks it of each place where it may join the old witness: all positions each time took a second."""

    class Counted(list[int | None]):
        asked = 0

        def __getitem__(self, at: Any) -> Any:
            Counted.asked += 1
            return super().__getitem__(at)

    _grammar, lexicon = setting("pairs")
    size = 200
    known = np.full(size, -1)
    known[[150, 190]] = 0, END
    old = np.array([*[0, 1] * 94, 2, *[END] * 11])
    none = TopK(np.zeros(0, np.int64), np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32))
    lattice = build_lattice(known, 0, size, none, old, 189, frozenset({END}), lexicon)
    lattice = replace(lattice, fixed=Counted(lattice.fixed))
    row = old[:189].tolist()
    for begin, since in ((0, 0), (10, 10), (9, 11), (10, 9), (151, 151), (188, 10)):
        agrees = all(
            known[at] < 0 or known[at] == (row[at - begin + since] if at - begin + since < len(row) else END)
            for at in range(begin, size)
        )
        assert lattice.agrees(begin, row, since) == lattice.agrees(begin, row[since:]) == agrees
    assert Counted.asked <= 2 * 2 * 6
