"""Errors as HTTP responses: status, headers, and the JSON body of OpenAI's APIs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from mmserve.errors import DoesNotFit, FieldViolation, InvalidArgument, MMServeError, ResourceExhausted, Unavailable

#: gRPC code to HTTP status. What a model cannot do is the caller's to change, as is an unsuitable argument.
STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "FAILED_PRECONDITION": HTTPStatus.BAD_REQUEST,
    "UNIMPLEMENTED": HTTPStatus.BAD_REQUEST,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
    "CANCELLED": 499,  # nginx's "client closed request"
    "INTERNAL": HTTPStatus.INTERNAL_SERVER_ERROR,
}
#: HTTP status to the ``type`` of OpenAI's errors.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


#: Fields that an error names, and characters of a field and of a description: a request may have millions.
_VIOLATIONS, _FIELD, _MESSAGE = 32, 300, 2000


class BadRequest(InvalidArgument):
    """A request that cannot be read as one of its API: its own status, such as 413 for a body that is too long."""

    def __init__(self, status: HTTPStatus, description: str) -> None:
        super().__init__()
        self.status, self.description = status, description

    @property
    def message(self) -> str:
        """What is wrong."""
        return self.description

    def __str__(self) -> str:
        return self.description


class TooManyConnections(Unavailable):
    """The server has all connections over HTTP that it takes; ``retry_after``: seconds until the next attempt."""

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
    """``Retry-After`` (whole seconds) where the error has a time, and the scheme that a missing token must have."""
    if isinstance(error, ResourceExhausted | TooManyConnections) and error.retry_after is not None:
        return {"retry-after": str(math.ceil(error.retry_after))}
    return {"www-authenticate": "Bearer"} if status_of(error) == HTTPStatus.UNAUTHORIZED else {}


def openai_error(error: MMServeError, names: Mapping[str, str]) -> dict[str, Any]:
    """The body of ``error``: ``param`` is the first wrong field, ``code`` the gRPC code in lower case, or OpenAI's code
    of prompts that are too long.

    ``names``: fields of ``GenerateRequest`` to those of the request's API.
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
    code = "context_length_exceeded" if isinstance(error, DoesNotFit) else error.code.lower()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def shortened(text: str, most: int) -> str:
    """``text``, without its end where it has more than ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}…"


@contextmanager
def renamed(names: Mapping[str, str], places: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Fields of ``GenerateRequest`` in an ``InvalidArgument`` become those of ``names``; ``places``: where a body has
    each message or question, which may have another number there."""
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
    """``field`` under its name of the API, with its rest, such as ``stop[0]`` or ``guided_json#/type``.

    Of several paths in ``names`` the longest counts. A number in one, ``[]``, is that of the name, where ``[-]`` has
    none there. A name that begins with ``@[]`` is a message's or question's, which ``places`` has by its number.
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


#: Where a field may end in a longer path.
_BOUNDARY = re.compile(r"(?<=.)(?=[\[.#]|\Z)")


@lru_cache(maxsize=1024)
def _pattern(path: str) -> re.Pattern[str]:
    """Matches fields that are ``path``, or in it."""
    numbered = re.escape(path).replace(re.escape("[]"), r"\[([0-9]+)\]").replace(re.escape("[-]"), r"\[[0-9]+\]")
    return re.compile(f"{numbered}{_BOUNDARY.pattern}")
