"""The benchmark of constraints: what it asks for, and the figures it makes of what comes back."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from grammars import accepts, compact, schema_matcher

from mmserve.bench import schema_suites, search
from mmserve.bench.schemas import SCHEMAS, Wanted
from mmserve.errors import ConfigError
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


def _suites(folder: Path, **options: Any) -> dict[str, Any]:
    given = {
        "data": folder,
        "sample": 0,
        "seed": 0,
        "repeats": 2,
        "mode": "strict",
        "resume": None,
        "schema_option": [],
    }
    return schema_suites.run(argparse.Namespace(**given | {"schema_option": []} | options), lambda text: None)


def test_public_suites_are_read_and_counted(tmp_path: Path) -> None:
    integer = {"type": "integer", "minimum": 3}
    pair = {"type": "object", "properties": {"a": {"type": "number"}, "b": {}}, "additionalProperties": False}
    tests = [{"data": 5, "valid": True}, {"data": 1e30, "valid": True}, {"data": 2, "valid": False}]
    (tmp_path / "draft4").mkdir()
    for name, content in {
        "one.json": {"schema": integer, "tests": tests},
        "two.json": {"schema": {"type": "array", "uniqueItems": True}, "tests": [{"data": [], "valid": True}]},
        "draft4/minimum.json": [
            {"schema": integer, "tests": tests[:1]},
            {"schema": {"minimum": 3, "exclusiveMinimum": True}, "tests": [{"data": 3, "valid": False}]},
        ],
        "three.json": {"schema": pair, "tests": [{"data": {"b": 1, "a": 1e-7}, "valid": True}]},
        "other.json": [1, 2],
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    rows = {row["task"]: row for row in _suites(tmp_path)["rows"]}
    found, suite = rows["MaskBench"], rows["JSON-Schema-Test-Suite"]
    assert (found["schemas"], found["admitted"], found["refusals"]) == (3, 2, {"uniqueItems": 1})
    assert (found["valid"], found["valid_rejected"], found["invalid"], found["invalid_accepted"]) == (3, 1, 1, 0)
    assert found["valid_respelled"] == 1
    found = _suites(tmp_path, schema_option=["any_order", "exponents"])["rows"][1]
    assert (found["task"], found["valid_respelled"], found["valid_rejected"]) == ("MaskBench", 0, 1)
    assert (suite["schemas"], suite["admitted"], suite["invalid_accepted"]) == (2, 2, 0)
    assert suite["answers"] > 0 and suite["answers_invalid"] == 0
    assert [row["schemas"] for row in _suites(tmp_path, sample=1)["rows"]] == [1, 1]


def test_a_run_over_a_suite_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    for number in range(5):
        tests = [{"data": number, "valid": True}, {"data": -1, "valid": False}]
        content = {"schema": {"type": "integer", "minimum": number}, "tests": tests}
        (tmp_path / f"suite/{number}.json").write_text(json.dumps(content))
    rows, whole = tmp_path / "rows", _suites(tmp_path / "suite")
    _suites(tmp_path / "suite", sample=3, resume=rows)
    lines = rows.read_text().splitlines(keepends=True)
    assert len(lines) == 3
    rows.write_text("".join(lines[:2]) + lines[2][:20])  # as a process leaves it that is killed
    first = rows.stat().st_ino, "".join(lines[:2])
    assert _suites(tmp_path / "suite", resume=rows) == whole
    assert (rows.stat().st_ino, "".join(rows.read_text().splitlines(keepends=True)[:2])) == first
    assert len(rows.read_text().splitlines()) == 5
    assert _suites(tmp_path / "suite", resume=rows) == whole
    with pytest.raises(ConfigError, match="with another mode"):
        _suites(tmp_path / "suite", resume=rows, mode="lenient")


def test_a_folder_without_suites_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no schemas with instances"):
        _suites(tmp_path)
