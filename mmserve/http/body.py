"""Bodies of requests: JSON objects, with limits on size and time."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from concurrent.futures import Executor
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any

from starlette.requests import Request

from mmserve.config import ServerConfig
from mmserve.errors import Cancelled, InvalidArgument
from mmserve.http.errors import BadRequest
from mmserve.rpc.memory_budget import MemoryBudget

#: Size (bytes) above which bodies are parsed off the event loop, and counted in the memory budget meanwhile.
INLINE_BYTES = 1 << 20
#: Maximum nesting depth: parsed values are serialised again, at a deeper stack level.
MAX_DEPTH = 256
#: Maximum objects and arrays of a body, and of all its values: each takes microseconds that block the event loop.
MAX_CONTAINERS, MAX_VALUES = 1 << 14, 1 << 17
#: Maximum escapes in the strings of a body: each takes a parser as long as a hundred other characters.
MAX_ESCAPES = 1 << 22
#: Bytes between two updates of the memory budget while a body is received.
_STEP = 1 << 20


class Bodies:
    """Reads bodies within ``max_message_bytes`` and ``message_seconds`` of ``config``; ``parser`` runs long parses."""

    def __init__(self, config: ServerConfig, budget: MemoryBudget, parser: Executor) -> None:
        self._config, self._budget, self._parser = config, budget, parser

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object in the body of ``request``; raises ``InvalidArgument``, or ``BadRequest`` with its status."""
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise BadRequest(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must have no content-encoding")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also keeps forms of foreign pages out, which a browser sends unasked
            raise BadRequest(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the content-type must be application/json")
        try:
            with ExitStack() as held:
                async with asyncio.timeout(self._config.message_seconds or None):
                    data = await self._bytes(request, held)
        except TimeoutError:
            why = f"the body took longer than {self._config.message_seconds:g} s (message_seconds) to arrive"
            raise BadRequest(HTTPStatus.REQUEST_TIMEOUT, why) from None
        if len(data) <= INLINE_BYTES:
            found = _parsed(data)
        else:
            with self._budget.taken((), len(data)):
                found = await asyncio.get_running_loop().run_in_executor(self._parser, _parsed, data)
        if not isinstance(found, dict):
            raise InvalidArgument.of("body", "must be a JSON object")
        return found

    async def _bytes(self, request: Request, held: ExitStack) -> bytes:
        """The body, whose bytes count in the budget until ``held`` is closed."""
        most = self._config.max_message_bytes
        why = f"the body is larger than {most} bytes (max_message_bytes); upload large media first, over gRPC"
        given = request.headers.get("content-length", "")
        if given.isdecimal() and int(given) > most:
            raise BadRequest(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        data, counted = bytearray(), INLINE_BYTES
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("the client went away while it sent the request")
            chunk, more = message.get("body", b""), message.get("more_body", False)
            if len(data) + len(chunk) > most:
                raise BadRequest(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
            data += chunk
            while len(data) > counted:
                held.enter_context(self._budget.taken((), _STEP))
                counted += _STEP
        return bytes(data)


#: Byte sequences of bodies that may contain a lone surrogate, which messages cannot represent: its escape, its UTF-8
#: form, or signs of another encoding than UTF-8.
_MAYBE_SURROGATE = (b"\\ud", b"\\uD", b"\xed", b"\0")


def _too_many(data: bytes) -> bool:
    """Whether there are more objects and arrays, or values, than a body may have."""
    containers = data.count(b"{") + data.count(b"[")
    values = containers + data.count(b",")
    if (containers <= MAX_CONTAINERS and values <= MAX_VALUES) or b"\0" in data:  # no UTF-8: strings are not known
        return containers > MAX_CONTAINERS or values > MAX_VALUES
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote begins or ends a string
    if plain.count(b'"') > 4 * MAX_VALUES:  # a key and a string for each value
        return True
    outside = b"".join(plain.split(b'"')[::2])
    containers = outside.count(b"{") + outside.count(b"[")
    return containers > MAX_CONTAINERS or containers + outside.count(b",") > MAX_VALUES


def _parsed(data: bytes) -> Any:
    if data.count(b"\\") - data.count(b"\\\\") > MAX_ESCAPES:
        how = "send characters as UTF-8 and not escaped, or less text"
        raise InvalidArgument.of("body", f"must hold at most {MAX_ESCAPES} escapes in its texts: {how}")
    if _too_many(data):
        raise InvalidArgument.of(
            "body", f"must hold at most {MAX_CONTAINERS} objects and arrays, and {MAX_VALUES} values"
        )
    try:
        found = json.loads(data, parse_constant=_constant, parse_float=_float)
        if any(each in data for each in _MAYBE_SURROGATE):
            json.dumps(found, ensure_ascii=False).encode()
        if data.count(b"{") + data.count(b"[") > MAX_DEPTH and _too_deep(found):
            raise InvalidArgument.of("body", f"is nested too deeply: more than {MAX_DEPTH} levels")
        return found
    except UnicodeEncodeError:
        raise InvalidArgument.of("body", "must be Unicode: it has half of a surrogate pair") from None
    except RecursionError:
        raise InvalidArgument.of("body", "is nested too deeply") from None
    except ValueError as error:  # also what is no UTF-8, and integers of thousands of digits
        why = str(error)[:200]
        if why.startswith("Exceeds the limit"):
            why = f"an integer has more than {sys.get_int_max_str_digits()} digits"
        raise InvalidArgument.of("body", f"must be JSON: {why}") from None


def _too_deep(found: Any) -> bool:
    """Whether objects and arrays are nested more than ``MAX_DEPTH`` deep."""
    level = [found]
    for _ in range(MAX_DEPTH + 1):
        level = [
            each
            for value in level
            if isinstance(value, dict | list)
            for each in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return False
    return True


def _float(text: str) -> float:
    """``text`` as a float; raises ``ValueError`` on overflow, as responses that repeat a field cannot represent inf."""
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
