"""Sessions of video under faults and hostile clients: nothing is leaked, and no session is stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from clips import clip
from video_client import PATIENCE, Raw, ask, image, sdk, video_server, wait_for

from mmserve.core.request import Request
from mmserve.errors import DeadlineExceeded, ResourceExhausted
from mmserve.rpc import video as rpc_video
from mmserve.rpc.room import Room
from mmserve.v1 import video_pb2 as pb
from mmserve.video import session as sessions
from mmserve.video.messages import Numbered
from mmserve.video.reading import PushReader
from mmserve.video.streams import EngineStream, EngineStreams

DEADLINE, PRECONDITION, INTERNAL = 4, 9, 13


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with video_server() as (found, _):
        yield found


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Iterator[threading.Event]:
    """Calls of a method wait; yields what is set once one does."""
    method, gate, began = getattr(owner, name), threading.Event(), threading.Event()

    def waiting(*args: Any) -> Any:
        began.set()
        assert gate.wait(PATIENCE)
        return method(*args)

    monkeypatch.setattr(owner, name, waiting)
    try:
        yield began
    finally:
        gate.set()


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
