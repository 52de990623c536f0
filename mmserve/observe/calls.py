"""The state of the call in progress, shared by the access log, other log lines, metrics and traces.

A call is handled by a task of the event loop, its request by threads of the engine, which have only the request.
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
    """One call in progress. Sizes are bytes of messages on the wire, before compression."""

    method: str = ""  # full name, as in /mmserve.v1.GenerationService/Generate
    route: str = ""  # label of its metrics, if it differs from ``method``
    peer: str = ""
    request_id: str = ""
    tenant: str = ""  # tenant of its token, "" = unknown
    model: str = ""
    received: int = 0
    sent: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failed: str = ""  # code of an error after the start of the answer
    started: float = field(default_factory=time.monotonic)
    headers: Mapping[str, str] = field(default_factory=dict)  # headers of its trace context
    trace_id: str = ""  # of its request if it is traced, …
    span_id: str = ""  # … and of the root span of the request, both in hexadecimal


_current: ContextVar[Call | None] = ContextVar("mmserve_call", default=None)


def current() -> Call:
    """The call that the current task handles; outside of a call a new one that is discarded."""
    return _current.get() or Call()


def begin(call: Call) -> None:
    """Make ``call`` the current call of this task, and of tasks that it starts."""
    _current.set(call)


class _Working(threading.local):
    request: Request | None = None


#: The request processed by this thread at the moment, if it is a single one: for the fields of log lines.
working = _Working()
