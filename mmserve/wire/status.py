"""Errors on the wire: ``MMServeError`` to a gRPC status with ``google.rpc`` details, and back.

| error | detail |
|---|---|
| ``InvalidArgument`` | ``BadRequest`` with its field violations |
| ``ResourceExhausted`` | ``RetryInfo`` where it has a time to retry after |
| ``Internal`` | ``RequestInfo`` with the id that the server's log has too |
"""

from __future__ import annotations

import logging
import math
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from mmserve.errors import (
    BY_CODE,
    FieldViolation,
    Internal,
    InvalidArgument,
    MMServeError,
    ResourceExhausted,
    Unavailable,
)

logger = logging.getLogger("mmserve.wire")

DETAILS_KEY = "grpc-status-details-bin"

# gRPC's default limit on all metadata of a call is 8 KiB. The message is sent percent-encoded (up to 3x), the details
# in base64 (4/3x) including the message again: 3 x 900 + 4/3 x (900 + 2200) is below 7 KiB.
_MESSAGE_BYTES = 900
_VIOLATIONS_BYTES = 2000
_FIELD_BYTES = 200


def to_status(error: MMServeError) -> status_pb2.Status:
    """The ``google.rpc.Status`` of ``error``, truncated to fit into gRPC's metadata."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=_cut(error.message, _MESSAGE_BYTES))
    if isinstance(error, InvalidArgument):
        status.details.add().Pack(_bad_request(error.violations))
    elif isinstance(error, ResourceExhausted) and error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(math.ceil(error.retry_after * 1e9))
        status.details.add().Pack(retry)
    elif isinstance(error, Internal):
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=_cut(error.error_id, _FIELD_BYTES)))
    return status


def from_status(status: status_pb2.Status) -> MMServeError:
    """The error in ``status``; a code without an error class becomes the most similar one."""
    found = _details(status)
    kind = BY_CODE.get(_code_name(status.code), Internal)
    if kind is InvalidArgument:
        bad = found.get(error_details_pb2.BadRequest)
        violations = [FieldViolation(v.field, v.description) for v in bad.field_violations] if bad else []
        return InvalidArgument(*violations) if violations else InvalidArgument.of("request", status.message)
    if kind is ResourceExhausted:
        retry = found.get(error_details_pb2.RetryInfo)
        return ResourceExhausted(
            status.message, retry_after=None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9
        )
    if kind is Internal:
        info = found.get(error_details_pb2.RequestInfo)
        return Internal(_unknown(status), error_id="" if info is None else info.request_id)
    return kind(status.message)


def from_rpc_error(error: Any) -> MMServeError:
    """The error of a ``grpc.RpcError`` of a finished call, synchronous or asyncio."""
    code: grpc.StatusCode = error.code()
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                break
            if status.code == code.value[0]:
                return from_status(status)
    return from_status(status_pb2.Status(code=code.value[0], message=error.details() or ""))


def from_server(error: Any) -> bool:
    """Whether the server sent the status of ``error``, rather than gRPC because the server is unreachable."""
    return any(key == DETAILS_KEY for key, _value in error.trailing_metadata() or ())


def _bad_request(violations: tuple[FieldViolation, ...]) -> error_details_pb2.BadRequest:
    bad = error_details_pb2.BadRequest()
    for index, violation in enumerate(violations):
        entry = bad.field_violations.add(
            field=_cut(violation.field, _FIELD_BYTES), description=_cut(violation.description, 2 * _FIELD_BYTES)
        )
        if bad.ByteSize() > _VIOLATIONS_BYTES:
            entry.field = "request"
            entry.description = f"{len(violations) - index} more fields are not acceptable"
            break
    return bad


def _details(status: status_pb2.Status) -> dict[type, Any]:
    found: dict[type, Any] = {}
    for packed in status.details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo, error_details_pb2.RequestInfo):
            message = kind()
            try:
                if packed.Unpack(message):
                    found[kind] = message
            except DecodeError:
                logger.debug("details of a status cannot be read: %s", packed.type_url)
    return found


#: Codes that this server never sends, but that a proxy may send, with their meaning here.
_NEAREST = {"ABORTED": Unavailable.code}


def _code_name(code: int) -> str:
    name = code_pb2.Code.Name(code) if code in code_pb2.Code.values() else "UNKNOWN"
    return _NEAREST.get(name, name)


def _unknown(status: status_pb2.Status) -> str:
    if status.code == code_pb2.Code.INTERNAL:
        return status.message
    return f"{_code_name(status.code)}: {status.message}"


def _cut(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` bytes of UTF-8, with an ellipsis if it is truncated."""
    data = text.encode("utf-8", errors="replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - 3].decode(errors="ignore") + "…"
