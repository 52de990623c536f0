"""Responses of a session as messages carry them: what the client reads."""

from __future__ import annotations

from google.rpc import status_pb2

from mmserve.errors import MMServeError
from mmserve.rpc.status import from_status
from mmserve.v1 import video_pb2 as pb
from mmserve.video.base import Asked
from mmserve.video.messages import Statistics


def from_error(error: pb.SessionError) -> MMServeError:
    """The error that a push, question or standing question ended with."""
    return from_status(status_pb2.Status(code=error.code, message=error.message, details=error.details))


def from_asked(asked: pb.Asked) -> Asked:
    """What a question was asked about."""
    return Asked(asked.frames, asked.begin_seconds, asked.end_seconds, asked.recomputed_rows)


def from_statistics(statistics: pb.SessionStatistics) -> Statistics:
    """Counters of a session."""
    names = [field.name for field in pb.SessionStatistics.DESCRIPTOR.fields]
    return Statistics(**{name: getattr(statistics, name) for name in names})
