"""Calibration of typed questions: the fit, its error, its file, and questions whose answers are known."""

import json
import math
import random
from pathlib import Path

import pytest

from mmserve.calibrate.fit import FEWEST, ScoredQuestion, calibration_error, fitted, unscaled
from mmserve.calibrate.items import bundled_items, read_items
from mmserve.cli import main
from mmserve.core.decisions import CHOICE, SCORE, YES_NO, Calibration, Decided, Scaling
from mmserve.errors import ConfigError
from mmserve.models.calibration import CALIBRATION_FILE, load_calibration, save_calibration


def drawn(count: int, kind: str, answers: int, scaling: Scaling, seed: int) -> list[ScoredQuestion]:
    """Questions whose right answers are drawn from what ``scaling`` makes of their log-probabilities."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        logs = tuple(rng.gauss(0, 2) for _ in range(answers))
        right = rng.choices(range(answers), scaling.probabilities(logs))[0]
        made.append(ScoredQuestion(kind, logs, right))
    return made


@pytest.mark.parametrize(("kind", "answers"), [(YES_NO, 2), (CHOICE, 5), (SCORE, 3)])
@pytest.mark.parametrize(("temperature", "bias"), [(0.5, 0.0), (2.0, 1.0), (1.0, -0.7)])
def test_a_fit_finds_the_temperature_and_the_bias_that_answers_were_drawn_with(
    kind: str, answers: int, temperature: float, bias: float
) -> None:
    truth = Scaling(temperature=temperature, bias=bias)
    judged = drawn(6000, kind, answers, truth, 1)
    [found] = fitted(judged).values()
    assert found.temperature == pytest.approx(temperature, rel=0.1)
    assert found.bias == pytest.approx(bias, abs=0.12)
    fresh = drawn(6000, kind, answers, truth, 2)
    right = [each.right for each in fresh]
    errors = [
        calibration_error([s.probabilities(each.log_probabilities) for each in fresh], right)
        for s in (Scaling(), found)
    ]
    assert errors[1] < 0.025 and (errors[1] < errors[0] or truth == Scaling())


def test_choices_of_different_numbers_of_options_are_fitted_together() -> None:
    truth = Scaling(temperature=2.0, bias=-0.7)
    judged = [each for answers in (2, 4, 6) for each in drawn(3000, CHOICE, answers, truth, answers)]
    found = fitted(judged)[CHOICE]
    assert (found.temperature, found.bias) == (pytest.approx(2.0, rel=0.1), pytest.approx(-0.7, abs=0.12))


def test_kinds_with_too_few_questions_are_left_as_they_are() -> None:
    judged = [*drawn(FEWEST - 1, YES_NO, 2, Scaling(), 1), *drawn(FEWEST, CHOICE, 3, Scaling(), 1)]
    assert set(fitted(judged)) == {CHOICE}


def test_what_is_always_right_is_not_scaled_without_end() -> None:
    judged = [ScoredQuestion(YES_NO, (-0.01, -5.0), 0) for _ in range(50)]
    scaling = fitted(judged)[YES_NO]
    assert 0.04 < scaling.temperature <= 1.5 and abs(scaling.bias) <= 10


def test_the_calibration_error_is_the_gap_between_confidence_and_share_right() -> None:
    rows = [(0.8, 0.2)] * 10
    assert calibration_error(rows, [0] * 8 + [1] * 2) == pytest.approx(0.0)
    assert calibration_error(rows, [0] * 3 + [1] * 7) == pytest.approx(0.5)
    mixed = [(0.8, 0.2)] * 10 + [(0.4, 0.6)] * 30
    assert calibration_error(mixed, [0] * 8 + [1] * 2 + [0] * 30) == pytest.approx(0.75 * 0.6)
    assert calibration_error([], []) == 0.0


@pytest.mark.parametrize("scaling", [Scaling(), Scaling(temperature=3.0, bias=-1.2)])
def test_unscaled_probabilities_are_scaled_back_to_themselves(scaling: Scaling) -> None:
    logs = (-0.3, -2.0, -4.5)
    probabilities = scaling.probabilities(logs)
    assert sum(probabilities) == pytest.approx(1)
    assert scaling.probabilities(unscaled(probabilities, scaling)) == pytest.approx(probabilities)
    plain = [math.exp(value) for value in logs]
    assert Scaling().probabilities(unscaled(probabilities, scaling)) == pytest.approx([p / sum(plain) for p in plain])


def test_mass_is_what_the_answers_had_together() -> None:
    decided = Decided.of((math.log(0.002), math.log(0.001)), Scaling())
    assert decided.mass == pytest.approx(0.003) and decided.best == 0
    assert decided.probabilities == pytest.approx((2 / 3, 1 / 3))


def test_a_calibration_is_read_as_it_was_written(tmp_path) -> None:
    assert load_calibration(tmp_path) == Calibration()
    made = Calibration({YES_NO: Scaling(temperature=1.5, bias=0.25)}, {"questions": 3})
    save_calibration(tmp_path / CALIBRATION_FILE, made)
    assert load_calibration(tmp_path) == made
    assert made.of(YES_NO).bias == 0.25 and made.of(SCORE) == Scaling()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not readable as JSON"),
        ('{"format": 2, "kinds": {}}', "its format is 2"),
        ('{"format": 1}', "'kinds' is missing"),
        ('{"format": 1, "kinds": {"other": {}}}', "it has the kinds"),
        ('{"format": 1, "kinds": {"score": {"temperature": 0, "bias": 0}}}', "temperature of score must be above 0"),
        ('{"format": 1, "kinds": {"score": {"temperature": 1, "bias": "x"}}}', "bias of score must be a finite number"),
    ],
)
def test_a_wrong_file_is_refused_with_what_to_do(tmp_path, text: str, why: str) -> None:
    (tmp_path / CALIBRATION_FILE).write_text(text)
    with pytest.raises(ConfigError, match=why) as raised:
        load_calibration(tmp_path)
    assert "mmserve calibrate" in str(raised.value)


def test_bundled_questions_are_the_same_for_a_seed_and_others_for_another() -> None:
    one, same, other = bundled_items(60, 1), bundled_items(60, 1), bundled_items(60, 2)
    assert one == same and one != other
    assert 60 <= sum(len(item.questions) for item in one) < 75
    assert {q.kind for item in one for q in item.questions} == {YES_NO, CHOICE, SCORE}
    assert any(not item.images and item.text for item in one) and any(item.images for item in one)


def test_questions_of_a_file_are_read_with_their_answers(tmp_path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    line = {
        "text": "A red circle.",
        "images": ["a.png"],
        "questions": [
            {"type": "yes_no", "text": "Is it red?", "answer": "yes"},
            {"type": "choice", "text": "Which?", "options": ["circle", "square"], "answer": "square"},
            {"type": "score", "text": "How many?", "low": 1, "high": 3, "answer": 2, "instructions": "Count."},
        ],
    }
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(line) + "\n\n")
    [item] = read_items(path)
    assert item.images == (b"png",) and item.right == (0, 1, 1)
    assert item.questions[2].instructions == "Count." and item.questions[2].answers == ("1", "2", "3")
    for change, why in (
        ({"other": 1}, "unknown key 'other'"),
        ({"questions": []}, "one at least"),
        ({"questions": [{"type": "yes_no", "text": "a", "answer": "maybe"}]}, "answer must be one of yes, no"),
        ({"questions": [{"type": "x", "text": "a", "answer": "yes"}]}, "type must be"),
        (
            {"questions": [{"type": "yes_no", "text": "a", "options": ["so"], "answer": "yes"}]},
            "meanings of yes and no",
        ),
        ({"questions": [{"type": "choice", "text": "a", "options": "xy", "answer": "x"}]}, "options must be an array$"),
        ({"images": ["none.png"]}, "none.png"),
    ):
        path.write_text(json.dumps({**line, **change}))
        with pytest.raises(ConfigError, match=f"line 1: .*{why}"):
            read_items(path)


def test_questions_of_the_command_line_need_their_form(capsys) -> None:
    for wrong in (["--choice", "Which?"], ["--score", "How many?=3"]):
        with pytest.raises(SystemExit):
            main(["decide", "context", *wrong])
        assert "must be TEXT=" in capsys.readouterr().err
    assert main(["decide", "context"]) == 1
    assert "at least one is needed: --yes-no, --choice or --score" in capsys.readouterr().err


def test_one_question_is_too_few_to_fit_and_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "questions.jsonl", tmp_path / "decisions.json"
    question = {"type": YES_NO, "text": "Is it red?", "answer": "yes"}
    file.write_text(json.dumps({"text": "A red circle.", "questions": [question]}) + "\n")
    assert main(["calibrate", "--model", "bundled", "--questions", str(file), "--out", str(out)]) != 0
    assert "--questions must have at least two questions" in capsys.readouterr().err
