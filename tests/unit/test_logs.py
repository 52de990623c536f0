"""Lines of the log for programs: whose request they are about, whichever thread writes them."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import pytest

from mmserve.core.request import Request
from mmserve.core.tenant import Tenant
from mmserve.errors import Internal
from mmserve.observe import calls
from mmserve.observe.calls import Call
from mmserve.observe.logs import Json, about

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WHOSE = {"request_id": "mine", "tenant": "acme", "trace_id": TRACE[3:35], "span_id": TRACE[36:52]}


def asked(**changes: Any) -> Request:
    fields = {"id": "own", "label": "mine", "tenant": Tenant(name="acme"), "trace": {"traceparent": TRACE}}
    return Request(model="m", messages=(), **{**fields, **changes})


def line(**extra: Any) -> dict[str, Any]:
    record = logging.makeLogRecord({"name": "mmserve.x", "levelname": "INFO", "msg": "said", **extra})
    found: dict[str, Any] = json.loads(Json().format(record))
    return {name: value for name, value in found.items() if name not in ("time", "level", "logger", "message")}


def test_a_line_of_nobody_names_nobody() -> None:
    assert line() == {}


def test_a_line_of_a_call_names_its_request_and_what_is_known_of_it() -> None:
    def answer() -> None:
        call = Call("/a", request_id="mine")
        calls.begin(call)
        assert line() == {"request_id": "mine"}
        call.tenant, call.trace_id, call.span_id = WHOSE["tenant"], WHOSE["trace_id"], WHOSE["span_id"]
        assert line() == WHOSE

    thread_of(answer)


def test_a_thread_of_the_engine_names_the_request_that_it_works_on() -> None:
    def work() -> None:
        calls.working.request = asked()
        assert line() == WHOSE
        calls.working.request = asked(label="", tenant=Tenant(), trace={})
        assert line() == {"request_id": "own"}
        calls.working.request = None
        assert line() == {}

    thread_of(work)
    assert line() == {}, "another thread's request is not this one's"


def test_a_bug_has_the_id_that_its_client_is_given(caplog: pytest.LogCaptureFixture) -> None:
    error = Internal.logged(RuntimeError("a bug"), "here", logging.getLogger("mmserve.engine"), about(asked()))
    [record] = caplog.records
    found = json.loads(Json().format(record))
    assert {name: found[name] for name in WHOSE} == WHOSE
    assert found["error_id"] in error.message and "a bug" in found["exception"]


def thread_of(work: Any) -> None:
    """Run ``work`` on a thread of its own; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
