"""Clients at fault beside one that is not: it is answered as if it were alone, and nothing of theirs stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from clips import clip, silence
from echo_server import threaded
from streaming import reserved
from video_client import PATIENCE, Raw, ask, image, picture, sdk, video_engine, wait_for

from mmserve.client import VideoSession
from mmserve.engine.engine import Engine
from mmserve.errors import FailedPrecondition, InvalidArgument, MMServeError, NotFound, ResourceExhausted
from mmserve.v1 import video_pb2 as pb
from mmserve.video.registry import Registry
from mmserve.video.streams import EngineStreams

INVALID, PRECONDITION = 3, 9
FRAMES, EVERY = 24, 3


def vanishing(address: str) -> None:
    """With a question under way."""
    raw = Raw.opened(address)
    raw.send(push_image=image(0))
    slow = ask("slow")
    slow.request.sampling.max_new_tokens = 150
    raw.send(ask=slow)
    raw.wait("answer")
    raw.cut()


def never_reading(address: str) -> None:
    raw = Raw(address, pb.SessionRequest(configure=pb.ConfigureSession()), reading=False, window=1024)
    for index in range(1, 1500):  # each is refused in a response of its own: more than the sockets hold
        wrong = ask(f"q{index}")
        wrong.request.sampling.temperature = -1
        raw.send(index, ask=wrong)
    raw.read()
    refused(raw, ResourceExhausted, "outbox_bytes")


def ten_times_too_fast(address: str) -> None:
    raw = Raw.opened(address)
    for number in range(200):
        raw.send(push_segment=pb.PushSegment(data=b"\x00\x00\x00\x18ftypmp42" + bytes(30_000), start_seconds=number))
    refused(raw, ResourceExhausted, "without credit")


def truncated_and_hostile(address: str) -> None:
    hostile = b"\x00\x00\x00\x18ftypmp42" + bytes(range(256)) * 20
    segments = clip(frames=20)[:-200], hostile, b"", b"\x00\x00\x01\x65" * 99
    reported(address, [pb.PushSegment(data=data, start_seconds=n) for n, data in enumerate(segments)])


def running_backwards(address: str) -> None:
    early = [pb.PushSegment(data=clip(frames=10), start_seconds=at) for at in (5000.0, 1.0, 4999.0)]
    reported(address, early, fine=1)


def of_another_size(address: str) -> None:
    """From one segment to the next, which is fine, and within one."""
    sizes = [pb.PushSegment(data=clip(frames=10, size=size)) for size in ((64, 48), (96, 64), (32, 80))]
    both = b"".join(clip("h264", frames=8, size=size) for size in ((64, 48), (96, 64)))
    reported(address, [*sizes, pb.PushSegment(data=both, start_seconds=9.0)], fine=3)


def sound_alone(address: str) -> None:
    reported(address, [pb.PushSegment(data=silence(), start_seconds=0.0)])


def asking_too_early(address: str) -> None:
    raw = Raw.opened(address)
    raw.send(ask=ask("early"))
    assert raw.refusal("early").code == PRECONDITION
    raw.close()


def with_a_stale_handle(address: str) -> None:
    raw = Raw.opened(address)
    handle = raw.handle
    raw.close()
    refused(Raw.resumed(address, handle), NotFound, "has ended")


def out_of_order(address: str) -> None:
    raw = Raw.opened(address)
    raw.send(7, push_image=image(0))
    refused(raw, InvalidArgument, "index")


def replaced(address: str) -> None:
    raw = Raw.opened(address)
    again = Raw.resumed(address, raw.handle)
    again.wait("configured")
    refused(raw, FailedPrecondition, "another connection")
    again.send(1, close=pb.CloseSession())
    again.wait("closed")
    again.cut()


FAULTS: tuple[Callable[[str], None], ...] = (
    vanishing,
    never_reading,
    ten_times_too_fast,
    truncated_and_hostile,
    running_backwards,
    of_another_size,
    sound_alone,
    asking_too_early,
    with_a_stale_handle,
    out_of_order,
    replaced,
)


def refused(raw: Raw, kind: type[MMServeError], why: str) -> None:
    with pytest.raises(kind, match=why):
        raise raw.failure()


def reported(address: str, segments: list[pb.PushSegment], fine: int = 0) -> None:
    """The first ``fine`` are taken, the others refused, and the session goes on."""
    raw = Raw.opened(address)
    sent = [raw.send(push_segment=segment) for segment in segments]
    wait_for("their reports", lambda: len(failures(raw)) == len(segments) - fine)
    assert failures(raw) == [(index, INVALID) for index in sent[fine:]]
    raw.send(push_image=image(0, 1e6))
    raw.send(ask=ask("after"))
    raw.answer("after")
    raw.close()


def failures(raw: Raw) -> list[tuple[int, int]]:
    failed = [r.push_failed for r in list(raw.responses) if r.HasField("push_failed")]
    return [(each.request_index, each.error.code) for each in failed]


def played(session: VideoSession, meanwhile: Callable[[int], None] = lambda number: None) -> list[list[int]]:
    """The tokens of its answers, one after every few frames."""
    answers = []
    for number in range(FRAMES):
        meanwhile(number)
        session.push(picture(number), float(number))
        if number % EVERY == EVERY - 1:
            answers.append(session.stream(f"question {number}", max_new_tokens=8, tokens=True))
    assert session.statistics().frames_taken == FRAMES
    return [[token.id for token in question.result().tokens] for question in answers]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Engine, Registry, list[EngineStreams]]]:
    """A server, its registry of sessions, and its streams once there are any."""
    made: dict[type, list[Any]] = {Registry: [], EngineStreams: []}

    def noted(kind: type) -> Callable[..., None]:
        make = kind.__init__  # type: ignore[misc]

        def noting(self: Any, *args: Any) -> None:
            made[kind].append(self)
            make(self, *args)

        return noting

    for kind in made:
        monkeypatch.setattr(kind, "__init__", noted(kind))
    video = {"outbox_bytes": 100_000, "credit_pushes": 8, "credit_bytes": 1 << 20, "resume_seconds": 0.5}
    config, engine = video_engine(video)
    with threaded(engine, config) as address:  # type: ignore[arg-type]
        [registry] = made[Registry]
        yield address, engine, registry, made[EngineStreams]


def test_faults_beside_a_session_change_nothing_of_it_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as (address, engine, registry, streams), sdk(address) as client:
        with client.video_session(budget=64) as session:
            expected = played(session)
        at_fault: list[threading.Thread] = []
        failed: list[BaseException] = []

        def run(fault: Callable[[str], None]) -> None:
            try:
                fault(address)
            except BaseException as error:  # noqa: BLE001 - told below
                error.add_note(fault.__name__)
                failed.append(error)

        def begin(number: int) -> None:
            if number < len(FAULTS):
                at_fault.append(threading.Thread(target=run, args=(FAULTS[number],)))
                at_fault[-1].start()

        with client.video_session(budget=64) as session:
            assert played(session, begin) == expected
            for thread in at_fault:
                thread.join(2 * PATIENCE)
                assert not thread.is_alive()
            if failed:
                raise failed[0]
            assert len(at_fault) == len(FAULTS)
            wait_for("an end of all other sessions", lambda: len(registry) == 1)
            own = session.statistics()
            assert (own.frames_taken, own.pushes_failed, own.resumes) == (FRAMES, 0, 0)
        wait_for("an end of all sessions", lambda: not len(registry))
        wait_for("an empty engine", lambda: not engine.stats().live and not engine.stats().pages_in_use)
        assert [reserved(each) for each in streams] == [0] * len(streams)
        assert streams
