"""A raw client of ``VideoService``, for what the SDK never does, and a server with a tiny model."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from echo_server import threaded
from PIL import Image
from streaming import streaming_model

from mmserve.client import Client
from mmserve.config import Config, EngineConfig, MediaConfig, ServerConfig, VideoConfig, resolve
from mmserve.engine.engine import Engine
from mmserve.errors import MMServeError
from mmserve.models.base import LoadedModel
from mmserve.reference.scenes import png
from mmserve.v1 import generation_pb2 as gen
from mmserve.v1 import video_pb2 as pb
from mmserve.v1 import video_pb2_grpc
from mmserve.video.registry import Registry
from mmserve.wire.status import from_rpc_error

#: Seconds that no healthy run comes near.
PATIENCE = 60.0


def picture(number: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Noise."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def image(number: int, seconds: float | None = None) -> pb.PushImage:
    return pb.PushImage(data=png(picture(number)), seconds=float(number) if seconds is None else seconds)


def ask(name: str, text: str = "what is it?", **options: Any) -> pb.Ask:
    chat = gen.ChatMessage(role=gen.ROLE_USER, parts=[gen.ContentPart(text=text)])
    sampling = gen.SamplingParams(max_new_tokens=6)
    return pb.Ask(question_id=name, request=gen.GenerateRequest(messages=[chat], sampling=sampling), **options)


def video_engine(
    video: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    model: LoadedModel | None = None,
    **options: Any,
) -> tuple[Config, Engine]:
    """A configuration, and an engine of a tiny model, not yet started; ``model``: another one."""
    config = Config(
        server=ServerConfig(**{"port": 0, "drain_seconds": 5.0, **(server or {})}),
        engine=EngineConfig(max_tokens=512, max_running=16, torch_threads=1),
        video=VideoConfig(**(video or {})),
        **options,
    )
    return config, Engine(model or streaming_model(), resolve(config.engine), MediaConfig())


@contextlib.contextmanager
def video_server(video: dict[str, Any] | None = None, **options: Any) -> Iterator[tuple[str, Engine]]:
    """The address of a server with a tiny model, and its engine; when it ends, nothing of any request may be left."""
    config, engine = video_engine(video, **options)
    with threaded(engine, config) as address:  # type: ignore[arg-type]
        yield address, engine
        wait_for("an empty engine", lambda: not engine.stats().live and not engine.stats().pages_in_use)


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    limit = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < limit, f"waited in vain: {what}"
        time.sleep(0.005)
    return value


class Raw:
    """One connection of a session, request by request. ``reading``: whether responses are read as they come.

    ``window``: bytes of unread responses that the server may send, 0 = as many as gRPC finds fit.
    """

    def __init__(
        self, address: str, first: pb.SessionRequest, token: str = "", *, reading: bool = True, window: int = 0
    ) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if window:
            options += [("grpc.http2.lookahead_bytes", window), ("grpc.http2.bdp_probe", 0)]
        self.channel = grpc.insecure_channel(address, options)
        self._out: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._out.put(first)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        stub = video_pb2_grpc.VideoServiceStub(self.channel)
        self.call: Any = stub.Session(iter(self._out.get, None), metadata=metadata)
        self.responses: list[pb.SessionResponse] = []
        self.error: MMServeError | None = None
        self.ended = threading.Event()
        self._index = 0
        if reading:
            self.read()

    @classmethod
    def opened(cls, address: str, token: str = "", **config: Any) -> Raw:
        return cls(address, pb.SessionRequest(configure=pb.ConfigureSession(**config)), token)

    @classmethod
    def resumed(cls, address: str, handle: str, received: int = 0, token: str = "") -> Raw:
        return cls(address, pb.SessionRequest(received=received, resume=pb.ResumeSession(resume_handle=handle)), token)

    def read(self) -> None:
        """Begin to read responses."""
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, index: int | None = None, received: int = 0, **request: Any) -> int:
        """Send a request, by default with the next index."""
        self._index = self._index + 1 if index is None else index
        self._out.put(pb.SessionRequest(index=self._index, received=received, **request))
        return self._index

    def wait(self, kind: str, of: Callable[[Any], bool] = lambda response: True) -> Any:
        """The first response of this kind that is so."""

        def found() -> Any:
            for response in list(self.responses):
                if response.WhichOneof("response") == kind and of(getattr(response, kind)):
                    return getattr(response, kind)
            assert not self.ended.is_set() or self.error is None, self.error
            return None

        return wait_for(kind, found)

    def taken(self) -> int:
        """Frames that were reported as taken."""
        return sum(r.frames_taken.taken for r in list(self.responses))

    def wait_taken(self, count: int) -> None:
        wait_for(f"{count} frames, not {self.taken()}", lambda: self.taken() >= count)

    def answer(self, name: str) -> gen.Finished:
        """What a question came to."""
        answer = self.wait("answer", lambda a: a.question_id == name and a.response.HasField("finished"))
        found: gen.Finished = answer.response.finished
        return found

    def refusal(self, name: str) -> pb.SessionError:
        answer = self.wait("answer", lambda a: a.question_id == name and a.HasField("error"))
        found: pb.SessionError = answer.error
        return found

    def failure(self) -> MMServeError:
        """What the call ended with."""
        assert self.ended.wait(PATIENCE), "the call goes on"
        assert self.error is not None, "the call ended without an error"
        return self.error

    @property
    def handle(self) -> str:
        return str(self.wait("configured").resume_handle)

    def close(self) -> None:
        """Close the session, and wait for the end of the call."""
        self.send(close=pb.CloseSession())
        self.wait("closed")
        self._out.put(None)
        assert self.ended.wait(PATIENCE)
        assert self.error is None
        self.channel.close()

    def cut(self) -> None:
        """Leave without a word."""
        self.call.cancel()
        self._out.put(None)
        self.channel.close()

    def _read(self) -> None:
        try:
            for response in self.call:
                self.responses.append(response)
        except grpc.RpcError as error:
            self.error = from_rpc_error(error)
        self.ended.set()


@contextlib.contextmanager
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


@contextlib.contextmanager
def registries() -> Iterator[list[Registry]]:
    """The registries of sessions of servers that begin meanwhile."""
    made: list[Registry] = []
    begin = Registry.__init__

    def noting(self: Registry, *args: Any, **options: Any) -> None:
        made.append(self)
        begin(self, *args, **options)

    Registry.__init__ = noting  # type: ignore[method-assign]
    try:
        yield made
    finally:
        Registry.__init__ = begin  # type: ignore[method-assign]


def sdk(address: str, **options: Any) -> Client:
    return Client(address, timeout=PATIENCE, **options)
