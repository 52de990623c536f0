"""What is known of the call that is being answered: shared by the access log, other log lines, metrics and traces.

A call is answered by a task of the event loop, its request by threads of the engine, which know the request alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from mmserve.core.request import Request


@dataclass
class Call:
    """One call, as far as it has come. Sizes are bytes of messages as they are on the wire, before compression."""

    method: str = ""  # full name, as in /mmserve.v1.GenerationService/Generate
    route: str = ""  # what it is counted by, where ``method`` holds more than that
    peer: str = ""
    request_id: str = ""
    tenant: str = ""  # whose token it came with, if that is known
    model: str = ""
    received: int = 0
    sent: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failed: str = ""  # code of the error that an answer ended with that had begun well
    started: float = field(default_factory=time.monotonic)
    headers: Mapping[str, str] = field(default_factory=dict)  # those of its trace context
    trace_id: str = ""  # of its request, where that is traced, …
    span_id: str = ""  # … and of the span of the whole request, both in hexadecimal


_current: ContextVar[Call | None] = ContextVar("mmserve_call", default=None)


def current() -> Call:
    """The call that this task answers; outside of a call a fresh one that is discarded."""
    return _current.get() or Call()


def begin(call: Call) -> None:
    """Make ``call`` the one that the current task, and tasks that it starts, answer."""
    _current.set(call)


class _Working(threading.local):
    request: Request | None = None


#: The request that this thread works on at this moment, where that is one alone: for its lines of the log.
working = _Working()
