"""Sessions of video through the SDK, on a tiny model over real sockets: files, several questions, lost connections."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clips import clip
from cutting import Cutting

sys.path.insert(0, str(Path(__file__).parents[1] / "rpc"))
from video_client import PATIENCE, picture, registries, sdk, video_server, wait_for

from mmserve.client import (
    Admitted,
    AsyncClient,
    Cancelled,
    Delta,
    FailedPrecondition,
    Finished,
    InvalidArgument,
    NotFound,
    Options,
    Prefilled,
    VideoSession,
)
from mmserve.core.session import Alert
from mmserve.engine.engine import Engine

OPTIONS = {"max_new_tokens": 8, "tokens": True}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Engine]]:
    with video_server({"credit_pushes": 4}) as found:
        yield found


@pytest.fixture
def address(served: tuple[str, Engine]) -> str:
    return served[0]


def test_a_session_from_its_first_frame_to_its_end(address: str) -> None:
    with sdk(address) as client, client.video_session(budget=64) as session:
        with pytest.raises(FailedPrecondition, match="no frame"):
            session.ask("What is it?")
        for number in range(3):
            session.push(picture(number), float(number))
        questions = [session.stream(f"question {i}", **OPTIONS) for i in range(3)]
        texts = ["".join(e.text for e in question if isinstance(e, Delta)) for question in questions]
        for question, text in zip(questions, texts, strict=True):
            assert question.result().text == text
            assert question.asked is not None and question.asked.frames == 3
        past = session.stream("and before?", scope=(None, 1.0), **OPTIONS)
        past.result()
        assert past.asked is not None and (past.asked.frames, past.asked.end) == (2, 1.0)
        slow = session.stream("and now?", max_new_tokens=150)
        slow.cancel()
        with pytest.raises(Cancelled):
            slow.result()
        wrong = session.push(b"no image", 5.0)
        with pytest.raises(InvalidArgument, match="temperature"):
            session.ask("What is it?", temperature=-1)
        statistics = session.statistics()
        assert (statistics.frames_taken, statistics.pushes_failed, statistics.questions) == (3, 1, 7)
        [failed] = session.push_failures
        assert isinstance(failed.error, InvalidArgument) and failed.index == wrong
    with pytest.raises(Cancelled, match="closed"):
        session.push(picture(1), 9.0)


def test_the_prompt_of_a_question_is_returned_on_request(address: str) -> None:
    """Also alone: then no answer."""
    with sdk(address) as client, client.video_session(budget=64) as session:
        session.push(picture(0), 0.0)
        asked: Options = {"return_prompt": True, "prompt_tokens": True, "n": 2}
        whole, alone = (session.ask("What is it?", max_new_tokens=room, **asked) for room in (2, 0))
        for one, other in zip(whole.samples, alone.samples, strict=True):
            assert one.prompt is not None and one.prompt == other.prompt and len(one.prompt.prompt_tokens) > 1
            assert one.usage.completion_tokens > 0 and one.text
            assert (other.text, other.finish_reason, other.usage.completion_tokens) == ("", "length", 0)
        events = list(session.stream("What is it?", max_new_tokens=0, prompt_tokens=True, snapshots=True))
        assert [type(event) for event in events] == [Admitted, Prefilled, Finished]


def test_a_file_is_pushed_without_encoding_it_anew(address: str, tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    path.write_bytes(clip(frames=100, rate=10, gop=10))
    with sdk(address) as client, client.video_session(budget=128) as session:
        assert session.push_file(path, segment_seconds=3.0) == pytest.approx(10.0, abs=0.2)
        question = session.stream("What is it?", scope="all", **OPTIONS)
        question.result()
        assert not session.push_failures
        assert question.asked is not None
        assert (question.asked.frames, question.asked.begin, question.asked.end) == (10, 0.0, 9.0)
        with pytest.raises(InvalidArgument, match="cannot be opened"):
            session.push_file(__file__)


def test_alerts_of_a_standing_question(address: str) -> None:
    with sdk(address) as client, client.video_session(budget=64) as session:
        found: list[float] = []
        alerts = session.watch("is it red?", on=1e-6, off=0.0, min_mass=0.0)
        session.watch("is it blue?", on=1e-6, off=0.0, min_mass=0.0, callback=lambda alert: found.append(alert.seconds))
        session.push(picture(0), 4.0)
        alert = alerts.next(PATIENCE)
        assert alert is not None and alert.active and alert.seconds == 4.0
        wait_for("the other alert", lambda: found == [4.0])
        alerts.close()
        assert list(alerts) == []
        with pytest.raises(InvalidArgument, match="text"):
            session.watch(" ").next(PATIENCE)


def broken(alert: Alert) -> None:
    raise ValueError(alert.seconds)


def test_a_callback_that_raises_is_logged_and_the_session_goes_on(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with sdk(address) as client, client.video_session(budget=64) as session:
        session.watch("is it red?", on=1e-6, off=0.0, min_mass=0.0, callback=broken)
        session.push(picture(0), 0.0)
        wait_for("the log", lambda: "callback of a standing question raised" in caplog.text)
        session.push(picture(1), 1.0)
        assert session.statistics().frames_taken == 2


def test_an_exception_ends_the_session_at_once(address: str) -> None:
    with sdk(address) as client:
        with pytest.raises(ZeroDivisionError), client.video_session(budget=64) as session:
            session.push(picture(0), 0.0)
            session.stream("What is it?", max_new_tokens=200)
            raise ZeroDivisionError
        assert not session._thread.is_alive()


async def _everything(address: str) -> list[str]:
    async with AsyncClient(address, timeout=PATIENCE) as client, client.video_session(budget=64) as session:
        for number in range(6):
            await session.push(picture(number), float(number))
        first, second = session.stream("question 0", **OPTIONS), session.stream("question 1", **OPTIONS)
        texts = await asyncio.gather(first.result(), second.result())
        session.watch("is it blue?", on=1e-6, off=0.0, min_mass=0.0, callback=broken)
        alerts = session.watch("is it red?", on=1e-6, off=0.0, min_mass=0.0)
        await session.push(picture(6), 6.0)
        alert = await alerts.next(PATIENCE)
        assert alert is not None and alert.seconds == 6.0
        assert (await session.statistics()).frames_taken == 7
        return [result.text for result in texts]


def test_the_client_for_asyncio_is_told_the_same(address: str) -> None:
    with sdk(address) as client, client.video_session(budget=64) as session:
        for number in range(6):
            session.push(picture(number), float(number))
        texts = [session.ask(f"question {i}", **OPTIONS).text for i in range(2)]
    assert asyncio.run(_everything(address)) == texts


def played(session: VideoSession, frames: int, every: int) -> list[list[int]]:
    """The tokens of each answer of a session of so many frames, with a question after every few of them."""
    questions = []
    for number in range(frames):
        session.push(picture(number), float(number))
        if number % every == every - 1:
            questions.append(session.stream(f"question {number}", **OPTIONS))
            if len(questions) > 3:
                questions[-4].result()
    return [[token.id for token in question.result().tokens] for question in questions]


def compared(address: str, frames: int, every: int, cuts: int) -> None:
    """A session whose connection is cut at random moments answers as one that is not, and takes each frame once."""
    with sdk(address) as client, client.video_session(budget=64) as session:
        expected = played(session, frames, every)
        assert session.statistics().frames_taken == frames
    with Cutting(address) as proxy, sdk(proxy.address) as client, client.video_session(budget=64) as session:
        over, made = threading.Event(), 0
        rng = random.Random(0)

        def cut() -> None:
            nonlocal made
            while made < cuts and not over.wait(rng.uniform(0.0, 0.06)):
                before = session.resumes
                proxy.cut()
                made += 1
                limit = time.monotonic() + PATIENCE
                while session.resumes == before and not over.is_set() and time.monotonic() < limit:
                    time.sleep(0.002)

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            answers = played(session, frames, every)
            while made < cuts:  # the cuts go on while it says what it has
                assert session.statistics().frames_taken == frames
        finally:
            over.set()
            cutter.join()
        assert answers == expected
        assert session.statistics().frames_taken == frames
        assert session.resumes >= cuts - 1 and not session.push_failures


def test_ten_lost_connections_change_nothing(address: str) -> None:
    compared(address, frames=60, every=6, cuts=10)


@pytest.mark.slow
def test_fifty_lost_connections_change_nothing(address: str) -> None:
    """``pytest -m slow tests/e2e/test_e2e_video_sessions.py``"""
    compared(address, frames=600, every=20, cuts=50)


def test_a_session_that_was_away_too_long_is_not_found() -> None:
    away = video_server({"resume_seconds": 0.2})
    with registries() as made, away as (address, _), Cutting(address) as proxy, sdk(proxy.address) as client:
        session = client.video_session(budget=64)
        session.push(picture(0), 0.0)
        proxy.hold()
        proxy.cut()
        wait_for("the end of the session", lambda: not len(made[0]))
        proxy.release()
        with pytest.raises(NotFound, match="open a new one"):
            session.statistics()
