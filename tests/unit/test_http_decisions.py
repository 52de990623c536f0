"""Bodies of typed questions over HTTP: what would leave an answer without a name of its own is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mmserve.core.decisions import MOST_OPTIONS
from mmserve.errors import InvalidArgument
from mmserve.http.decisions import DECISION_APIS

YES_NO = {"type": "yes_no", "question": "Is it red?"}


def refusal(path: str, body: dict[str, Any]) -> str:
    with pytest.raises(InvalidArgument) as raised:
        DECISION_APIS[path].read({"model": "m", **body})
    return raised.value.message


def test_options_have_names_of_their_own() -> None:
    """Descriptions distinguish them, but probabilities are by name."""
    options = [{"name": "a", "description": "one"}, {"name": "b"}, {"name": "a", "description": "two"}]
    question = {"id": "q", "type": "choice", "question": "Which?", "options": options}
    why = refusal("/v1/decisions", {"input": "A circle.", "questions": [question]})
    assert why == "questions[0].options[2].name: 'a' is that of another option"


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"a (b)": "", "a": "b"}, ["a (b)", "a ((b))"]),
        ({"a": "b", "a (b)": "", "a ((b))": "", "d": ""}, ["a (((b)))", "a (b)", "a ((b))", "d"]),
        ({"a": "b", "c": "b"}, ["a (b)", "c (b)"]),
    ],
)
def test_options_with_other_names_have_other_texts(options: dict[str, str], texts: list[str]) -> None:
    """Answers are read by the texts of options, which would otherwise be refused as equal."""
    given = [{"name": name, "description": meaning} for name, meaning in options.items()]
    question = {"id": "q", "type": "choice", "question": "Which?", "options": given}
    first = DECISION_APIS["/v1/decisions"].read({"model": "m", "input": "A circle.", "questions": [question]})
    named = {"q": {"type": "choice", "criteria": options}}
    second = DECISION_APIS["/v1/systemone"].read({"model": "m", "state": "A circle.", "questions": named})
    for asked in (first, second):
        assert list(asked.message.questions[0].choice.options) == texts and asked.questions[0].names == tuple(options)


def test_of_too_many_options_only_the_names_are_read() -> None:
    """They are refused; telling the texts of thousands apart took minutes on the event loop."""
    options = {"a": "b"} | {"a " + "(" * i + "b" + ")" * i: "" for i in range(1, MOST_OPTIONS + 1)}
    for count, text in ((MOST_OPTIONS, "a " + "(" * MOST_OPTIONS), (MOST_OPTIONS + 1, "a")):
        named = {"q": {"type": "choice", "criteria": dict([*options.items()][:count])}}
        asked = DECISION_APIS["/v1/systemone"].read({"model": "m", "state": "A circle.", "questions": named})
        assert asked.message.questions[0].choice.options[0].partition("b")[0] == text


def test_questions_have_ids() -> None:
    """Those without one would all be answered under the same name."""
    questions = [{"id": "", **YES_NO}, {"id": "", **YES_NO}]
    why = refusal("/v1/decisions", {"input": "A circle.", "questions": questions})
    assert why == "questions[0].id: must not be empty"
    noul = {"type": "noul", "instructions": "Is it red?"}
    assert refusal("/v1/systemone", {"state": "A circle.", "questions": {"": noul, "1": noul}}) == (
        "questions: must have names that are not empty"
    )


@pytest.mark.parametrize("levels", [[], ["red"]])
def test_a_score_has_levels(levels: list[str]) -> None:
    question = {"id": "q", "type": "score", "question": "How red is it?", "levels": levels}
    why = refusal("/v1/decisions", {"input": "A circle.", "questions": [question]})
    assert why == f"questions[0].levels: must hold at least two levels, not {len(levels)}"
    score = {"type": "score", "instructions": "How red is it?", "criteria": levels}
    why = refusal("/v1/systemone", {"state": "A circle.", "questions": {"q": score}})
    assert why == f"questions.q.criteria: must hold at least two levels, not {len(levels)}"
