"""Messages between the coordinator and its workers: plain data, sent by Ray or a ``link``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmserve.core.events import Event
from mmserve.core.handover import Handover
from mmserve.core.info import AdapterInfo, ModelInfo
from mmserve.core.progress import Progress
from mmserve.core.request import ImagePart, Message, Request, RequestId, VideoPart
from mmserve.core.share import MediaShare
from mmserve.core.stats import Pass, Stats
from mmserve.errors import MMServeError

if TYPE_CHECKING:  # imports torch, which is slow
    from mmserve.video.support import SessionSupport

#: Prefix of the names of questions about video streams, which run concurrently with others.
STREAM = "stream."
#: The location of a state's bytes: shared memory of a process, or a reference to Ray's object store; None = no bytes.
Parcel = Any


@dataclass(frozen=True)
class Order:
    """Start or continue a request: ``handover`` without its payload, which is in ``parcel``.

    ``key``: the client's request; ``sample``: its sample, None = all that are left. ``left``: seconds until its
    deadline, because clocks of hosts differ.
    """

    model: str
    key: RequestId
    sample: int | None
    handover: Handover
    parcel: Parcel = None
    left: float | None = None
    shard: tuple[MediaShare, ...] = ()  # encode only these of its media
    seen: tuple[Parcel, ...] = ()  # visual tokens of its media, encoded by others
    ahead: tuple[tuple[int, Parcel], ...] = ()  # numbered chunks of its K/V sent ahead
    expects: bool = False  # only chunks: it is still being prefilled elsewhere

    def request(self) -> Request:
        """The request, with its deadline converted to this host's clock."""
        deadline = None if self.left is None else time.monotonic() + self.left
        return replace(self.handover.request, deadline=deadline)


@dataclass(frozen=True)
class RequestEvent:
    """An event of a request, for its client or its trace; ``sample`` as in ``Order``."""

    model: str
    key: RequestId
    sample: int | None
    event: Event | Progress


@dataclass(frozen=True)
class Moved:
    """The state of a request: handed over or, if ``stays``, a checkpoint."""

    model: str
    key: RequestId
    sample: int | None
    handover: Handover
    parcel: Parcel
    stays: bool


@dataclass(frozen=True)
class Chunk:
    """K/V of a request that is still being prefilled: chunk ``number``, from 0; ``handover``: as it will be handed
    over."""

    model: str
    key: RequestId
    sample: int | None
    handover: Handover
    parcel: Parcel
    number: int


@dataclass(frozen=True)
class Refused:
    """A worker could not accept a request because its state was not received; the request's last point remains
    valid."""

    model: str
    key: RequestId
    sample: int | None
    error: MMServeError


@dataclass(frozen=True)
class Lost:
    """Replaces a ``Moved`` or ``Chunk`` whose state was not received; created by the coordinator."""

    model: str
    key: RequestId
    sample: int | None
    error: MMServeError
    stays: bool


@dataclass(frozen=True)
class Appended:
    """A frame of the stream ``key`` was appended, or failed; ``number``: see ``WorkerStreams.append``."""

    model: str
    key: str
    number: int
    error: MMServeError | None


@dataclass(frozen=True)
class StreamSaved:
    """The state of the stream ``key`` after frame ``number``; ``parcel`` is None if it could not be written."""

    model: str
    key: str
    number: int
    parcel: Parcel


@dataclass(frozen=True)
class Heartbeat:
    """A worker is running; with its engines' statistics by model, and the passes since the last heartbeat."""

    stats: Mapping[str, Stats]
    passes: tuple[Pass, ...] = ()


Item = RequestEvent | Moved | Chunk | Refused | Appended | StreamSaved | Heartbeat


@dataclass(frozen=True)
class Described:
    """A worker that is ready: its models, their properties for video sessions, the adapters of their checkpoints, its
    host (see ``host_id``), its process and the address of its arena. ``listener``: the address of its
    ``link.Listener``; empty = it is reached only by Ray."""

    models: Mapping[str, ModelInfo]
    sessions: Mapping[str, SessionSupport]
    adapters: Mapping[str, tuple[AdapterInfo, ...]]
    host: str
    pid: int
    arena: str
    listener: str = ""


def without_media(request: Request) -> Request:
    """``request`` for stages after encode, without media files: these stages have its visual tokens."""
    if all(not isinstance(part, ImagePart | VideoPart) for message in request.messages for part in message.parts):
        return request
    return replace(request, messages=tuple(map(_without_media, request.messages)))


def _without_media(message: Message) -> Message:
    parts = (replace(p, data=b"") if isinstance(p, ImagePart | VideoPart) else p for p in message.parts)
    return replace(message, parts=tuple(parts))
