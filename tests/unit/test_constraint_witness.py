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
from test_constraint_toy import Wanted
from tokenizers import Tokenizer

import mmserve
from mmserve.bench.copyist import Copyist, blank, decode, observed, written
from mmserve.constraint.compile.wire import FirstAnswers
from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.search.matcher import Grammar, completes
from mmserve.constraint.search.shortest_completion import Effort, find_completion
from mmserve.constraint.search.vocabulary import Lexicon, Vocabulary, spell
from mmserve.constraint.search.witness import (
    Infeasible,
    Outcome,
    Witness,
    admit,
    advance,
    find_first,
    improve,
)
from mmserve.constraint.session.answer import ConstrainedAnswer
from mmserve.constraint.session.session import Session, known_tokens
from mmserve.decode.commit.threshold import Threshold

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
    tokenizer = Tokenizer.from_file(str(Path(mmserve.__file__).parent / "assets" / "bundled" / "tokenizer.json"))
    made = Vocabulary.spelled(spell(tokenizer), {END, 2}, tokenizer)
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


def nonsense(rng: random.Random, positions: np.ndarray, words: list[int], size: int) -> TopK:
    """Candidates of a model that babbles in the schema's own words, or in any."""
    tokens = [[rng.choice(words) if rng.random() < 0.6 else rng.randrange(size) for _ in range(6)] for _ in positions]
    scores = np.sort(np.log([[rng.random() + 1e-9 for _ in range(6)] for _ in positions]))[:, ::-1]
    return TopK(positions, np.array(tokens, np.int64), scores.astype(np.float32))


def babbled(n: int, size: int, block: int, seed: int) -> Any:
    """A canvas filled under nonsense, a random part of it a step; checked at every step."""
    _vocabulary, lexicon, tokenizer = vocabulary()
    rng = random.Random(seed)
    words = [*tokenizer.encode(json.dumps(SCHEMAS[n])).ids, END, 2]
    session = Session(ConstrainedAnswer(shortest(n, size), lexicon))
    canvas = blank(session, block)
    while canvas.masked.any():
        here = canvas.block_masked()
        proposed = observed(session, canvas, nonsense(rng, here - 1, words, len(lexicon.spelled)))
        final = session.choose(canvas, proposed, Wanted(frozenset(at for at in here.tolist() if rng.random() < 0.3)))
        assert len(final.positions)
        canvas.commit(final.positions, final.tokens)
        session.sync(canvas)
        holds(n, session.answer.witness, known_tokens(canvas), size)
    assert not session.stats.report().late
    return json.loads(lexicon.text(canvas.answer({END, 2})[0].tolist()).decode())


_WORDS = ("red", "green", "big", "small", "circle", "left", "of", "the", "picture")


def draw(schema: dict[str, Any], rng: random.Random) -> Any:
    """A document that obeys one of the plain schemas of these tests."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return draw(rng.choice(schema["anyOf"]), rng)
    kind = schema["type"]
    if kind == "object":
        names = [n for n in schema["properties"] if n in schema["required"] or rng.random() < 0.5]
        return {name: draw(schema["properties"][name], rng) for name in names}
    if kind == "array":
        low = schema.get("minItems", 0)
        return [draw(schema["items"], rng) for _ in range(rng.randint(low, schema.get("maxItems", low + 4)))]
    if kind == "string":
        if "examples" in schema:
            return rng.choice(schema["examples"])
        return " ".join(rng.choice(_WORDS) for _ in range(3))
    if kind == "integer":
        return rng.randint(schema.get("minimum", 0), schema.get("maximum", 999))
    return {"number": round(rng.uniform(-99, 99), 2), "boolean": rng.random() < 0.5, "null": None}[kind]


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
        admit(endless, vocabulary()[1], 50, Effort(exact_tokens=50, patient_tokens=50, states=100))
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
        session = Session(ConstrainedAnswer(shortest(n, size), lexicon))
        canvas = blank(session, size)
        final = session.choose(canvas, observed(session, canvas, top), Threshold(0.5))
        assert final.tokens.tolist() == target.tolist()


def test_a_noisy_model_is_mostly_followed() -> None:
    """Valid always; and few steps leave the old witness because no other way could be brought to its end."""
    _vocabulary, lexicon, tokenizer = vocabulary()
    rng = random.Random(11)
    steps, fallbacks, exact = 0, 0, 0
    for n in (0, 1, 2, 3, 0, 1, 2, 3):
        document = draw(SCHEMAS[n], rng)
        ids = tokenizer.encode(written(document)).ids
        size = (len(ids) // 32 + 2) * 32
        model = Copyist(ids, END, rng, accuracy=0.9, slip=0.05)
        session = Session(ConstrainedAnswer(shortest(n, size), lexicon))
        result = decode(session, model, check=lambda w, known, n=n, size=size: holds(n, w, known, size))
        found = json.loads(result.text(lexicon))
        assert jsonschema_rs.is_valid(SCHEMAS[n], found)
        steps, fallbacks = steps + len(result.commits), fallbacks + session.stats.report().fallbacks
        exact += found == document
    assert fallbacks <= 0.1 * steps
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
    begun = advance(shortest(0, size), known)
    witness, outcome = improve(begun, known, top, size, lexicon, seconds=60)
    assert outcome is Outcome.FOUND
    holds(0, witness, known, size)
    assert lexicon.text(witness.tokens[: witness.length].tolist()).startswith(b'{"a":"a')
    assert witness.length > begun.length or (witness.tokens != begun.tokens).any()


def test_no_time_leaves_the_old_witness() -> None:
    size = least(1) + 20
    known, begun = np.full(size, -1, np.int64), shortest(1, size)
    top = nonsense(random.Random(0), np.arange(size), [5, 6, 7], 500)
    ticks = iter(range(1000))
    witness, outcome = improve(begun, known, top, size, vocabulary()[1], seconds=3, clock=lambda: float(next(ticks)))
    assert outcome is Outcome.LATE
    assert witness is begun


def test_only_the_witness_can_be_committed() -> None:
    size = least(0)
    known = np.full(size, -1, np.int64)
    known[2] = 300 if shortest(0, size).tokens[2] != 300 else 301
    with pytest.raises(ValueError, match="only the witness"):
        advance(shortest(0, size), known)


def test_the_most_likely_token_is_chosen_where_the_policy_and_the_witness_differ() -> None:
    """The model prefers a token that no answer may hold; the policy, to which the witness's are shown, takes none."""
    mine = shortest(0, least(0)).tokens[:3]
    wrong = vocabulary()[1].ids[b"\x00"]
    tokens = np.stack([[wrong, mine[0]], [wrong, mine[1]], [wrong, mine[2]]])
    scores = np.log(np.array([[0.8, 0.2], [0.9, 0.1], [0.6, 0.4]], np.float32))

    def chosen(policy: Wanted | Threshold) -> list[int]:
        session = Session(ConstrainedAnswer(shortest(0, least(0)), vocabulary()[1]))
        canvas = blank(session, 3)
        final = session.choose(canvas, observed(session, canvas, TopK(np.arange(3), tokens, scores)), policy)
        assert (final.tokens == mine[final.positions - 1]).all()
        return list(final.positions)

    assert chosen(Wanted(frozenset({2}))) == [2]
    assert chosen(Wanted(frozenset())) == [1]  # what no other token may hold is sure
    assert 1 in chosen(Threshold(0.9))


def test_end_tokens_wait_for_the_answer() -> None:
    """Those that the model does not mean: it would go on, and the witness is padded to its budget."""
    size = least(0) + 3
    begun = shortest(0, size)
    other = vocabulary()[1].ids[b"\x00"]
    meant = np.where(np.arange(size) < least(0), begun.tokens, other)
    top = TopK(np.arange(size), np.stack([meant, begun.tokens], 1), np.log(np.tile(np.float32([0.9, 0.1]), (size, 1))))

    def chosen(wanted: range) -> list[int]:
        session = Session(ConstrainedAnswer(begun, vocabulary()[1]))
        canvas = blank(session, size)
        return list(session.choose(canvas, observed(session, canvas, top), Wanted(frozenset(wanted))).positions)

    assert chosen(range(1, size + 1)) == [*range(1, size + 1)]
    early = chosen(range(least(0) + 1, size + 1))
    assert early and max(early) <= least(0)
    assert chosen(range(1, least(0) + 1))[: least(0)] == [*range(1, least(0) + 1)]


def test_the_shortest_answer_is_the_same_whatever_was_asked_before() -> None:
    lexicon, budgets = vocabulary()[1], (1, 8, 500)
    looked_for = {
        (n, budget): find_completion(grammar(n).start(), lexicon, classes=grammar(n).classes, room=budget)
        for n in (0, 2, 4, 7)
        for budget in budgets
    }
    for order in (budgets, budgets[::-1]):
        known: dict[int, FirstAnswers] = {}
        for _again in range(2):
            for n in (0, 2, 4, 7):
                found = []
                for budget in order:
                    if n not in known or not known[n].covers(budget):
                        known[n] = find_first(grammar(n), lexicon, budget)
                    found.append(known[n].shortest(budget))
                assert found == [looked_for[n, budget] for budget in order]
