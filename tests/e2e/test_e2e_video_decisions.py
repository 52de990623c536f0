"""Typed questions about a live session of video, over gRPC, for every kind of model that takes sessions."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clips import clip
from streaming import streaming_model

sys.path.insert(0, str(Path(__file__).parents[1] / "rpc"))
from video_client import PATIENCE, Raw, ask, image, picture, sdk, video_server, wait_for

from mmserve.client import (
    AsyncClient,
    Choice,
    Client,
    DeadlineExceeded,
    Decisions,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Score,
    VideoSampling,
    YesNo,
)
from mmserve.engine.engine import Engine
from mmserve.models.base import Attention
from mmserve.tenants import TenantConfig
from mmserve.v1 import decision_pb2, generation_pb2
from mmserve.v1 import video_pb2 as pb
from mmserve.video.streams import EngineStream

QUESTIONS = {
    "circle": YesNo("Is there a red circle?"),
    "place": Choice("Where is the square?", ["top left", "bottom right"]),
    "count": Score("How many shapes are there?", 0, 4),
}
#: Kind of attention, and how far the row of logits is from the position that it predicts.
KINDS = {"masked": (Attention.FULL, 0), "blocks": (Attention.BLOCK_CAUSAL, 0), "causal": (Attention.CAUSAL, 1)}
INVALID, CANCELLED = 3, 1


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine, str]]:
    attention, shift = KINDS[request.param]
    block = {"default_block_length": 4} if request.param == "blocks" else {}
    model = streaming_model(attention, shift, **block)
    with video_server({"max_questions": 2}, model=model) as (address, engine):
        yield address, engine, request.param


@pytest.fixture
def client(served: tuple[str, Engine, str]) -> Iterator[Client]:
    with sdk(served[0]) as found:
        yield found


def told(decisions: Decisions) -> dict[str, Any]:
    """What was answered, to the digits that a batch cannot change."""
    return {
        each.id: (
            each.answer,
            {answer: pytest.approx(p, abs=1e-5) for answer, p in each.probabilities.items()},
            pytest.approx(each.mass, rel=1e-3),
        )
        for each in decisions
    }


def plain(decisions: Decisions) -> dict[str, Any]:
    return {each.id: (each.answer, dict(each.probabilities), each.mass) for each in decisions}


def test_the_answers_are_those_about_the_same_frames_as_a_file(served: tuple[str, Engine, str], client: Client) -> None:
    film = clip(frames=30, rate=10)
    expected = client.decide("", QUESTIONS, videos=[film], video_sampling=VideoSampling(fps=1))
    with client.video_session(budget=64) as session:
        session.push_segment(film, 0.0)
        found = session.decide(QUESTIONS)
        assert found.asked is not None
        assert (found.asked.frames, found.asked.begin, found.asked.end) == (3, 0.0, 2.0)
        assert plain(found) == told(expected)
        assert found.forwards == expected.forwards == 1
        assert found.usage.visual_tokens == expected.usage.visual_tokens
        for each in found:
            assert sum(each.probabilities.values()) == pytest.approx(1) and 0 < each.mass <= 1
        assert found["count"].expected is not None and list(found["place"].probabilities) == [
            "top left",
            "bottom right",
        ]
        assert session.statistics().questions == 1


def test_an_interval_and_the_frames_pushed_before(served: tuple[str, Engine, str], client: Client) -> None:
    with client.video_session(budget=64) as session:
        with pytest.raises(FailedPrecondition, match="no frame"):
            session.decide(QUESTIONS)
        session.push(picture(0), 0.0)
        first = session.decide(QUESTIONS)
        for number in range(1, 4):
            session.push(picture(number), float(number))
        later = session.decide(QUESTIONS)
        assert later.asked is not None and later.asked.frames == 4
        assert plain(later) != told(first)
        again = session.decide(QUESTIONS, scope=(None, 0.5))
        assert again.asked is not None and (again.asked.frames, again.asked.end) == (1, 0.0)
        if served[2] != "blocks":  # whose K/V of a frame have seen the rest of their block by now
            assert plain(again) == told(first)
        with pytest.raises(FailedPrecondition, match="no frame is kept"):
            session.decide(QUESTIONS, scope=(7.0, 8.0))
        everything = session.decide(QUESTIONS, scope="all")
        assert plain(everything) == told(later)
        context = session.decide(QUESTIONS, "The scene is of a park.")
        assert plain(context) != told(later) and context.usage.prompt_tokens > later.usage.prompt_tokens


def test_answers_do_not_depend_on_questions_beside_them(client: Client) -> None:
    with client.video_session(budget=64) as session:
        for number in range(3):
            session.push(picture(number), float(number))
        alone = session.decide(QUESTIONS)
        beside = session.stream("What is it?", max_new_tokens=40)
        assert plain(session.decide(QUESTIONS)) == told(alone)
        beside.result()


def test_the_client_for_asyncio_is_told_the_same(served: tuple[str, Engine, str], client: Client) -> None:
    with client.video_session(budget=64) as session:
        session.push(picture(0), 0.0)
        expected = session.decide(list(QUESTIONS.values()))

    async def everything() -> list[Decisions]:
        async with AsyncClient(served[0]) as own, own.video_session(budget=64) as session:
            await session.push(picture(0), 0.0)
            return list(await asyncio.gather(*(session.decide(list(QUESTIONS.values())) for _ in range(2))))

    for found in asyncio.run(everything()):
        assert plain(found) == told(expected) and [each.id for each in found] == ["1", "2", "3"]


def test_wrong_questions_are_refused_alone(served: tuple[str, Engine, str], client: Client) -> None:
    with client.video_session(budget=64) as session:
        session.push(picture(0), 0.0)
        for questions, why in (
            ({"a": Choice("Which?", ["one"])}, r"questions\[0\].choice.options: must be 2 to 26"),
            ({}, "questions: must be 1 to 256"),
            ({"a": YesNo(" ")}, r"questions\[0\].text: must not be empty"),
            ({"a": Score("How many?", 0, 100)}, r"questions\[0\]: .*one token"),
        ):
            with pytest.raises(InvalidArgument, match=why):
                session.decide(questions)
        many = {str(number): YesNo(f"Is it {number}?") for number in range(33)}
        assert len(session.decide(many)) == 33
        with pytest.raises(InvalidArgument, match="scope"):
            session.decide(QUESTIONS, scope="never")
        assert len(session.decide(QUESTIONS)) == 3


def decide(name: str, **options: Any) -> pb.Decide:
    question = decision_pb2.DecisionQuestion(text="Is it?", yes_no=decision_pb2.YesNoKind())
    return pb.Decide(question_id=name, questions=[question], **options)


def test_requests_that_no_sdk_sends(served: tuple[str, Engine, str]) -> None:
    raw = Raw.opened(served[0], memory=pb.StreamMemory(budget=64))
    raw.send(push_image=image(0))
    shown = generation_pb2.ContentPart(image=generation_pb2.Image(data=b"png"))
    media = generation_pb2.ChatMessage(role=generation_pb2.ROLE_USER, parts=[shown])
    for name, wrong, field in (
        ("media", decide("media", messages=[media]), "decide.messages[0]"),
        ("late", decide("late", timeout_seconds=0), "decide.timeout_seconds"),
        ("none", pb.Decide(question_id="none"), "questions"),
    ):
        raw.send(decide=wrong)
        error = raw.refusal(name)
        assert (error.code, [each.field for each in error.wrong_fields]) == (INVALID, [field])
    raw.send(decide=decide("good", interval=pb.Interval(end_seconds=0.0)))
    answer = raw.wait("answer", lambda a: a.question_id == "good" and a.HasField("decided"))
    assert [each.id for each in answer.decided.decisions] == ["1"] and answer.decided.model
    events = [r.answer.WhichOneof("event") for r in raw.responses if r.answer.question_id == "good"]
    assert events == ["asked", "decided"]
    raw.close()


def test_they_are_cancelled_and_bounded_as_questions(
    served: tuple[str, Engine, str], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = threading.Event(), threading.Event()
    real = EngineStream.ask

    def held(stream: EngineStream, *args: Any) -> Any:
        begun.set()
        assert gate.wait(PATIENCE)
        return real(stream, *args)

    with monkeypatch.context() as patch:
        patch.setattr(EngineStream, "ask", held)
        raw = Raw.opened(served[0], memory=pb.StreamMemory(budget=64))
        raw.send(push_image=image(0))
        raw.send(decide=decide("first"))
        assert begun.wait(PATIENCE)
        raw.send(decide=decide("second"))
        raw.send(ask=ask("third"))
        assert "max_questions" in raw.refusal("third").message
        for name in ("first", "second"):
            raw.send(cancel_ask=pb.CancelAsk(question_id=name))
        assert raw.refusal("second").code == CANCELLED
        gate.set()
        assert raw.refusal("first").code == CANCELLED
    raw.send(decide=decide("fourth"))
    raw.wait("answer", lambda a: a.question_id == "fourth" and a.HasField("decided"))
    raw.close()
    wait_for("an empty engine", lambda: not served[1].stats().live)


def test_a_deadline_ends_them(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), EngineStream.append

    def held(stream: EngineStream, *args: Any) -> Any:
        assert gate.wait(PATIENCE)
        return real(stream, *args)

    monkeypatch.setattr(EngineStream, "append", held)
    with client.video_session(budget=64) as session:
        session.push(picture(0), 0.0)
        with pytest.raises(DeadlineExceeded):
            session.decide(QUESTIONS, timeout=0.2)
        gate.set()
        assert len(session.decide(QUESTIONS)) == 3


def test_they_count_for_a_tenant_s_rate(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    tenant = TenantConfig(name="t", token_file=str(tmp_path / "token"), rate=0.001, burst=1)
    with (
        video_server(tenants=(tenant,)) as (address, _engine),
        sdk(address, token="secret") as client,
        client.video_session(budget=64) as session,
    ):
        session.push(picture(0), 0.0)
        assert len(session.decide(QUESTIONS)) == 3
        with pytest.raises(ResourceExhausted):
            session.decide(QUESTIONS)
