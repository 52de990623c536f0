"""Parts of a session's responses as plain data: errors and moments."""

from __future__ import annotations

from google.rpc import code_pb2

from mmserve.core.session import Moment
from mmserve.errors import BY_CODE, FieldViolation, Internal, InvalidArgument, MMServeError, ResourceExhausted
from mmserve.v1 import video_pb2 as pb


def from_error(error: pb.SessionError) -> MMServeError:
    """The error that a push, question or standing question ended with."""
    name = code_pb2.Code.Name(error.code) if error.code in code_pb2.Code.values() else ""
    kind = BY_CODE.get(name, Internal)
    if kind is InvalidArgument:
        fields = [FieldViolation(each.field, each.description) for each in error.wrong_fields]
        return InvalidArgument(*fields) if fields else InvalidArgument.of("request", error.message)
    if kind is ResourceExhausted:
        later = error.retry_after_seconds if error.HasField("retry_after_seconds") else None
        return ResourceExhausted(error.message, retry_after=later)
    if kind is Internal:
        return Internal(error.message, error_id=error.error_id)
    return kind(error.message)


def from_moments(answer: pb.AnswerEvent) -> tuple[Moment, ...]:
    """The moments of a finished answer."""
    return tuple(Moment(each.begin, each.end, each.seconds, each.ambiguous) for each in answer.moments)
