"""The bookkeeping of sessions: what is taken and sent is taken and sent once, whatever becomes of connections."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmserve.client.video_requests import configuration
from mmserve.client.video_state import SessionState
from mmserve.core.events import Alternative, Delta, Finished, Prefilled, PromptToken, Snapshot, StageTimes, Usage
from mmserve.core.session import Alert
from mmserve.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from mmserve.v1 import video_pb2 as pb
from mmserve.video import indexes
from mmserve.video.base import Frame
from mmserve.video.indexes import MOST_BEYOND, Requests, Responses, Window
from mmserve.video.messages import Answer, FramesTaken, Numbered, response_bytes
from mmserve.video.overload import Origin, Overload, Waiting, WaitingFrame

_TEXT = "abcdefghijklmnopqrstuvwxyz"
FINISHED = Finished("end", _TEXT, Usage(1, 0, 1), 1, 1, StageTimes())


def alert(number: int) -> Alert:
    return Alert("w", True, 0.9, 1.0, float(number), "yes")


def test_requests_are_taken_once_and_in_order() -> None:
    requests = Requests()
    assert [requests.take(i) for i in (1, 2, 2, 1, 3)] == [True, True, False, False, True]
    for wrong in (0, 5):
        with pytest.raises(InvalidArgument, match="must be 4"):
            requests.take(wrong)
    assert requests.taken == 3


def test_credit_is_what_is_left_and_no_push_beyond_it_is_taken() -> None:
    window = Window(2, 100)
    assert window.push(60) and not window.push(60) and window.push(40)
    assert (window.credit.pushes, window.credit.bytes) == (0, 0)
    window.done(60)
    assert (window.credit.pushes, window.credit.bytes) == (1, 60)


def test_who_pushes_on_without_credit_is_ended() -> None:
    window = Window(2, 100)
    refused = 0
    with pytest.raises(ResourceExhausted, match="without credit"):
        for _ in range(100):
            refused += not window.push(10)
    assert refused == MOST_BEYOND * 2
    assert window.bytes == 20


def test_unsent_reports_are_joined_and_keep_the_text_whole() -> None:
    responses = Responses(1 << 20)
    for number, letter in enumerate(_TEXT):
        responses.add(Answer("q", Delta(letter)))
        responses.add(Answer("q", Snapshot(letter, number, 26, number, edited=1)))
        responses.add(FramesTaken(1, 2, float(number), number / 10))
    responses.add(Answer("q", FINISHED))
    sent = [found[1] for found in iter(responses.send, None)]
    assert sent[0] == Answer("q", Delta(_TEXT))
    assert sent[1] == Answer("q", Snapshot("z", 25, 26, 25, edited=26))
    assert sent[2] == FramesTaken(26, 52, 25.0, 2.5)
    assert len(sent) == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["add", "send", "receive", "confirm", "cut"]), max_size=80))
def test_each_response_arrives_once_over_any_number_of_cuts(steps: list[str]) -> None:
    responses = Responses(1 << 20)
    wire: list[tuple[int, Alert]] = []  # sent and not received
    received: list[int] = []  # indexes
    seen: list[float] = []
    added = 0

    def receive() -> None:
        index, response = wire.pop(0)
        if index > (received[-1] if received else 0):
            received.append(index)
            seen.append(response.seconds)

    def cut() -> None:
        wire.clear()
        responses.resume(received[-1] if received else 0)

    for step in steps:
        if step == "add":
            added += 1
            responses.add(alert(added))
        elif step == "send" and (found := responses.send()) is not None:
            wire.append(found)  # type: ignore[arg-type]
        elif step == "receive" and wire:
            receive()
        elif step == "confirm" and received:
            responses.confirm(received[-1])
        elif step == "cut":
            cut()
    cut()
    while (found := responses.send()) is not None:
        wire.append(found)  # type: ignore[arg-type]
    while wire:
        receive()
    assert seen == [float(i + 1) for i in range(added)]
    assert received == list(range(1, added + 1))
    responses.confirm(added)
    assert responses.confirmed


def test_the_answer_to_a_question_of_the_same_name_is_not_joined_with_the_one_before() -> None:
    responses = Responses(1 << 20)
    said = [Answer("q", Delta("a")), Answer("q", FINISHED), Answer("q", Delta("b")), Answer("q", Delta("c"))]
    for each in said:
        responses.add(each)
    sent = [found[1] for found in iter(responses.send, None)]
    assert sent == [*said[:2], Answer("q", Delta("bc"))]
    assert responses.unsent_bytes == 0


def test_what_waits_is_not_counted_anew_with_each_response(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(response: Numbered) -> int:
        nonlocal calls
        calls += 1
        return response_bytes(response)

    monkeypatch.setattr(indexes, "response_bytes", counted)
    responses = Responses(1 << 20)
    for number in range(1000):
        responses.add(alert(number))
        assert responses.unsent_bytes == (number + 1) * response_bytes(alert(number))
    assert calls <= 3000


def test_the_tokens_of_a_prompt_count() -> None:
    tokens = tuple(PromptToken(i, "a", -0.5, 1, (Alternative(1, "b", -1.0),)) for i in range(10))
    plain, scored = (Prefilled(Usage(10, 0, 0), prompt_tokens=each) for each in ((), tokens))
    assert response_bytes(Answer("q", scored)) > response_bytes(Answer("q", plain)) + 20 * 200


def test_what_is_not_confirmed_is_kept_within_bounds_and_a_resume_before_that_is_refused() -> None:
    each = response_bytes(alert(0))
    responses = Responses(4 * each)
    for number in range(10):
        responses.add(alert(number))
        responses.send()
    responses.resume(6)
    assert [responses.send()[0] for _ in range(4)] == [7, 8, 9, 10]  # type: ignore[index]
    with pytest.raises(FailedPrecondition, match="up to 6"):
        responses.resume(5)
    with pytest.raises(InvalidArgument, match="at most 10"):
        responses.confirm(11)


def frames(policy: Overload, count: int, *, most: int = 4, size: int = 1 << 30) -> tuple[Waiting, int]:
    waiting, image = Waiting(policy, most, size), Image.new("RGB", (10, 10))
    dropped = sum(waiting.put(WaitingFrame(Frame(float(i), image), Origin(i, 0.0))) for i in range(count))
    return waiting, dropped


def left(waiting: Waiting) -> list[float]:
    found = []
    while len(waiting):
        item = waiting.pop()
        assert isinstance(item, WaitingFrame)
        found.append(item.frame.seconds)
    assert (waiting.frames, waiting.bytes) == (0, 0)
    return found


def test_a_full_queue_blocks_drops_the_oldest_or_thins() -> None:
    waiting, dropped = frames(Overload.BLOCK, 6)
    assert waiting.full and not dropped and left(waiting) == [0, 1, 2, 3, 4, 5]
    waiting, dropped = frames(Overload.DROP_OLDEST, 6)
    assert not waiting.full and dropped == 2 and left(waiting) == [2, 3, 4, 5]
    waiting, dropped = frames(Overload.THIN, 5)
    assert dropped == 2 and left(waiting) == [1, 3, 4]


def test_bytes_of_waiting_frames_are_bounded_too_and_the_newest_is_kept() -> None:
    waiting, dropped = frames(Overload.DROP_OLDEST, 6, size=3 * 400)
    assert dropped == 3 and left(waiting) == [3, 4, 5]
    waiting, dropped = frames(Overload.DROP_OLDEST, 6, size=10)
    assert dropped == 5 and left(waiting) == [5]


def test_questions_keep_their_place_among_dropped_frames() -> None:
    waiting, _ = frames(Overload.DROP_OLDEST, 4)
    question = object()
    waiting.put(question)
    image = Image.new("RGB", (10, 10))
    for i in range(4, 7):
        waiting.put(WaitingFrame(Frame(float(i), image), Origin(i, 0.0)))
    order = []
    while len(waiting):
        item = waiting.pop()
        order.append(item.frame.seconds if isinstance(item, WaitingFrame) else item)
    assert order == [3.0, question, 4.0, 5.0, 6.0]


def test_alerts_that_nobody_reads_are_counted_as_dropped(caplog: pytest.LogCaptureFixture) -> None:
    state = SessionState(configuration())
    watching = state.watch("is it red?", None, None, None)
    for number in range(1030):
        state.take(pb.SessionResponse(alert=pb.Alert(watch_id=watching.watch_id, seconds=float(number))))
    assert (watching.dropped, len(watching.alerts), watching.alerts[0].seconds) == (6, 1024, 6.0)
    assert caplog.text.count("alerts of a standing question are not read") == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["push", "ask", "send", "take", "done", "reply", "cut"]), max_size=120))
def test_client_and_server_agree_over_any_number_of_cuts(steps: list[str]) -> None:
    """The client's bookkeeping against the server's: each push once and in order, none without credit."""
    state = SessionState(configuration())
    requests, window = Requests(), Window(3, 30)
    up: list[pb.SessionRequest] = []
    down: list[pb.SessionResponse] = []
    taken: list[float] = []
    waiting: list[int] = []
    pushed = 0

    def acknowledge() -> None:
        credit = pb.Credit(pushes=window.credit.pushes, bytes=window.credit.bytes)
        down.append(pb.SessionResponse(acknowledged=pb.Acknowledged(index=requests.taken, credit=credit)))

    def connect() -> None:
        up.clear()
        down.clear()
        state.opening()
        configured = pb.SessionConfigured(resume_handle="h", limits=pb.SessionLimits(max_request_bytes=30))
        down.append(pb.SessionResponse(configured=configured))
        acknowledge()

    def take() -> None:
        request = up.pop(0)
        if request.index and requests.take(request.index):
            if request.HasField("push_image"):
                size = len(request.push_image.data)
                assert window.push(size), "a push came without credit"
                taken.append(request.push_image.seconds)
                waiting.append(size)
            acknowledge()

    connect()
    for step in [*steps, "cut", *["reply", "send", "take", "done"] * 200]:
        if step == "push" and state.push_fits(10):
            pushed += 1
            state.enqueue(push_image=pb.PushImage(data=bytes(10), seconds=pushed))
        elif step == "ask":
            state.enqueue(get_statistics=pb.GetStatistics())
        elif step == "send" and (request := state.next_request()) is not None:
            up.append(pb.SessionRequest.FromString(request.SerializeToString()))
        elif step == "take" and up:
            take()
        elif step == "done" and waiting:
            window.done(waiting.pop(0))
            acknowledge()
        elif step == "reply" and down:
            state.take(down.pop(0))
        elif step == "cut":
            connect()
    assert taken == [float(i + 1) for i in range(pushed)]
