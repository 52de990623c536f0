"""The interface of a model's video streams for sessions: frames in, questions out, with bounded memory."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from PIL import Image

from mmserve.core.request import Request, Vision
from mmserve.core.session import Asked, Memory
from mmserve.core.tenant import Tenant
from mmserve.errors import Unavailable

if TYPE_CHECKING:  # the client uses these types without torch
    from torch import Tensor

    from mmserve.engine.request_state import Sink


class StreamLost(Unavailable):
    """The process that kept a stream has exited, and its frames are lost: the session ends."""


@dataclass(frozen=True)
class Frame:
    """A sampled frame: RGB, upright, at ``seconds`` of the stream's clock; ``detail`` False = one token (slow-fast)."""

    seconds: float
    image: Image.Image
    detail: bool = True


@dataclass(frozen=True)
class EncodedFrame:
    """A frame after the vision tower and the projector: D is the decoder's width.

    ``tokens_RD``: its rows as a frame of a clip; ``whole_RD``: its rows as a separate image, for standing questions.
    """

    seconds: float
    tokens_RD: Tensor
    whole_RD: Tensor


@dataclass(frozen=True)
class Scope:
    """The time range of a question, in seconds of the stream's clock; None = from its start, or to its current end."""

    begin: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class StreamStats:
    """Counters of one stream; bytes are current values."""

    frames: int
    kept_rows: int
    evicted_rows: int
    kv_bytes: int
    feature_bytes: int


class Stream(Protocol):
    """The frames of one session in a model. Methods must not be called concurrently, except for ``close``."""

    def append(self, frame: Frame) -> Future[EncodedFrame]:
        """Append the next frame; the future is done when questions can see it. Raises ``InvalidArgument`` if its time
        is not after the last one's.

        Frames are processed in the order of the calls. The caller must limit how many are in progress.
        """
        ...

    def ask(self, request: Request, scope: Scope | None, sink: Sink) -> Asked:
        """Ask about all frames that are done; ``scope`` None = the frames that ``Memory`` keeps.

        ``request`` has text only: the stream is inserted before its last message's text. Events are sent to ``sink`` as
        by ``Engine.submit``, whose errors this raises, and ``Engine.cancel`` ends the question. Questions do not change
        the stream's K/V. Raises ``FailedPrecondition`` if no frame of ``scope`` is kept.
        """
        ...

    def stats(self) -> StreamStats:
        """Counters, possibly slightly outdated."""
        ...

    def close(self) -> None:
        """Release everything; frames in progress fail with ``Cancelled``, questions continue.

        May be called while another method runs, which then stops waiting.
        """
        ...


class Streams(Protocol):
    """All streams of one engine."""

    def open(self, memory: Memory, tenant: Tenant, vision: Vision | None = None, extra_bytes: int = 0) -> Stream:
        """Open a stream whose frames are pruned by ``vision`` (default: not pruned).

        ``extra_bytes``: additional bytes reserved for its session. Raises ``InvalidArgument``, ``Unimplemented`` if the
        model does not support these settings, ``ResourceExhausted`` if the limits for all streams are reached.
        """
        ...

    def adapter_for(self, asked: str) -> str:
        """The adapter of a session's questions: the one ``asked`` for, else the checkpoint's adapter for streams; empty
        = none. Raises ``InvalidArgument`` if the model does not support adapters in sessions."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether all streams are closed, and none can be opened."""
        ...

    def stop(self) -> None:
        """Close all streams and stop their thread."""
        ...
