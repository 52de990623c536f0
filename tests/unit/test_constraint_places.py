"""Searches that remember where they have been find what others find, and never less than what they began with."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest

from mmserve.bench.copyist import Copyist, written
from mmserve.bench.schemas import SCHEMAS
from mmserve.bench.search import Language, made_up
from mmserve.constraint.grammar import grammar_of
from mmserve.core.constraint import ConstraintSpec, JsonSchema
from mmserve.decode.constraint.matcher import Grammar
from mmserve.decode.constraint.witness import Outcome, Witness, admit, choose, follow, improve
from mmserve.decode.paths.completion import completes
from mmserve.decode.paths.field import TopK
from mmserve.decode.paths.places import Places

SIZE = 64
NAMES = ("person", "matrix", "payment", "account")


@cache
def language() -> Language:
    return made_up(2000)


@cache
def grammar(name: str) -> Grammar:
    wanted = next(each for each in SCHEMAS if each.name == name)
    return Grammar(grammar_of(ConstraintSpec(JsonSchema(json.dumps(wanted.schema)))).text, language().vocabulary)


def model(name: str, seed: int) -> Copyist:
    """Has a document in mind that may be of another kind."""
    rng = random.Random(f"{name} {seed}")
    document = rng.choice(rng.choice([each for each in SCHEMAS if seed % 2 or each.name == name]).documents)
    ids = language().lexicon.cover(written(document).encode())
    assert ids is not None
    return Copyist(ids, 0, rng, accuracy=0.5)


def score(witness: Witness, top: TopK) -> float:
    """Of the witness's tokens at ``top``'s positions; for those that are no candidates, a little less than the last."""
    same = top.tokens == witness.tokens[top.positions][:, None]
    listed = np.where(same, top.log_probabilities, -np.inf).max(-1)
    return float(np.where(same.any(-1), listed, top.log_probabilities.min(-1) - 1).sum())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_remembered_changes_nothing(name: str) -> None:
    lexicon = language().lexicon
    places = Places(lexicon, grammar(name).kinds)
    for seed in range(2):
        source, known = model(name, seed), np.full(SIZE, -1, np.int64)
        witness = admit(grammar(name), lexicon, SIZE)
        while (known < 0).any() and witness.known <= witness.length:
            end = min((int(np.flatnonzero(known < 0)[0]) // 32 + 1) * 32, SIZE)
            here = np.flatnonzero(known[:end] < 0)
            top = source.candidates(known, here)
            found, outcome = improve(witness, known, top, end, lexicon, places=places, seconds=60)
            fresh, same = improve(witness, known, top, end, lexicon, seconds=60)
            assert (found.tokens.tolist(), outcome) == (fresh.tokens.tolist(), same)
            assert completes(grammar(name).start(), found.tokens[: found.length].tolist())
            assert score(found, top) >= score(witness, top) - 1e-3
            chosen = choose(found, here, top.tokens[:, 0], top.log_probabilities[:, 0] > np.log(0.9), top)
            known[here[chosen]] = found.tokens[here[chosen]]
            witness = follow(found, known)


def test_the_old_witness_is_the_best_where_the_model_says_it() -> None:
    lexicon = language().lexicon
    witness = admit(grammar("payment"), lexicon, SIZE)
    tokens = np.stack([witness.tokens, np.full(SIZE, 9)], 1)
    top = TopK(np.arange(SIZE), tokens, np.full((SIZE, 2), np.log([[0.6, 0.4]]), np.float32))
    found, outcome = improve(witness, np.full(SIZE, -1), top, SIZE, lexicon, seconds=60)
    assert outcome is Outcome.FOUND and found.tokens.tolist() == witness.tokens.tolist()
