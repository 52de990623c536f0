"""Sessions of video on a cluster with workers that are objects of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from fake_workers import MODEL, PATIENCE, Worker, coordinator, finish, join
from harness import Call, eventually
from helpers import ask
from PIL import Image

from mmserve.cluster import journal, stream
from mmserve.cluster.asking import WorkerEnded
from mmserve.cluster.config import ClusterSettings
from mmserve.cluster.coordinator import Coordinator
from mmserve.cluster.messages import Appended, Moved, Order, Refused, StreamSaved
from mmserve.config import Config, VideoConfig
from mmserve.core.info import AdapterInfo
from mmserve.core.request import Stage
from mmserve.core.session import Asked, Memory
from mmserve.core.tenant import Tenant
from mmserve.errors import (
    Cancelled,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TransferError,
    Unavailable,
    Unimplemented,
)
from mmserve.models.adapters import key_of
from mmserve.video.base import EncodedFrame, Frame, Stream, StreamLost
from mmserve.video.standing import StandingQuestion
from mmserve.video.support import SessionSupport

ASKED = Asked(3, 0.0, 2.0, 0)


def encoder(name: str) -> Worker:
    return Worker(name, frozenset({"encode"}), answers={"stream.open": 0, "stream.ask": ASKED, "stream.judge": ["yes"]})


class Cluster:
    """Two encode workers and one for the rest, with a stream on the first."""

    def __init__(self, **settings: Any) -> None:
        self.owner, self.next, self.rest = encoder("e"), encoder("f"), Worker("0", frozenset({"prefill", "decode"}))
        given = ClusterSettings(**{"save_frames": 4, **settings})
        self.made = coordinator(self.owner, self.rest, support=SessionSupport(), settings=given)
        self.streams = self.made.session_parts(Config()).streams
        self.stream: Stream = self.streams.open(Memory(), Tenant())
        join(self.made, self.next)
        self.count = 0

    def append(self, count: int = 1) -> list[Future[EncodedFrame]]:
        made = [Frame(float(self.count + i), Image.new("RGB", (4, 3))) for i in range(count)]
        self.count += count
        return [self.stream.append(frame) for frame in made]

    def report(self, worker: Worker, *numbers: int) -> None:
        """``worker`` has taken in frames that it was given by the newest name."""
        self.made.take(worker.name, [Appended(MODEL, name_at(worker), number, None) for number in numbers])

    def save(self, worker: Worker, number: int, state: str) -> None:
        self.made.take(worker.name, [StreamSaved(MODEL, name_at(worker), number, state)])

    def leave(self, worker: Worker) -> None:
        worker.answers = dict.fromkeys(worker.answers, WorkerEnded("it has ended"))
        self.made.worker_exited(worker.name)

    def asked_once(self, name: str) -> Call:
        call = Call(ask(name))
        assert self.stream.ask(call.request, None, call.sink) == ASKED
        return call


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.streams.stop()
    assert made.made.stats().live == 0


def until(condition: Callable[[], Any]) -> None:
    eventually(lambda: bool(condition()), "what the test waits for")


def of(worker: Worker, question: str) -> list[tuple[Any, ...]]:
    return [arguments for asked, arguments in worker.asked if asked == question]


def name_at(worker: Worker) -> str:
    name: str = of(worker, "stream.open")[-1][0]
    return name


def given(worker: Worker) -> list[Any]:
    """Numbers of frames and ids of questions that a worker got for the newest name, in their order."""
    name = name_at(worker)
    found: list[Any] = []
    for question, arguments in worker.asked:
        if arguments[0] == name and question in ("stream.append", "stream.ask"):
            found.append(arguments[1].key if isinstance(arguments[1], Order) else arguments[1])
    return found


def test_a_question_goes_on_from_the_worker_of_its_stream_as_any_request(cluster: Cluster) -> None:
    call = cluster.asked_once("q")
    _name, order, _scope = of(cluster.owner, "stream.ask")[-1]
    assert order.key == "q" and not cluster.owner.orders
    handover = replace(order.handover, stage=Stage.ENCODED)
    cluster.made.take("e", [Moved(MODEL, "q", None, handover, "state", stays=False)])
    assert [each.key for each in cluster.rest.orders] == ["q"] and cluster.made.stats().queued == 0
    cluster.leave(cluster.owner)
    assert not call.ended, "its state is saved"
    finish(cluster.made, cluster.rest, "q")
    assert call.ended


def test_another_worker_goes_on_from_the_saved_state_with_what_came_after_it(cluster: Cluster) -> None:
    frames = cluster.append(5)
    _name, number, seconds, size, pixels, detail = of(cluster.owner, "stream.append")[-1]
    assert (number, seconds, size, len(pixels), detail) == (5, 4.0, (4, 3), 36, True)
    assert len(of(cluster.owner, "stream.save")) == 1, "after four frames"
    cluster.report(cluster.owner, 1, 2, 3, 4)
    cluster.save(cluster.owner, 4, "after four")
    frames += cluster.append(1)
    assert [each.done() for each in frames] == [True] * 4 + [False] * 2
    cluster.leave(cluster.owner)
    until(lambda: of(cluster.next, "stream.open") and given(cluster.next) == [5, 6])
    assert of(cluster.next, "stream.open")[0][-1] == "after four"
    cluster.report(cluster.next, 5, 6)
    assert [each.result(PATIENCE).seconds for each in frames] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    cluster.report(cluster.next, 5)  # once more: no_worker waits for it
    cluster.append(2)
    until(lambda: given(cluster.next) == [5, 6, 7, 8])
    until(lambda: len(of(cluster.next, "stream.save")) == 1)  # four frames after the state before
    cluster.report(cluster.next, 7, 8)


def test_a_question_that_is_lost_is_asked_again_after_the_frames_that_it_saw(cluster: Cluster) -> None:
    cluster.append(2)
    cluster.report(cluster.owner, 1, 2)
    call = cluster.asked_once("q")
    cluster.append(3)
    cluster.report(cluster.owner, 3, 4, 5)
    cluster.save(cluster.owner, 4, "after four")
    cluster.leave(cluster.owner)
    until(lambda: of(cluster.next, "stream.open") and given(cluster.next) == [1, 2])
    assert of(cluster.next, "stream.open")[0][-1] is None, "the state after four frames is too late for the question"
    cluster.report(cluster.next, 1, 2)
    until(lambda: given(cluster.next) == [1, 2, "q", 3, 4, 5])
    cluster.report(cluster.next, 3, 4, 5)
    finish(cluster.made, cluster.next, "q")
    assert call.ended and [type(event).__name__ for event in call.events] == ["Admitted", "Finished"]


def test_a_question_that_finds_its_worker_gone_is_put_to_the_next(cluster: Cluster) -> None:
    cluster.append(1)
    cluster.report(cluster.owner, 1)

    def ends(*_arguments: Any) -> Any:
        cluster.leave(cluster.owner)
        raise WorkerEnded("it has ended")

    cluster.owner.answers["stream.ask"] = ends
    cluster.next.answers["stream.ask"] = lambda *_arguments: ASKED
    waiting = Call(ask("q"))
    taken = cluster.next.post

    def post(model: str, question: str, arguments: Any) -> None:
        taken(model, question, arguments)
        if question == "stream.append":
            cluster.report(cluster.next, arguments[1])

    cluster.next.post = post  # type: ignore[method-assign]
    assert cluster.stream.ask(waiting.request, None, waiting.sink) == ASKED
    assert given(cluster.next) == [1, "q"]
    finish(cluster.made, cluster.next, "q")
    assert [type(event).__name__ for event in waiting.events] == ["Admitted", "Finished"]


def test_a_stream_leaves_a_worker_that_encodes_no_more(cluster: Cluster) -> None:
    frames = cluster.append(1)
    cluster.made.tick(0.0)
    assert not of(cluster.next, "stream.open")
    cluster.owner.serve({"decode"})
    cluster.made.tick(0.0)
    until(lambda: of(cluster.next, "stream.open") and given(cluster.next) == [1])
    until(lambda: of(cluster.owner, "stream.close"))
    cluster.report(cluster.owner, 1)  # late, by its former name
    assert not frames[0].done()
    cluster.report(cluster.next, 1)
    assert frames[0].result(PATIENCE).seconds == 0.0
    [judged] = cluster.streams.judge(frames[0].result(), [])
    assert judged == "yes" and of(cluster.next, "stream.judge") == [(name_at(cluster.next), 1, [])]


def test_a_question_whose_worker_changes_its_role_goes_with_its_stream(cluster: Cluster) -> None:
    call = cluster.asked_once("q")
    _name, order, _scope = of(cluster.owner, "stream.ask")[-1]
    cluster.owner.serve({"decode"})
    cluster.made.take("e", [Moved(MODEL, "q", None, order.handover, None, stays=False)])
    until(lambda: of(cluster.next, "stream.open") and given(cluster.next) == ["q"])
    finish(cluster.made, cluster.next, "q")
    assert call.ended


def test_without_saved_states_a_session_ends_with_what_it_lost() -> None:
    cluster = Cluster(save_frames=0)
    done, in_flight = cluster.append(2)
    cluster.report(cluster.owner, 1)
    cluster.leave(cluster.owner)
    with pytest.raises(StreamLost, match=r"lost are its frames up to 1 s \(2 in all\); open another session"):
        in_flight.result(PATIENCE)
    assert done.result(PATIENCE).seconds == 0.0
    for use in (cluster.stream.stats, lambda: cluster.append()):
        with pytest.raises(StreamLost):
            use()
    cluster.streams.stop()


def test_without_saved_states_a_frame_waits_until_its_stream_is_open_again() -> None:
    cluster, opens = Cluster(save_frames=0), threading.Event()
    cluster.next.answers["stream.open"] = lambda *_arguments: 0 if opens.wait(PATIENCE) else 1
    cluster.leave(cluster.owner)
    until(lambda: of(cluster.next, "stream.open"))
    frames: list[Future[EncodedFrame]] = []
    pushing = threading.Thread(target=lambda: frames.extend(cluster.append()))
    pushing.start()
    pushing.join(0.1)
    opens.set()
    pushing.join(PATIENCE)
    assert given(cluster.next) == [1]
    cluster.report(cluster.next, 1)
    assert frames[0].result(PATIENCE).seconds == 0.0
    cluster.streams.stop()


def test_a_question_that_waits_for_a_worker_ends_when_its_stream_is_closed(cluster: Cluster) -> None:
    opens, found = threading.Event(), []
    cluster.next.answers["stream.open"] = lambda *_arguments: 0 if opens.wait(PATIENCE) else 1
    cluster.leave(cluster.owner)
    until(lambda: of(cluster.next, "stream.open"))

    def asking() -> None:
        with pytest.raises(Cancelled) as ended:
            cluster.asked_once("q")
        found.append(ended)

    waiting = threading.Thread(target=asking)
    waiting.start()
    waiting.join(0.1)
    assert not found
    cluster.stream.close()
    waiting.join(PATIENCE)
    assert found
    opens.set()


@pytest.mark.parametrize("save_frames", [0, 4])
def test_a_frame_that_no_worker_takes_in_and_nothing_keeps_is_refused(
    save_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MOST_BYTES", 36)
    cluster, opens = Cluster(save_frames=save_frames), threading.Event()
    cluster.next.answers["stream.open"] = lambda *_arguments: 0 if opens.wait(PATIENCE) else 1
    cluster.leave(cluster.owner)
    until(lambda: of(cluster.next, "stream.open"))
    frames = cluster.append(3) if save_frames else []  # as many as are kept
    monkeypatch.setattr(stream, "PATIENCE", 0.01)
    with pytest.raises(Unavailable, match="accepts no frames"):
        cluster.append()
    opens.set()
    until(lambda: given(cluster.next) == list(range(1, len(frames) + 1)))
    cluster.report(cluster.next, *range(1, len(frames) + 1))
    assert [each.result(PATIENCE).seconds for each in frames] == [float(i) for i in range(len(frames))]
    cluster.streams.stop()


def test_a_question_is_of_the_worker_that_it_was_put_to_where_its_stream_moves_meanwhile(cluster: Cluster) -> None:
    there = cluster.stream._when_ready  # type: ignore[attr-defined]

    def moves(*given: Any) -> Any:
        found = there(*given)
        cluster.stream.move()  # type: ignore[attr-defined]
        until(lambda: of(cluster.next, "stream.open") and cluster.stream._ready)  # type: ignore[attr-defined]
        return found

    cluster.stream._when_ready = moves  # type: ignore[attr-defined]
    cluster.asked_once("q")
    [(_name, order, _scope)] = of(cluster.owner, "stream.ask")
    moved = Moved(MODEL, "q", None, replace(order.handover, stage=Stage.ENCODED), "state", stays=False)
    cluster.made.take("e", [moved])
    assert [each.key for each in cluster.rest.orders] == ["q"]
    finish(cluster.made, cluster.rest, "q")


def test_a_question_that_cannot_be_asked_again_ends_typed() -> None:
    cluster = Cluster(save_frames=0)
    call = cluster.asked_once("q")
    cluster.leave(cluster.owner)
    assert isinstance(call.error(), Unavailable) and "ask again" in call.error().message
    cluster.streams.stop()
    assert cluster.made.stats().live == 0


def test_a_session_that_ends_one_worker_after_another_ends() -> None:
    cluster = Cluster(max_losses=2)
    [frame] = cluster.append(1)
    workers = [cluster.owner, cluster.next]
    for i in range(3):
        workers.append(encoder(f"g{i}"))
        join(cluster.made, workers[-1])
    gone = 0
    while not frame.done():
        until(lambda: frame.done() or any(of(worker, "stream.append") for worker in workers))
        for worker in list(workers):
            if of(worker, "stream.append"):
                workers.remove(worker)
                gone += 1
                cluster.leave(worker)
    assert gone == 3
    with pytest.raises(StreamLost, match="3 workers ended one after another"):
        frame.result(PATIENCE)
    cluster.streams.stop()


def test_a_standing_question_is_checked_by_a_worker_that_is_there(cluster: Cluster) -> None:
    cluster.owner.answers["stream.check"] = WorkerEnded("it has ended")
    cluster.next.answers["stream.check"] = InvalidArgument.of("watch.text", "must not be empty")
    with pytest.raises(InvalidArgument, match="must not be empty"):
        cluster.streams.check(StandingQuestion(""), "watch")
    cluster.next.answers["stream.check"] = None
    cluster.streams.check(StandingQuestion("Is it red?"), "watch")
    assert len(of(cluster.next, "stream.check")) == 2


def test_a_state_that_cannot_be_read_ends_the_session(cluster: Cluster) -> None:
    cluster.append(4)
    cluster.report(cluster.owner, 1, 2, 3, 4)
    cluster.save(cluster.owner, 4, "state")
    cluster.next.answers["stream.open"] = TransferError("a payload is lost")
    [frame] = cluster.append(1)
    cluster.leave(cluster.owner)
    with pytest.raises(StreamLost, match="a payload is lost"):
        frame.result(PATIENCE)


def test_frames_wait_while_many_are_not_in_a_saved_state(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_BYTES", 36)
    cluster.append(2)
    assert len(of(cluster.owner, "stream.save")) == 1, "after two frames of 36 bytes"
    cluster.append(1)
    with pytest.MonkeyPatch.context() as patch:
        waits: list[Any] = []
        patch.setattr(cluster.stream._changed, "wait_for", lambda condition, _seconds: waits.append(condition()))  # type: ignore[attr-defined]
        cluster.report(cluster.owner, 1, 2, 3)
        cluster.save(cluster.owner, 2, "after two")
        cluster.append(1)
        assert waits == [True], "there is room again"


def test_a_state_that_its_worker_did_not_save_any_more_is_saved_by_the_next(cluster: Cluster) -> None:
    """Else frames wait for a state that no worker was asked for, where no more of them may come before it."""
    cluster.append(4)
    assert len(of(cluster.owner, "stream.save")) == 1
    cluster.leave(cluster.owner)
    until(lambda: of(cluster.next, "stream.open") and given(cluster.next) == [1, 2, 3, 4])
    until(lambda: of(cluster.next, "stream.save"))
    cluster.save(cluster.next, 4, "after four")
    cluster.append(3)
    assert len(of(cluster.next, "stream.save")) == 1, "not before four more"
    cluster.append(1)
    until(lambda: len(of(cluster.next, "stream.save")) == 2)


def test_a_question_that_is_lost_after_a_state_without_it_ends_typed(cluster: Cluster) -> None:
    """Its prompt was with another worker when the state was saved, and did not come there."""
    cluster.append(2)
    cluster.report(cluster.owner, 1, 2)
    call = cluster.asked_once("q")
    handover = replace(of(cluster.owner, "stream.ask")[-1][1].handover, stage=Stage.ENCODED)
    cluster.made.take("e", [Moved(MODEL, "q", None, handover, "prompt", stays=False)])
    cluster.append(2)
    cluster.report(cluster.owner, 3, 4)
    cluster.save(cluster.owner, 4, "after four")
    cluster.made.take("0", [Refused(MODEL, "q", None, TransferError("a payload is lost"))])
    assert isinstance(call.error(), Unavailable), "it cannot be asked again"


def test_a_stream_that_is_closed_while_it_is_opened_again_is_closed_there_too(cluster: Cluster) -> None:
    opening, opens = threading.Event(), threading.Event()

    def slow(*_arguments: Any) -> int:
        opening.set()
        assert opens.wait(PATIENCE)
        return 0

    cluster.next.answers["stream.open"] = slow
    cluster.leave(cluster.owner)
    assert opening.wait(PATIENCE)
    cluster.stream.close()
    before = len(cluster.next.asked)
    opens.set()
    until(lambda: ("stream.close", (name_at(cluster.next),)) in cluster.next.asked[before:])


def test_a_stream_that_is_closed_before_its_next_name_is_known_leaves_none(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = cluster.streams.renamed

    def closes(stream_: Any, *names: str) -> bool:
        stream_.close()
        known: bool = renamed(stream_, *names)
        return known

    monkeypatch.setattr(cluster.streams, "renamed", closes)
    cluster.leave(cluster.owner)
    until(lambda: of(cluster.next, "stream.open"))
    until(lambda: not cluster.streams._streams and not cluster.streams._open)


def test_a_question_that_is_cancelled_while_its_worker_takes_it_in_ends_there(cluster: Cluster) -> None:
    """Its cancellation goes another way, and may be there first."""
    told: list[list[str]] = []

    def takes_in(*_arguments: Any) -> Asked:
        cluster.made.cancel("q")
        told.append(list(cluster.owner.cancelled))
        return ASKED

    cluster.owner.answers["stream.ask"] = takes_in
    call = Call(ask("q"))
    cluster.stream.ask(call.request, None, call.sink)
    assert isinstance(call.error(), Cancelled)
    assert cluster.owner.cancelled == [*told[0], "q"], "once more, after it was taken in"


def test_a_question_that_a_worker_refuses_leaves_nothing(cluster: Cluster) -> None:
    cluster.owner.answers["stream.ask"] = InvalidArgument.of("adapter", "must not be set")
    call = Call(ask("q"))
    with pytest.raises(InvalidArgument, match="must not be set"):
        cluster.stream.ask(call.request, None, call.sink)
    assert not call.ended and cluster.made.stats().live == 0
    cluster.stream.close()
    assert cluster.owner.asked[-1][0] == "stream.close"


def test_bounds_are_those_of_all_workers_together() -> None:
    encoders = [encoder(name) for name in "ef"]
    for each in encoders:
        each.answers["stream.open"] = 100
    made = coordinator(*encoders, support=SessionSupport())
    streams = made.session_parts(Config(video=VideoConfig(max_sessions=3, total_bytes=250))).streams
    first, _second = (streams.open(Memory(), Tenant()) for _ in range(2))
    assert [len(of(each, "stream.open")) for each in encoders] == [1, 1]
    with pytest.raises(ResourceExhausted, match=r"reserve 200 bytes, and this one needs 100; .* allows 250"):
        streams.open(Memory(), Tenant())
    until(lambda: sum(len(of(each, "stream.close")) for each in encoders) == 1)  # what was refused
    first.close()
    encoders[0].answers["stream.open"] = encoders[1].answers["stream.open"] = 10
    for _ in range(2):
        streams.open(Memory(), Tenant())
    with pytest.raises(ResourceExhausted, match="3 streams are open, as many as"):
        streams.open(Memory(), Tenant())
    streams.stop()


def test_a_stream_that_ends_while_it_is_opened_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made = coordinator(encoder("e"), support=SessionSupport())
    streams = made.session_parts(Config(video=VideoConfig(max_sessions=1))).streams
    begin = stream.ClusterStream.begin

    def lost(opened: stream.ClusterStream) -> int:
        held = begin(opened)
        opened._end(StreamLost("its worker has ended"))
        return held

    with monkeypatch.context() as patch:
        patch.setattr(stream.ClusterStream, "begin", lost)
        with pytest.raises(StreamLost, match="its worker has ended"):
            streams.open(Memory(), Tenant())
    streams.open(Memory(), Tenant())
    streams.stop()


def test_questions_have_the_checkpoint_s_adapter_where_no_k_v_is_kept() -> None:
    own = AdapterInfo(name="streams", digest="d", rank=1, bytes=1)
    owner = encoder("e")
    owner.answers["hold"] = own
    for kept, default in ((False, "streams"), (True, "")):
        made = coordinator(owner, support=SessionSupport(keeps_kv=kept), own=[own])
        streams = made.session_parts(Config()).streams
        assert streams.adapter_for("") == default
        if kept:
            with pytest.raises(InvalidArgument, match="keeps K/V of the frames without it"):
                streams.adapter_for("streams")
            continue
        stream = streams.open(Memory(), Tenant())
        call = Call(replace(ask("q"), adapter="streams"))
        stream.ask(call.request, None, call.sink)
        assert of(owner, "stream.ask")[-1][1].handover.request.adapter == key_of(own)
        other = Call(replace(ask("r"), adapter="other"))
        with pytest.raises(NotFound, match="has no adapter 'other'; there is: streams"):
            stream.ask(other.request, None, other.sink)
        streams.stop()


def test_a_model_without_sessions_refuses_them() -> None:
    made: Coordinator = coordinator(Worker("0"))
    with pytest.raises(Unimplemented, match="takes no video sessions"):
        made.session_parts(Config())
