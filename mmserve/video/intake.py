"""Processing of frames of one or several streams in batches: through the tower, and in passes over their rows.

Frames go through the tower one by one, so that none depends on others. A failed batch is repeated frame by frame, so
that only the frame that causes the failure fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from mmserve.core.request import Vision
from mmserve.core.stream_state import StreamPayload
from mmserve.errors import Cancelled, Internal, MMServeError
from mmserve.prune.base import Pruner
from mmserve.video.append import append
from mmserve.video.base import EncodedFrame, Frame
from mmserve.video.layout import FrameRows, encode_frame
from mmserve.video.state import Coming, Streaming, StreamState

logger = logging.getLogger("mmserve.video")


@dataclass
class Waiting:
    """A frame to be appended."""

    frame: Frame
    future: Future[EncodedFrame] = field(default_factory=Future)


@dataclass
class Saving:
    """A request for a stream's state after the preceding frames, the newest of which is at ``last`` (seconds)."""

    last: float
    future: Future[StreamPayload] = field(default_factory=Future)


class Taking(Protocol):
    """A stream whose frames are processed."""

    vision: Vision
    pruner: Pruner | None
    state: StreamState | None  # None = closed


@dataclass
class _Frame:
    """A frame after the tower, and its rows."""

    state: StreamState
    stream: Taking
    waiting: Waiting
    shown: FrameRows
    rows: Coming | None = None


def take_in(model: Streaming, batch: Sequence[tuple[Taking, Waiting]]) -> None:
    """Process the frames of ``batch``, in order for each stream; each future is then done, or has failed."""
    coming: list[_Frame] = []
    for stream, waiting in batch:
        state = stream.state
        try:
            if state is None:
                raise closed()
            shown = encode_frame(model.model, state.units.with_open(waiting.frame), stream.pruner, stream.vision.amount)
            coming.append(_Frame(state, stream, waiting, state.units.chosen(shown)))
        except BaseException as error:  # noqa: BLE001 - of one frame: the others go on
            failed(waiting, error)
    while coming:
        now, coming = _together(coming)
        if _run(model, now, alone=len(now) == 1):
            continue
        for c in now:  # repeat one by one: only the frame that causes the failure must fail
            _run(model, _together([c])[0], alone=True)


def _run(model: Streaming, now: Sequence[_Frame], *, alone: bool) -> bool:
    """Write the rows of frames and make them visible to questions. Returns False if nothing is written and it can be
    repeated.

    An ``alone`` frame fails instead.
    """
    try:
        append(model.model, [c.rows.new for c in now if c.rows is not None and c.rows.new is not None], model.floor)
    except BaseException as error:  # noqa: BLE001
        if not alone:
            logger.warning("a pass of %d frames failed, and is repeated for each of them: %r", len(now), error)
            return False
        for c in now:
            failed(c.waiting, error)
        return True
    lost: dict[int, BaseException] = {}  # streams with a failed frame, whose later rows cannot be written
    for c in now:
        try:
            if (before := lost.get(id(c.state))) is not None:
                raise before
            assert c.rows is not None
            c.state.commit(c.rows, c.shown)
        except BaseException as error:  # noqa: BLE001 - of one stream: the others go on
            lost[id(c.state)] = error
            failed(c.waiting, error)
            continue
        if c.stream.state is None:
            failed(c.waiting, closed())
        elif c.waiting.future.set_running_or_notify_cancel():
            c.waiting.future.set_result(c.shown.seen)
    return True


def _together(coming: list[_Frame]) -> tuple[list[_Frame], list[_Frame]]:
    """The frames of the next pass, and the others: for each stream the first, and those that fit after it."""
    now: list[_Frame] = []
    later: list[_Frame] = []
    beside: dict[int, Coming] = {}
    full: set[int] = set()
    for c in coming:
        own, state = id(c.state), c.state
        before = beside.get(own)
        if own in full or (before is not None and not state.has_room(c.shown, before)):
            full.add(own)
            later.append(c)
            continue
        try:
            if before is None:
                state.make_room(c.shown)
            c.rows = beside[own] = state.coming(c.shown, before)
        except BaseException as error:  # noqa: BLE001 - of one stream: the others go on
            failed(c.waiting, error)
            continue
        now.append(c)
    return now, later


def closed() -> Cancelled:
    """The error for frames of a closed stream."""
    return Cancelled("the stream was closed")


def failed(waiting: Waiting | Saving, error: BaseException) -> None:
    """Fail a frame, or a request for a state; a bug becomes ``Internal`` with an id that is also in the log."""
    if waiting.future.done() or not waiting.future.set_running_or_notify_cancel():
        return
    typed = error if isinstance(error, MMServeError) else Internal.logged(error, "a stream's frame", logger)
    waiting.future.set_exception(typed)
