"""Sessions of video under faults and hostile clients: nothing is leaked, and no session is stuck."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from clips import clip
from echo_server import served
from video_client import PATIENCE, Raw, ask, held, image, sdk, video_engine, video_server, wait_for

from mmserve.client import VideoSession, YesNo, retries, video_view
from mmserve.config import Config
from mmserve.core.request import Request
from mmserve.engine.engine import Engine
from mmserve.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from mmserve.rpc import status, video_questions
from mmserve.rpc import video as rpc_video
from mmserve.rpc.memory_budget import MemoryBudget
from mmserve.v1 import video_pb2 as pb
from mmserve.video import request_queue
from mmserve.video import session as sessions
from mmserve.video.connection import Connection
from mmserve.video.messages import Numbered
from mmserve.video.reading import PushReader
from mmserve.video.registry import Registry
from mmserve.video.streams import EngineStream, EngineStreams

CANCELLED, DEADLINE, PRECONDITION, INTERNAL = 1, 4, 9, 13


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with video_server() as (found, _):
        yield found


def test_a_client_that_leaves_while_its_session_is_opened_leaves_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with video_server({"max_sessions": 1}) as (address, _):
        with held(monkeypatch, EngineStreams, "open") as began:
            raw = Raw.opened(address)
            assert began.wait(PATIENCE)
            raw.cut()
            time.sleep(0.3)  # the server is told of it meanwhile
        opened: list[Raw] = []

        def again() -> bool:
            opened.append(Raw.opened(address))
            return opened[-1].ended.wait(0.5) is False

        wait_for("room for a session", again)
        opened[-1].close()


def test_a_session_that_the_server_does_not_open_fails_in_time(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    late = pytest.raises(DeadlineExceeded, match="the session was not opened in time")
    with held(monkeypatch, EngineStreams, "open"), sdk(address) as client, late:
        client.video_session(timeout=1)


@pytest.mark.parametrize("again", [True, False])
def test_a_session_whose_configured_was_lost_is_not_opened_twice(
    address: str, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """``again``: by the SDK; else by a client that sent a request meanwhile, and cannot mean that session."""
    opened: list[str] = []
    open_ = Registry.open

    def noted(registry: Registry, *args: Any) -> sessions.Session:
        session = open_(registry, *args)
        opened.append(session.handle)
        return session

    monkeypatch.setattr(Registry, "open", noted)
    if not again:
        first = Raw.opened(address, open_id="x" * 16)
        first.send(get_statistics=pb.GetStatistics())
        first.wait("statistics")
        assert Raw.opened(address, open_id="x" * 16).handle != first.handle
        return
    send = rpc_video._send

    async def lost(*args: Any) -> None:
        monkeypatch.setattr(rpc_video, "_send", send)
        raise Unavailable("the connection is lost")

    monkeypatch.setattr(rpc_video, "_send", lost)
    with sdk(address) as client, client.video_session() as session:
        session.push(b"no image", 0.0)
        assert session.statistics().pushes_failed == 1 and session.resumes == 0
        assert opened == [session._state.configured.resume_handle]  # type: ignore[union-attr]


def test_a_client_that_resumes_and_never_reads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    most, sent = 0, 0
    report = sessions.Session._report

    def noted(session: sessions.Session, response: Numbered) -> None:
        nonlocal most, sent
        report(session, response)
        most, sent = max(most, session._response_queue.responses.unsent_bytes), session._response_queue.responses._index

    monkeypatch.setattr(sessions.Session, "_report", noted)
    outbox, ended = 20_000, False
    with video_server({"outbox_bytes": outbox}) as (address, _):
        raw = Raw(address, pb.SessionRequest(configure=pb.ConfigureSession()), reading=False)
        handle, taken = next(iter(raw.call)).configured.resume_handle, 0
        for _ in range(100):
            for index in range(taken + 1, taken + 1001):
                wrong = ask(f"q{index}")
                wrong.request.sampling.temperature = -1
                raw.send(index, ask=wrong)
            time.sleep(0.3)
            raw.cut()
            raw = Raw(
                address,
                pb.SessionRequest(received=sent, resume=pb.ResumeSession(resume_handle=handle)),
                reading=False,
            )
            try:
                taken = next(r for r in raw.call if r.HasField("acknowledged")).acknowledged.index
            except grpc.RpcError as error:
                ended = error.code() is grpc.StatusCode.NOT_FOUND or "open a new session" in error.details()
                break
        raw.cut()
    assert ended and most < 6 * outbox


def test_half_closing_waits_for_what_is_under_way(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, request, response in (
        (PushReader, "read", {"push_image": image(0)}, "frames_taken"),
        (EngineStream, "stats", {"get_statistics": pb.GetStatistics()}, "statistics"),
    ):
        with held(monkeypatch, owner, name) as began:
            raw = Raw.opened(address)
            raw.wait("acknowledged")
            raw.send(**request)  # type: ignore[arg-type]
            raw._out.put(None)
            assert began.wait(PATIENCE)
            assert not raw.ended.wait(0.5), f"ended before {response}"
        raw.wait(response)
        assert raw.ended.wait(PATIENCE) and raw.error is None
        raw.cut()


def test_a_question_about_the_past_where_nothing_of_it_is_kept(address: str) -> None:
    raw = Raw.opened(address, memory=pb.StreamMemory(policy="recall", host_bytes=1))
    raw.send(push_image=image(0))
    raw.send(ask=ask("q", everything=pb.Everything()))
    assert raw.refusal("q").code == PRECONDITION
    raw.close()


def test_frames_of_a_segment_are_no_requests_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "MOST_QUEUED", 4)
    with video_server({"credit_pushes": 2, "frames_under_way": 1}) as (address, _):
        with held(monkeypatch, EngineStream, "append") as began:
            raw = Raw.opened(address, sampler=pb.FrameSampler(rate=30))
            raw.send(push_segment=pb.PushSegment(data=clip(frames=40, gop=40, rate=10)))
            assert began.wait(PATIENCE)
            time.sleep(0.2)
            raw.send(ask=ask("q"))
            assert not raw.ended.wait(0.3), raw.error
        raw.answer("q")
        raw.close()


def test_a_question_ends_in_time_that_waits_for_frames(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Raw.opened(address)
    with held(monkeypatch, EngineStream, "append") as began:
        raw.send(push_image=image(0))
        assert began.wait(PATIENCE)
        raw.send(ask=ask("late", timeout_seconds=0.2))
        assert raw.refusal("late").code == DEADLINE
    raw.send(ask=ask("next"))
    raw.answer("next")
    raw.close()


def test_a_bug_with_one_question_is_its_own(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to_request = video_questions.to_request

    def broken(message: Any, **how: Any) -> Request:
        if message.messages[0].parts[0].text == "bug":
            raise ZeroDivisionError
        return to_request(message, **how)

    monkeypatch.setattr(video_questions, "to_request", broken)
    raw = Raw.opened(address)
    raw.send(push_image=image(0))
    raw.send(ask=ask("wrong", "bug"))
    assert raw.refusal("wrong").code == INTERNAL
    raw.send(ask=ask("right"))
    raw.answer("right")
    raw.close()


def test_a_message_without_room_costs_the_connection_and_not_the_session(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def full(budget: MemoryBudget, files: Sequence[bytes], texts: int = 0) -> Iterator[None]:
        raise ResourceExhausted("no room", retry_after=0.1)
        yield

    raw = Raw.opened(address)
    raw.send(push_image=image(0))
    raw.wait_taken(1)
    handle = raw.handle
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBudget, "taken", full)
        raw.send(push_segment=pb.PushSegment(data=bytes(2 << 20)))
        with pytest.raises(ResourceExhausted, match="no room"):
            raise raw.failure()
    again = Raw.resumed(address, handle, max(r.index for r in raw.responses))
    again.send(again.wait("acknowledged").index + 1, push_image=image(1))
    again.wait_taken(1)
    again.close()


def test_statistics_that_came_too_late_are_not_those_of_the_next_call(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sdk(address) as client, client.video_session() as session:
        with held(monkeypatch, EngineStream, "stats"), pytest.raises(DeadlineExceeded):
            session.statistics(timeout=0.2)
        session.push(image(0).data, seconds=0.0)
        assert session.statistics().frames_taken == 1


def test_a_session_that_ended_holds_nothing_while_its_connection_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[sessions.Session] = []
    attach = sessions.Session.attach

    def noted(session: sessions.Session, received: int | None = None) -> Any:
        opened.append(session)
        return attach(session, received)

    monkeypatch.setattr(sessions.Session, "attach", noted)
    with video_server({"frames_under_way": 1}) as (address, _):
        with held(monkeypatch, EngineStream, "append") as began:
            raw = Raw(address, pb.SessionRequest(configure=pb.ConfigureSession()), reading=False)
            for number in range(4):
                raw.send(push_image=image(number))
            assert began.wait(PATIENCE)
            [session] = opened
            wait_for("three frames that wait", lambda: session._waiting.frames == 3)
            raw.send(index=99, push_image=image(5))  # which ends the session
            wait_for("the end", lambda: session.over)
            assert (
                not len(session._waiting)
                and not session._waiting.bytes
                and not session._response_queue.responses.pending
            )
        raw.cut()


@pytest.mark.parametrize(
    "window",
    [pytest.param(0, marks=pytest.mark.slow, id="status not read"), pytest.param(1024, id="write blocked")],
)
def test_a_connection_that_is_ended_and_never_read_leaves_nothing(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    connections: list[weakref.ref[Connection]] = []
    attach = sessions.Session.attach

    def noted(session: sessions.Session, received: int | None = None) -> Connection:
        connection = attach(session, received)
        connections.append(weakref.ref(connection))
        return connection

    def ended() -> bool:
        time.sleep(0.3)  # collecting is slow, and takes the time of the server's thread
        gc.collect()
        return connections[0]() is None

    monkeypatch.setattr(sessions.Session, "attach", noted)
    monkeypatch.setattr(rpc_video, "_UNREAD_SECONDS", 0.2)
    monkeypatch.setattr(status, "UNREAD_SECONDS", 0.2)
    with video_server({"outbox_bytes": 500_000 if window else 30_000}) as (address, _):
        raw = Raw(address, pb.SessionRequest(configure=pb.ConfigureSession()), reading=False, window=window)
        for index in range(1, 2500):  # each is refused in a response of its own: more than the sockets hold
            wrong = ask(f"q{index}")
            wrong.request.sampling.temperature = -1
            raw.send(index, ask=wrong)
        wait_for("the connection", lambda: connections)
        wait_for("the end of its handler", ended)
        raw.read()  # a client that reads at last still gets the status
        with pytest.raises(ResourceExhausted, match="outbox_bytes"):
            raise raw.failure()


async def _replaced(config: Config, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    open_stream, opening, gate = EngineStreams.open, threading.Event(), threading.Event()

    def late(streams: EngineStreams, *args: Any) -> Any:
        stream = open_stream(streams, *args)
        opening.set()
        assert gate.wait(PATIENCE)
        return stream

    async with served(engine, config) as server:  # type: ignore[arg-type]
        address = f"127.0.0.1:{server.port}"
        early = Raw.opened(address)
        early.send(push_image=image(0))
        await asyncio.to_thread(early.wait_taken, 1)
        with monkeypatch.context() as patch:
            patch.setattr(EngineStreams, "open", late)
            raw = Raw.opened(address)
            assert await asyncio.to_thread(opening.wait, PATIENCE)
            leaving = asyncio.create_task(server._leave(engine, 20.0))
            assert (await asyncio.to_thread(early.wait, "go_away")).time_left_seconds > 1
            early.send(ask=ask("the last one"))
            await asyncio.to_thread(early.answer, "the last one")
            await asyncio.to_thread(early.close)
            await leaving
            gate.set()
            with pytest.raises(Unavailable):
                raise await asyncio.to_thread(raw.failure)
        assert not len(server.sessions)


def test_sessions_of_a_model_that_is_replaced_are_ended_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open ones get a notice and may ask until they are closed; one that is being opened is refused."""
    config, engine = video_engine()
    asyncio.run(_replaced(config, engine, monkeypatch))


def test_a_watch_that_is_refused_does_not_free_the_id_of_its_successor(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ask, remove and ask again with one id before the first is looked at: a third one is still refused."""
    raw = Raw.opened(address)
    with held(monkeypatch, PushReader, "read") as began:
        raw.send(push_image=image(0))
        assert began.wait(PATIENCE)
        raw.send(watch=pb.Watch(watch_id="w", text="", yes_no=pb.YesNo()))
        raw.send(unwatch=pb.Unwatch(watch_id="w"))
        raw.send(watch=pb.Watch(watch_id="w", text="is it red?", yes_no=pb.YesNo()))
    raw.wait("watch_state", lambda state: state.HasField("accepted"))
    states = [r.watch_state.WhichOneof("state") for r in raw.responses if r.HasField("watch_state")]
    assert states == ["error", "accepted"]
    raw.send(watch=pb.Watch(watch_id="w", text="is it blue?", yes_no=pb.YesNo()))
    with pytest.raises(InvalidArgument, match="is a standing question already"):
        raise raw.failure()


def test_reports_of_failed_pushes_do_not_hold_what_was_pushed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept until the client confirms them: otherwise a client that never does holds all bytes it ever sent."""
    read, pushed = PushReader.read, []

    def noted(reader: PushReader, push: Any, *rest: Any) -> None:
        pushed.append(weakref.ref(push))
        read(reader, push, *rest)

    monkeypatch.setattr(PushReader, "read", noted)
    raw = Raw.opened(address)
    for number in range(3):
        raw.send(push_segment=pb.PushSegment(data=bytes(100_000), start_seconds=number))
    wait_for("three reports", lambda: sum(r.HasField("push_failed") for r in list(raw.responses)) == 3)

    def gone() -> bool:
        time.sleep(0.1)
        gc.collect()
        return len(pushed) == 3 and not any(ref() for ref in pushed)

    wait_for("the pushes to be gone", gone)
    raw.close()


def test_a_push_that_fails_frame_by_frame_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another one fails between two of its frames."""
    goes_on, frames = threading.Event(), []

    def refused(_stream: EngineStream, frame: Any) -> None:
        frames.append(frame.seconds)
        assert len(frames) == 1 or goes_on.wait(PATIENCE)
        raise InvalidArgument.of("frame", "is not wanted")

    monkeypatch.setattr(EngineStream, "append", refused)
    with video_server() as (address, _):
        raw = Raw.opened(address)
        first = raw.send(push_segment=pb.PushSegment(data=clip(frames=20, rate=10), start_seconds=1.0))
        second = raw.send(push_segment=pb.PushSegment(data=b"none", start_seconds=9.0))

        def failed() -> list[int]:
            return [each.push_failed.request_index for each in list(raw.responses) if each.HasField("push_failed")]

        wait_for("both reports", lambda: sorted(failed()) == [first, second])
        goes_on.set()
        raw.send(get_statistics=pb.GetStatistics())
        assert raw.wait("statistics").pushes_failed == 2
        assert len(frames) > 1 and sorted(failed()) == [first, second]
        raw.close()


def test_statistics_are_answered_where_the_stream_has_none(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the session's own counters; without an answer the client would wait, and take the next one for it."""

    def none(stream: EngineStream) -> Any:
        raise Unavailable("its worker is being replaced")

    with sdk(address) as client, client.video_session() as session:
        session.push(image(0).data, seconds=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(EngineStream, "stats", none)
            found = session.statistics(timeout=5.0)
        assert (found.frames_taken, found.kept_rows) == (1, 0)
        assert session.statistics().kept_rows


def test_a_question_ends_in_time_while_its_stream_is_asked(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster, where that waits for a worker that goes on with the stream; nothing more is heard of it."""
    raw = Raw.opened(address)
    raw.send(push_image=image(0))
    with held(monkeypatch, EngineStream, "ask") as began:
        raw.send(ask=ask("late", timeout_seconds=0.2))
        assert began.wait(PATIENCE)
        assert raw.refusal("late").code == DEADLINE
        raw.send(ask=ask("left"))
        raw.send(cancel_ask=pb.CancelAsk(question_id="left"))
        assert raw.refusal("left").code == CANCELLED
    raw.send(ask=ask("next"))
    raw.answer("next")
    assert [r.answer.question_id for r in raw.responses if r.HasField("answer")][:2] == ["late", "left"]
    assert {r.answer.question_id for r in raw.responses if r.HasField("answer")} == {"late", "left", "next"}
    assert sum(r.answer.question_id in ("late", "left") for r in raw.responses) == 2
    raw.close()


def test_a_question_that_is_cancelled_while_its_stream_is_asked_ends_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = Raw.opened(address)
    raw.send(push_image=image(0))
    with held(monkeypatch, EngineStream, "ask") as began:
        raw.send(ask=ask("left"))
        assert began.wait(PATIENCE)
        raw.send(cancel_ask=pb.CancelAsk(question_id="left"))
        assert raw.refusal("left").code == CANCELLED
    raw.send(ask=ask("left"))  # the name is free
    raw.answer("left")
    raw.close()


def test_a_connection_that_was_lost_before_it_began_does_not_stop_its_successor(address: str) -> None:
    """gRPC asks for the first request on a thread of its own, which may come late."""
    with sdk(address) as client, client.video_session() as session:
        list(session._outgoing(object()))  # of a connection that is not the session's any more
        session.push(image(0).data, seconds=0.0, timeout=5.0)
        assert session.statistics(timeout=5.0).frames_taken == 1


def test_a_connection_that_is_lost_long_after_the_last_request_is_resumed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for it begins when the connection is lost."""
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0])
    for module in (retries, video_view):
        monkeypatch.setattr(module, "time", clock)
    with sdk(address) as client, client.video_session() as session:
        session.push(image(0).data, seconds=0.0)
        session.statistics()
        later[0] = 3600.0
        session._call.cancel()
        wait_for("its resume, or its end", lambda: session.resumes or session._state.error)
        session.push(image(1).data, seconds=1.0)
        assert session.statistics().frames_taken == 2


def test_what_is_interrupted_leaves_nothing(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl+C, for example in a notebook."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "mmserve-session"}

    before = threads()
    with sdk(address) as client:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(VideoSession, "_until", interrupted)
            client.video_session()
        wait_for("the end of its thread", lambda: threads() <= before)
        with client.video_session() as session:
            cancelled: list[Any] = []
            for asked in (lambda: session.ask("what?"), lambda: session.decide([YesNo("red?")])):
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(session, "_until", interrupted)
                    patch.setattr(session._state, "cancel", cancelled.append)
                    asked()
            assert len(cancelled) == 2


def test_times_of_sessions_are_those_of_calls(address: str) -> None:
    """Finite and above 0, and however long: longer ones than a clock can take are as good as none."""
    with sdk(address) as client, client.video_session(timeout=1e300) as session:
        session.push(image(0).data, seconds=0.0, timeout=1e300)
        assert session.ask("what?", timeout=1e300, max_new_tokens=2).finish_reason == "length"
        assert session.statistics(timeout=1e300).questions == 1
        for wrong in (0, math.inf, math.nan):
            for call in (session.ask, client.generate):
                with pytest.raises(InvalidArgument, match="must be finite and above 0"):
                    call("what?", timeout=wrong)
            with pytest.raises(InvalidArgument, match="must be finite and above 0"):
                client.video_session(timeout=wrong)


def test_a_session_that_ends_while_its_stream_is_asked_makes_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster, where a question may wait long for a worker that goes on with the stream."""
    with video_server() as (address, _):
        raw = Raw.opened(address)
        raw.send(push_image=image(0))
        closed = threading.Event()
        close = EngineStream.close

        def noted(stream: EngineStream) -> None:
            close(stream)
            closed.set()

        monkeypatch.setattr(EngineStream, "close", noted)
        with held(monkeypatch, EngineStream, "ask") as began:
            raw.send(ask=ask("q"))
            assert began.wait(PATIENCE)
            raw.send(index=99, push_image=image(1))  # which ends the session
            assert isinstance(raw.failure(), InvalidArgument)
            assert closed.wait(5.0)
