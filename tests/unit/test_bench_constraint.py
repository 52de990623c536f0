"""The benchmark of constraints: what it asks for, and the figures it makes of what comes back."""

from __future__ import annotations

import json
import random

import jsonschema_rs
import pytest
from grammars import accepts, compact, schema_matcher

from mmserve.bench import search
from mmserve.bench.schemas import SCHEMAS, Wanted
from mmserve.reference.images import schema_asked
from mmserve.reference.tasks import sample


@pytest.mark.parametrize("wanted", SCHEMAS, ids=lambda w: w.name)
def test_built_in_schemas_take_their_documents_as_judge_and_as_grammar(wanted: Wanted) -> None:
    at = schema_matcher(wanted.schema)
    for document in wanted.documents:
        assert jsonschema_rs.validator_for(wanted.schema, validate_formats=True).is_valid(document)
        assert accepts(at, compact(document))
    assert not accepts(at, '"no such thing"')


def test_names_are_told_apart() -> None:
    assert len({wanted.name for wanted in SCHEMAS}) == len(SCHEMAS)


def test_search_is_measured_apart_from_any_model() -> None:
    told: list[str] = []
    found = search.run(2, 0, told.append, tokens=3000, schemas=SCHEMAS[:2])
    assert told == ["search: person", "search: shape"]
    assert found["vocabulary"] == 3000 and found["steps"] > 6
    for times in ("step_ms", "rewrite_ms", "compile_ms", "admit_ms", "admit_again_ms"):
        assert 0 < found[times]["p50"] <= found[times]["p99"] <= found[times]["max"]
    assert found["mask_us_mean"] > 0
    assert 0 <= found["fallback_share"] <= 1 and 0 <= found["exact_share"] <= 1 <= found["tokens_per_step"]


def test_a_made_up_vocabulary_has_the_tokens_asked_for_and_spells_everything() -> None:
    made = search.made_up(2000)
    assert len(made.vocabulary.token_bytes) == len(set(made.vocabulary.token_bytes)) == 2000
    assert all(bytes([b]) in made.lexicon.ids for b in range(256))
    assert search.made_up(2000).vocabulary.token_bytes == made.vocabulary.token_bytes


def test_percentiles() -> None:
    assert search.percentiles(range(101)) == {"p50": 50.0, "p99": 99.0, "max": 100}
    assert search.percentiles([2.5]) == {"p50": 2.5, "p99": 2.5, "max": 2.5}


def test_the_schema_asked_for_takes_the_answer_and_nothing_with_other_fields() -> None:
    asked = set()
    for seed in range(200):
        _scene, question = sample("json", random.Random(seed))
        schema, answer = schema_asked(question.text), json.loads(question.answer)
        asked.add(question.text)
        assert jsonschema_rs.is_valid(schema, answer), question.text
        assert list(schema["properties"]) == list(answer)
        for name in answer:
            assert not jsonschema_rs.is_valid(schema, {k: v for k, v in answer.items() if k != name})
        assert not jsonschema_rs.is_valid(schema, {**answer, "more": 1})
    assert len(asked) > 20
