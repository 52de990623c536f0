"""The witness over real schemas: always valid, always within its budget, whatever the model says."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer

import mmserve
from mmserve.bench.copyist import Copyist, decode, draw, written
from mmserve.constraint.compile.begun import First
from mmserve.constraint.search.completion import completes
from mmserve.constraint.search.first_witness import look
from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.matcher import Grammar
from mmserve.constraint.search.shortest_completion import Effort, shortest_close
from mmserve.constraint.search.vocabulary import Vocabulary
from mmserve.constraint.search.witness import (
    Infeasible,
    Outcome,
    Witness,
    admit,
    choose,
    follow,
    improve,
    log_probabilities,
)

STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def of(**properties: object) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: list[dict[str, Any]] = [
    of(a=STRING, b=INTEGER),
    of(name=STRING, tags={"type": "array", "items": STRING, "minItems": 1, "maxItems": 4}, on={"type": "boolean"}),
    of(objects={"type": "array", "items": of(shape={"enum": ["circle", "square"]}, row=INTEGER), "maxItems": 3}),
    {"anyOf": [of(kind={"const": "circle"}, radius={"type": "number"}), of(kind={"const": "dot"}, at=INTEGER)]},
    of(count={"type": "integer", "minimum": 10, "maximum": 99}, day=dict(STRING, pattern="^[0-9]{4}-[0-9]{2}$")),
    of(text={"type": "string", "minLength": 6, "maxLength": 30}),
    {"type": "object", "properties": {"x": INTEGER, "y": STRING}, "required": ["x"], "additionalProperties": False},
    {"enum": ["a red circle", "a blue square", None, 17]},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}}},
]
END = 1


@cache
def vocabulary() -> tuple[Vocabulary, Lexicon, Tokenizer]:
    tokenizer = Tokenizer.from_file(str(Path(mmserve.__file__).parent / "assets" / "reference" / "tokenizer.json"))
    made = Vocabulary.of(tokenizer, {END, 2})
    return made, Lexicon.of(made.token_bytes), tokenizer


@cache
def grammar(n: int) -> Grammar:
    source = LLMatcher.grammar_from_json_schema(SCHEMAS[n], overrides={"whitespace_flexible": False})
    return Grammar(source, vocabulary()[0])


@cache
def least(n: int) -> int:
    return admit(grammar(n), vocabulary()[1], 500).length


@cache
def shortest(n: int, budget: int) -> Witness:
    return admit(grammar(n), vocabulary()[1], budget)


def holds(n: int, witness: Witness, known: np.ndarray, size: int) -> None:
    """The invariant: agrees with every committed token, is valid, has exactly the budget's length."""
    assert witness.tokens.shape == (size,)
    assert ((known < 0) | (known == witness.tokens)).all()
    assert np.isin(witness.tokens[witness.length :], [END, 2]).all()
    assert not np.isin(witness.tokens[: witness.length], [END, 2]).any()
    assert completes(grammar(n).start(), witness.tokens[: witness.length].tolist())
    assert witness.known == (np.flatnonzero(known < 0)[0] if (known < 0).any() else size)


def nonsense(rng: random.Random, positions: np.ndarray, words: list[int]) -> TopK:
    """Candidates of a model that babbles in the schema's own words, or in any."""
    tokens = [
        [rng.choice(words) if rng.random() < 0.6 else rng.randrange(-3, 700) for _ in range(6)] for _ in positions
    ]
    scores = np.sort(np.log([[rng.random() + 1e-9 for _ in range(6)] for _ in positions]))[:, ::-1]
    return TopK(positions, np.array(tokens, np.int64), scores.astype(np.float32))


def babbled(n: int, size: int, block: int, seed: int) -> Any:
    """A canvas filled under nonsense, a random part of it a step; checked at every step."""
    _vocabulary, lexicon, tokenizer = vocabulary()
    rng = random.Random(seed)
    words = [*tokenizer.encode(json.dumps(SCHEMAS[n])).ids, END, 2]
    witness, known = shortest(n, size), np.full(size, -1, np.int64)
    while (known < 0).any():
        masked = np.flatnonzero(known < 0)
        end = min((int(masked[0]) // block + 1) * block, size)
        here = masked[masked < end]
        top = nonsense(rng, here, words)
        witness, outcome = improve(witness, known, top, end, lexicon, seconds=60)
        assert outcome is not Outcome.LATE
        holds(n, witness, known, size)
        wanted = np.array([rng.random() < 0.3 for _ in here])
        chosen = wanted if rng.random() < 0.5 and wanted.any() else choose(witness, here, top.tokens[:, 0], wanted, top)
        assert chosen.any()
        known[here[chosen]] = witness.tokens[here[chosen]]
        witness = follow(witness, known)
        holds(n, witness, known, size)
    ends = np.flatnonzero(np.isin(known, [END, 2]))
    return json.loads(lexicon.text(known[: ends[0] if len(ends) else size].tolist()).decode())


@pytest.mark.parametrize("more", [0, 1, 2, 3, 40])
@pytest.mark.parametrize("n", range(len(SCHEMAS)))
def test_nonsense_ends_in_valid_documents_within_the_budget(n: int, more: int) -> None:
    for seed in range(2):
        assert jsonschema_rs.is_valid(SCHEMAS[n], babbled(n, least(n) + more, (8, 32)[seed], seed))


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, len(SCHEMAS) - 1),
    more=st.integers(0, 25),
    block=st.sampled_from([1, 4, 16, 1000]),
    seed=st.integers(0, 1 << 30),
)
def test_the_invariant_holds_at_every_step(n: int, more: int, block: int, seed: int) -> None:
    assert jsonschema_rs.is_valid(SCHEMAS[n], babbled(n, least(n) + more, block, seed))


@pytest.mark.parametrize("n", range(len(SCHEMAS)))
def test_too_small_a_budget_is_refused_with_the_number_needed(n: int) -> None:
    with pytest.raises(Infeasible, match=f"{least(n)} tokens") as refused:
        admit(grammar(n), vocabulary()[1], least(n) - 1)
    assert refused.value.needed == least(n)
    assert admit(grammar(n), vocabulary()[1], least(n)).length == least(n)


def test_a_language_without_an_end_is_refused() -> None:
    endless = Grammar('start: "a" start', vocabulary()[0])
    with pytest.raises(Infeasible, match="no answer") as refused:
        admit(endless, vocabulary()[1], 50, Effort(exact_tokens=50, patient_tokens=50, places=100))
    assert refused.value.needed is None


def test_a_model_that_is_right_is_followed() -> None:
    _vocabulary, lexicon, tokenizer = vocabulary()
    rng = random.Random(3)
    for n in (0, 1, 2, 3):
        document = draw(SCHEMAS[n], rng)
        ids = tokenizer.encode(written(document)).ids
        size = len(ids) + 8
        target = np.array([*ids, *[END] * 8])
        known = np.full(size, -1, np.int64)
        top = TopK(np.arange(size), target[:, None], np.full((size, 1), -0.1, np.float32))
        witness, outcome = improve(shortest(n, size), known, top, size, lexicon, seconds=60)
        assert outcome is Outcome.FOUND
        assert witness.tokens.tolist() == target.tolist()
        assert choose(witness, np.arange(size), target, np.ones(size, bool), top).all()


def test_a_noisy_model_is_mostly_followed() -> None:
    """Valid always; and few steps leave the old witness because no other way could be brought to its end."""
    _vocabulary, lexicon, tokenizer = vocabulary()
    rng = random.Random(11)
    outcomes: list[Outcome] = []
    exact = 0
    for n in (0, 1, 2, 3, 0, 1, 2, 3):
        document = draw(SCHEMAS[n], rng)
        ids = tokenizer.encode(written(document)).ids
        size = (len(ids) // 32 + 2) * 32
        model = Copyist(ids, END, rng, accuracy=0.9, slip=0.05)
        result = decode(
            shortest(n, size), lexicon, model, check=lambda w, known, n=n, size=size: holds(n, w, known, size)
        )
        found = json.loads(result.text(lexicon))
        assert jsonschema_rs.is_valid(SCHEMAS[n], found)
        outcomes += result.outcomes
        exact += found == document
    assert outcomes.count(Outcome.KEPT) <= 0.1 * len(outcomes)
    assert exact >= 3


def test_end_tokens_to_the_right_bound_the_answer() -> None:
    """Committed end tokens leave less room than the budget; the model's longer text is cut to it."""
    _vocabulary, lexicon, tokenizer = vocabulary()
    size, kept = least(0) + 30, least(0) + 4
    known = np.full(size, -1, np.int64)
    known[kept:] = END
    ids = tokenizer.encode('{"a":"a very long text that goes on","b":12345678}').ids
    row = np.array([ids[i] if i < len(ids) else END for i in range(kept)])
    top = TopK(np.arange(kept), row[:, None], np.full((kept, 1), -0.1, np.float32))
    begun = follow(shortest(0, size), known)
    witness, outcome = improve(begun, known, top, size, lexicon, seconds=60)
    assert outcome is Outcome.FOUND
    holds(0, witness, known, size)
    assert lexicon.text(witness.tokens[: witness.length].tolist()).startswith(b'{"a":"a')
    assert witness.length > begun.length or (witness.tokens != begun.tokens).any()


def test_no_time_leaves_the_old_witness() -> None:
    size = least(1) + 20
    known, begun = np.full(size, -1, np.int64), shortest(1, size)
    top = nonsense(random.Random(0), np.arange(size), [5, 6, 7])
    ticks = iter(range(1000))
    witness, outcome = improve(begun, known, top, size, vocabulary()[1], seconds=3, clock=lambda: float(next(ticks)))
    assert outcome is Outcome.LATE
    assert witness is begun


def test_only_the_witness_can_be_committed() -> None:
    size = least(0)
    known = np.full(size, -1, np.int64)
    known[2] = 300 if shortest(0, size).tokens[2] != 300 else 301
    with pytest.raises(ValueError, match="only the witness"):
        follow(shortest(0, size), known)


def test_the_most_likely_token_is_chosen_where_the_policy_and_the_witness_differ() -> None:
    begun = shortest(0, least(0))
    positions = np.array([0, 1, 2])
    mine = begun.tokens[positions]
    tokens = np.stack([[9, mine[0]], [9, 8], [9, mine[2]]])
    top = TopK(positions, tokens, np.log(np.array([[0.8, 0.1], [0.9, 0.1], [0.7, 0.3]], np.float32)))
    assert choose(begun, positions, tokens[:, 0], np.ones(3, bool), top).tolist() == [False, False, True]
    np.testing.assert_allclose(log_probabilities(begun, top), [np.log(0.1), -20, np.log(0.3)], rtol=1e-5)
    agreeing = np.array([9, mine[1], 9])
    assert choose(begun, positions, agreeing, np.ones(3, bool), top).tolist() == [False, True, False]
    assert choose(begun, positions, agreeing, np.zeros(3, bool), top).sum() == 1


def test_end_tokens_wait_for_the_answer() -> None:
    begun = shortest(0, least(0) + 3)
    positions = np.arange(least(0) + 3)
    top = TopK(positions, begun.tokens[:, None], np.full((len(positions), 1), -0.1, np.float32))
    ends, every = positions >= least(0), np.ones(len(positions), bool)
    assert choose(begun, positions, begun.tokens, every, top).all()
    assert choose(begun, positions, begun.tokens, ends, top).tolist() == (positions == 0).tolist()
    behind = TopK(positions[ends], top.tokens[ends], top.log_probabilities[ends])
    assert choose(begun, positions[ends], begun.tokens[ends], ~every[ends], behind).tolist() == [True, False, False]


def test_the_shortest_answer_is_the_same_whatever_was_asked_before() -> None:
    lexicon, budgets = vocabulary()[1], (1, 8, 500)
    looked_for = {
        (n, budget): shortest_close(grammar(n).start(), lexicon, kinds=grammar(n).kinds, room=budget)
        for n in (0, 2, 4, 7)
        for budget in budgets
    }
    for order in (budgets, budgets[::-1]):
        known: dict[int, First] = {}
        for _again in range(2):
            for n in (0, 2, 4, 7):
                found = []
                for budget in order:
                    if n not in known or not known[n].covers(budget):
                        known[n] = look(grammar(n), lexicon, budget)
                    found.append(known[n].close(budget))
                assert found == [looked_for[n, budget] for budget in order]
