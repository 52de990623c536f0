"""Frames of video sessions by URL, over a real socket to a host on this machine."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from clips import clip
from hosts import Host, moved, serving, whole

sys.path.insert(0, str(Path(__file__).parents[1] / "rpc"))
from video_client import PATIENCE, Raw, picture, sdk, video_server, wait_for

from mmserve.client import AsyncClient, InvalidArgument, ResourceExhausted, VideoSession
from mmserve.config import MediaConfig
from mmserve.v1 import video_pb2 as pb

OPTIONS = {"max_new_tokens": 8, "tokens": True}
MOST = 1 << 16


def png(number: int) -> bytes:
    file = io.BytesIO()
    picture(number).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Host]]:
    with serving() as host:
        media = MediaConfig(url_hosts=(f"127.0.0.1:{host.port}",), url_seconds=PATIENCE, max_item_bytes=MOST)
        # less credit than the files have bytes: it is the URL that counts
        with video_server({"credit_bytes": 1 << 12}, media=media) as (address, _engine):
            yield address, host


def answers(session: VideoSession) -> list[int]:
    return [token.id for token in session.ask("What is it?", **OPTIONS).tokens]


def test_frames_by_url_are_those_of_the_file(served: tuple[str, Host]) -> None:
    address, host = served
    segment = clip(frames=20, rate=10)
    assert len(segment) > 1 << 12
    for number in range(2):
        host.answers[f"/{number}.png"] = whole(png(number))
    host.answers["/film.mp4"] = whole(segment)
    host.answers["/moved.png"] = moved("/1.png")
    with video_server() as (other, _engine), sdk(other) as client, client.video_session(budget=64) as session:
        session.push(png(0), 0.0)
        session.push(png(1), 1.0)
        first = answers(session)
        session.push_segment(segment, 2.0)
        second = answers(session)
        assert (session.frames_taken, session.push_failures) == (4, ())
    with sdk(address) as client, client.video_session(budget=64) as session:
        session.push(host.url("/0.png"), 0.0)
        session.push(host.url("/moved.png"), 1.0)
        assert answers(session) == first
        session.push_segment(host.url("/film.mp4"), 2.0)
        assert answers(session) == second
        assert (session.frames_taken, session.push_failures) == (4, ())


def test_the_client_for_asyncio_pushes_urls_too(served: tuple[str, Host]) -> None:
    address, host = served
    host.answers["/0.png"], host.answers["/film.mp4"] = whole(png(0)), whole(clip(frames=20, rate=10))

    async def everything() -> int:
        async with AsyncClient(address) as client, client.video_session(budget=64) as session:
            await session.push(host.url("/0.png"), 0.0)
            await session.push_segment(host.url("/film.mp4"), 2.0)
            with pytest.raises(
                InvalidArgument, match=r"push_image\.url: must be an http or https URL, .*: pass a file as a Path"
            ):
                await session.push("ftp://127.0.0.1/0.png", 9.0)
            return (await session.statistics()).frames_taken

    assert asyncio.run(everything()) == 3


def test_each_refusal_is_of_its_push_alone(served: tuple[str, Host]) -> None:
    address, host = served
    host.answers["/0.png"] = whole(png(0))
    host.answers["/text.png"] = whole(b"<html>")
    host.answers["/long.png"] = whole(bytes(MOST + 1))
    host.answers["/out.png"] = moved("http://example.org/a.png")
    wrong = {
        "https://example.org/a.png": "push_image.url: must have a host in the server's",
        host.url("/gone.png"): "push_image.url: could not be fetched: .* answered with status 404",
        host.url("/text.png"): "push_image.url: .*not a readable PNG",
        host.url("/long.png"): f"larger than {MOST} bytes",
        host.url("/out.png"): "it redirects to a URL that must have a host",
    }
    with sdk(address) as client, client.video_session(budget=64) as session:
        with pytest.raises(
            InvalidArgument, match=r"push_segment\.url: must be an http or https URL, .*: pass a file as a Path"
        ):
            session.push_segment("/film.mp4", 0.0)
        for url in wrong:
            session.push(url, 0.0)
        session.push_segment(host.url("/text.png"), 0.0)
        session.push(host.url("/0.png"), 1.0)
        assert session.statistics().frames_taken == 1
        failures = [failed.error for failed in session.push_failures]
        for error, why in zip(failures, [*wrong.values(), "push_segment.url: "], strict=True):
            assert isinstance(error, InvalidArgument)
            with pytest.raises(InvalidArgument, match=why):
                raise error


def test_a_push_has_one_file(served: tuple[str, Host]) -> None:
    address, host = served
    raw = Raw.opened(address, memory=pb.StreamMemory(budget=64))
    host.answers["/0.png"] = whole(png(0))
    raw.send(push_image=pb.PushImage(data=png(0), url=host.url("/0.png")))
    failed = raw.wait("push_failed")
    assert [wrong.field for wrong in failed.error.wrong_fields] == ["push_image.url"]
    raw.close()


def test_a_file_that_no_room_is_left_for_is_refused(served: tuple[str, Host]) -> None:
    _address, host = served
    host.answers["/0.png"] = whole(png(0) + bytes(MOST - len(png(0))))
    media = MediaConfig(url_hosts=(f"127.0.0.1:{host.port}",), max_item_bytes=MOST, live_bytes=MOST - 1)
    with (
        video_server(media=media) as (address, _engine),
        sdk(address) as client,
        client.video_session(budget=64) as session,
    ):
        session.push(host.url("/0.png"), 0.0)
        session.statistics()
        [failed] = session.push_failures
        assert isinstance(failed.error, ResourceExhausted)


def test_a_silent_host_holds_up_its_own_session_alone(served: tuple[str, Host]) -> None:
    """And a session that was left and is not resumed ends the fetch."""
    _address, host = served
    begun, left = threading.Event(), threading.Event()

    def silent(stream: socket.socket) -> None:
        begun.set()
        stream.recv(1)  # until the client is gone
        left.set()

    host.answers["/silent.png"], host.answers["/0.png"] = silent, whole(png(0))
    media = MediaConfig(url_hosts=(f"127.0.0.1:{host.port}",), url_seconds=10 * PATIENCE)
    with (
        video_server({"resume_seconds": 0.5}, media=media) as (address, _engine),
        sdk(address) as client,
        client.video_session(budget=64) as other,
    ):
        with pytest.raises(KeyError), client.video_session(budget=64) as session:
            session.push(png(0), 0.0)
            session.push(host.url("/silent.png"), 1.0)
            question = session.stream("What is it?", **OPTIONS)
            assert begun.wait(PATIENCE)
            other.push(host.url("/0.png"), 0.0)
            assert answers(other)
            assert question.asked is None, "it waits for the frame before it"
            raise KeyError
        wait_for("the end of the fetch", left.is_set)
