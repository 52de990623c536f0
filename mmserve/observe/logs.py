"""How log records are written: as lines for people, or as one JSON object each for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from mmserve.core.request import Request
from mmserve.observe import calls

FORMATS = ("text", "json")


def configure(level: int, form: str = "text") -> None:
    """Write records to stderr in ``form``: those of mmserve from ``level`` on, and warnings of libraries."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else logging.Formatter(_TEXT))
    # of libraries only warnings: PyTorch writes its counters at every end
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("mmserve").setLevel(level)


_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Json(logging.Formatter):
    """One JSON object a line: ``time`` (UTC, RFC 3339), ``level``, ``logger`` and ``message``.

    With ``exception`` where it has one, and what the record's ``fields`` hold. Of a call, or of a request on a thread
    of the engine: ``request_id``, ``tenant`` where one is known, ``trace_id`` and ``span_id`` where it is traced.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
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
    """The request that this task or thread works for."""
    request = calls.working.request
    if request is not None:
        return about(request)
    call = calls.current()
    of_trace = {"trace_id": call.trace_id, "span_id": call.span_id}
    return {"request_id": call.request_id, "tenant": call.tenant, **of_trace}


def about(request: Request) -> dict[str, str]:
    """Fields of a line about ``request``, for those who work on several at once."""
    _version, trace_id, span_id, _flags = (request.trace.get("traceparent") or "---").split("-")
    of_trace = {"trace_id": trace_id, "span_id": span_id}
    return {"request_id": request.label or request.id, "tenant": request.tenant.name, **of_trace}
