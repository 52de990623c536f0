"""Sessions of video on a cluster with workers that are objects of the test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fake_workers import MODEL, PATIENCE, Worker, coordinator, finish
from harness import Call
from helpers import ask
from PIL import Image

from mmserve.cluster.coordinator import Coordinator
from mmserve.cluster.messages import Appended, Moved
from mmserve.config import Config
from mmserve.core.request import Stage
from mmserve.core.session import Asked, Memory
from mmserve.core.tenant import Tenant
from mmserve.errors import InvalidArgument, Unavailable, Unimplemented
from mmserve.video.base import Frame, Stream, StreamLost
from mmserve.video.facts import Facts


@pytest.fixture
def streaming() -> Iterator[tuple[Coordinator, Worker, Worker, Stream]]:
    encoder = Worker("e", frozenset({"encode"}), answers={"stream.open": None, "stream.ask": Asked(3, 0.0, 2.0, 0)})
    other = Worker("0", frozenset({"prefill", "decode"}))
    made = coordinator(encoder, other, facts=Facts())
    streams = made.session_parts(Config()).streams
    stream = streams.open(Memory(), Tenant())
    yield made, encoder, other, stream
    streams.stop()


def test_a_question_goes_on_from_the_worker_of_its_stream_as_any_request(
    streaming: tuple[Coordinator, Worker, Worker, Stream],
) -> None:
    made, home, other, stream = streaming
    call = Call(ask("q"))
    assert stream.ask(call.request, None, call.sink) == Asked(3, 0.0, 2.0, 0)
    _question, (_name, order, _scope) = home.asked[-1]
    assert order.key == "q" and not home.orders
    handover = replace(order.handover, stage=Stage.ENCODED)
    made.take("e", [Moved(MODEL, "q", None, handover, "state", stays=False)])
    assert [each.key for each in other.orders] == ["q"] and made.stats().queued == 0
    made.left("e")
    assert not call.ended, "its state is saved"
    finish(made, other, "q")
    assert call.ended and made.stats().live == 0


def test_what_a_worker_that_ends_had_of_sessions_is_lost_with_an_error(
    streaming: tuple[Coordinator, Worker, Worker, Stream],
) -> None:
    made, home, _other, stream = streaming
    done, under_way = (stream.append(Frame(float(i), Image.new("RGB", (4, 3)))) for i in range(2))
    _question, (name, number, seconds, size, pixels, detail) = home.asked[-1]
    assert (number, seconds, size, len(pixels), detail) == (2, 1.0, (4, 3), 36, True)
    made.take("e", [Appended(MODEL, name, 1, None)])
    assert done.result(PATIENCE).seconds == 0.0
    call = Call(ask("q"))
    stream.ask(call.request, None, call.sink)
    made.left("e")
    assert isinstance(call.error(), Unavailable) and "ask again" in call.error().message
    with pytest.raises(StreamLost, match="open another session"):
        under_way.result(PATIENCE)
    for use in (stream.stats, lambda: stream.append(Frame(3.0, Image.new("RGB", (4, 3))))):
        with pytest.raises(StreamLost):
            use()
    assert made.stats().live == 0


def test_a_question_that_a_worker_refuses_leaves_nothing(
    streaming: tuple[Coordinator, Worker, Worker, Stream],
) -> None:
    made, home, _other, stream = streaming
    home.answers["stream.ask"] = InvalidArgument.of("adapter", "must not be set")
    call = Call(ask("q"))
    with pytest.raises(InvalidArgument, match="must not be set"):
        stream.ask(call.request, None, call.sink)
    assert not call.ended and made.stats().live == 0
    stream.close()
    assert home.asked[-1][0] == "stream.close"


def test_a_model_without_sessions_refuses_them() -> None:
    with pytest.raises(Unimplemented, match="takes no video sessions"):
        coordinator(Worker("0")).session_parts(Config())
