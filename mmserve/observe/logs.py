"""Formatting of log records: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from mmserve.core.request import Request
from mmserve.observe import calls

FORMATS = ("text", "json")


def configure(level: int, form: str = "text") -> None:
    """Write log records to stderr in ``form`` ("text" or "json"): mmserve's from ``level`` up, libraries' warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else logging.Formatter(_TEXT))
    # of libraries only warnings: PyTorch logs its counters at exit
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("mmserve").setLevel(level)
    # fields of records that neither format has, but which take a fifth of a record's time
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Json(logging.Formatter):
    """One JSON object a line: ``time`` (UTC, RFC 3339), ``level``, ``logger`` and ``message``.

    Also ``exception`` if there is one, and the record's ``fields``. In a call, or in an engine's thread that works on
    one request: ``request_id``, ``tenant`` if known, and ``trace_id`` and ``span_id`` if the request is traced.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in _whose().items() if value}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line |= getattr(record, "fields", {})
        return json.dumps(line, ensure_ascii=False, default=str)


def _whose() -> dict[str, str]:
    """Fields that identify the request of this task or thread; empty if there is none."""
    request = calls.working.request
    if request is not None:
        return about(request)
    call = calls.current()
    of_trace = {"trace_id": call.trace_id, "span_id": call.span_id}
    return {"request_id": call.request_id, "tenant": call.tenant, **of_trace}


def about(request: Request) -> dict[str, str]:
    """Log fields that identify ``request``, for code that works on several requests at once."""
    _version, trace_id, span_id, _flags = (request.trace.get("traceparent") or "---").split("-")
    of_trace = {"trace_id": trace_id, "span_id": span_id}
    return {"request_id": request.label or request.id, "tenant": request.tenant.name, **of_trace}
