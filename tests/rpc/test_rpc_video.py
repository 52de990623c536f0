"""Sessions of video over real sockets: order, resume, and what goes wrong, each with its typed error."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
from clips import clip
from echo_server import EchoEngine, served, threaded
from video_client import PATIENCE, Raw, ask, image, registries, sdk, video_engine, video_server, wait_for

from mmserve.config import Config
from mmserve.engine.engine import Engine
from mmserve.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from mmserve.tenants import TenantConfig
from mmserve.v1 import video_pb2 as pb
from mmserve.video.base import EncodedFrame, Frame, StreamStats
from mmserve.video.connection import Connection
from mmserve.video.reading import MAX_INIT_BYTES
from mmserve.video.session import Session
from mmserve.video.standing import MAX_QUESTIONS, Standing, StandingQuestion, TypedAnswer
from mmserve.video.streams import EngineStream

INVALID, PRECONDITION, EXHAUSTED, CANCELLED = 3, 9, 8, 1


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[str, Engine]]:
    with video_server({"credit_pushes": 8, "credit_bytes": 1 << 20, "max_questions": 2, "max_watches": 2}) as found:
        yield found


@pytest.fixture
def address(shared: tuple[str, Engine]) -> str:
    return shared[0]


@pytest.fixture
def raw(address: str) -> Iterator[Raw]:
    connection = Raw.opened(address, memory=pb.StreamMemory(budget=64))
    yield connection
    if not connection.ended.is_set():
        connection.close()


def test_a_question_sees_the_frames_pushed_before_it_and_no_others(raw: Raw) -> None:
    for number in range(3):
        raw.send(push_image=image(number))
    raw.send(ask=ask("first"))
    raw.send(push_image=image(3))
    raw.send(ask=ask("second"))
    first = raw.wait("answer", lambda a: a.question_id == "first" and a.HasField("asked")).asked
    second = raw.wait("answer", lambda a: a.question_id == "second" and a.HasField("asked")).asked
    assert (first.frames, first.end_seconds) == (3, 2.0)
    assert (second.frames, second.end_seconds) == (4, 3.0)
    assert raw.answer("first").usage.visual_tokens == 3
    assert raw.answer("second").usage.visual_tokens == 4
    order = [r.answer.WhichOneof("event") for r in raw.responses if r.answer.question_id == "first"]
    assert order[0] == "asked" and order[-1] == "response"
    indexes = [r.index for r in raw.responses if r.index]
    assert indexes == list(range(1, len(indexes) + 1))
    assert max(r.acknowledged.index for r in raw.responses) == 6


def test_what_is_in_force_is_told(address: str) -> None:
    raw = Raw.opened(address, overload=pb.OVERLOAD_POLICY_THIN, memory=pb.StreamMemory(budget=64))
    told = raw.wait("configured")
    assert len(told.resume_handle) >= 40 and told.resume_seconds == 60 and not told.resumed
    assert told.config.memory.policy == "window" and told.config.memory.budget == 64
    assert told.config.overload == pb.OVERLOAD_POLICY_THIN and told.config.sampler.rate == 1.0
    assert told.limits.max_request_bytes == 1 << 20 and told.limits.max_questions == 2
    credit = raw.wait("acknowledged").credit
    assert (credit.pushes, credit.bytes) == (8, 1 << 20)
    raw.close()


def test_a_question_before_the_first_frame(raw: Raw) -> None:
    raw.send(ask=ask("early"))
    assert raw.refusal("early").code == PRECONDITION
    raw.send(push_image=image(0))
    raw.send(ask=ask("later"))
    assert raw.answer("later").text is not None


def test_a_question_may_have_any_time_that_is_finite(raw: Raw) -> None:
    raw.send(push_image=image(0))
    raw.send(ask=ask("long", timeout_seconds=1e300))
    assert raw.answer("long").text is not None
    for name, seconds in (("never", math.inf), ("none", 0.0)):
        raw.send(ask=ask(name, timeout_seconds=seconds))
        assert raw.refusal(name).code == INVALID and "timeout_seconds" in raw.refusal(name).message


def test_segments_and_images_become_frames_on_one_clock(raw: Raw) -> None:
    raw.send(push_segment=pb.PushSegment(data=clip(frames=20, rate=10), start_seconds=10.0))
    raw.send(push_segment=pb.PushSegment(data=clip(frames=20, rate=10)))  # where the first ends
    raw.send(push_image=image(1, 20.0))
    raw.wait_taken(5)
    raw.send(ask=ask("all", everything=pb.Everything()))
    asked = raw.wait("answer", lambda a: a.HasField("asked")).asked
    assert (asked.frames, asked.begin_seconds, asked.end_seconds) == (5, 10.0, 20.0)


def test_the_rate_counts_images_too(raw: Raw) -> None:
    """The second of an image has its frame: the segment's next one is at the second after it."""
    raw.send(push_image=image(1, 20.0))
    raw.send(push_segment=pb.PushSegment(data=clip(frames=20, rate=10), start_seconds=20.3))
    raw.send(ask=ask("all", everything=pb.Everything()))
    assert raw.wait("answer", lambda a: a.HasField("asked")).asked.frames == 3  # at 20, 21 and 22 s


def test_a_segment_without_start_begins_where_the_image_before_it_ends(raw: Raw) -> None:
    """An image lasts as long as the sampler's interval, as one that is pushed as a segment does."""
    raw.send(push_image=image(1, 20.0))
    raw.send(push_segment=pb.PushSegment(data=clip(frames=20, rate=10)))
    raw.wait_taken(3)
    raw.send(ask=ask("all", everything=pb.Everything()))
    asked = raw.wait("answer", lambda a: a.HasField("asked")).asked
    assert (asked.frames, asked.begin_seconds, asked.end_seconds) == (3, 20.0, 22.0)
    assert not any(r.HasField("push_failed") for r in raw.responses)


def test_an_initialisation_segment_is_bounded(raw: Raw) -> None:
    """It is kept as long as its session, beside what the session's memory may hold."""
    raw.send(push_segment=pb.PushSegment(data=clip(), init=bytes(MAX_INIT_BYTES + 1)))
    failed = raw.wait("push_failed")
    assert failed.error.code == INVALID and "push_segment.init" in failed.error.message


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"GIF89a" + bytes(40), "push_segment.data"),
        (clip(frames=20)[:-200], "push_segment.data"),
        (bytes(range(256)) * 8, "push_segment.data"),
        (b"\x00\x00\x00\x18ftypmp42" + bytes(range(256)) * 20, "push_segment.data"),
    ],
    ids=["empty", "damaged image", "truncated", "noise", "hostile"],
)
def test_a_bad_segment_is_reported_and_the_session_goes_on(raw: Raw, data: bytes, says: str) -> None:
    raw.send(push_image=image(0))
    bad = raw.send(push_segment=pb.PushSegment(data=data, start_seconds=1.0))
    raw.send(push_image=image(2))
    failed = raw.wait("push_failed")
    assert failed.request_index == bad and failed.error.code == INVALID and says in failed.error.message
    raw.wait_taken(2)


def test_audio_alone_is_refused(raw: Raw) -> None:
    import io

    import av
    import numpy as np

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    raw.send(push_segment=pb.PushSegment(data=file.getvalue(), start_seconds=0.0))
    failed = raw.wait("push_failed")
    assert failed.error.code == INVALID and "no video" in failed.error.message


def test_timestamps_that_run_backwards_are_reported_and_jumps_are_taken(raw: Raw) -> None:
    raw.send(push_image=image(0, 5.0))
    back = raw.send(push_image=image(1, 4.0))
    same = raw.send(push_image=image(2, 5.0))
    segment = raw.send(push_segment=pb.PushSegment(data=clip(), start_seconds=1.0))
    raw.send(push_image=image(3, 5000.0))
    raw.wait_taken(2)
    failed = [r.push_failed for r in raw.responses if r.HasField("push_failed")]
    assert [f.request_index for f in failed] == [back, same, segment]
    assert all(f.error.code == INVALID and "must be after 5" in f.error.message for f in failed)


def test_the_size_of_frames_may_change_between_segments(raw: Raw) -> None:
    for start, size in ((0.0, (64, 48)), (4.0, (96, 64)), (8.0, (32, 80))):
        raw.send(push_segment=pb.PushSegment(data=clip(frames=20, size=size), start_seconds=start))
    raw.wait_taken(6)
    assert not any(r.HasField("push_failed") for r in raw.responses)


def test_what_is_wrong_with_one_request_does_not_end_the_session(raw: Raw) -> None:
    """Such as a question about the last five seconds of a video that is shorter."""
    first = raw.send(push_image=image(0, -0.1))
    second = raw.send(push_segment=pb.PushSegment(data=clip(), start_seconds=math.nan))
    raw.send(push_image=image(0))
    before, turned = pb.Interval(begin_seconds=-4, end_seconds=1), pb.Interval(begin_seconds=1, end_seconds=0)
    questions = [ask("before", interval=before), ask("turned", interval=turned), ask("long", "x" * (2 << 20))]
    for question in questions:
        raw.send(ask=question)
    raw.send(decide=pb.Decide(question_id="typed", interval=before))
    choices = pb.WatchChoices(options=["red", "blue"], wanted="green")
    raw.send(watch=pb.Watch(watch_id="w", text="which?", choices=choices))
    raw.send(watch=pb.Watch(watch_id="long", text="x" * (2 << 20), yes_no=pb.YesNo()))
    for name, says in (("before", "at least 0"), ("turned", "ends at 0 s"), ("long", "bytes"), ("typed", "at least 0")):
        assert raw.refusal(name).code == INVALID and says in raw.refusal(name).message
    assert "must be one of the options" in raw.wait("watch_state").error.message
    long = raw.wait("watch_state", lambda s: s.watch_id == "long").error.message
    assert long == "watch: must be at most 1048576 bytes"
    raw.send(ask=ask("right"))
    raw.answer("right")
    failed = [r.push_failed for r in raw.responses if r.HasField("push_failed")]
    assert [f.request_index for f in failed] == [first, second]
    assert all(f.error.code == INVALID and "must be at least 0" in f.error.message for f in failed)


def test_one_question_is_cancelled_and_the_others_are_answered(raw: Raw) -> None:
    raw.send(push_image=image(0))
    slow = ask("slow")
    slow.request.sampling.max_new_tokens = 150
    raw.send(ask=slow)
    raw.send(ask=ask("other"))
    raw.send(cancel_ask=pb.CancelAsk(question_id="slow"))
    assert raw.refusal("slow").code == CANCELLED
    raw.answer("other")


def test_too_many_questions_and_wrong_ones_are_refused_alone(raw: Raw) -> None:
    raw.send(push_image=image(0))
    for name in ("a", "b"):
        long = ask(name)
        long.request.sampling.max_new_tokens = 150
        raw.send(ask=long)
    raw.send(ask=ask("c"))
    assert raw.refusal("c").code == EXHAUSTED
    for name in ("a", "b"):
        raw.send(cancel_ask=pb.CancelAsk(question_id=name))
        raw.refusal(name)
    wrong = ask("wrong")
    wrong.request.sampling.temperature = -1
    raw.send(ask=wrong)
    assert raw.refusal("wrong").code == INVALID and "temperature" in raw.refusal("wrong").message


def test_a_segment_that_no_credit_allows_is_refused(raw: Raw) -> None:
    raw.send(push_segment=pb.PushSegment(data=bytes(2 << 20)))
    assert "1048576" in raw.wait("push_failed").error.message


@pytest.mark.parametrize("index", [0, 3])
def test_a_gap_in_the_indexes_ends_the_session(address: str, index: int) -> None:
    raw = Raw.opened(address)
    raw.send(index=index, get_statistics=pb.GetStatistics())
    with pytest.raises(InvalidArgument, match="must be 1"):
        raise raw.failure()
    with pytest.raises(NotFound):
        raise Raw.resumed(address, raw.handle).failure()


def test_a_session_begins_with_its_configuration(address: str) -> None:
    raw = Raw(address, pb.SessionRequest(index=1, push_image=image(0)))
    with pytest.raises(InvalidArgument, match="configure or resume"):
        raise raw.failure()
    wrong = pb.ConfigureSession(sampler=pb.FrameSampler(rate=0.0, detail_every=0))
    with pytest.raises(InvalidArgument, match=r"sampler\.rate.*sampler\.detail_every"):
        raise Raw(address, pb.SessionRequest(configure=wrong)).failure()
    with pytest.raises(NotFound, match="no model"):
        raise Raw.opened(address, model="other").failure()
    with pytest.raises(InvalidArgument, match="policy"):
        raise Raw.opened(address, memory=pb.StreamMemory(policy="other")).failure()


def test_a_client_that_pushes_ten_times_too_fast_is_ended_and_others_go_on(address: str) -> None:
    other, raw = Raw.opened(address), Raw.opened(address)
    for number in range(200):
        raw.send(push_segment=pb.PushSegment(data=b"\x00\x00\x00\x18ftypmp42" + bytes(60_000), start_seconds=number))
    with pytest.raises(ResourceExhausted, match="without credit"):
        raise raw.failure()
    other.send(push_image=image(0))
    other.send(ask=ask("q"))
    other.answer("q")
    other.close()


def test_a_connection_that_is_lost_is_resumed_and_everything_is_taken_once(address: str) -> None:
    raw = Raw.opened(address, memory=pb.StreamMemory(budget=64))
    for number in range(3):
        raw.send(push_image=image(number))
    raw.wait_taken(3)
    raw.send(ask=ask("q"))
    unbroken = raw.answer("q").text
    received = 2
    raw.cut()
    again = Raw.resumed(address, raw.handle, received)
    assert again.wait("configured").resumed and again.wait("acknowledged").index == 4
    indexes = wait_for("the rest again", lambda: [r.index for r in again.responses if r.index])
    assert indexes[0] == received + 1
    assert again.answer("q").text == unbroken
    for index in (2, 3, 4):  # taken before: ignored
        again.send(index, push_image=image(index))
    again.send(5, push_image=image(3))
    again.send(6, get_statistics=pb.GetStatistics())
    assert again.wait("statistics").frames_taken == 4 and again.wait("statistics").resumes == 1
    again.send(7, close=pb.CloseSession())
    again.wait("closed")
    again.send(0, received=max(r.index for r in again.responses))
    assert again.ended.wait(PATIENCE) and again.error is None


def test_a_connection_that_is_lost_while_its_session_is_closed_is_resumed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the client has confirmed the last response; gRPC reports the end of its requests first."""
    raw = Raw.opened(address)
    raw.send(push_image=image(0))
    raw.send(close=pb.CloseSession())
    raw.wait("closed")
    last = max(r.index for r in raw.responses)
    detach, detached = Session.detach, threading.Event()

    def noted(session: Session, connection: Connection) -> None:
        detach(session, connection)
        detached.set()

    monkeypatch.setattr(Session, "detach", noted)
    raw.cut()
    assert detached.wait(PATIENCE)
    again = Raw.resumed(address, raw.handle, last - 1)
    again.wait("closed")
    again.send(0, received=last)
    assert again.ended.wait(PATIENCE) and again.error is None
    with pytest.raises(NotFound):
        raise Raw.resumed(address, raw.handle, last).failure()


def test_a_second_connection_replaces_the_first(address: str) -> None:
    raw = Raw.opened(address)
    again = Raw.resumed(address, raw.handle)
    again.wait("configured")
    with pytest.raises(FailedPrecondition, match="another connection"):
        raise raw.failure()
    again.send(1, close=pb.CloseSession())
    again.wait("closed")
    again.cut()


def test_an_unknown_handle_is_not_found(address: str) -> None:
    with pytest.raises(NotFound, match="open a new one"):
        raise Raw.resumed(address, "x" * 43).failure()


def test_standing_questions_are_accepted_removed_and_bounded(raw: Raw) -> None:
    for name in ("a", "b", "c"):
        raw.send(watch=pb.Watch(watch_id=name, text="is it red?", yes_no=pb.YesNo(), on_threshold=0.31, min_mass=0.0))
    states = wait_for("three states", lambda: [s for s in raw.responses if s.HasField("watch_state")][2:])
    assert states[0].watch_state.error.code == EXHAUSTED
    raw.send(unwatch=pb.Unwatch(watch_id="b"))
    raw.wait("watch_state", lambda s: s.watch_id == "b" and s.HasField("removed"))
    for number in range(6):
        raw.send(push_image=image(number))
    raw.wait_taken(6)
    raw.send(watch=pb.Watch(watch_id="bad", text="", yes_no=pb.YesNo()))
    assert raw.wait("watch_state", lambda s: s.watch_id == "bad").error.code == INVALID


def test_a_session_may_have_more_standing_questions_than_one_pass_takes() -> None:
    names = [f"w{number}" for number in range(MAX_QUESTIONS + 2)]
    rule = {"on_threshold": 0.01, "off_threshold": 0.0, "min_mass": 0.0}
    with video_server({"max_watches": len(names)}) as (address, _):
        raw = Raw.opened(address)
        for name in names:
            raw.send(watch=pb.Watch(watch_id=name, text=f"is it {name}?", yes_no=pb.YesNo(), **rule))
        raw.send(push_image=image(0))
        raw.send(get_statistics=pb.GetStatistics())
        raw.wait("statistics")
        raw.close()  # once every question was asked
        assert not any(r.watch_state.HasField("error") for r in raw.responses)
        assert {r.alert.watch_id for r in raw.responses if r.HasField("alert")} == {*names}


def test_alerts_say_when_a_standing_question_turns_true(raw: Raw) -> None:
    choices = pb.WatchChoices(options=["yes", "no"], wanted="no")
    for name, kind in (("yes", {"yes_no": pb.YesNo()}), ("no", {"choices": choices})):
        raw.send(
            watch=pb.Watch(watch_id=name, text="is it red?", on_threshold=0.4, off_threshold=0.1, min_mass=0, **kind)
        )
    raw.send(push_image=image(0, 7.5))
    alert = raw.wait("alert")  # one of the two has at least 0.5
    assert alert.active and alert.probability >= 0.4 and alert.seconds == 7.5 and alert.answer in ("yes", "no")
    assert 0 < alert.mass <= 1


def test_a_judgement_that_does_not_end_delays_no_alert_of_another_session(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, go, began = Standing.judge, threading.Event(), threading.Event()

    def held(standing: Standing, frame: EncodedFrame, questions: Sequence[StandingQuestion]) -> list[TypedAnswer]:
        if questions[0].text == "is it stuck?":
            began.set()
            assert go.wait(PATIENCE)
        return judge(standing, frame, questions)

    monkeypatch.setattr(Standing, "judge", held)
    stuck, other = Raw.opened(address), Raw.opened(address)
    rule = {"yes_no": pb.YesNo(), "on_threshold": 0.01, "off_threshold": 0.0, "min_mass": 0.0}
    try:
        stuck.send(watch=pb.Watch(watch_id="w", text="is it stuck?", **rule))
        stuck.send(push_image=image(0))
        assert began.wait(PATIENCE)
        for number in range(3):
            other.send(watch=pb.Watch(watch_id=f"{number}", text="is it red?", **rule))
            other.send(push_image=image(number))
            other.wait("alert", lambda alert, number=number: alert.watch_id == f"{number}")
            other.send(unwatch=pb.Unwatch(watch_id=f"{number}"))
        assert not any(response.HasField("alert") for response in stuck.responses)
    finally:
        go.set()
    stuck.wait("alert")
    for each in (stuck, other):
        each.close()


def test_a_client_that_vanishes_leaves_nothing() -> None:
    with registries() as made, video_server({"resume_seconds": 0.3}) as (address, engine):
        raw, [registry] = Raw.opened(address), made
        raw.send(push_image=image(0))
        slow = ask("slow")
        slow.request.sampling.max_new_tokens = 150
        raw.send(ask=slow)
        raw.wait("answer")
        handle = raw.handle
        raw.cut()
        wait_for("the end of its question", lambda: not engine.stats().live)
        wait_for("the end of its session", lambda: not len(registry))
        with pytest.raises(NotFound):
            raise Raw.resumed(address, handle).failure()


def test_a_silent_session_ends_and_one_with_requests_does_not() -> None:
    with video_server({"idle_seconds": 1.0}) as (address, _):
        silent, talking = Raw.opened(address), Raw.opened(address)
        number = 0
        while not silent.ended.wait(0.2):
            talking.send(push_image=image(number))
            number += 1
        with pytest.raises(DeadlineExceeded, match="idle_seconds"):
            raise silent.failure()
        talking.close()


def test_sessions_are_bounded_and_each_tenants_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_A", "token-of-a")
    monkeypatch.setenv("TOKEN_B", "token-of-b")
    tenants = (TenantConfig(name="a", token_env="TOKEN_A", concurrency=1), TenantConfig(name="b", token_env="TOKEN_B"))
    with video_server({"max_sessions": 3, "sessions_per_tenant": 2}, tenants=tenants) as (address, _):
        of_a = [Raw.opened(address, "token-of-a") for _ in range(2)]
        for each in of_a:
            each.wait("configured")
        with pytest.raises(ResourceExhausted, match="sessions_per_tenant"):
            raise Raw.opened(address, "token-of-a").failure()
        of_b = Raw.opened(address, "token-of-b")
        of_b.wait("configured")
        with pytest.raises(ResourceExhausted, match="max_sessions"):
            raise Raw.opened(address, "token-of-b").failure()
        for handle in (of_a[0].handle, "x" * 43):  # a stolen handle is told what an unknown one is
            with pytest.raises(NotFound, match="there is none, or it has ended"):
                raise Raw.resumed(address, handle, token="token-of-b").failure()
        of_a[0].send(push_image=image(0))
        slow = ask("slow")
        slow.request.sampling.max_new_tokens = 150
        of_a[0].send(ask=slow)
        of_a[0].wait("answer")
        of_a[0].send(ask=ask("second"))
        assert of_a[0].refusal("second").code == EXHAUSTED
        for each in (*of_a, of_b):
            each.close()


def test_a_client_that_never_reads_is_sent_away_and_can_come_back() -> None:
    with video_server({"outbox_bytes": 30_000, "credit_pushes": 1000}) as (address, _):
        other = Raw.opened(address)
        raw = Raw(address, pb.SessionRequest(configure=pb.ConfigureSession()), reading=False)
        first = next(iter(raw.call))
        handle = first.configured.resume_handle
        for index in range(1, 9000):  # each is refused in a response of its own: more than the sockets hold
            wrong = ask(f"q{index}")
            wrong.request.sampling.temperature = -1
            raw.send(index, ask=wrong)
        raw.read()
        with pytest.raises(ResourceExhausted, match="outbox_bytes"):
            raise raw.failure()
        other.send(push_image=image(0))
        other.wait_taken(1)
        other.close()
        received = max(r.index for r in raw.responses)
        again = Raw.resumed(address, handle, received)
        taken = again.wait("acknowledged").index
        again.send(taken + 1, close=pb.CloseSession())
        again.wait("closed")
        indexes = [r.index for r in again.responses if r.index]
        assert indexes == list(range(received + 1, received + 1 + len(indexes)))
        again.cut()


async def _drained(config: Config, engine: Engine) -> tuple[Raw, Raw]:
    async with served(engine, config) as server:  # type: ignore[arg-type]
        address = f"127.0.0.1:{server.port}"
        closing, staying = Raw.opened(address), Raw.opened(address)
        for raw in (closing, staying):
            raw.send(push_image=image(0))
            await asyncio.to_thread(raw.wait_taken, 1)
        draining = asyncio.create_task(server.drain())
        for raw in (closing, staying):
            notice = await asyncio.to_thread(raw.wait, "go_away")
            assert 0 < notice.time_left_seconds <= 1.5 and notice.reason
        closing.send(push_image=image(1))
        closing.send(ask=ask("after the notice"))
        await asyncio.to_thread(closing.answer, "after the notice")
        with pytest.raises(Unavailable):
            raise await asyncio.to_thread(Raw.opened(address).failure)
        await asyncio.to_thread(closing.close)
        assert not draining.done()
        await draining
    return closing, staying


def test_frames_that_come_too_fast_are_dropped_as_chosen_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    append, gate = EngineStream.append, threading.Event()

    def held(stream: EngineStream, frame: Frame) -> Future[EncodedFrame]:
        assert gate.wait(PATIENCE)
        return append(stream, frame)

    monkeypatch.setattr(EngineStream, "append", held)
    with video_server({"waiting_frames": 2, "frames_under_way": 1, "credit_pushes": 10}) as (address, _):
        policies = (pb.OVERLOAD_POLICY_BLOCK, pb.OVERLOAD_POLICY_DROP_OLDEST, pb.OVERLOAD_POLICY_THIN)
        block, oldest, thin = (Raw.opened(address, overload=policy) for policy in policies)
        for raw in (block, oldest, thin):
            for number in range(10):
                raw.send(push_image=image(number))
        for raw in (oldest, thin):  # one is with the stream, two wait
            wait_for("seven dropped", lambda raw=raw: sum(r.frames_taken.dropped for r in list(raw.responses)) == 7)
        wait_for("ten taken in", lambda: max(r.acknowledged.index for r in block.responses) == 10)
        credits = lambda: [r.acknowledged.credit.pushes for r in list(block.responses) if r.HasField("acknowledged")]  # noqa: E731
        wait_for("credit for those that were decoded", lambda: credits()[-1] == 3)
        gate.set()
        for raw, seen in ((block, 10), (oldest, 3), (thin, 3)):
            raw.send(ask=ask("q", everything=pb.Everything()))
            asked = raw.wait("answer", lambda a: a.HasField("asked")).asked
            assert (asked.frames, asked.begin_seconds, asked.end_seconds) == (seen, 0.0, 9.0)
            raw.answer("q")
            raw.close()


def test_a_drain_is_announced_and_ends_what_is_left() -> None:
    config, engine = video_engine(server={"drain_seconds": 1.5})
    closing, staying = asyncio.run(_drained(config, engine))
    assert closing.error is None
    with pytest.raises(Unavailable, match="shutting down"):
        raise staying.failure()
    assert not engine.stats().live


def test_clients_can_ask_whether_a_model_takes_sessions(address: str) -> None:
    with sdk(address) as client:
        assert client.describe().sessions
    with threaded(EchoEngine()) as other, sdk(other) as client:
        assert not client.describe().sessions
        with pytest.raises(Unimplemented, match="no video sessions"):
            client.video_session()


def test_flooding_with_requests_that_need_no_credit_ends_the_session(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    stats, gate = EngineStream.stats, threading.Event()

    def held(stream: EngineStream) -> StreamStats:
        assert gate.wait(PATIENCE)
        return stats(stream)

    monkeypatch.setattr(EngineStream, "stats", held)
    for _ in range(1200):
        raw.send(get_statistics=pb.GetStatistics())
    try:
        with pytest.raises(ResourceExhausted, match="requests wait"):
            raise raw.failure()
    finally:
        gate.set()
