"""How log records are written: as lines for people, or as one JSON object each for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

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

    With ``request_id`` where the record is of a call, ``exception`` where it has one, and what the record's ``fields``
    hold.
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
        if request_id := calls.current().request_id:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line |= getattr(record, "fields", {})
        return json.dumps(line, ensure_ascii=False, default=str)
