"""Schemas of every kind, a model that does its worst, and budgets with no token to spare: all that comes is valid.

The slow ones go over all schemas: ``pytest -m slow -s tests/engine/test_adversarial_schemas.py`` prints the figures.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import harness
import jsonschema_rs
import pytest
from adversary import adversarial, near_misses
from grammars import accepts, schema_matcher, sentence
from harness import Bench, Call
from helpers import ask, tiny_model
from schema_zoo import BY_HAND, Schema, zoo
from test_constrained import constrained, like
from test_policies import policy

from mmserve.core.events import Finished
from mmserve.core.request import Policy
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import Attention, LoadedModel

Make = Callable[..., Bench]
MORE = (0, 1, 2, 3, 48)  # tokens beyond the least
AT_ONCE = 32
COMMITS = [
    policy("low_confidence"),
    policy("threshold", confidence=0.3),
    policy("random"),
    policy("factor", factor=2.0),
    policy("confident", confidence=0.4),
    policy("entropy_bound", bound=6.0),
    policy("early_commit", early=0.9, middle=0.7, late=0.5),
]
POLICIES = {
    Attention.FULL: list(itertools.product(COMMITS, [policy("none"), policy("dkv_decode"), policy("dual")])),
    Attention.BLOCK_CAUSAL: list(itertools.product(COMMITS[:3], [policy("block")])),
    Attention.CAUSAL: list(itertools.product([policy("low_confidence"), policy("ngram")], [policy("last")])),
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests wait for each other here."""
    monkeypatch.setattr(harness, "PATIENCE", 600.0)


@pytest.fixture(scope="module")
def madmen() -> dict[Attention, LoadedModel]:
    made = tiny_model(vision=False, seed=7)
    return {attention: adversarial(like(made, attention)) for attention in POLICIES}


def judge_of(schema: Schema) -> Any:
    return jsonschema_rs.validator_for(schema, validate_formats=True)


def value_of(text: str) -> Any:
    """JSON's numbers have no largest one, Python's floats have, and so have Decimal's exponents."""
    return json.loads(
        text,
        parse_float=lambda number: (
            Decimal(re.sub(r"(\d{6})\d+$", r"\1", number, count=1))
            if re.search(r"[eE].{7,}$", number)
            else Decimal(number)
        ),
    )


def least_budgets(bench: Bench, schemas: Sequence[Schema], recompute: Policy) -> list[int | None]:
    """Of each schema the least budget, as the refusal of a smaller one says it; None where it is refused itself."""

    def budget(call: Call) -> int | None:
        if isinstance(call.wait(), Finished):
            return 1
        error = call.error()
        assert isinstance(error, InvalidArgument | Unimplemented), error  # the latter: the search gave up
        found = re.search(r"at least (\d+) for", error.message)
        return int(found[1]) if found else None

    found: list[int | None] = []
    for begin in range(0, len(schemas), AT_ONCE):
        asked = [
            constrained(ask(f"least {begin + i}", max_new_tokens=1, recompute=recompute), schema)
            for i, schema in enumerate(schemas[begin : begin + AT_ONCE])
        ]
        found += [budget(call) for call in bench.submit(*asked)]
    return found


def answers(bench: Bench, schemas: Sequence[Schema], seen: Counter[str]) -> Iterator[tuple[Schema, str]]:
    """Every schema under each budget, with the policies in turn; each answer is valid, or the test fails."""
    attention, rng = bench.engine.stages.model.spec.attention, random.Random(0)
    policies = itertools.cycle(POLICIES[attention])
    least = least_budgets(bench, schemas, POLICIES[attention][0][1])
    seen["schemas"] += len(schemas)
    seen["schemas refused"] += least.count(None)
    cases = [(s, n, n + more) for s, n in zip(schemas, least, strict=True) if n is not None for more in MORE]
    for begin in range(0, len(cases), AT_ONCE):
        some, asked = cases[begin : begin + AT_ONCE], []
        for i, (schema, _least, budget) in enumerate(some):
            commit, recompute = next(policies)
            request = ask(
                f"r{begin + i}",
                max_new_tokens=budget,
                block=rng.choice((4, 8, 32)) if attention is Attention.FULL else 0,
                steps=rng.choice((0, budget // 4 or 1)),
                recompute=recompute,
                commit=commit,
                temperature=rng.choice((0.0, 1.0, 3.0)),
                seed=begin + i,
            )
            asked.append(constrained(request, schema))
        for call, (schema, _least, budget) in zip(bench.submit(*asked), some, strict=True):
            done = call.finished()
            assert done.reason == "end", (schema, budget, done)
            assert done.usage.completion_tokens <= budget
            assert judge_of(schema).is_valid(value_of(done.text)), (schema, budget, done.text)
            seen["valid"] += 1
            seen["closed by budget"] += done.closed_by_budget
            yield schema, done.text
    stats = bench.engine.stats()
    seen["searches"] += stats.constraint_steps
    seen["fallbacks"] += stats.constraint_fallbacks


def nothing_invalid_is_accepted(schema: Schema, texts: Sequence[str], rng: random.Random, seen: Counter[str]) -> None:
    """Texts near valid ones, and the grammar's own sentences: what it accepts, the judge accepts."""
    at, judge = schema_matcher(schema), judge_of(schema)
    tried = {text for valid in texts for text in near_misses(valid, rng, 12)}
    tried |= {said for _ in range(4) if (said := sentence(at, rng)) is not None}
    for text in tried:
        try:
            right = judge.is_valid(value_of(text))
        except ValueError:
            right = False
        taken = accepts(at, text)
        assert right or not taken, (schema, text)
        seen["invalid, refused" if not right else "valid, accepted" if taken else "valid, refused"] += 1


def everything(bench: Bench, schemas: Sequence[Schema]) -> Counter[str]:
    seen, said = Counter[str](), dict[str, tuple[Schema, list[str]]]()
    for schema, text in answers(bench, schemas, seen):
        said.setdefault(repr(schema), (schema, []))[1].append(text)
    rng = random.Random(1)
    for schema, texts in said.values():
        nothing_invalid_is_accepted(schema, texts, rng, seen)
    return seen


@pytest.mark.parametrize("attention", [Attention.FULL, Attention.CAUSAL])
def test_some_schemas_under_adversarial_logits(
    bench: Make, madmen: dict[Attention, LoadedModel], attention: Attention
) -> None:
    schemas = random.Random(attention.value).sample(zoo(400), 3)
    seen = everything(bench(madmen[attention], max_tokens=512), schemas)
    assert seen["valid"] >= 2 * len(MORE) and seen["invalid, refused"] > 100
    assert seen["schemas refused"] <= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("attention", "share"), [(Attention.FULL, 1), (Attention.BLOCK_CAUSAL, 4), (Attention.CAUSAL, 2)]
)
def test_all_schemas_under_adversarial_logits(
    bench: Make, madmen: dict[Attention, LoadedModel], attention: Attention, share: int
) -> None:
    schemas = zoo(400)[::share]
    seen = everything(bench(madmen[attention], max_tokens=512), schemas)
    print(f"\n{attention.value}: {dict(seen)}")
    assert len(schemas) - seen["schemas refused"] >= 300 // share
    assert seen["valid"] == 5 * (len(schemas) - seen["schemas refused"])
    assert seen["invalid, refused"] > 10 * len(schemas)


def test_what_is_written_by_hand_is_enforced() -> None:
    for schema in BY_HAND:
        schema_matcher(schema)
