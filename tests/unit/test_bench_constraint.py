"""The benchmark of constraints: what it asks for, and the figures it makes of what comes back."""

from __future__ import annotations

import json
import random

import jsonschema_rs
import pytest
from grammars import accepts, compact, schema_matcher

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
