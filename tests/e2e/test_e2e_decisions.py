"""Typed questions over real sockets: by both SDK clients, by gRPC itself, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import math
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e_helpers import PATIENCE, Running, running, settings

from mmserve.assembly import BackgroundServer
from mmserve.calibrate.fit import FEWEST
from mmserve.cli import main
from mmserve.client import (
    AsyncClient,
    Choice,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Score,
    YesNo,
)
from mmserve.client.decisions import build_decision
from mmserve.config import ModelConfig
from mmserve.models.calibration import CALIBRATION_FILE, load_calibration
from mmserve.models.registry import model_folder
from mmserve.reference.scenes import draw_scene
from mmserve.v1 import decision_pb2 as pb
from mmserve.v1 import decision_pb2_grpc

CAUSAL = "bundled-causal"
SCENE = draw_scene(random.Random(1))
QUESTIONS = {
    "there": YesNo("Is there a red circle?"),
    "color": Choice("What color is the circle?", ["red", "dark yellow", "blue"]),
    "count": Score("How many shapes are there?", 0, 4),
    "good": Score("How good is it?", levels=["bad", "fine", "good"], instructions="Be strict."),
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    config = settings(server={"http_port": free_port()})
    models = (ModelConfig(path="bundled"), ModelConfig(path="bundled-causal"))
    with running(replace(config, models=models)) as found:
        yield found
        found.assert_serves()


@pytest.mark.parametrize("model", ["", CAUSAL])
def test_every_question_is_answered_by_its_name_with_probabilities_of_its_answers(served: Running, model: str) -> None:
    decided = served.client.decide("Look at it.", QUESTIONS, images=[SCENE.picture], model=model)
    assert [each.id for each in decided] == list(QUESTIONS)
    answers = {
        "there": ["yes", "no"],
        "color": ["red", "dark yellow", "blue"],
        "count": ["0", "1", "2", "3", "4"],
        "good": ["0", "1", "2"],
    }
    for each in decided:
        assert list(each.probabilities) == answers[each.id]
        assert sum(each.probabilities.values()) == pytest.approx(1)
        assert each.answer == max(each.probabilities, key=lambda name: each.probabilities[name])
        assert 0 < each.mass <= 1
    assert decided["there"].expected is None and decided[1].expected is None
    levels = [float(level) * p for level, p in decided["count"].probabilities.items()]
    assert decided["count"].expected == pytest.approx(sum(levels))
    assert decided.forwards == 1
    assert decided.model == (model or "bundled") and decided.usage.visual_tokens > 0


def test_an_autoregressive_model_is_asked_again_about_a_context_that_it_has(served: Running) -> None:
    context = "A red circle is at the top left. " * 20
    questions = [YesNo(f"Is there a {color} circle?") for color in ("red", "green", "blue", "white", "purple")]
    one = served.client.decide(context, questions[:1], model=CAUSAL).usage
    all_of_them = served.client.decide(context, questions, model=CAUSAL).usage
    assert all_of_them.prompt_tokens == one.prompt_tokens
    assert all_of_them.cached_tokens == one.prompt_tokens - one.prompt_tokens % 16


@pytest.mark.parametrize("model", ["", CAUSAL])
def test_neither_order_nor_company_changes_an_answer(served: Running, model: str) -> None:
    questions = list(QUESTIONS.values())
    forward = served.client.decide("", questions, images=[SCENE.picture], model=model)
    backward = served.client.decide("", questions[::-1], images=[SCENE.picture], model=model)
    for one, other, question in zip(forward, reversed(tuple(backward)), questions, strict=True):
        [alone] = served.client.decide("", [question], images=[SCENE.picture], model=model)
        assert one.probabilities == other.probabilities == alone.probabilities


def test_the_client_for_asyncio_gives_the_same(served: Running) -> None:
    async def ask() -> tuple[float, ...]:
        async with AsyncClient(served.address, timeout=PATIENCE) as client:
            decided = await client.decide([{"role": "user", "content": "A red circle."}], QUESTIONS)
            return tuple(p for each in decided for p in each.probabilities.values())

    blocking = served.client.decide("A red circle.", QUESTIONS)
    assert asyncio.run(ask()) == tuple(p for each in blocking for p in each.probabilities.values())


@pytest.mark.parametrize(
    ("question", "field"),
    [
        (Choice("Which?", ["one"]), "questions[0].choice.options"),
        (Choice("Which?", ["a", "a"]), "questions[0].choice.options"),
        (Choice("Which?", ["a", " "]), "questions[0].choice.options"),
        (Score("How much?", 3, 3), "questions[0].score.high"),
        (Score("How much?", 0, 200), "questions[0].score.high"),
        (Score("How much?", 0, 2, levels=["a", "b"]), "questions[0].score.levels"),
        (Score("How much?", 5, 12), "questions[0]"),
        (YesNo("  "), "questions[0].text"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_question_is_named(served: Running, question: YesNo, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        served.client.decide("context", [question])
    assert [violation.field for violation in raised.value.violations] == [field]


def test_requests_that_no_model_could_answer_are_refused(served: Running) -> None:
    with pytest.raises(InvalidArgument, match="questions: must be 1 to 256, not 0"):
        served.client.decide("context", [])
    with pytest.raises(NotFound, match="no model 'other'"):
        served.client.decide("context", QUESTIONS, model="other")
    with pytest.raises(InvalidArgument, match="tokens"):
        served.client.decide("red circle " * 2000, QUESTIONS)
    twice = build_decision("context", list(QUESTIONS.values())[:2], (), (), None, "")
    twice.questions[0].id = twice.questions[1].id = "same"
    twice.questions.add(text="none")
    with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError) as raised:
        decision_pb2_grpc.DecisionServiceStub(channel).Decide(twice, timeout=PATIENCE)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "questions[1].id: 'same' is that of another question" in raised.value.details()
    assert "questions[2]: must be one of yes_no, choice, score" in raised.value.details()


def test_a_call_whose_time_is_over_leaves_nothing(served: Running) -> None:
    file = io.BytesIO()
    SCENE.picture.save(file, "PNG")
    with Client(served.address) as client, pytest.raises(DeadlineExceeded):
        client.decide("", list(QUESTIONS.values()) * 20, images=[file.getvalue()], model=CAUSAL, timeout=0.03)
    served.assert_serves()


def test_a_context_may_be_empty_and_questions_may_be_many(served: Running) -> None:
    with grpc.insecure_channel(served.address) as channel:
        message = pb.DecideRequest(questions=[pb.DecisionQuestion(text=f"Is {n} even?") for n in range(12)])
        for question in message.questions:
            question.yes_no.SetInParent()
        response = decision_pb2_grpc.DecisionServiceStub(channel).Decide(message, timeout=PATIENCE)
    assert [decision.id for decision in response.decisions] == [str(n) for n in range(1, 13)]
    assert response.forwards == 1


Post = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]


@pytest.fixture
def post(served: Running) -> Post:
    """Status and JSON of an answer over HTTP."""
    port = served.background.config.server.http_port

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        found = response.status, json.loads(response.read())
        connection.close()
        return found

    return answer


def data_url() -> str:
    file = io.BytesIO()
    SCENE.picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


#: The questions of ``QUESTIONS`` as ``/v1/decisions`` has them.
ONE_OPTION = {"type": "choice", "criteria": {"b": None}}
ASKED = [
    {"id": "there", "type": "yes_no", "question": "Is there a red circle?"},
    {
        "id": "color",
        "type": "choice",
        "question": "What color is the circle?",
        "options": [{"name": "red"}, {"name": "yellow", "description": "dark"}, {"name": "blue"}],
    },
    {"id": "good", "type": "score", "question": "How good is it?", "levels": ["bad", "fine", "good"]},
]


@pytest.mark.parametrize("model", ["bundled", CAUSAL])
def test_decisions_over_http_are_those_of_the_sdk(served: Running, post: Post, model: str) -> None:
    body = {"model": model, "input": "Look.", "images": [data_url()], "questions": ASKED}
    status, found = post("/v1/decisions", body)
    assert status == 200, found
    questions = {
        "there": YesNo("Is there a red circle?"),
        "color": Choice("What color is the circle?", ["red", "yellow (dark)", "blue"]),
        "good": Score("How good is it?", levels=["bad", "fine", "good"]),
    }
    own = served.client.decide("Look.", questions, images=[SCENE.picture], model=model)
    assert found["object"] == "decisions" and found["model"] == model and found["prompt_format_version"] == 1
    for each in own:
        answer = found["answers"][each.id]
        assert list(answer["probabilities"].values()) == list(each.probabilities.values())
        assert answer["label_mass"] == each.mass
    assert found["answers"]["color"]["choice"] in ("red", "yellow", "blue")
    assert found["answers"]["good"]["score"] == pytest.approx(own["good"].expected)
    assert found["usage"]["prompt_tokens"] > 81 and found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"]


def test_a_temperature_changes_probabilities_and_not_the_mass(post: Post) -> None:
    plain, flat = (
        post("/v1/decisions", {"model": "bundled", "input": "x", "questions": ASKED, **more})[1]["answers"]["color"]
        for more in ({}, {"temperature": 3.0})
    )
    weights = [p ** (1 / 3) for p in plain["probabilities"].values()]
    expected = [weight / sum(weights) for weight in weights]
    assert list(flat["probabilities"].values()) == pytest.approx(expected)
    assert flat["label_mass"] == plain["label_mass"]


def test_systemone_names_its_questions_and_answers_as_its_clients_do(post: Post) -> None:
    body = {
        "model": "bundled",
        "state": {"shapes": ["a red circle"]},
        "questions": {
            "red": {"type": "noul", "instructions": "Is it red?", "criteria": {"true": "it is red"}},
            "kind": {"type": "choice", "criteria": {"circle": None, "square": "four sides"}},
            "size": {"type": "score", "instructions": "How large?", "criteria": ["small", {"then": "large"}]},
        },
        "unknown": 1,
    }
    status, found = post("/v1/systemone", body)
    assert status == 200, found
    red, kind, size = (found["answers"][name] for name in ("red", "kind", "size"))
    assert red["type"] == "noul" and 0 <= red["noul"] <= 1 and set(red) == {"type", "noul", "x_label_mass"}
    assert kind["choice"] == max(kind["probabilities"], key=kind["probabilities"].get)
    assert set(kind["probabilities"]) == {"circle", "square"}
    assert kind["confidence"] == pytest.approx(2 * max(kind["probabilities"].values()) - 1)
    assert size["legend"] == {"0": "small", "1": {"then": "large"}}
    assert size["score"] == pytest.approx(size["probabilities"]["1"])
    assert found["usage"]["output_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/decisions", {"input": ""}, "input"),
        ("/v1/decisions", {"questions": []}, "questions"),
        ("/v1/decisions", {"questions": [{"id": "a", "type": "other", "question": "b"}]}, "questions[0].type"),
        ("/v1/decisions", {"questions": [{**ASKED[0], "more": 1}]}, "questions[0].more"),
        ("/v1/decisions", {"temperature": 0}, "temperature"),
        ("/v1/decisions", {"prompt_format_version": 7}, "prompt_format_version"),
        ("/v1/decisions", {"return_prompt_token_ids": True}, "return_prompt_token_ids"),
        ("/v1/decisions", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/v1/decisions", {"images": ["https://example.com/a.png"]}, "images[0]"),
        ("/v1/decisions", {"other": 1}, "other"),
        ("/v1/systemone", {"temperature": 2.0}, "temperature"),
        ("/v1/systemone", {"questions": {"a": {"type": "yes_no"}}}, "questions.a.type"),
        ("/v1/systemone", {"questions": {"a": {"type": "noul"}}}, "questions.a.instructions"),
        (
            "/v1/systemone",
            {"questions": {"a": {"type": "choice", "criteria": {"b": None}}}},
            "questions.a.criteria",
        ),
    ],
)
def test_a_wrong_field_over_http_is_a_400_that_names_it(
    post: Post, path: str, change: dict[str, Any], param: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/decisions": {"model": "bundled", "input": "x", "questions": ASKED},
        "/v1/systemone": {
            "model": "bundled",
            "state": "x",
            "questions": {"a": {"type": "noul", "instructions": "b"}},
        },
    }
    status, found = post(path, {**bodies[path], **change})
    assert (status, found["error"]["param"]) == (400, param), found


def test_questions_on_the_command_line(served: Running, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--yes-no", "Is it red?", "--choice", "What is it?=circle|square", "--score", "How many?=0-4"]
    assert main(["decide", "A red circle.", *asked, "--server", served.address]) == 0
    yes_no, choice, score = capsys.readouterr().out.splitlines()
    assert yes_no.startswith("Is it red? ") and "mass" in yes_no
    assert "circle" in choice and "square" in choice and "mean" in score
    assert main(["decide", "A red circle.", *asked, "--server", served.address, "--model", CAUSAL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(each["probabilities"]) for each in found["answers"]] == [2, 2, 5]


def test_a_calibration_is_fitted_written_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("bundled"), folder)
    (folder / CALIBRATION_FILE).unlink(missing_ok=True)
    lines = []
    for n in range(2 * FEWEST):
        asked: dict[str, Any] = {"type": "yes_no", "text": f"Is {n} even?", "answer": ("yes", "no")[n % 4 > 0]}
        lines.append({"text": f"Number {n}.", "questions": [asked]})
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, lines)))
    assert main(["calibrate", "--model", str(folder), "--questions", str(questions), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in report["rows"]] == ["yes_no", "all"]
    scaling = load_calibration(folder).of("yes_no")
    assert (scaling.temperature, scaling.bias) == (report["rows"][0]["temperature"], report["rows"][0]["bias"])
    assert scaling.bias != 0
    config = replace(settings(), models=(ModelConfig(path=str(folder)),))
    found = []
    for _ in range(2):
        with BackgroundServer(config) as server, Client(server.address, timeout=PATIENCE) as client:
            found.append(client.decide("Number 3.", [YesNo("Is 3 even?")])[0])
        (folder / CALIBRATION_FILE).unlink(missing_ok=True)
    after, before = found
    odds = math.log(before.probabilities["yes"] / before.probabilities["no"]) / scaling.temperature + scaling.bias
    assert after.probabilities["yes"] == pytest.approx(1 / (1 + math.exp(-odds)), abs=1e-6)
    assert after.mass == pytest.approx(before.mass, rel=1e-6)
