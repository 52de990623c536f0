"""What the coordinator and its workers send each other: plain data, which Ray carries."""

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

if TYPE_CHECKING:  # it imports torch, which starts slowly
    from mmserve.video.facts import Facts

#: What names of questions about streams of video begin with: they wait for no others.
STREAM = "stream."
#: Where the bytes of a state are: shared memory of a process, or a reference to Ray's object store; None = there are
#: none.
Parcel = Any


@dataclass(frozen=True)
class Order:
    """Take a request in and go on with it: ``handover`` without its payload, which is in ``parcel``.

    ``key``: the request that the client sent; ``sample``: which of its samples this is, None = all that are left.
    ``left``: seconds until its deadline, since clocks of hosts differ.
    """

    model: str
    key: RequestId
    sample: int | None
    handover: Handover
    parcel: Parcel = None
    left: float | None = None
    shard: tuple[MediaShare, ...] = ()  # only this of its media is to be encoded
    seen: tuple[Parcel, ...] = ()  # its media that others have encoded
    ahead: tuple[tuple[int, Parcel], ...] = ()  # numbered chunks of its K/V that go ahead of it
    expects: bool = False  # only those are here: it is still prefilled elsewhere

    def request(self) -> Request:
        """The request, with its deadline on this host's clock."""
        deadline = None if self.left is None else time.monotonic() + self.left
        return replace(self.handover.request, deadline=deadline)


@dataclass(frozen=True)
class Happened:
    """An event of a request, for its client or its trace; ``sample`` as in ``Order``."""

    model: str
    key: RequestId
    sample: int | None
    event: Event | Progress


@dataclass(frozen=True)
class Moved:
    """The state of a request: it left its worker, or, where it ``stays``, it was saved."""

    model: str
    key: RequestId
    sample: int | None
    handover: Handover
    parcel: Parcel
    stays: bool


@dataclass(frozen=True)
class Chunk:
    """K/V of a request that is still prefilled there, the ``number``-th from 0; ``handover`` as it will leave."""

    model: str
    key: RequestId
    sample: int | None
    handover: Handover
    parcel: Parcel
    number: int


@dataclass(frozen=True)
class Refused:
    """A worker could not take a request in, because its state did not come: it is where it was before."""

    model: str
    key: RequestId
    sample: int | None
    error: MMServeError


@dataclass(frozen=True)
class Lost:
    """In place of a ``Moved`` or ``Chunk`` whose state did not come; made by the coordinator."""

    model: str
    key: RequestId
    sample: int | None
    error: MMServeError
    stays: bool


@dataclass(frozen=True)
class Appended:
    """A frame of the stream ``key`` is in, or has failed; ``number``: as of ``WorkerStreams.append``."""

    model: str
    key: str
    number: int
    error: MMServeError | None


@dataclass(frozen=True)
class StreamSaved:
    """The state of the stream ``key`` after frame ``number``; ``parcel`` is None where it could not be written."""

    model: str
    key: str
    number: int
    parcel: Parcel


@dataclass(frozen=True)
class Heartbeat:
    """A worker is running; what its engines hold and have counted, by model, and the passes since the last one."""

    stats: Mapping[str, Stats]
    passes: tuple[Pass, ...] = ()


Item = Happened | Moved | Chunk | Refused | Appended | StreamSaved | Heartbeat


@dataclass(frozen=True)
class Described:
    """A worker that is ready: its models, what video sessions must know of them, the adapters of their checkpoints, its
    host (as of ``host_id``), its process and the address of its arena. ``listener``: the address of its
    ``link.Listener``; empty = it is reached by Ray alone."""

    models: Mapping[str, ModelInfo]
    sessions: Mapping[str, Facts]
    adapters: Mapping[str, tuple[AdapterInfo, ...]]
    host: str
    pid: int
    arena: str
    listener: str = ""


def without_media(request: Request) -> Request:
    """``request`` for stages after encode, which have its visual tokens: files of media are left out."""
    if all(not isinstance(part, ImagePart | VideoPart) for message in request.messages for part in message.parts):
        return request
    return replace(request, messages=tuple(map(_without_media, request.messages)))


def _without_media(message: Message) -> Message:
    parts = (replace(p, data=b"") if isinstance(p, ImagePart | VideoPart) else p for p in message.parts)
    return replace(message, parts=tuple(parts))
