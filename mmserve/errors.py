"""The error classes of requests, each with its gRPC status code.

Raised anywhere in the server, carried over the wire by ``mmserve.rpc.status``, raised again by the client.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


class MMServeError(Exception):
    """Base of every error a request can end with; ``code`` is the name of a gRPC status code."""

    code = "INTERNAL"

    @property
    def message(self) -> str:
        """The cause and the remedy, in one sentence."""
        return str(self)

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), self.args, self.__dict__)  # whatever ``__init__`` takes


def _rebuilt(kind: type[MMServeError], args: tuple[Any, ...], state: Mapping[str, Any]) -> MMServeError:
    """Restore an error received from another process."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


@dataclass(frozen=True)
class FieldViolation:
    """An invalid field of a request, and the reason."""

    field: str
    description: str


class InvalidArgument(MMServeError):
    """The request is invalid; repeating it unchanged cannot succeed."""

    code = "INVALID_ARGUMENT"

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> Self:
        """An error with one violation."""
        return cls(FieldViolation(field, description))


class DoesNotFit(InvalidArgument):
    """Prompt and answer together are too long; an answer of ``room`` tokens would fit (0 = none would)."""

    room = 0


class Unauthenticated(MMServeError):
    """The call carries no bearer token that the server accepts."""

    code = "UNAUTHENTICATED"


class PermissionDenied(Unauthenticated):
    """The call's bearer token is accepted, but its tenant may not do this."""

    code = "PERMISSION_DENIED"


class NotFound(MMServeError):
    """A model or media id that the server does not have."""

    code = "NOT_FOUND"


class UnknownModel(NotFound):
    """A model, or an adapter of one, that the server does not have."""


class FailedPrecondition(MMServeError):
    """The request is valid, but not for this model or the present state of the server."""

    code = "FAILED_PRECONDITION"


class Unimplemented(MMServeError):
    """The model or server lacks a capability that the request needs; the message names it."""

    code = "UNIMPLEMENTED"


class ResourceExhausted(MMServeError):
    """A queue, store or budget is full; ``retry_after``: seconds until the next attempt."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(MMServeError):
    """The server is draining or unreachable; another one may accept the request."""

    code = "UNAVAILABLE"


class TransferError(Unavailable):
    """A payload between stages is damaged, truncated, or of an unknown version."""


class TLSError(Unavailable):
    """The TLS settings of client and server do not match; raised by the client, without retries."""


class DeadlineExceeded(MMServeError):
    """The request's deadline passed before it finished."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(MMServeError):
    """The client cancelled the request."""

    code = "CANCELLED"


class Internal(MMServeError):
    """A bug; ``error_id`` identifies the traceback in the server's log."""

    code = "INTERNAL"

    def __init__(self, message: str, *, error_id: str) -> None:
        super().__init__(message)
        self.error_id = error_id

    @classmethod
    def logged(
        cls, error: BaseException, where: str, logger: logging.Logger, fields: Mapping[str, str] | None = None
    ) -> Internal:
        """Log ``error`` with its traceback, a new id and ``fields``; returns an ``Internal`` with that id."""
        error_id = uuid.uuid4().hex
        more = {"fields": {"error_id": error_id, **(fields or {})}}
        logger.error("internal error, error id %s, in %s", error_id, where, exc_info=error, extra=more)
        return cls(f"internal error; the server's log has it under {error_id}", error_id=error_id)


#: Every concrete error class by its gRPC status code's name.
BY_CODE: dict[str, type[MMServeError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        FailedPrecondition,
        Unimplemented,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        Internal,
    )
}


class ConfigError(ValueError):
    """A configuration file or a model directory is invalid; raised at start, never during a request."""
