"""What a session of video asks of a model's streams: frames in, questions out, in bounded memory."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from PIL import Image

from mmserve.core.request import Request, Vision
from mmserve.core.session import Asked, Memory
from mmserve.core.tenant import Tenant
from mmserve.errors import Unavailable

if TYPE_CHECKING:  # the client knows these types without torch
    from torch import Tensor

    from mmserve.engine.request_state import Sink


class StreamLost(Unavailable):
    """What kept a stream has ended, and its frames with it: so does its session."""


@dataclass(frozen=True)
class Frame:
    """A sampled frame: RGB, upright, at ``seconds`` of the stream's clock; ``detail`` False = compact (slow-fast)."""

    seconds: float
    image: Image.Image
    detail: bool = True


@dataclass(frozen=True)
class Seen:
    """A frame after the vision tower and the projector: D is the decoder's width.

    ``tokens_RD``: its rows as a frame of a clip; ``whole_RD``: its rows as an image by itself, for standing questions.
    """

    seconds: float
    tokens_RD: Tensor
    whole_RD: Tensor


@dataclass(frozen=True)
class Scope:
    """Which part of the stream a question is about, in seconds of its clock; None = from its start, to its end now."""

    begin: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class StreamStats:
    """Counters of one stream; bytes are those held now."""

    frames: int
    kept_rows: int
    evicted_rows: int
    kv_bytes: int
    feature_bytes: int


class Stream(Protocol):
    """The frames of one session as a model has seen them. Methods are called from one thread at a time, but
    ``close`` at any."""

    def append(self, frame: Frame) -> Future[Seen]:
        """Take the next frame in; done when questions can see it. ``InvalidArgument`` if it is not after the last one.

        Frames are taken in the order of the calls. The caller bounds how many are in progress.
        """
        ...

    def ask(self, request: Request, scope: Scope | None, sink: Sink) -> Asked:
        """Ask about every frame that is done; ``scope`` None = about now, as ``Memory`` keeps it.

        ``request`` holds text only: the stream is put in front of its last message's text. Events go to ``sink`` as
        those of ``Engine.submit``, whose errors this raises, and ``Engine.cancel`` ends it. The stream's own K/V do not
        change by a question. ``FailedPrecondition`` where no frame is kept of ``scope``.
        """
        ...

    def stats(self) -> StreamStats:
        """Counters, at most a moment old."""
        ...

    def close(self) -> None:
        """Forget everything; frames in progress fail with ``Cancelled``, questions go on.

        Also while another method is called, which does not wait for anything any more then.
        """
        ...


class Streams(Protocol):
    """All streams of one engine."""

    def open(self, memory: Memory, tenant: Tenant, vision: Vision | None = None, beside: int = 0) -> Stream:
        """A stream of its own, each of its frames pruned by ``vision`` (by default not at all).

        ``beside``: bytes that are set aside with it, for what its session keeps for as long as it is open.
        ``InvalidArgument``, ``Unimplemented`` where the model cannot keep it so, ``ResourceExhausted`` where the bounds
        of all streams leave no room.
        """
        ...

    def adapter_for(self, asked: str) -> str:
        """The adapter of a session's questions: the one that is ``asked`` for, else that of the model's checkpoint for
        streams; empty = none. Raises ``InvalidArgument`` where the model takes none in sessions."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether all streams are closed, and none can be opened."""
        ...

    def stop(self) -> None:
        """Close all streams and end their thread."""
        ...
