"""Conversion of errors to HTTP responses: status, headers, and the JSON body of OpenAI's APIs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from mmserve.errors import (
    DoesNotFit,
    FieldViolation,
    InvalidArgument,
    MMServeError,
    ResourceExhausted,
    Unavailable,
    UnknownModel,
)

#: HTTP status by gRPC code. Unsupported features are client errors, like invalid arguments.
STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "FAILED_PRECONDITION": HTTPStatus.BAD_REQUEST,
    "UNIMPLEMENTED": HTTPStatus.BAD_REQUEST,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
    "CANCELLED": 499,  # nginx's "client closed request"
    "INTERNAL": HTTPStatus.INTERNAL_SERVER_ERROR,
}
#: The ``type`` of OpenAI's errors, by HTTP status.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


#: Maximum fields in an error, and characters of a field and of a description: a request may have millions.
_VIOLATIONS, _FIELD, _MESSAGE = 32, 300, 2000


class BadRequest(InvalidArgument):
    """A request that cannot be read: with its own status, such as 413 for a body that is too long."""

    def __init__(self, status: HTTPStatus, description: str) -> None:
        super().__init__()
        self.status, self.description = status, description

    @property
    def message(self) -> str:
        """The description."""
        return self.description

    def __str__(self) -> str:
        return self.description


class TooManyConnections(Unavailable):
    """The server has reached its maximum of HTTP connections; ``retry_after``: seconds."""

    retry_after = 1.0

    def __init__(self, most: int) -> None:
        super().__init__(
            f"the server has all {most} connections over HTTP that it takes; try again later, or raise [server] "
            "http_connections"
        )


def status_of(error: MMServeError) -> int:
    """The HTTP status of ``error``."""
    return int(error.status if isinstance(error, BadRequest) else STATUS[error.code])


def headers_of(error: MMServeError) -> dict[str, str]:
    """``Retry-After`` (whole seconds) if the error has a time, and the authentication scheme if the token is
    missing."""
    if isinstance(error, ResourceExhausted | TooManyConnections) and error.retry_after is not None:
        return {"retry-after": str(math.ceil(error.retry_after))}
    return {"www-authenticate": "Bearer"} if status_of(error) == HTTPStatus.UNAUTHORIZED else {}


def openai_error(error: MMServeError, names: Mapping[str, str]) -> dict[str, Any]:
    """The body of ``error``: ``param`` is the first invalid field, ``code`` the gRPC code in lower case, or OpenAI's
    code for prompts that are too long and for unknown models.

    ``names``: names in the request's API of fields of ``GenerateRequest``.
    """
    message, param = shortened(error.message, _MESSAGE), None
    if isinstance(error, InvalidArgument) and error.violations:
        wrong = [
            (shortened(_named(each.field, names), _FIELD), shortened(each.description, _MESSAGE))
            for each in error.violations[:_VIOLATIONS]
        ]
        message, param = "; ".join(f"{field}: {description}" for field, description in wrong), wrong[0][0]
        if (left := len(error.violations) - len(wrong)) > 0:
            message += f"; {left} more fields are not acceptable"
    kind = _TYPES.get(status_of(error), "server_error" if status_of(error) >= 500 else "invalid_request_error")
    code = error.code.lower()
    if isinstance(error, DoesNotFit):
        code = "context_length_exceeded"
    elif isinstance(error, UnknownModel):
        kind, param, code = "invalid_request_error", "model", "model_not_found"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def shortened(text: str, most: int) -> str:
    """``text``, truncated to at most ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}…"


@contextmanager
def renamed(names: Mapping[str, str], places: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Context that renames fields of ``GenerateRequest`` in an ``InvalidArgument`` by ``names``; ``places``: locations
    in the body of messages or questions whose index differs."""
    try:
        yield
    except InvalidArgument as error:
        if not error.violations:
            raise
        shown = error.violations[:_VIOLATIONS]
        wrong = (FieldViolation(_named(each.field, names, places), each.description) for each in shown)
        kind = DoesNotFit if isinstance(error, DoesNotFit) else InvalidArgument
        raise kind(*wrong, *error.violations[_VIOLATIONS:]) from error


def _named(field: str, names: Mapping[str, str], places: Mapping[str, str] = MappingProxyType({})) -> str:
    """``field`` with its name in the API, including its rest, such as ``stop[0]`` or ``guided_json#/type``.

    The longest matching path in ``names`` is used. An index ``[]`` in the path replaces that in the name; ``[-]`` has
    none in the name. A name that begins with ``@[]`` is relative to a message or question, whose location is in
    ``places`` by its index.
    """
    found = [(len(path), path, match) for path in names if (match := _pattern(path).match(field))]
    if not found:
        return field
    _, path, match = max(found)
    numbers = iter(match.groups())
    name = re.sub(r"\[\]", lambda _: f"[{next(numbers)}]", names[path]) + field[match.end() :]
    if not name.startswith("@"):
        return name
    for end in [*reversed([found.start() for found in _BOUNDARY.finditer(name)])]:
        if name[:end] in places:
            return places[name[:end]] + name[end:]
    return f"messages{name[1:]}"


#: Characters after which a longer field continues a path.
_BOUNDARY = re.compile(r"(?<=.)(?=[\[.#]|\Z)")


@lru_cache(maxsize=1024)
def _pattern(path: str) -> re.Pattern[str]:
    """A pattern of fields that are ``path``, or within it."""
    numbered = re.escape(path).replace(re.escape("[]"), r"\[([0-9]+)\]").replace(re.escape("[-]"), r"\[[0-9]+\]")
    return re.compile(f"{numbered}{_BOUNDARY.pattern}")
